"""Padded and jagged batches of tensors, as trainers hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from routepack.core.arrays import to_numpy
from routepack.core.errors import TraceError
from routepack.traces.formats.assembler import Assembler
from routepack.traces.formats.payloads import decoded
from routepack.traces.formats.records import RecordedSequence, Segment, whole_numbers


def padded_ids(value: Any, where: str) -> np.ndarray:
    """Ids [B, S, L, K] of any integer dtype; shares a CPU tensor's memory."""
    ids = to_numpy(value, f"{where}: routed_experts")
    if ids.ndim != 4 or ids.dtype.kind not in "iu":
        raise TraceError(
            f"{where}: routed_experts has shape {ids.shape} and dtype {ids.dtype}; whole numbers [batch, tokens, layers, "
            "top_k] are needed."
        )
    return ids


def attended(value: Any, batch: int, width: int, where: str) -> np.ndarray:
    """An attention mask as bool [B, S]: padding to the left, to the right or both, and tokens without a gap between."""
    mask = to_numpy(value, f"{where}: attention_mask")
    if mask.shape != (batch, width) or mask.dtype.kind not in "iubf":
        raise TraceError(f"{where}: attention_mask has shape {mask.shape}; {(batch, width)} is needed, as the routes have it.")
    marked = _marked(mask, f"{where}: attention_mask")
    starts_B = marked[:, :1].sum(axis=1) + (marked[:, 1:] & ~marked[:, :-1]).sum(axis=1)
    if (starts_B > 1).any():
        b = int((starts_B > 1).argmax())
        hole = int(np.flatnonzero(~marked[b, marked[b].argmax() :])[0] + marked[b].argmax())
        raise TraceError(
            f"{where}, sequence {b}: attention_mask has {starts_B[b]} runs of tokens; position {hole} between them is masked. "
            "Padding stands before and after a sequence's tokens, never among them: cut masked tokens out, routes too."
        )
    return marked


def padded_tokens(value: Any, shape: tuple[int, ...], where: str) -> np.ndarray | None:
    """Token ids [B, S] of the same layout as the routes; None for None."""
    if value is None:
        return None
    ids = to_numpy(value, f"{where}: input_ids")
    if ids.shape != shape:
        raise TraceError(f"{where}: input_ids has shape {ids.shape}; {shape} is needed, as the routes have it.")
    return ids


def row_mask(value: Any, shape: tuple[int, ...], name: str, where: str) -> np.ndarray | None:
    """A mask of rows as bool, of *shape*; None for None."""
    if value is None:
        return None
    mask = to_numpy(value, f"{where}: {name}")
    if mask.shape != shape or mask.dtype.kind not in "iub":
        raise TraceError(f"{where}: {name} has shape {mask.shape} and dtype {mask.dtype}; bool {shape} is needed.")
    return _marked(mask, f"{where}: {name}")


def _marked(mask: np.ndarray, name: str) -> np.ndarray:
    """*mask* as bool. Raises TraceError for anything but 0, 1 and bool, naming where it stands."""
    if mask.dtype == np.bool_:
        return mask
    wrong = np.argwhere((mask != 0) & (mask != 1))
    if len(wrong):
        position = tuple(wrong[0].tolist())
        at = f"sequence {position[0]}, position {position[1]}" if len(position) == 2 else f"row {position[0]}"
        raise TraceError(f"{name} holds {mask[position].item()!r} at {at} ({len(wrong)} such entries): give 0, 1 or bool.")
    return mask != 0


def lengths_of(value: Any, batch: int, width: int, where: str) -> np.ndarray:
    """The tokens of each sequence, int64 [B], none longer than the padded width."""
    lengths = whole_numbers(value, f"{where}: lengths")
    if len(lengths) != batch or (batch and not 0 <= lengths.min() <= lengths.max() <= width):
        raise TraceError(f"{where}: lengths {lengths[:8].tolist()} must be {batch} numbers from 0 to the width {width}.")
    return lengths


