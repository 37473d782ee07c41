"""Traces and demands on disk: safetensors files, mapped into memory, never pickled.

``routepack.trace/1`` holds recorded routing, ``routepack.demand/1`` its counts per sequence, layer and expert. A trace may
also be a folder of such files (shards), read in name order.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from routepack.core.arrays import joined
from routepack.core.checks import instance
from routepack.core.errors import TraceError
from routepack.core.files import is_folder, naming
from routepack.core.rollouts import TRACE_TENSORS, RolloutBatch, RoutingDemand
from routepack.core.tensor_files import check_format, check_names, read_tensors, write_tensors

TRACE, DEMAND = "routepack.trace/1", "routepack.demand/1"
Tensors = Mapping[str, np.ndarray]
_TRACE_FIELDS = (
    "routed_experts_TLK", "cu_seqlens", "num_tokens_S", "layer_ids_L", "valid_T", "group_S", "modality_S",
)  # fmt: skip
_OF_TRACE = dict(zip(TRACE_TENSORS, _TRACE_FIELDS, strict=True))
"""Each tensor of a trace and the field of RolloutBatch that it is."""
_OF_DEMAND = {name: name for name in ("tokens_SLE", "length_S", "group_S", "modality_S", "estimated_S")} | {
    "layer_ids": "layer_ids_L"
}
"""Each tensor of a demand and the field of RoutingDemand that it is."""


def load_window(path: str | Path) -> RolloutBatch | RoutingDemand:
    """Read a trace or a demand file, whichever *path* is."""
    if is_folder(path):
        return load_trace(path)
    metadata, tensors = read_tensors(path)
    if metadata.get("format") == DEMAND:
        return _demand(path, metadata, tensors)
    check_format(path, metadata, TRACE, DEMAND)
    return _some(path, _trace(path, metadata, tensors))


def load_trace(path: str | Path) -> RolloutBatch:
    """Read a ``routepack.trace/1`` file, or a folder of them; one file is mapped, not copied.

    Raises TraceError for a file that is missing, truncated, of another format or contradicts itself.
    """
    if not is_folder(path):
        return _some(path, load_shard(path))
    shards = sorted(Path(path).glob("*.safetensors"))
    if not shards:
        raise TraceError(f"{path} holds no .safetensors files: name a trace file or a folder of shards.")
    return _some(path, concatenate([load_shard(shard) for shard in shards], list(map(str, shards))))


def load_shard(path: str | Path) -> RolloutBatch:
    """Read one ``routepack.trace/1`` file, which may hold no sequences; recorded ids are mapped and not read."""
    return _trace(path, *read_tensors(path))


def save_trace(batch: RolloutBatch, path: str | Path, **metadata: str) -> None:
    """Write a ``routepack.trace/1`` file; *metadata* adds entries, such as ``num_layers`` of the model."""
    instance("batch", batch, RolloutBatch)
    tensors = {name: getattr(batch, field) for name, field in _OF_TRACE.items()}
    header = {
        "num_layers": int(batch.layer_ids_L.max()) + 1,
        **metadata,
        "format": TRACE,
        "id_space": "logical",
        "num_experts": batch.num_experts,
        "top_k": batch.top_k,
        "source": batch.source,
        "weights_version": batch.weights_version,
        "token_fields": ",".join(batch.token_fields),
        "sequence_fields": ",".join(batch.sequence_fields),
    }
    write_tensors(path, {**tensors, **batch.token_fields, **batch.sequence_fields}, _as_text(header))


def concatenate(batches: list[RolloutBatch], names: list[str] | None = None) -> RolloutBatch:
    """One batch of all sequences, in order; the batches must agree on layers, top-k and fields. *names*: theirs, for errors."""
    first = batches[0]
    for number, batch in enumerate(batches):
        where = "" if names is None else f"{names[number]}: "
        for name in ("num_experts", "num_layers", "top_k"):
            if getattr(batch, name) != getattr(first, name):
                raise TraceError(f"{where}shards disagree on {name}: {getattr(first, name)} and {getattr(batch, name)}.")
        if set(batch.token_fields) != set(first.token_fields) or set(batch.sequence_fields) != set(first.sequence_fields):
            raise TraceError(f"{where}shards disagree on their token or sequence fields.")
        if (batch.layer_ids_L != first.layer_ids_L).any():
            raise TraceError(f"{where}shards disagree on layer_ids.")
        if (batch.modality_S is None) != (first.modality_S is None):
            raise TraceError(
                f"{where}shards disagree on whether sequences have a modality: give modality_ids to all or to none."
            )
    valid = [np.ones(len(b.routed_experts_TLK), bool) if b.valid_T is None else b.valid_T for b in batches]
    return RolloutBatch(
        # Mixed widths are promoted, never cut: a shard's dtype may follow from another tool's choice.
        routed_experts_TLK=np.concatenate([batch.routed_experts_TLK for batch in batches]),
        cu_seqlens=np.cumsum(np.concatenate([[0], *(np.diff(batch.cu_seqlens) for batch in batches)])),
        num_tokens_S=np.concatenate([batch.num_tokens_S for batch in batches]),
        num_experts=first.num_experts,
        layer_ids_L=first.layer_ids_L,
        valid_T=None if all(batch.valid_T is None for batch in batches) else np.concatenate(valid),
        group_S=joined([batch.group_S for batch in batches]),
        modality_S=joined([batch.modality_S for batch in batches]),
        token_fields={k: np.concatenate([b.token_fields[k] for b in batches]) for k in first.token_fields},
        sequence_fields={k: np.concatenate([b.sequence_fields[k] for b in batches]) for k in first.sequence_fields},
        source=first.source,
        weights_version=first.weights_version,
    )


def load_demand(path: str | Path) -> RoutingDemand:
    """Read a ``routepack.demand/1`` file. Raises TraceError as :func:`load_trace` does."""
    return _demand(path, *read_tensors(path))


def save_demand(demand: RoutingDemand, path: str | Path) -> None:
    """Write a ``routepack.demand/1`` file."""
    instance("demand", demand, RoutingDemand)
    tensors = {name: getattr(demand, field) for name, field in _OF_DEMAND.items()}
    header = {name: getattr(demand, name) for name in ("name", "top_k", "num_experts", "num_masked_rows")}
    write_tensors(path, tensors, _as_text({"format": DEMAND} | header))


def _as_text(header: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in header.items()}


def _trace(path: str | Path, metadata: dict[str, str], tensors: Tensors) -> RolloutBatch:
    check_format(path, metadata, TRACE)
    needed = ("routed_experts", "cu_seqlens", "num_tokens")
    check_names(path, tensors, needed, TRACE)
    for name in needed:
        if tensors[name].dtype.kind not in "iu":
            raise TraceError(f"{path}: tensor {name!r} has dtype {tensors[name].dtype}; whole numbers are needed.")
    if metadata.get("id_space", "logical") != "logical":
        raise TraceError(f"{path} has id_space={metadata['id_space']!r}: ids must be logical, before any physical map.")
    token_fields, sequence_fields = _fields(path, metadata, tensors)
    ids = tensors["routed_experts"]
    if ids.ndim == 3 and "top_k" in metadata and _number(path, metadata, "top_k") != ids.shape[2]:
        raise TraceError(f"{path} says top_k={metadata['top_k']} but routed_experts has shape {ids.shape}.")
    num_experts = _number(path, metadata, "num_experts")
    with naming(path):
        batch = RolloutBatch(
            **{field: tensors[name] for name, field in _OF_TRACE.items() if name in tensors},
            num_experts=num_experts,
            token_fields=token_fields,
            sequence_fields=sequence_fields,
            source=metadata.get("source", ""),
            weights_version=metadata.get("weights_version", ""),
        )
    if "num_layers" in metadata and batch.num_layers > _number(path, metadata, "num_layers"):
        raise TraceError(
            f"{path} records {batch.num_layers} layers of a model with num_layers={metadata['num_layers']}: "
            "leave draft (MTP) layers out."
        )
    return batch


def _fields(path: str | Path, metadata: dict[str, str], tensors: Tensors) -> tuple[dict, dict]:
    """Extra tensors by what their first axis counts: as the metadata says, else by their size."""
    named = {kind: [n for n in metadata.get(kind, "").split(",") if n] for kind in ("token_fields", "sequence_fields")}
    tokens = int(tensors["num_tokens"].sum())
    for name in sorted(set(tensors) - set(TRACE_TENSORS) - {n for names in named.values() for n in names}):
        size = len(tensors[name]) if tensors[name].ndim else -1
        if size not in (tokens, len(tensors["num_tokens"])):
            raise TraceError(f"{path}: tensor {name!r} of shape {tensors[name].shape} counts neither tokens nor sequences.")
        named["token_fields" if size == tokens else "sequence_fields"].append(name)
    missing = [name for names in named.values() for name in names if name not in tensors]
    if missing:
        raise TraceError(f"{path} announces fields that it does not hold: {', '.join(missing)}.")
    token_fields, sequence_fields = ({name: tensors[name] for name in names} for names in named.values())
    return token_fields, sequence_fields


def _demand(path: str | Path, metadata: dict[str, str], tensors: Tensors) -> RoutingDemand:
    check_format(path, metadata, DEMAND)
    check_names(path, tensors, ("tokens_SLE", "length_S"), DEMAND)
    top_k = _number(path, metadata, "top_k")
    num_masked_rows = _number(path, metadata, "num_masked_rows") if "num_masked_rows" in metadata else 0
    with naming(path):
        return RoutingDemand(
            **{field: tensors[name] for name, field in _OF_DEMAND.items() if name in tensors},
            top_k=top_k,
            num_masked_rows=num_masked_rows,
            name=metadata.get("name", ""),
        )


def _some(path: str | Path, batch: RolloutBatch) -> RolloutBatch:
    if not batch.num_sequences:
        raise TraceError(f"{path} holds no sequences: was anything recorded?")
    return batch


def _number(path: str | Path, metadata: dict[str, str], name: str) -> int:
    try:
        return int(metadata[name])
    except KeyError as error:
        raise TraceError(f"{path} lacks the metadata entry {name!r}.") from error
    except ValueError as error:
        raise TraceError(f"{path} has {name}={metadata[name]!r}, which is not a whole number.") from error
