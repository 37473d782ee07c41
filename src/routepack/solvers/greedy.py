"""Sequences to cells in one pass: first fit, best fit, longest first."""

from __future__ import annotations

import numpy as np
from numba import njit


def first_fit(
    length_S: np.ndarray, max_tokens: int, *, order_S: np.ndarray | None = None, tightest: bool = False
) -> tuple[np.ndarray, int]:
    """Each sequence into the first cell that has room for it, or with *tightest* into the fullest such cell.

    >>> first_fit(np.array([5, 4, 3, 2]), 8)
    (array([0, 1, 0, 1], dtype=int32), 2)

    Returns:
        ``cell_of_S`` int32 [S], and the number of cells used.

    """
    length_S = np.ascontiguousarray(length_S, dtype=np.int64)
    order_S = np.arange(len(length_S)) if order_S is None else np.ascontiguousarray(order_S, dtype=np.int64)
    cell_of_S = np.empty(len(length_S), dtype=np.int32)
    used = _first_fit(length_S, order_S, max_tokens, tightest, cell_of_S)
    return cell_of_S, int(used)


@njit(nogil=True, cache=True)
def _first_fit(length_S, order_S, max_tokens, tightest, cell_of_S):
    if tightest:
        return _best_fit(length_S, order_S, max_tokens, cell_of_S)
    # A tree over all cells there could be, each node with the most room of any cell below it.
    leaves = 1
    while leaves < length_S.size:
        leaves *= 2
    room_N = np.full(2 * leaves, max_tokens, np.int64)
    used = 0
    for s in order_S:
        node = 1
        while node < leaves:
            node *= 2
            if room_N[node] < length_S[s]:
                node += 1
        cell_of_S[s] = node - leaves
        used = max(used, node - leaves + 1)
        room_N[node] -= length_S[s]
        while node > 1:
            node //= 2
            room_N[node] = max(room_N[2 * node], room_N[2 * node + 1])
    return used


@njit(nogil=True, cache=True)
def _best_fit(length_S, order_S, max_tokens, cell_of_S):
    tokens_C = np.zeros(length_S.size, np.int64)
    used = 0
    for s in order_S:
        best = -1
        for c in range(used):
            if tokens_C[c] + length_S[s] <= max_tokens and (best < 0 or tokens_C[c] > tokens_C[best]):
                best = c
        if best < 0:
            best = used
            used += 1
        cell_of_S[s] = best
        tokens_C[best] += length_S[s]
    return used


def longest_first(
    cost_S: np.ndarray, num_cells: int, *, length_S: np.ndarray | None = None, max_tokens: int | None = None
) -> np.ndarray:
    """Costliest sequence first, each into the cell with the least cost so far that has room for it (LPT).

    With the lengths as costs this is token-LPT. -1 marks a sequence that fitted nowhere under *max_tokens*.

    >>> longest_first(np.array([5, 4, 3, 3]), 2)
    array([0, 1, 1, 0], dtype=int32)
    """
    cost_S = np.ascontiguousarray(cost_S, dtype=np.float64)
    if length_S is None or max_tokens is None:
        length_S, max_tokens = np.zeros(len(cost_S), dtype=np.int64), 0
    cell_of_S = np.empty(len(cost_S), dtype=np.int32)
    order_S = np.argsort(-cost_S, kind="stable")
    _longest_first(cost_S, order_S, num_cells, np.ascontiguousarray(length_S, dtype=np.int64), max_tokens, cell_of_S)
    return cell_of_S


@njit(nogil=True, cache=True)
def _longest_first(cost_S, order_S, num_cells, length_S, max_tokens, cell_of_S):
    # A tree over the cells, each node with the least cost of any cell below it.
    leaves = 1
    while leaves < num_cells:
        leaves *= 2
    cost_N = np.full(2 * leaves, np.inf)
    cost_N[leaves : leaves + num_cells] = 0.0
    for node in range(leaves - 1, 0, -1):
        cost_N[node] = min(cost_N[2 * node], cost_N[2 * node + 1])
    tokens_C = np.zeros(num_cells, np.int64)
    for s in order_S:
        node = 1
        while node < leaves:
            node *= 2
            if cost_N[node] > cost_N[node + 1]:
                node += 1
        cell = node - leaves
        if tokens_C[cell] + length_S[s] > max_tokens:
            cell = _cheapest_with_room(cost_N[leaves:], tokens_C, max_tokens - length_S[s])
        cell_of_S[s] = cell
        if cell < 0:
            continue
        tokens_C[cell] += length_S[s]
        node = leaves + cell
        cost_N[node] += cost_S[s]
        while node > 1:
            node //= 2
            cost_N[node] = min(cost_N[2 * node], cost_N[2 * node + 1])


@njit(nogil=True, cache=True)
def _cheapest_with_room(cost_C, tokens_C, most):
    best = -1
    for c in range(tokens_C.size):
        if tokens_C[c] <= most and (best < 0 or cost_C[c] < cost_C[best]):
            best = c
    return best


def fill_empty(cell_of_S: np.ndarray, length_S: np.ndarray, num_cells: int) -> np.ndarray:
    """int32 [S]: the same packing with one sequence moved into every empty cell, where there are enough sequences.

    The longest sequence of the fullest cell with more than one moves, so a legal packing stays legal.
    """
    cell_of_S = np.array(cell_of_S, dtype=np.int32)
    counts_C = np.bincount(cell_of_S, minlength=num_cells)
    tokens_C = np.bincount(cell_of_S, length_S, num_cells)
    for cell in np.flatnonzero(counts_C == 0):
        fullest = int(np.where(counts_C > 1, tokens_C, -1.0).argmax())
        if counts_C[fullest] < 2:
            break
        members = np.flatnonzero(cell_of_S == fullest)
        moved = members[np.argmax(length_S[members])]
        cell_of_S[moved] = cell
        for changed, sign in ((fullest, -1), (cell, 1)):
            counts_C[changed] += sign
            tokens_C[changed] += sign * length_S[moved]
    return cell_of_S
