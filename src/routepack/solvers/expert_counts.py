"""Counting recorded expert ids, on all cores. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit

from routepack.core.threads import num_cores, on_all_cores

NO_MASK = np.empty(0, dtype=np.bool_)
MIN_ROWS = 1024
"""Rows from which on several threads look for repeated ids."""

MAX_COMPARED = 16
"""Up to this top-k, comparing all pairs of a row's ids is the faster way to see that none repeats."""


def count_experts(
    routed_experts_TLK: np.ndarray,
    cu_seqlens: np.ndarray,
    num_experts: int,
    valid_T: np.ndarray | None = None,
    num_threads: int | None = None,
) -> tuple[np.ndarray, int]:
    """How often each sequence's rows name each expert of each layer.

    Returns ``tokens_SLE`` (uint16 while no sequence has more than 65,535 ids in a layer, else int32) and the
    flat index of an id outside 0 .. E - 1 in a valid row, or -1 where there is none. Rows that are not
    valid are never looked at, so they may hold anything.
    """
    rows_S = np.diff(cu_seqlens)
    rows, layers, top_k = routed_experts_TLK.shape
    most = int(rows_S.max(initial=0)) * top_k
    dtype = np.uint16 if most <= np.iinfo(np.uint16).max else np.int32
    tokens_SLE = np.zeros((len(rows_S), layers, num_experts), dtype=dtype)
    ids_TJ = np.ascontiguousarray(routed_experts_TLK).reshape(rows, layers * top_k)
    valid_T = NO_MASK if valid_T is None else np.ascontiguousarray(valid_T)
    threads = num_threads or num_cores()
    edges = _balanced_edges(cu_seqlens, 4 * threads if threads > 1 else 1)

    kernel = _count_bytes if ids_TJ.dtype == np.uint8 and num_experts <= 256 else _count_checked

    def count(block: int) -> int:
        sequences = slice(edges[block], edges[block + 1])
        offsets = cu_seqlens[edges[block] : edges[block + 1] + 1]
        return kernel(ids_TJ, offsets, valid_T, tokens_SLE[sequences])

    return tokens_SLE, _first(count, len(edges) - 1, threads)


def find_repeated(
    routed_experts_TLK: np.ndarray, num_experts: int, valid_T: np.ndarray | None = None, num_threads: int | None = None
) -> int:
    """The flat index of an id that stands in its row and layer for the second time, in a valid row; -1: there is none.

    Ids of valid rows must lie in 0 .. E - 1, as :func:`count_experts` finds out.
    """
    rows, layers, top_k = routed_experts_TLK.shape
    if top_k == 1:
        return -1
    ids_TJ = np.ascontiguousarray(routed_experts_TLK).reshape(rows, layers * top_k)
    valid_T = NO_MASK if valid_T is None else np.ascontiguousarray(valid_T)
    threads = num_threads or num_cores()
    blocks = 4 * threads if threads > 1 and rows >= MIN_ROWS else 1
    edges = [rows * block // blocks for block in range(blocks + 1)]
    # same_layer_DJ[d, j]: ids j and j + d + 1 of a row belong to one layer.
    same_layer_DJ = np.arange(layers * top_k) % top_k + np.arange(1, top_k)[:, None] < top_k

    def find(block: int) -> int:
        first, end = edges[block], edges[block + 1]
        if top_k <= MAX_COMPARED and not _any_repeated(ids_TJ, same_layer_DJ, valid_T, first, end):
            return -1
        return _find_repeated(ids_TJ, layers, num_experts, valid_T, first, end)

    return _first(find, blocks, threads)


def _first(search: Callable[[int], int], blocks: int, threads: int) -> int:
    """The least index that a block's search gives, on so many threads; -1 where all give -1."""
    return min((index for index in on_all_cores(search, blocks, threads) if index >= 0), default=-1)


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
    for s in range(tokens_SLE.shape[0]):
        counts_LE = tokens_SLE[s]
        for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
            if valid_T.size and not valid_T[t]:
                continue
            row = ids_TJ[t]
            j = 0
            for layer in range(layers):
                counts_E = counts_LE[layer]
                for _ in range(top_k):
                    expert = np.int64(row[j])
                    if expert < 0 or expert >= experts:
                        return t * ids_TJ.shape[1] + j
                    counts_E[expert] += 1
                    j += 1
    return -1


@njit(nogil=True, cache=True)
def _count_bytes(ids_TJ, cu_seqlens, valid_T, tokens_SLE):  # pragma: no cover - compiled
    """As above for uint8 ids: with room for all 256 values, checking can wait until a sequence is counted."""
    layers, experts = tokens_SLE.shape[1:]
    top_k = ids_TJ.shape[1] // layers
    counts_LV = np.empty((layers, 256), dtype=tokens_SLE.dtype)
    for s in range(tokens_SLE.shape[0]):
        counts_LV[:] = 0
        for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
            if valid_T.size and not valid_T[t]:
                continue
            row = ids_TJ[t]
            j = 0
            for layer in range(layers):
                counts_V = counts_LV[layer]
                for _ in range(top_k):
                    counts_V[row[j]] += 1
                    j += 1
        if counts_LV[:, experts:].any():
            return _count_checked(ids_TJ, cu_seqlens[s:], valid_T, tokens_SLE[s:])
        tokens_SLE[s] = counts_LV[:, :experts]
    return -1


@njit(nogil=True, cache=True)
def _any_repeated(ids_TJ, same_layer_DJ, valid_T, first, end):  # pragma: no cover - compiled
    """Whether a row repeats an id in a layer: rows compared with themselves, shifted, in the machine's vectors.

    Equal ids of different layers are noted as well and left out at the end, which keeps masks out of the loop.
    """
    shifts, width = same_layer_DJ.shape
    equal_DJ = np.zeros((shifts, width), dtype=np.bool_)
    for t in range(first, end):
        if valid_T.size and not valid_T[t]:
            continue
        row = ids_TJ[t]
        for d in range(shifts):
            equal_J, later = equal_DJ[d], row[d + 1 :]
            for j in range(later.size):
                equal_J[j] |= row[j] == later[j]
    return (equal_DJ & same_layer_DJ).any()


@njit(nogil=True, cache=True)
def _find_repeated(ids_TJ, layers, experts, valid_T, first, end):  # pragma: no cover - compiled
    """Which experts a row named its number tells, so that nothing need be cleared; a row is searched only if one repeats."""
    top_k = ids_TJ.shape[1] // layers
    seen_E, turn = np.zeros(experts, dtype=np.int64), 0
    for t in range(first, end):
        if valid_T.size and not valid_T[t]:
            continue
        row = ids_TJ[t]
        twice = False
        j = 0
        for _ in range(layers):
            turn += 1
            for _ in range(top_k):
                expert = row[j]
                twice |= seen_E[expert] == turn
                seen_E[expert] = turn
                j += 1
        if twice:
            for j in range(row.size):
                for k in range(j - j % top_k, j):
                    if row[k] == row[j]:
                        return t * row.size + j
    return -1
