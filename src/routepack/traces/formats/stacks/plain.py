"""Plain arrays: ``.npz``, ``.safetensors`` or JSON lines of whatever recorded them, and nothing to guess at.

What was not recorded is said by ``valid``, or by -1 throughout a row; every other row must be a route.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from routepack.core.checks import MOST
from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.assembler import Assembler
from routepack.traces.formats.convention import Convention, Reason
from routepack.traces.formats.exporting import rows_of, sequence_records
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.records import Record, RecordedSequence, Segment, flat_array, whole_numbers
from routepack.traces.formats.tensors import add_packed, check_count, lengths_of, packed_routes, padded_ids, row_mask

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
    routes = packed_routes(assembler, source, "routed_experts")
    valid_T = row_mask(source.get("valid"), routes[0].shape[:1], "valid", "arrays")
    add_packed(assembler, routes, valid_T, _per_sequence(source, routes[2]))


def _add_padded(assembler: Assembler, source: Mapping[str, Any]) -> None:
    ids = padded_ids(source["routed_experts"], "arrays")
    if source.get("num_tokens") is None:
        raise TraceError("arrays: padded routes [S, n, L, K] need num_tokens [S].")
    num_tokens = lengths_of(source["num_tokens"], ids.shape[0], ids.shape[1] + 1, "arrays")
    valid = row_mask(source.get("valid"), ids.shape[:2], "valid", "arrays")
    for s, extra in enumerate(_per_sequence(source, num_tokens)):
        n = int(num_tokens[s])
        segment = Segment(ids_TLK=ids[s, :n], valid_T=None if valid is None else valid[s, :n])
        assembler.add(RecordedSequence(num_tokens=n, segments=[segment], **extra))


def _per_sequence(source: Mapping[str, Any], num_tokens: np.ndarray) -> list[dict[str, Any]]:
    """Group and token ids of each sequence, where there are any."""
    if len(num_tokens) and not 1 <= num_tokens.min() <= num_tokens.max() <= MOST:
        raise TraceError(f"arrays: num_tokens holds {num_tokens.min()} .. {num_tokens.max()}; every sequence has at least one.")
    extra: list[dict[str, Any]] = [{} for _ in num_tokens]
    if source.get("group_ids") is not None:
        groups = whole_numbers(source["group_ids"], "arrays: group_ids")
        check_count(groups, len(num_tokens), "arrays: group_ids")
        extra = [{"group": group} for group in groups.tolist()]
    if source.get("token_ids") is not None:
        tokens, ends = whole_numbers(source["token_ids"], "arrays: token_ids"), np.cumsum(num_tokens)
        if ends[-1:].sum() != len(tokens):
            raise TraceError(f"arrays: token_ids has {len(tokens)} entries; num_tokens adds up to {num_tokens.sum()}.")
        for fields, part in zip(extra, np.split(tokens, ends[:-1]), strict=False):
            fields["token_fields"] = {"token_ids": part}
    return extra


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
