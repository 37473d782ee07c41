"""Traces, demands and plans on disk: safetensors files, mapped into memory, never pickled.

``routepack.trace/1`` holds recorded routing, ``routepack.demand/1`` its counts per sequence, layer and
expert, ``routepack.plan/1`` a plan. A trace may also be a folder of such files (shards), read in name order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from routepack.core.arrays import joined
from routepack.core.checks import instance
from routepack.core.errors import ConfigError, RoutePackError, TraceError
from routepack.core.files import atomic_path, is_folder
from routepack.core.plans import Certificate, ExpertPlacement, Packing, PackingRules, Plan, PlannedBy, Topology
from routepack.core.rollouts import TRACE_TENSORS, RolloutBatch, RoutingDemand

TRACE, DEMAND, PLAN = "routepack.trace/1", "routepack.demand/1", "routepack.plan/1"
PLAN_TENSORS = ("physical_to_logical", "cell_of_sequence", "order", "length")
_PLAN_NOUNS = ("topology", "placement", "packing", "length_S", "certificate", "rules", "packer", "rerouter")
_MADE_BY = ("packer", "rerouter")
"""Entries that plans made before they were recorded do not have."""
_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "F16": np.float16, "U32": np.uint32,
    "I32": np.int32, "F32": np.float32, "U64": np.uint64, "I64": np.int64, "F64": np.float64,
}  # fmt: skip


def load_window(path: str | Path) -> RolloutBatch | RoutingDemand:
    """Read a trace or a demand file, whichever *path* is."""
    if is_folder(path):
        return load_trace(path)
    metadata, tensors = read_tensors(path)
    if metadata.get("format") == DEMAND:
        return _demand(path, metadata, tensors)
    _expect(path, metadata, TRACE, DEMAND)
    return _some(path, _trace(path, metadata, tensors))


def load_trace(path: str | Path) -> RolloutBatch:
    """Read a ``routepack.trace/1`` file, or a folder of them; one file is mapped, not copied.

    Raises TraceError for a file that is missing, truncated, of another format or contradicts itself.
    """
    if not is_folder(path):
        return _some(path, _trace(path, *read_tensors(path)))
    shards = sorted(Path(path).glob("*.safetensors"))
    if not shards:
        raise TraceError(f"{path} holds no .safetensors files: name a trace file or a folder of shards.")
    # A shard may be empty, the whole may not.
    return _some(path, concatenate([_trace(shard, *read_tensors(shard)) for shard in shards], list(map(str, shards))))


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceHeader:
    """What a trace file says of itself; see :class:`~routepack.RolloutBatch`."""

    num_layers: int
    num_experts: int
    top_k: int
    layer_ids_L: np.ndarray


def trace_header(path: str | Path) -> TraceHeader:
    """The sizes of a ``routepack.trace/1`` file; no recorded id is read. Raises TraceError as :func:`load_trace` does."""
    metadata, tensors = read_tensors(path)
    _expect(path, metadata, TRACE)
    ids = tensors.get("routed_experts")
    if ids is None or ids.ndim != 3:
        raise TraceError(f"{path} has no tensor 'routed_experts' of shape [rows, layers, top_k].")
    return TraceHeader(
        num_layers=ids.shape[1],
        num_experts=_number(path, metadata, "num_experts"),
        top_k=ids.shape[2],
        layer_ids_L=_layer_ids(tensors, "routed_experts"),
    )


def save_trace(batch: RolloutBatch, path: str | Path, **metadata: str) -> None:
    """Write a ``routepack.trace/1`` file; *metadata* adds entries, such as ``num_layers`` of the model."""
    instance("batch", batch, RolloutBatch)
    tensors = {
        "routed_experts": batch.routed_experts_TLK,
        "cu_seqlens": batch.cu_seqlens,
        "num_tokens": batch.num_tokens_S,
        "layer_ids": batch.layer_ids_L,
        "valid": batch.valid_T,
        "group_ids": batch.group_S,
        "modality_ids": batch.modality_S,
        **batch.token_fields,
        **batch.sequence_fields,
    }
    header = {
        "format": TRACE,
        "id_space": "logical",
        "num_experts": str(batch.num_experts),
        "top_k": str(batch.top_k),
        "num_layers": str(metadata.pop("num_layers", int(batch.layer_ids_L.max()) + 1)),
        "source": batch.source,
        "weights_version": batch.weights_version,
        "token_fields": ",".join(batch.token_fields),
        "sequence_fields": ",".join(batch.sequence_fields),
    }
    _write(path, tensors, {name: str(value) for name, value in metadata.items()} | header)


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
    rows = np.cumsum([0] + [len(batch.routed_experts_TLK) for batch in batches])
    valid = [np.ones(len(b.routed_experts_TLK), bool) if b.valid_T is None else b.valid_T for b in batches]
    groups = [batch.group_S for batch in batches if batch.group_S is not None]
    return RolloutBatch(
        # Mixed widths are promoted, never cut: a shard's dtype may follow from another tool's choice.
        routed_experts_TLK=np.concatenate([batch.routed_experts_TLK for batch in batches]),
        cu_seqlens=np.concatenate([[0], *(b.cu_seqlens[1:] + row for b, row in zip(batches, rows, strict=False))]),
        num_tokens_S=np.concatenate([batch.num_tokens_S for batch in batches]),
        num_experts=first.num_experts,
        layer_ids_L=first.layer_ids_L,
        valid_T=None if all(batch.valid_T is None for batch in batches) else np.concatenate(valid),
        group_S=np.concatenate(groups) if len(groups) == len(batches) else None,
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
    tensors = {
        "tokens_SLE": demand.tokens_SLE,
        "length_S": demand.length_S,
        "group_S": demand.group_S,
        "modality_S": demand.modality_S,
        "layer_ids": demand.layer_ids_L,
        "estimated_S": demand.estimated_S,
    }
    header = {
        "format": DEMAND,
        "name": demand.name,
        "top_k": str(demand.top_k),
        "num_experts": str(demand.num_experts),
        "num_masked_rows": str(demand.num_masked_rows),
    }
    _write(path, tensors, header)


def load_plan(path: str | Path) -> Plan:
    """Read a ``routepack.plan/1`` file; whether it still is what was planned, :func:`routepack.verify` tells."""
    metadata, tensors = read_tensors(path)
    _expect(path, metadata, PLAN)
    header = _plan_header(path, metadata)
    for name in PLAN_TENSORS:
        if name not in tensors:
            raise TraceError(f"{path} has no tensor {name!r}, which every {PLAN} file has: plan again.")
    try:
        with naming(path):
            return _plan(header, tensors)
    except RoutePackError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TraceError(f"{path} is not a whole {PLAN} file: a value is not of its kind ({error}). Plan again.") from error


def _plan(header: dict[str, Any], tensors: dict[str, np.ndarray]) -> Plan:
    topology = Topology(**header.pop("topology"))
    return Plan(
        topology=topology,
        placement=ExpertPlacement(physical_to_logical_LP=tensors["physical_to_logical"]),
        packing=Packing(
            cell_of_S=tensors["cell_of_sequence"],
            order_S=tensors["order"],
            num_microbatches=header.pop("num_microbatches"),
            data_parallel_degree=topology.data_parallel_degree,
        ),
        length_S=tensors["length"],
        certificate=Certificate(**header.pop("certificate")),
        rules=PackingRules(**header.pop("rules")),
        **{name: PlannedBy(**header.pop(name)) for name in _MADE_BY if name in header},
        **header,
    )


def _plan_header(path: str | Path, metadata: dict[str, str]) -> dict[str, Any]:
    """The header of a plan, with all entries that a plan is made of and no others."""
    if "plan" not in metadata:
        raise TraceError(f"{path} lacks the metadata entry 'plan', which says what was planned: plan again.")
    try:
        header = json.loads(metadata["plan"])
    except RecursionError as error:
        raise TraceError(f"{path} is not a whole {PLAN} file: its header is nested too deeply.") from error
    except ValueError as error:
        raise TraceError(f"{path} is not a whole {PLAN} file: its header is no JSON ({error}).") from error
    figures = {entry.name: _is_required(entry) for entry in fields(Plan) if entry.name not in _PLAN_NOUNS}
    parts = {"num_microbatches": True, "topology": True, "certificate": True, "rules": False} | dict.fromkeys(_MADE_BY, False)
    _check_entries(path, "its header", header, figures | parts | {"digest": True})
    header.setdefault("rules", {})
    nouns = {"topology": Topology, "certificate": Certificate, "rules": PackingRules} | dict.fromkeys(_MADE_BY, PlannedBy)
    for name, noun in nouns.items():
        if name in header:
            _check_entries(path, name, header[name], {entry.name: _is_required(entry) for entry in fields(noun)})
    if not header["digest"]:
        raise TraceError(f"{path} has lost the digest of its plan: plan again.")
    return header


def _is_required(entry: Field) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def _check_entries(path: str | Path, name: str, given: Any, wanted: dict[str, bool]) -> None:
    """Raise TraceError unless *given* is an object with the required of the *wanted* entries and no others."""
    if not isinstance(given, dict):
        raise TraceError(f"{path} is not a whole {PLAN} file: {name} is a {type(given).__name__}, no JSON object.")
    missing = [key for key, is_required in wanted.items() if is_required and key not in given]
    unknown = [key[:40] for key in given if key not in wanted]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown[:8])}, which no plan has"
        raise TraceError(f"{path} is not a whole {PLAN} file: {name} {what}. Was it changed, or cut off? Plan again.")


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a ``routepack.plan/1`` file."""
    instance("plan", plan, Plan)
    tensors = {
        "physical_to_logical": plan.placement.physical_to_logical_LP,
        "cell_of_sequence": plan.packing.cell_of_S,
        "order": plan.packing.order_S,
        "length": plan.length_S,
    }
    _write(path, tensors, {"format": PLAN, "plan": json.dumps(plan.header())})