def is_jagged(value: Any) -> bool:
    """Whether *value* is a jagged tensor, or a mapping with its ``values`` and ``offsets``."""
    if isinstance(value, Mapping):
        return "values" in value and "offsets" in value
    return bool(getattr(value, "is_nested", False))


def jagged(value: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Values [T, ...] and offsets int64 [B + 1], checked against one another before anything is sliced."""
    if isinstance(value, Mapping):
        values, offsets = value["values"], value["offsets"]
    else:
        values, offsets = value.values(), value.offsets()
    array, edges = to_numpy(values, f"{where}: values"), whole_numbers(offsets, f"{where}: offsets")
    check_offsets(edges, array.shape[0] if array.ndim else 0, where)
    return array, edges


def check_offsets(offsets: np.ndarray, rows: int, where: str) -> None:
    """Raise TraceError unless *offsets* ascend from 0 to *rows*."""
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != rows or (offsets[1:] < offsets[:-1]).any():
        raise TraceError(f"{where}: offsets {offsets[:8].tolist()} ... must ascend from 0 to the {rows} rows.")


def add_padded(
    assembler: Assembler, ids_BSLK: np.ndarray, mask_BS: np.ndarray, valid_BS: np.ndarray | None, tokens_BS: np.ndarray | None
) -> None:
    """Take the sequences of a padded batch, each where its attention mask is set. *tokens_BS*: token ids, where known."""
    for b, mask_S in enumerate(mask_BS):
        # The first of the one run that attended() lets through.
        first, n = int(mask_S.argmax()), int(mask_S.sum())
        span = slice(first, first + n)
        segment = Segment(ids_TLK=ids_BSLK[b][span], valid_T=None if valid_BS is None else valid_BS[b][span])
        fields = {}
        if tokens_BS is not None:
            fields["token_ids"] = whole_numbers(tokens_BS[b][span], f"{assembler.convention.stack}: input_ids")
        assembler.add(RecordedSequence(num_tokens=n, segments=[segment], token_fields=fields))


Packed = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Ids [T, L, K] of sequences end to end; offsets int64 [S + 1], their rows; and int64 [S], the tokens of each."""


def packed_routes(assembler: Assembler, source: Mapping[str, Any], name: str) -> Packed:
    """The array *name* beside ``cu_seqlens`` and, unless every token has its row, ``num_tokens``."""
    stack = assembler.convention.stack
    ids_TLK = decoded(source.get(name), stack, assembler.model, assembler.report)
    if ids_TLK is None:
        raise TraceError(f"{stack}: there is no array {name} [rows, layers, top_k] beside cu_seqlens.")
    offsets = whole_numbers(source["cu_seqlens"], f"{stack}: cu_seqlens")
    check_offsets(offsets, len(ids_TLK), f"{stack}: cu_seqlens")
    tokens = source.get("num_tokens")
    num_tokens_S = np.diff(offsets) if tokens is None else whole_numbers(tokens, f"{stack}: num_tokens")
    check_count(num_tokens_S, len(offsets) - 1, f"{stack}: num_tokens")
    return ids_TLK, offsets, num_tokens_S


def check_count(values: np.ndarray, sequences: int, name: str) -> None:
    """Raise TraceError unless there is one value a sequence."""
    if len(values) != sequences:
        raise TraceError(f"{name} has {len(values)} entries for {sequences} sequences.")


def add_packed(
    assembler: Assembler, routes: Packed, valid_T: np.ndarray | None, extra_S: Sequence[Mapping[str, Any]] | None = None
) -> None:
    """Take packed sequences. *extra_S*: other fields of each :class:`RecordedSequence`."""
    ids_TLK, offsets, num_tokens_S = routes
    assembler.share(ids_TLK, np.diff(offsets).tolist(), num_tokens_S.tolist())
    for s, (first, end) in enumerate(pairwise(offsets.tolist())):
        segment = Segment(ids_TLK=ids_TLK[first:end], valid_T=None if valid_T is None else valid_T[first:end])
        extra = {} if extra_S is None else extra_S[s]
        assembler.add(RecordedSequence(num_tokens=int(num_tokens_S[s]), segments=[segment], **extra))
