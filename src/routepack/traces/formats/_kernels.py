"""One pass over recorded ids: narrow them, and judge every row. Letters: :mod:`routepack.core`."""

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