def _trace(path: str | Path, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> RolloutBatch:
    _expect(path, metadata, TRACE)
    for name in ("routed_experts", "cu_seqlens", "num_tokens"):
        if name not in tensors:
            raise TraceError(f"{path} has no tensor {name!r}, which every {TRACE} file has.")
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
            routed_experts_TLK=ids,
            cu_seqlens=tensors["cu_seqlens"],
            num_tokens_S=tensors["num_tokens"],
            num_experts=num_experts,
            layer_ids_L=_layer_ids(tensors, "routed_experts"),
            valid_T=tensors.get("valid"),
            group_S=tensors.get("group_ids"),
            modality_S=tensors.get("modality_ids"),
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


def _fields(path: str | Path, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> tuple[dict, dict]:
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


def _demand(path: str | Path, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> RoutingDemand:
    _expect(path, metadata, DEMAND)
    for name in ("tokens_SLE", "length_S"):
        if name not in tensors:
            raise TraceError(f"{path} has no tensor {name!r}, which every {DEMAND} file has.")
    top_k = _number(path, metadata, "top_k")
    num_masked_rows = _number(path, metadata, "num_masked_rows") if "num_masked_rows" in metadata else 0
    with naming(path):
        return RoutingDemand(
            tokens_SLE=tensors["tokens_SLE"],
            length_S=tensors["length_S"],
            top_k=top_k,
            group_S=tensors.get("group_S"),
            modality_S=tensors.get("modality_S"),
            layer_ids_L=_layer_ids(tensors, "tokens_SLE"),
            estimated_S=tensors.get("estimated_S"),
            num_masked_rows=num_masked_rows,
            name=metadata.get("name", ""),
        )


@contextmanager
def naming(path: str | Path, kind: type[RoutePackError] = RoutePackError) -> Iterator[None]:
    """Errors of what a file holds, of *kind*, with its name: of many files it tells which to mend."""
    try:
        yield
    except kind as error:
        raise type(error)(f"{path}: {error}") from error


def _some(path: str | Path, batch: RolloutBatch) -> RolloutBatch:
    if not batch.num_sequences:
        raise TraceError(f"{path} holds no sequences: was anything recorded?")
    return batch


def _layer_ids(tensors: dict[str, np.ndarray], counted: str) -> np.ndarray:
    return tensors.get("layer_ids", np.arange(tensors[counted].shape[1] if tensors[counted].ndim == 3 else 0))


def _expect(path: str | Path, metadata: dict[str, str], *kinds: str) -> None:
    if metadata.get("format") not in kinds:
        wanted = " or ".join(map(repr, kinds))
        raise TraceError(f"{path} has format {metadata.get('format', '(none)')!r}; {wanted} is needed.")


def _number(path: str | Path, metadata: dict[str, str], name: str) -> int:
    try:
        return int(metadata[name])
    except KeyError as error:
        raise TraceError(f"{path} lacks the metadata entry {name!r}.") from error
    except ValueError as error:
        raise TraceError(f"{path} has {name}={metadata[name]!r}, which is not a whole number.") from error


def read_tensors(path: str | Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and memory-mapped tensors. safetensors checks the header and the file's size; we map the bytes."""
    if is_folder(path):
        raise TraceError(f"{path} is a folder: name a file.")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
        with Path(path).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (OSError, ValueError) as error:
        raise TraceError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except SafetensorError as error:
        raise TraceError(f"{path} is not a whole safetensors file ({error}): it may be truncated; write it again.") from error
    header.pop("__metadata__", None)
    return metadata, {name: _map(path, name, entry, 8 + size) for name, entry in header.items()}


def _map(path: str | Path, name: str, entry: dict[str, Any], start: int) -> np.ndarray:
    if entry["dtype"] not in _DTYPES:
        raise TraceError(f"{path}: tensor {name!r} has dtype {entry['dtype']}, which RoutePack does not read.")
    shape, dtype = tuple(entry["shape"]), np.dtype(_DTYPES[entry["dtype"]])
    if 0 in shape:
        return np.empty(shape, dtype)
    array = np.memmap(path, dtype, "r", start + entry["data_offsets"][0], shape)
    return np.asarray(array) if array.flags.aligned else np.array(array)


def _write(path: str | Path, tensors: Mapping[str, np.ndarray | None], metadata: Mapping[str, str]) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items() if array is not None}
    with atomic_path(path) as temporary:
        try:
            save_file(arrays, temporary, metadata=dict(metadata))
        except SafetensorError as error:
            raise ConfigError(f"cannot write {path}: {error}: choose another place.") from error
