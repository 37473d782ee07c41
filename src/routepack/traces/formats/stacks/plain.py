"""Plain arrays: ``.npz``, ``.safetensors`` or JSON lines of whatever recorded them, and nothing to guess at.

What was not recorded is said by ``valid``, or by -1 throughout a row; every other row must be a route.
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
from routepack.traces.formats.exporting import rows_of, sequence_records
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.payloads import decoded
from routepack.traces.formats.records import Record, RecordedSequence, Segment, flat_array, whole_numbers
from routepack.traces.formats.tensors import add_packed, check_offsets, lengths_of, padded_ids, row_mask

CONVENTION = Convention(stack="arrays", switch="record routed_experts", missing=frozenset({Reason.MINUS}))


def load(source: Mapping[str, Any] | Iterable[Any], model: ModelRouting, *, options: ImportOptions = STRICT) -> Imported:
    """Arrays, or records one a sequence.

    Arrays: ``routed_experts`` [T, L, K] with ``cu_seqlens`` [S + 1], and ``num_tokens`` [S], or as many tokens as rows; or
    padded to the right [S, n, L, K] with ``num_tokens``. ``valid`` of the same layout; ``token_ids`` [N], ``group_ids`` [S].
    Records: ``routed_experts``, ``valid``, and ``token_ids`` or ``num_tokens``.
    """
    assembler = Assembler(model, CONVENTION, options)
    if isinstance(source, Mapping) and ("cu_seqlens" in source or getattr(source.get("routed_experts"), "ndim", 0) == 4):
        (_add_packed if "cu_seqlens" in source else _add_padded)(assembler, source)
    else:
        for record in assembler.records(source, "record"):
            assembler.add(_sequence(record))
    return assembler.finish()


def _add_packed(assembler: Assembler, source: Mapping[str, Any]) -> None:
    ids = decoded(source.get("routed_experts"), "arrays", assembler.model, assembler.report)
    if ids is None:
        raise TraceError("arrays: there is no array routed_experts.")
    offsets = whole_numbers(source["cu_seqlens"], "arrays: cu_seqlens")
    check_offsets(offsets, len(ids), "arrays: cu_seqlens")
    rows = np.diff(offsets)
    num_tokens = rows if source.get("num_tokens") is None else whole_numbers(source["num_tokens"], "arrays: num_tokens")
    valid = source.get("valid")
    valid = None if valid is None else row_mask(valid, (len(ids),), "valid", "arrays")
    per_sequence = _per_sequence(source, num_tokens, len(rows))
    add_packed(assembler, ids, offsets, num_tokens, valid, per_sequence)


def _add_padded(assembler: Assembler, source: Mapping[str, Any]) -> None:
    ids = padded_ids(source["routed_experts"], "arrays")
    if source.get("num_tokens") is None:
        raise TraceError("arrays: padded routes [S, n, L, K] need num_tokens [S].")
    num_tokens = lengths_of(source["num_tokens"], ids.shape[0], ids.shape[1] + 1, "arrays")
    valid = source.get("valid")
    valid = None if valid is None else row_mask(valid, ids.shape[:2], "valid", "arrays")
    per_sequence = _per_sequence(source, num_tokens, len(ids))
    for s, n in enumerate(num_tokens.tolist()):
        segment = Segment(ids_TLK=ids[s, :n], valid_T=None if valid is None else valid[s, :n])
        assembler.add(RecordedSequence(num_tokens=n, segments=[segment], **per_sequence[s]))


def _per_sequence(source: Mapping[str, Any], num_tokens: np.ndarray, sequences: int) -> list[dict[str, Any]]:
    if len(num_tokens) != sequences:
        raise TraceError(f"arrays: num_tokens has {len(num_tokens)} entries for {sequences} sequences.")
    if len(num_tokens) and not 1 <= num_tokens.min() <= num_tokens.max() <= 2**48:
        raise TraceError(f"arrays: num_tokens holds {num_tokens.min()} .. {num_tokens.max()}; every sequence has at least one.")
    groups = source.get("group_ids")
    groups = None if groups is None else whole_numbers(groups, "arrays: group_ids")
    if groups is not None and len(groups) != sequences:
        raise TraceError(f"arrays: group_ids has {len(groups)} entries for {sequences} sequences.")
    tokens = source.get("token_ids")
    tokens = None if tokens is None else whole_numbers(tokens, "arrays: token_ids")
    edges = [0] * (sequences + 1)
    if tokens is not None:
        edges = np.concatenate([[0], np.cumsum(num_tokens)]).tolist()
        if edges[-1] != len(tokens):
            raise TraceError(f"arrays: token_ids has {len(tokens)} entries; num_tokens adds up to {edges[-1]}.")
    return [
        {"group": None if groups is None else int(groups[s]),
         "token_fields": {} if tokens is None else {"token_ids": tokens[edges[s] : edges[s + 1]]}}
        for s in range(sequences)
    ]  # fmt: skip


def _sequence(record: Record) -> RecordedSequence:
    token_ids = record.token_ids("token_ids" if record.value("token_ids") is not None else "tokens")
    num_tokens = record.num_tokens(token_ids, "token_ids")
    segments, valid = record.routes(record.value("routed_experts")), record.value("valid")
    if segments and valid is not None:
        shape = segments[0].ids_TLK.shape[:1]
        valid_T = row_mask(flat_array(valid, f"{record.where}: valid"), shape, "valid", record.where)
        segments = [replace(segments[0], valid_T=valid_T)]
    return record.sequence(num_tokens, token_ids, segments)


def export(batch: RolloutBatch, *, records: bool = False) -> dict[str, Any] | list[dict[str, Any]]:
    """Arrays, or records that JSON can hold; rows that were not recorded are marked in ``valid``."""
    if records:
        return [record | _record(batch, s) for s, record in sequence_records(batch)]
    arrays = {"routed_experts": batch.routed_experts_TLK, "cu_seqlens": batch.cu_seqlens, "num_tokens": batch.num_tokens_S}
    extra = {"valid": batch.valid_T, "group_ids": batch.group_S, "token_ids": batch.token_fields.get("token_ids")}
    return arrays | {name: value for name, value in extra.items() if value is not None}


def _record(batch: RolloutBatch, s: int) -> dict[str, Any]:
    ids = rows_of(batch, s, np.int64, missing=-1)
    return {"routed_experts": None if ids is None else ids.tolist()}
