"""One pass over recorded ids: narrow them, and judge every row; and base64. Letters: :mod:`routepack.core`."""

from __future__ import annotations

import functools

import numpy as np
from numba import njit, types

from routepack.core.threads import on_all_cores
from routepack.traces.formats.convention import COUNTS_UP, REPEATS, Reason

PIECE = 1 << 18
"""Ids judged at once: with fewer another thread costs more than it saves."""
_ZEROS, _MINUS, _NEGATIVE = int(Reason.ZEROS), int(Reason.MINUS), int(Reason.NEGATIVE)
_RANGE, _TWICE = int(Reason.OUT_OF_RANGE), int(Reason.DUPLICATE)


def judge_rows(
    ids_TLK: np.ndarray, kept_L: np.ndarray, num_experts: int, judged_T: np.ndarray, out_TLK: np.ndarray | None = None
) -> None:
    """Write each row's reason and flags to *judged_T*, and the kept columns to *out_TLK* where given.

    A row is valid if every kept layer has K different ids in 0 .. E - 1. *ids_TLK* is C-contiguous, of any integer dtype.
    """
    target = np.empty((0, 0, 0), dtype=np.uint8) if out_TLK is None else out_TLK
    kernel = _compiled(ids_TLK.dtype, target.dtype)
    # As a signed number the upper half of uint64 reads as negative ids, -1 among them.
    is_signed = ids_TLK.dtype.kind == "i"
    rows, pieces = len(ids_TLK), max(ids_TLK.size // PIECE, 1)
    edges = [rows * i // pieces for i in range(pieces + 1)]

    def judge(piece: int) -> None:
        seen_E = np.zeros(num_experts, dtype=np.int64)
        kernel(ids_TLK, kept_L, seen_E, judged_T, target, edges[piece], edges[piece + 1], is_signed)

    on_all_cores(judge, pieces)


@functools.cache
def _compiled(source: np.dtype, target: np.dtype):
    """One machine code for read-only and writable sources alike: a signature that names the source read-only takes both."""
    arrays = [
        types.Array(_scalar(source), 3, "C", readonly=True),
        types.Array(types.int64, 1, "C", readonly=True),
        types.int64[::1],
        types.uint8[::1],
        types.Array(_scalar(target), 3, "C"),
    ]
    return njit(types.void(*arrays, types.int64, types.int64, types.boolean), nogil=True, cache=True)(_judge)


def _scalar(dtype: np.dtype) -> types.Integer:
    return getattr(types, dtype.name)


def _judge(ids_TLK, kept_L, seen_E, judged_T, out_TLK, first, end, is_signed):  # pragma: no cover - compiled
    experts, top_k = seen_E.size, ids_TLK.shape[2]
    writes = out_TLK.size > 0
    stamp = np.int64(0)
    for t in range(first, end):
        nonzero = np.int64(0)
        minus, negative, beyond, twice = np.int64(0), False, False, False
        counts_up, repeats = True, t > 0
        for i in range(kept_L.size):
            layer = kept_L[i]
            stamp += 1
            for k in range(top_k):
                raw = ids_TLK[t, layer, k]
                expert = np.int64(raw)
                if writes:
                    out_TLK[t, i, k] = raw
                nonzero |= expert
                counts_up &= expert == k
                if repeats:
                    repeats = raw == ids_TLK[t - 1, layer, k]
                if expert < 0 and is_signed:
                    negative = True
                    minus += expert == -1
                elif expert < 0 or expert >= experts:
                    beyond = True
                else:
                    twice |= seen_E[expert] == stamp
                    seen_E[expert] = stamp
        code = 0
        if nonzero == 0:
            code = _ZEROS
        elif minus == kept_L.size * top_k:
            code = _MINUS
        elif negative:
            code = _NEGATIVE
        elif beyond:
            code = _RANGE
        elif twice:
            code = _TWICE
        judged_T[t] = code | (COUNTS_UP if counts_up else 0) | (REPEATS if repeats else 0)


_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_BAD = np.uint32(1 << 31)


def _pairs() -> tuple[np.ndarray, np.ndarray]:
    """uint32 [65536] twice: where the twelve bits of two characters go as the first and as the second pair of a group.

    An index is two characters as a little-endian number, an entry three bytes as one; bit 31 marks other characters.
    """
    values = np.full(256, -1, dtype=np.int64)
    values[np.frombuffer(_ALPHABET, dtype=np.uint8)] = np.arange(64)
    pair = np.arange(1 << 16)
    left, right = values[pair & 0xFF], values[pair >> 8]
    twelve, is_bad = left << 6 | right, (left < 0) | (right < 0)
    first = np.where(is_bad, _BAD, twelve >> 4 | (twelve & 0xF) << 12)
    second = np.where(is_bad, _BAD, twelve >> 8 << 8 | (twelve & 0xFF) << 16)
    return first.astype(np.uint32), second.astype(np.uint32)


_FIRST, _SECOND = _pairs()


def decode_groups(text: np.ndarray, out: np.ndarray) -> bool:
    """Write to *out*, uint8, what base64 *text* stands for: uint8, a multiple of 16 without padding. False for other text."""
    pairs = text.view("<u2")
    # Python keeps texts at even addresses; a slice of one that is at none would have to be copied.
    return not _decode(pairs if pairs.flags.aligned else pairs.copy(), _FIRST, _SECOND, out.view(np.uint32)) & _BAD


@njit(
    types.uint32(types.Array(types.uint16, 1, "C", readonly=True), types.uint32[::1], types.uint32[::1], types.uint32[::1]),
    nogil=True,
    cache=True,
)
def _decode(pairs, first, second, out):  # pragma: no cover - compiled
    """Four groups of four characters are three numbers of four bytes; the lookups of all characters fit the first cache."""
    seen = np.uint32(0)
    for i in range(len(pairs) // 8):
        a = first[pairs[8 * i]] | second[pairs[8 * i + 1]]
        b = first[pairs[8 * i + 2]] | second[pairs[8 * i + 3]]
        c = first[pairs[8 * i + 4]] | second[pairs[8 * i + 5]]
        d = first[pairs[8 * i + 6]] | second[pairs[8 * i + 7]]
        seen |= a | b | c | d
        out[3 * i] = a | (b << 24)
        out[3 * i + 1] = (b >> 8) | (c << 16)
        out[3 * i + 2] = (c >> 16) | (d << 8)
    return seen
