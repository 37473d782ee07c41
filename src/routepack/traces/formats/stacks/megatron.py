"""Megatron-core: ``router_trace_rank<r>.jsonl`` (``--moe-routing-trace-path``), and the tensors of its router replay.

A line holds what one router chose for the tokens of one forward on one rank: ``{step, layer, rank, num_tokens, topk,
top_indices}``, ``block`` (``mtp`` for draft layers, left out here) since newer versions. Lines know no sequences: a step's
microbatch on a rank counts as one, unless its offsets are given, and the routes recorded are whatever that rank's router
saw, a slice of the sequence under sequence or context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from routepack.core.arrays import to_numpy
from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch, id_dtype
from routepack.traces.formats.assembler import Assembler
from routepack.traces.formats.convention import Convention
from routepack.traces.formats.exporting import rows_of
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.records import Record, RecordedSequence, Segment, whole_numbers
from routepack.traces.formats.tensors import check_offsets

CONVENTION = Convention(stack="megatron", switch="run with --moe-routing-trace-path")


def load(
    source: Iterable[Mapping[str, Any]] | Sequence[Any],
    model: ModelRouting,
    *,
    cu_seqlens: Any = None,
    options: ImportOptions = STRICT,
) -> Imported:
    """Lines of a trace as dicts, in any order of layers and ranks; or replay data, one array [T, K] a layer.

    Args:
        cu_seqlens: int [S + 1], how the rows of replay data divide into sequences; None: they are one.
    """
    assembler = Assembler(model, CONVENTION, options)
    if isinstance(source, list | tuple) and source and not isinstance(source[0], Mapping):
        _add_replay(assembler, source, cu_seqlens)
    else:
        for layers, ids in _microbatches(assembler.records(source, "line", first=1)):
            assembler.model = _with_layers(assembler.model, layers)
            assembler.add(RecordedSequence(num_tokens=len(ids), segments=[Segment(ids_TLK=ids)]))
    return assembler.finish()


def _add_replay(assembler: Assembler, layers: Sequence[Any], cu_seqlens: Any) -> None:
    arrays = [to_numpy(layer, f"megatron: layer {number}") for number, layer in enumerate(layers)]
    if any(array.ndim != 2 or array.dtype.kind not in "iu" or array.shape != arrays[0].shape for array in arrays):
        raise TraceError(
            f"megatron: replay data has shapes {[a.shape for a in arrays][:4]}; whole numbers [tokens, top_k] are needed."
        )
    ids = np.stack(arrays, axis=1)
    offsets = np.asarray([0, len(ids)]) if cu_seqlens is None else whole_numbers(cu_seqlens, "megatron: cu_seqlens")
    check_offsets(offsets, len(ids), "megatron: cu_seqlens")
    for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        assembler.add(RecordedSequence(num_tokens=end - first, segments=[Segment(ids_TLK=ids[first:end])]))


def _with_layers(model: ModelRouting, layers: list[int]) -> ModelRouting:
    """Lines name their layers, so the model need not."""
    if model.moe_layers is not None and list(model.moe_layers) == layers:
        return model
    if model.moe_layers is not None:
        raise TraceError(f"megatron: layers {layers} are recorded; {list(model.moe_layers)} are needed in every microbatch.")
    if model.num_layers is not None and layers[-1] >= model.num_layers:
        raise TraceError(
            f"megatron: layer {layers[-1]} is recorded of a model with num_layers={model.num_layers}: leave draft "
            "(MTP) layers out."
        )
    return ModelRouting(num_experts=model.num_experts, top_k=model.top_k, num_layers=model.num_layers, moe_layers=layers)


def _microbatches(lines: Iterable[Record]) -> Iterable[tuple[list[int], np.ndarray]]:
    """The layers and ids [T, L, K] of each microbatch, by step and rank, in the order of their first line.

    A layer that comes again in a step on a rank belongs to the next microbatch there.
    """
    microbatches: dict[tuple[int, int, int], dict[int, np.ndarray]] = {}
    count: dict[tuple[int, int, int], int] = {}
    for line in lines:
        if str(line.value("block")) == "mtp" or line.value("mtp_idx") is not None:
            continue
        step, rank, layer = line.whole("step", 0), line.whole("rank", 0), line.whole("layer")
        occurrence = count.get((step, rank, layer), 0)
        count[step, rank, layer] = occurrence + 1
        microbatches.setdefault((step, rank, occurrence), {})[layer] = _chosen(line)
    while microbatches:
        # Released one by one: what waits here is the whole trace.
        step, rank, occurrence = next(iter(microbatches))
        ids_of_layer = microbatches.pop((step, rank, occurrence))
        layers = sorted(ids_of_layer)
        shapes = {ids_of_layer[layer].shape for layer in layers}
        if len(shapes) > 1:
            raise TraceError(
                f"megatron: step {step}, rank {rank}, microbatch {occurrence} has layers of shapes {sorted(shapes)} [tokens, "
                "topk]; they must be equal. Were lines lost?"
            )
        yield layers, np.stack([ids_of_layer[layer] for layer in layers], axis=1)


def _chosen(line: Record) -> np.ndarray:
    ids, num_experts = to_numpy(line.value("top_indices"), f"{line.where}: top_indices"), line.model.num_experts
    top_k = line.whole("topk", ids.shape[1] if ids.ndim == 2 else 0)
    rows = line.whole("num_tokens", len(ids) if ids.ndim else 0)
    if ids.size == 0 and rows == 0 and 1 <= top_k <= num_experts:
        return np.empty((0, top_k), np.int32)
    if ids.dtype.kind not in "iu" or ids.shape != (rows, top_k):
        raise TraceError(
            f"{line.where}: top_indices has shape {ids.shape} and dtype {ids.dtype}; whole numbers "
            f"[num_tokens={rows}, topk={top_k}]."
        )
    narrow = id_dtype(num_experts)
    # Lists become 64-bit numbers; ids in range fit the batch's dtype, others stay as they are, to be named in an error.
    fits = ids.size == 0 or (int(ids.min()) >= 0 and int(ids.max()) <= np.iinfo(narrow).max)
    return ids.astype(narrow) if fits else ids


def export(batch: RolloutBatch, *, step: int = 0) -> list[dict[str, Any]]:
    """Lines of a trace, each sequence a microbatch of rank 0. Raises TraceError for a row that was not recorded."""
    lines = []
    for s in range(batch.num_sequences):
        ids = rows_of(batch, s, np.int32, missing=None)
        for i, layer in enumerate(batch.layer_ids_L.tolist() if ids is not None else []):
            rows = ids[:, i].tolist()  # pyrefly: ignore[unsupported-operation]
            lines.append({"step": step + s, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0,
                          "num_tokens": len(rows), "topk": batch.top_k, "top_indices": rows})  # fmt: skip
    return lines
