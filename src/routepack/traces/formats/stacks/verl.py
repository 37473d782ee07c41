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

from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.assembler import Assembler
from routepack.traces.formats.convention import Convention, Reason
from routepack.traces.formats.exporting import padded_left, token_rows
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.payloads import checked_ids
from routepack.traces.formats.records import Record, RecordedSequence, whole_numbers
from routepack.traces.formats.tensors import (
    add_packed,
    add_padded,
    attended,
    check_count,
    is_jagged,
    jagged,
    padded_ids,
    padded_tokens,
    row_mask,
)

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
        for record in assembler.records(source, "output"):
            assembler.add(_output(record))
    imported = assembler.finish()
    if veomni and imported.batch.top_k == 1:
        raise TraceError("verl: veomni=True says that repeated ids mark rows without routes; a top-1 model repeats none.")
    return imported


def _add_padded(assembler: Assembler, source: Mapping[str, Any]) -> None:
    ids = padded_ids(source["routed_experts"], "verl")
    if source.get("attention_mask") is None:
        raise TraceError("verl: padded routes need the attention_mask [B, S], which says where the tokens are.")
    mask = attended(source["attention_mask"], ids.shape[0], ids.shape[1], "verl")
    replayed = row_mask(source.get("replay_mask"), mask.shape, "replay_mask", "verl")
    add_padded(assembler, ids, mask, replayed, padded_tokens(source.get("input_ids"), mask.shape, "verl"))


def _add_jagged(assembler: Assembler, source: Mapping[str, Any]) -> None:
    values, offsets = jagged(source["routed_experts"], "verl")
    ids = checked_ids(values, "verl", assembler.model)
    num_tokens, extra = np.diff(offsets), None
    if is_jagged(source.get("input_ids")):
        token_ids, edges = jagged(source["input_ids"], "verl: input_ids")
        num_tokens = np.diff(edges)
        extra = [
            {"token_fields": {"token_ids": part}} for part in np.split(whole_numbers(token_ids, "verl: input_ids"), edges[1:-1])
        ]
    elif source.get("num_tokens") is not None:
        num_tokens = whole_numbers(source["num_tokens"], "verl: num_tokens")
    check_count(num_tokens, len(offsets) - 1, "verl: num_tokens")
    mask = source.get("replay_mask")
    mask = jagged(mask, "verl: replay_mask")[0] if is_jagged(mask) else mask
    add_packed(assembler, (ids, offsets, num_tokens), row_mask(mask, (len(ids),), "replay_mask", "verl"), extra)


def _output(record: Record) -> RecordedSequence:
    is_whole = record.value("prompt_ids") is not None and record.value("response_ids") is not None
    token_ids = record.token_ids("prompt_ids", "response_ids") if is_whole else None
    num_tokens = record.num_tokens(token_ids, "prompt_ids and response_ids")
    return record.sequence(num_tokens, token_ids, record.routes(record.value("routed_experts")))


def export(batch: RolloutBatch, *, dense: bool = False) -> dict[str, Any]:
    """A batch's tensors as numpy arrays: jagged ``values`` and ``offsets``, or padded; zeros where nothing was recorded."""
    dtype = np.int16 if batch.num_experts <= 32_768 else np.int32
    rows = token_rows(batch, dtype, 0)
    if dense:
        mask = padded_left([np.ones(len(ids), bool) for ids in rows], 0)
        return {"routed_experts": padded_left(rows, 0), "attention_mask": mask}
    fields = {"routed_experts": np.concatenate(rows)}
    if "token_ids" in batch.token_fields:
        fields["input_ids"] = batch.token_fields["token_ids"]
    return {name: {"values": values, "offsets": batch.cu_tokens} for name, values in fields.items()}
