"""verl: int16 ``routed_experts``, padded [B, S, L, K] (prompts to the left, responses to the right) or jagged.

Rows without a route are zeros: the last token's, tool responses that were never fed in, and padding. The mask that R3
builds can be passed along. Its VeOmni engine routes every row with a repeated id natively, so there such a row means "not
recorded"; like that engine, we refuse it for top-1 models, where no id can repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from routepack.core.arrays import to_numpy
from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.assembler import Assembler
from routepack.traces.formats.convention import Convention, Reason
from routepack.traces.formats.exporting import rows_of
from routepack.traces.formats.fields import joined_tokens, num_tokens_of, records_of, value_of, whole_numbers
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.payloads import checked_ids, decoded
from routepack.traces.formats.recorded_sequence import RecordedSequence, Segment
from routepack.traces.formats.tensors import attended, is_jagged, jagged, padded_ids, row_mask, span_of
from routepack.traces.formats.travelling import travelling

CONVENTION = Convention(
    stack="verl", switch="set actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
    missing=frozenset({Reason.ZEROS}), ends_early=True,
)  # fmt: skip
VEOMNI = replace(CONVENTION, missing=CONVENTION.missing | {Reason.DUPLICATE})


def load(
    source: Mapping[str, Any] | Iterable[Any],
    model: ModelRouting,
    *,
    veomni: bool = False,
    options: ImportOptions = STRICT,
) -> Imported:
    """A batch's tensors, or agent-loop outputs one a sequence.

    Tensors: ``routed_experts`` padded, with ``attention_mask`` [B, S] and perhaps ``input_ids`` [B, S]; or jagged (a nested
    tensor, or its ``values`` and ``offsets``), with perhaps ``input_ids`` alike or ``num_tokens`` [B]. ``replay_mask`` of
    the same layout marks the rows that are replayed. Outputs: ``prompt_ids``, ``response_ids``, ``routed_experts``.

    Args:
        veomni: whether a repeated id means that a row was not recorded.
    """
    assembler = Assembler(model, VEOMNI if veomni else CONVENTION, options)
    if isinstance(source, Mapping) and "routed_experts" in source and "prompt_ids" not in source:
        routes = source["routed_experts"]
        (_add_jagged if is_jagged(routes) else _add_padded)(assembler, source)
    else:
        _add_outputs(assembler, source, model)
    imported = assembler.finish()
    if veomni and imported.batch.top_k == 1:
        raise TraceError("verl: veomni=True says that repeated ids mark rows without routes; a top-1 model repeats none.")
    return imported


def _add_padded(assembler: Assembler, source: Mapping[str, Any]) -> None:
    ids = padded_ids(source["routed_experts"], "verl")
    batch, width = ids.shape[:2]
    if source.get("attention_mask") is None:
        raise TraceError("verl: padded routes need the attention_mask [B, S], which says where the tokens are.")
    mask = attended(source["attention_mask"], batch, width, "verl")
    replayed = source.get("replay_mask")
    replayed = None if replayed is None else row_mask(replayed, mask.shape, "replay_mask", "verl")
    token_ids = source.get("input_ids")
    token_ids = None if token_ids is None else _token_ids(token_ids, mask.shape)
    for b in range(batch):
        where = span_of(mask[b])
        segment = Segment(ids_TLK=ids[b][where], valid_T=None if replayed is None else replayed[b][where])
        fields = {} if token_ids is None else {"token_ids": whole_numbers(token_ids[b][where], "verl: input_ids")}
        assembler.add(RecordedSequence(num_tokens=int(mask[b].sum()), segments=[segment], token_fields=fields))


def _token_ids(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    ids = to_numpy(value, "verl: input_ids")
    if ids.shape != shape:
        raise TraceError(f"verl: input_ids has shape {ids.shape}; {shape} is needed, as the routes have it.")
    return ids


def _add_jagged(assembler: Assembler, source: Mapping[str, Any]) -> None:
    values, offsets = jagged(source["routed_experts"], "verl")
    ids = checked_ids(values, "verl", assembler.model)
    token_ids, token_edges = None, None
    if is_jagged(source.get("input_ids")):
        token_ids, token_edges = jagged(source["input_ids"], "verl: input_ids")
    if token_edges is None and source.get("num_tokens") is not None:
        num_tokens = whole_numbers(source["num_tokens"], "verl: num_tokens")
    else:
        num_tokens = np.diff(offsets if token_edges is None else token_edges)
    if len(num_tokens) != len(offsets) - 1:
        raise TraceError(f"verl: {len(num_tokens)} sequences of tokens for {len(offsets) - 1} of routes.")
    replayed = source.get("replay_mask")
    if replayed is not None:
        flat = jagged(replayed, "verl: replay_mask")[0] if is_jagged(replayed) else replayed
        replayed = row_mask(flat, (len(ids),), "replay_mask", "verl")
    assembler.share(ids, np.diff(offsets).tolist(), num_tokens.tolist())
    for b, (first, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        segment = Segment(ids_TLK=ids[first:end], valid_T=None if replayed is None else replayed[first:end])
        fields = {}
        if token_ids is not None and token_edges is not None:
            fields["token_ids"] = whole_numbers(token_ids[token_edges[b] : token_edges[b + 1]], "verl: input_ids")
        assembler.add(RecordedSequence(num_tokens=int(num_tokens[b]), segments=[segment], token_fields=fields))


def _add_outputs(assembler: Assembler, source: Any, model: ModelRouting) -> None:
    for number, output in enumerate(records_of(source, "verl")):
        where = f"verl, output {number}"
        parts = {name: value_of(output, name) for name in ("prompt_ids", "response_ids")}
        token_ids = None if None in parts.values() else joined_tokens(parts, where)
        num_tokens = num_tokens_of(output, token_ids, where, "prompt_ids and response_ids")
        ids = decoded(value_of(output, "routed_experts"), where, model, assembler.report)
        segments = [] if ids is None else [Segment(ids_TLK=ids)]
        assembler.add(RecordedSequence(num_tokens=num_tokens, segments=segments, **travelling(output, token_ids, where)))


def export(batch: RolloutBatch, *, dense: bool = False) -> dict[str, Any]:
    """A batch's tensors as numpy arrays: jagged ``values`` and ``offsets``, or padded; zeros where nothing was recorded."""
    dtype = np.int16 if batch.num_experts <= 32_768 else np.int32
    shape = (batch.num_layers, batch.top_k)
    rows = [rows_of(batch, s, dtype, missing=0, num_rows=int(n)) for s, n in enumerate(batch.num_tokens_S)]
    whole = [np.zeros((int(n), *shape), dtype) if ids is None else ids for ids, n in zip(rows, batch.num_tokens_S, strict=True)]
    if not dense:
        jagged_routes = {"routed_experts": {"values": np.concatenate(whole), "offsets": batch.cu_tokens}}
        if "token_ids" not in batch.token_fields:
            return jagged_routes
        return jagged_routes | {"input_ids": {"values": batch.token_fields["token_ids"], "offsets": batch.cu_tokens}}
    width = int(batch.num_tokens_S.max())
    padded = np.zeros((batch.num_sequences, width, *shape), dtype)
    mask = np.arange(width) >= width - batch.num_tokens_S[:, None]
    for s, ids in enumerate(whole):
        padded[s, width - len(ids) :] = ids
    return {"routed_experts": padded, "attention_mask": mask}
