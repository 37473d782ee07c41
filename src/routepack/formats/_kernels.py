"""One pass over recorded ids: narrow them, and judge every row; and base64. Letters: :mod:`routepack.types`."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit, types

from routepack.formats.convention import COUNTS_UP, REPEATS, Reason

WORTH_A_THREAD = 1 << 18
"""Ids below which another thread costs more than it saves."""
_ZEROS, _MINUS, _PARTLY = int(Reason.ZEROS), int(Reason.MINUS), int(Reason.PARTLY_MINUS)
_RANGE, _TWICE = int(Reason.OUT_OF_RANGE), int(Reason.DUPLICATE)


def judge_rows(
    ids_TLK: np.ndarray, kept_L: np.ndarray, num_experts: int, judged_T: np.ndarray, out_TLK: np.ndarray | None = None
) -> None:
    """Write each row's reason and flags to *judged_T*, and the kept columns to *out_TLK* where given.

    A row is valid if every kept layer has K different ids in 0 .. E - 1. *ids_TLK* is C-contiguous, of any integer dtype.
    """
    target = np.empty((0, 0, 0), dtype=np.uint8) if out_TLK is None else out_TLK
    kernel = _compiled(ids_TLK.dtype, target.dtype)
    rows = len(ids_TLK)
    threads = min(len(os.sched_getaffinity(0)), max(ids_TLK.size // WORTH_A_THREAD, 1), max(rows, 1))
    edges = [rows * i // threads for i in range(threads + 1)]

    def judge(block: int) -> None:
        seen_E = np.zeros(num_experts, dtype=np.int64)
        kernel(ids_TLK, kept_L, seen_E, judged_T, target, edges[block], edges[block + 1])

    if threads == 1:
        judge(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(judge, range(threads)))


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
    return njit(types.void(*arrays, types.int64, types.int64), nogil=True, cache=True)(_judge)


def _scalar(dtype: np.dtype) -> types.Integer:
    return getattr(types, dtype.name)


def _judge(ids_TLK, kept_L, seen_E, judged_T, out_TLK, first, end):  # pragma: no cover - compiled
    experts, top_k = seen_E.size, ids_TLK.shape[2]
    writes = out_TLK.size > 0
    stamp = np.int64(0)
    for t in range(first, end):
        nonzero = np.int64(0)
        negative, beyond, twice = np.int64(0), False, False
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
                if expert < 0:
                    negative += 1
                elif expert >= experts:
                    beyond = True
                else:
                    twice |= seen_E[expert] == stamp
                    seen_E[expert] = stamp
        code = 0
        if nonzero == 0:
            code = _ZEROS
        elif negative == kept_L.size * top_k:
            code = _MINUS
        elif negative > 0:
            code = _PARTLY
        elif beyond:
            code = _RANGE
        elif twice:
            code = _TWICE
        judged_T[t] = code | (COUNTS_UP if counts_up else 0) | (REPEATS if repeats else 0)


_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_BAD = 0x80
_VALUES = np.full(256, _BAD, dtype=np.uint8)
_VALUES[np.frombuffer(_ALPHABET, dtype=np.uint8)] = np.arange(64)


def decode_groups(text: np.ndarray, out: np.ndarray) -> bool:
    """Write to *out*, uint8, what base64 *text*, uint8 without padding, stands for; False for other text."""
    return int(_decode(text, _VALUES, out, 0, len(text) // 4)) < _BAD


@njit(
    types.uint8(types.Array(types.uint8, 1, "C", readonly=True), types.uint8[::1], types.uint8[::1], types.int64, types.int64),
    nogil=True,
    cache=True,
)
def _decode(characters, values, out, first, end):  # pragma: no cover - compiled
    seen = np.uint8(0)
    for g in range(first, end):
        a, b = values[characters[4 * g]], values[characters[4 * g + 1]]
        c, d = values[characters[4 * g + 2]], values[characters[4 * g + 3]]
        seen |= a | b | c | d
        out[3 * g] = (a << 2) | (b >> 4)
        out[3 * g + 1] = (b << 4) | (c >> 2)
        out[3 * g + 2] = (c << 6) | d
    return seen
