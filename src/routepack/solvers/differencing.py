"""Karmarkar and Karp's largest differencing method, for any number of parts, with and without equal counts.

Source: N. Karmarkar, R. M. Karp, *The differencing method of set partitioning* (1982), and its usual extension to k parts:
the two partial partitions with the largest spread are joined, the heaviest part of one with the lightest of the other.
"""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit


def largest_differencing(cost_S: np.ndarray, num_parts: int, *, equal_counts: bool = False) -> np.ndarray:
    """int32 [S]: a part for every sequence, sums of cost near one another.

    With *equal_counts* the method starts from runs of one sequence for every part, so that numbers of sequences differ
    by at most one. Without, parts can stay empty where there are fewer sequences than parts, or few costly ones.

    >>> largest_differencing(np.array([8, 7, 6, 5, 4]), 2).tolist()
    [1, 0, 1, 0, 0]
    """
    order_S = np.argsort(-np.asarray(cost_S), kind="stable")
    part_of_S = np.empty(len(order_S), dtype=np.int32)
    run = num_parts if equal_counts else 1
    part_of_S[order_S] = _difference(np.asarray(cost_S, dtype=np.float64)[order_S], num_parts, run)
    return part_of_S


@njit(nogil=True, cache=True)
def _join(sum_P, head_P, tail_P, other_sum_P, other_head_P, other_tail_P, next_S):
    """Add another partial partition, its lightest part to the heaviest here; parts are kept heaviest first."""
    parts = sum_P.size
    for p in range(parts):
        q = parts - 1 - p
        if other_head_P[q] < 0:
            continue
        sum_P[p] += other_sum_P[q]
        if head_P[p] < 0:
            head_P[p] = other_head_P[q]
        else:
            next_S[tail_P[p]] = other_head_P[q]
        tail_P[p] = other_tail_P[q]
    for p in range(1, parts):
        _settle(sum_P, head_P, tail_P, p)


@njit(nogil=True, cache=True, inline="always")
def _settle(sum_P, head_P, tail_P, place):
    """Move a part forward to where its sum belongs."""
    moved, head, tail = sum_P[place], head_P[place], tail_P[place]
    while place > 0 and sum_P[place - 1] < moved:
        sum_P[place], head_P[place], tail_P[place] = sum_P[place - 1], head_P[place - 1], tail_P[place - 1]
        place -= 1
    sum_P[place], head_P[place], tail_P[place] = moved, head, tail


@njit(nogil=True, cache=True)
def _begin(cost_S, first, run, sum_P, head_P, tail_P):
    """A run of sequences, costliest first, as a partial partition of one each."""
    sum_P[:] = 0.0
    head_P[:] = -1
    tail_P[:] = -1
    for p in range(min(run, cost_S.size - first)):
        sum_P[p], head_P[p], tail_P[p] = cost_S[first + p], first + p, first + p


@njit(nogil=True, cache=True)
def _difference(cost_S, parts, run):
    """Parts of sequences given costliest first; every *run* of them begins as one partial partition."""
    sequences = cost_S.size
    states = -(-sequences // run)
    # Rows are written when a partial partition is first joined, so that most of this memory is never touched.
    sum_XP = np.empty((states, parts))
    head_XP = np.empty((states, parts), np.int32)
    tail_XP = np.empty((states, parts), np.int32)
    begun_X = np.zeros(states, np.bool_)
    # The sequences of a part are a chain: its first, its last, and the next of each.
    next_S = np.full(sequences, -1, np.int32)
    heap = [(0.0, np.int64(0), np.int64(0)) for _ in range(0)]
    for x in range(states):
        whole = run == parts and (x + 1) * run <= sequences
        spread = cost_S[x * run] - (cost_S[(x + 1) * run - 1] if whole else 0.0)
        heapq.heappush(heap, (-spread, np.int64(x), np.int64(x)))
    turn = np.int64(states)
    while len(heap) > 1:
        x = heapq.heappop(heap)[2]
        y = heapq.heappop(heap)[2]
        for z in (x, y):
            if not begun_X[z] and (z == x or run > 1):
                _begin(cost_S, z * run, run, sum_XP[z], head_XP[z], tail_XP[z])
                begun_X[z] = True
        if begun_X[y]:
            _join(sum_XP[x], head_XP[x], tail_XP[x], sum_XP[y], head_XP[y], tail_XP[y], next_S)
        else:
            _add(cost_S[y], y, sum_XP[x], head_XP[x], tail_XP[x], next_S)
        heapq.heappush(heap, (sum_XP[x, parts - 1] - sum_XP[x, 0], turn, x))
        turn += 1
    x = heap[0][2]
    if not begun_X[x]:
        _begin(cost_S, 0, run, sum_XP[x], head_XP[x], tail_XP[x])
    return _parts_of(head_XP[x], next_S)


@njit(nogil=True, cache=True)
def _add(cost, sequence, sum_P, head_P, tail_P, next_S):
    """Add a single sequence to the lightest part."""
    last = sum_P.size - 1
    sum_P[last] += cost
    if head_P[last] < 0:
        head_P[last] = sequence
    else:
        next_S[tail_P[last]] = sequence
    tail_P[last] = sequence
    _settle(sum_P, head_P, tail_P, last)


@njit(nogil=True, cache=True)
def _parts_of(head_P, next_S):
    part_of_S = np.empty(next_S.size, np.int32)
    for p in range(head_P.size):
        s = head_P[p]
        while s >= 0:
            part_of_S[s] = p
            s = next_S[s]
    return part_of_S
