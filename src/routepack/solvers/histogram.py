"""Counting recorded expert ids, on all cores. Letters: :mod:`routepack.types`."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

NO_MASK = np.empty(0, dtype=np.bool_)


def count_experts(
    routed_experts_TLK: np.ndarray,
    cu_seqlens: np.ndarray,
    num_experts: int,
    valid_T: np.ndarray | None = None,
    num_threads: int | None = None,
) -> tuple[np.ndarray, int]:
    """How often each sequence's rows name each expert of each layer.

    Returns ``tokens_SLE`` (uint16 while no sequence has more than 65,535 ids in a layer, else int32) and the
    flat index of an id in a valid row that is outside 0 .. E - 1, or stands in its row and layer for the second time; -1
    where there is none. Rows that are not
    valid are never looked at, so they may hold anything.
    """
    rows_S = np.diff(cu_seqlens)
    rows, layers, top_k = routed_experts_TLK.shape
    most = int(rows_S.max(initial=0)) * top_k
    dtype = np.uint16 if most <= np.iinfo(np.uint16).max else np.int32
    tokens_SLE = np.zeros((len(rows_S), layers, num_experts), dtype=dtype)
    ids_TJ = np.ascontiguousarray(routed_experts_TLK).reshape(rows, layers * top_k)
    valid_T = NO_MASK if valid_T is None else np.ascontiguousarray(valid_T)
    threads = num_threads or len(os.sched_getaffinity(0))
    edges = _balanced_edges(cu_seqlens, 4 * threads if threads > 1 else 1)

    kernel = _count_bytes if ids_TJ.dtype == np.uint8 and num_experts <= 256 else _count_checked

    def count(block: int) -> int:
        sequences = slice(edges[block], edges[block + 1])
        offsets = cu_seqlens[edges[block] : edges[block + 1] + 1]
        return kernel(ids_TJ, offsets, valid_T, tokens_SLE[sequences])

    blocks = range(len(edges) - 1)
    if threads == 1 or len(blocks) <= 1:
        bad = [count(block) for block in blocks]
    else:
        with ThreadPoolExecutor(threads) as pool:
            bad = list(pool.map(count, blocks))
    return tokens_SLE, min((index for index in bad if index >= 0), default=-1)


def _balanced_edges(cu_seqlens: np.ndarray, blocks: int) -> np.ndarray:
    """Cut the sequences into runs of about equally many rows."""
    targets = np.linspace(0, cu_seqlens[-1], blocks + 1)
    edges = np.searchsorted(cu_seqlens, targets)
    edges[0], edges[-1] = 0, len(cu_seqlens) - 1
    return np.unique(edges)


@njit(nogil=True, cache=True)
def _count_checked(ids_TJ, cu_seqlens, valid_T, tokens_SLE):  # pragma: no cover - compiled
    """Count into *tokens_SLE*; stop at the first bad id and return its flat index."""
    layers, experts = tokens_SLE.shape[1:]
    top_k = ids_TJ.shape[1] // layers
    seen_E, turn = np.zeros(experts, dtype=np.int64), 0
    for s in range(tokens_SLE.shape[0]):
        counts_LE = tokens_SLE[s]
        for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
            if valid_T.size and not valid_T[t]:
                continue
            row = ids_TJ[t]
            j = 0
            for layer in range(layers):
                counts_E = counts_LE[layer]
                turn += 1
                for _ in range(top_k):
                    expert = np.int64(row[j])
                    if expert < 0 or expert >= experts or seen_E[expert] == turn:
                        return t * ids_TJ.shape[1] + j
                    seen_E[expert] = turn
                    counts_E[expert] += 1
                    j += 1
    return -1


@njit(nogil=True, cache=True)
def _count_bytes(ids_TJ, cu_seqlens, valid_T, tokens_SLE):  # pragma: no cover - compiled
    """As above for uint8 ids: with room for all 256 values, checking can wait until a sequence is counted."""
    layers, experts = tokens_SLE.shape[1:]
    top_k = ids_TJ.shape[1] // layers
    counts_LV = np.empty((layers, 256), dtype=tokens_SLE.dtype)
    seen_V, turn = np.zeros(256, dtype=np.int64), 0
    for s in range(tokens_SLE.shape[0]):
        counts_LV[:] = 0
        twice = False
        for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
            if valid_T.size and not valid_T[t]:
                continue
            row = ids_TJ[t]
            j = 0
            for layer in range(layers):
                counts_V = counts_LV[layer]
                turn += 1
                for _ in range(top_k):
                    counts_V[row[j]] += 1
                    twice |= seen_V[row[j]] == turn
                    seen_V[row[j]] = turn
                    j += 1
        if twice or counts_LV[:, experts:].any():
            return _count_checked(ids_TJ, cu_seqlens[s:], valid_T, tokens_SLE[s:])
        tokens_SLE[s] = counts_LV[:, :experts]
    return -1
