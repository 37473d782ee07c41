"""SkyRL: ``rollout_expert_indices``, uint8, int16 or int32, one array a trajectory, packed, or padded to the left.

Rows cover a prefix of the trajectory: the last token, an appended end-of-sequence token and a last observation were never
fed in. Their rows and the padding are 0 .. top_k - 1, which ``router_padding_mask`` (True there) tells from routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.assembler import Assembler
from routepack.traces.formats.convention import Convention
from routepack.traces.formats.exporting import padded_left, token_rows
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.records import Record, RecordedSequence
from routepack.traces.formats.tensors import add_packed, add_padded, attended, packed_routes, padded_ids, row_mask

FIELD = "rollout_expert_indices"
CONVENTION = Convention(
    stack="skyrl", switch="set generator.inference_engine.enable_return_routed_experts=true",
    ends_early=True, fills_last=True, fills_inside=True,
)  # fmt: skip


def load(source: Mapping[str, Any] | Iterable[Any], model: ModelRouting, *, options: ImportOptions = STRICT) -> Imported:
    """A batch's tensors, or trajectories.

    Tensors: ``rollout_expert_indices`` padded [B, S, L, K] with ``attention_mask`` [B, S]; or packed [T, L, K] with
    ``cu_seqlens`` [B + 1] and perhaps ``num_tokens`` [B]; ``router_padding_mask`` of the same layout where there is one.
    Trajectories: ``prompt_ids`` and ``response_ids`` (or ``token_ids``), ``rollout_expert_indices`` as an array or a
    mapping with ``data``, ``shape`` and ``dtype``.
    """
    assembler = Assembler(model, CONVENTION, options)
    if isinstance(source, Mapping) and "cu_seqlens" in source:
        _add_packed(assembler, source)
    elif isinstance(source, Mapping) and "attention_mask" in source:
        _add_padded(assembler, source)
    else:
        for record in assembler.records(source, "trajectory"):
            assembler.add(_trajectory(record))
    return assembler.finish()


def _add_padded(assembler: Assembler, source: Mapping[str, Any]) -> None:
    ids = padded_ids(source.get(FIELD), "skyrl")
    mask = attended(source["attention_mask"], ids.shape[0], ids.shape[1], "skyrl")
    add_padded(assembler, ids, mask, _delivered(source, mask.shape), None)


def _add_packed(assembler: Assembler, source: Mapping[str, Any]) -> None:
    # Without num_tokens every token has its row, as in the tensors that SkyRL packs.
    routes = packed_routes(assembler, source, FIELD if FIELD in source else "routed_experts")
    add_packed(assembler, routes, _delivered(source, routes[0].shape[:1]))


def _delivered(source: Mapping[str, Any], shape: tuple[int, ...]) -> np.ndarray | None:
    padding = row_mask(source.get("router_padding_mask"), shape, "router_padding_mask", "skyrl")
    return None if padding is None else ~padding


def _trajectory(record: Record) -> RecordedSequence:
    token_ids = record.token_ids("token_ids")
    token_ids = record.token_ids("prompt_ids", "response_ids") if token_ids is None else token_ids
    num_tokens = record.num_tokens(token_ids, "prompt_ids and response_ids (or token_ids)")
    return record.sequence(num_tokens, token_ids, record.routes(record.value(FIELD)))


def export(batch: RolloutBatch, *, packed: bool = False) -> dict[str, Any]:
    """A batch's tensors as numpy arrays, padded to the left, or packed.

    0 .. top_k - 1 and the mask stand where nothing was recorded.
    """
    dtype = np.uint8 if batch.num_experts <= 256 else np.int16 if batch.num_experts <= 32_768 else np.int32
    rows = token_rows(batch, dtype, "arange")
    lost = [_lost(batch, s, len(ids)) for s, ids in enumerate(rows)]
    if packed:
        return {FIELD: np.concatenate(rows), "cu_seqlens": batch.cu_tokens, "router_padding_mask": np.concatenate(lost)}
    return {
        FIELD: padded_left(rows, np.arange(batch.top_k)),
        "attention_mask": padded_left([np.ones(len(ids), bool) for ids in rows], 0),
        "router_padding_mask": padded_left(lost, 1),
    }


def _lost(batch: RolloutBatch, s: int, num_tokens: int) -> np.ndarray:
    lost = np.ones(num_tokens, bool)
    first, end = batch.cu_seqlens[s : s + 2]
    lost[: end - first] = False if batch.valid_T is None else ~batch.valid_T[first:end]
    return lost
