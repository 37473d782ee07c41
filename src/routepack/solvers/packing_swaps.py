"""A swap of two sequences between cells: how it is proposed, what it would change, and how it is made.

The kernels of both annealers are built from these functions: :mod:`~routepack.solvers.anneal_separate_groups` and
:mod:`~routepack.solvers.anneal_joined_groups`. A block is so many consecutive cells that wait for one another: a unit, or a
whole microbatch. Letters: :mod:`routepack.core`; B blocks, I attention stages.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from routepack.solvers.metropolis import below

TOP = 3
"""Costliest cells known of a block: a swap changes two, so that the costliest of the others is always among them."""
SAMPLE = 256
"""Proposals whose expert term is always found, to learn what it usually changes by."""
SELDOM = SAMPLE // 64
"""So many of the sample may change it by less than the screen assumes of all that follow."""


@njit(nogil=True, cache=True)
def propose(place, members, near, cell_of_S, count_C, nobody, state):
    """(sequence, the one it changes places with or *nobody*, their cells); the first is -1 where nothing could change."""
    kind = below(state, 20)
    if kind < 16:
        reach = near if kind < 12 else 8 * near
        partner = place + below(state, 2 * reach + 1) - reach
        if partner < 0 or partner >= members.size:
            return -1, -1, -1, -1
    else:
        partner = below(state, members.size)
    s, t = members[place], members[partner]
    a, b = cell_of_S[s], cell_of_S[t]
    if a == b or (kind == 19 and count_C[a] < 2):
        return -1, -1, -1, -1
    return s, nobody if kind == 19 else t, a, b


@njit(nogil=True, cache=True)
def _rank(cost_CI, width, block, i, top_BIT, cell_BIT):
    """Find the costliest cells of a block in stage i; costs are positive, and cell -1 is none."""
    first, second, third = np.int64(0), np.int64(0), np.int64(0)
    at_first, at_second, at_third = np.int64(-1), np.int64(-1), np.int64(-1)
    for c in range(block * width, (block + 1) * width):
        cost = cost_CI[c, i]
        if cost <= third:
            continue
        if cost <= second:
            third, at_third = cost, c
        elif cost <= first:
            third, at_third = second, at_second
            second, at_second = cost, c
        else:
            third, at_third = second, at_second
            second, at_second = first, at_first
            first, at_first = cost, c
    top_BIT[block, i, 0], top_BIT[block, i, 1], top_BIT[block, i, 2] = first, second, third
    cell_BIT[block, i, 0], cell_BIT[block, i, 1], cell_BIT[block, i, 2] = at_first, at_second, at_third


@njit(nogil=True, cache=True)
def ranked(cost_CI, width):
    """The costliest cells of every block and stage: costs and cells, [B, I, TOP]."""
    blocks, stages = cost_CI.shape[0] // width, cost_CI.shape[1]
    top_BIT, cell_BIT = np.empty((blocks, stages, TOP), np.int64), np.empty((blocks, stages, TOP), np.int64)
    for block in range(blocks):
        for i in range(stages):
            _rank(cost_CI, width, block, i, top_BIT, cell_BIT)
    return top_BIT, cell_BIT


@njit(nogil=True, cache=True)
def rank_again(cost_CI, width, c, top_BIT, cell_BIT):
    """Look through the block of cell c once more where its new cost may have changed which are the costliest."""
    block = c // width
    for i in range(cost_CI.shape[1]):
        known = cost_CI[c, i] > top_BIT[block, i, TOP - 1]
        for k in range(TOP):
            known |= cell_BIT[block, i, k] == c
        if known:
            _rank(cost_CI, width, block, i, top_BIT, cell_BIT)


@njit(nogil=True, cache=True, inline="always")
def costliest_other(top_BIT, cell_BIT, block, i, a, b):
    """What the costliest cell of a block but a and b costs in stage i."""
    for k in range(TOP):
        c = cell_BIT[block, i, k]
        if c != a and c != b:
            return top_BIT[block, i, k]
    return np.int64(0)


@njit(nogil=True, cache=True)
def find_rest(cost_CI, width, unit, rest_CI):
    """For every cell of a unit and every stage, what the costliest of the unit's other cells costs."""
    for i in range(cost_CI.shape[1]):
        first, second, at_first = np.int64(0), np.int64(0), np.int64(-1)
        for c in range(unit * width, (unit + 1) * width):
            cost = cost_CI[c, i]
            if cost > first:
                first, second, at_first = cost, first, c
            elif cost > second:
                second = cost
        for c in range(unit * width, (unit + 1) * width):
            rest_CI[c, i] = second if c == at_first else first


@njit(nogil=True, cache=True)
def rest_of_units(cost_CI, width):
    """What :func:`find_rest` finds, of all units."""
    rest_CI = np.empty_like(cost_CI)
    for unit in range(cost_CI.shape[0] // width):
        find_rest(cost_CI, width, unit, rest_CI)
    return rest_CI


@njit(nogil=True, cache=True, inline="always")
def attention_after(cost_CI, cost_SI, rest_CI, a, s, t):
    """Sum over stages of the costliest cell of a's unit, once cell a has given s for t to another unit."""
    total = np.int64(0)
    for i in range(cost_CI.shape[1]):
        total += max(cost_CI[a, i] + cost_SI[t, i] - cost_SI[s, i], rest_CI[a, i])
    return total


@njit(nogil=True, cache=True)
def attention_within(cost_CI, cost_SI, width, a, b, s, t):
    """Sum over stages of the costliest cell of a's unit, once a has given s for t to cell b of that unit."""
    total, first = np.int64(0), a // width * width
    for i in range(cost_CI.shape[1]):
        gain = cost_SI[t, i] - cost_SI[s, i]
        most = max(cost_CI[a, i] + gain, cost_CI[b, i] - gain)
        for c in range(first, first + width):
            if c != a and c != b:
                most = max(most, cost_CI[c, i])
        total += most
    return total


@njit(nogil=True, cache=True)
def peaks_after(load_URL, load_SRL, ua, ub, s, t, peak_L, other_L):
    """Sums over layers of the fullest rank of two units, once a has given s to b for t; of each layer in the arrays."""
    peak_L[:] = 0
    other_L[:] = 0
    for r in range(load_URL.shape[1]):
        for i in range(peak_L.size):
            given = np.int32(load_SRL[t, r, i] - load_SRL[s, r, i])
            peak_L[i] = max(peak_L[i], np.int32(load_URL[ua, r, i] + given))
            other_L[i] = max(other_L[i], np.int32(load_URL[ub, r, i] - given))
    peak, other = np.int64(0), np.int64(0)
    for i in range(peak_L.size):
        peak += peak_L[i]
        other += other_L[i]
    return peak, other


@njit(nogil=True, cache=True)
def move_loads(load_URL, load_SRL, ua, ub, s, t):
    """Unit a gives s to unit b for t: what their ranks hold."""
    for r in range(load_URL.shape[1]):
        for i in range(load_URL.shape[2]):
            given = load_SRL[t, r, i] - load_SRL[s, r, i]
            load_URL[ua, r, i] += given
            load_URL[ub, r, i] -= given


@njit(nogil=True, cache=True)
def exchange_cells(s, t, a, b, length_S, cost_SI, cell_of_S, tokens_C, count_C, cost_CI):
    """Cell a gives s to cell b for t, which may be nobody, the last: what the cells hold and cost."""
    gain = length_S[t] - length_S[s]
    tokens_C[a] += gain
    tokens_C[b] -= gain
    for i in range(cost_CI.shape[1]):
        gain = cost_SI[t, i] - cost_SI[s, i]
        cost_CI[a, i] += gain
        cost_CI[b, i] -= gain
    cell_of_S[s] = b
    if t + 1 < length_S.size:
        cell_of_S[t] = a
    else:
        count_C[a] -= 1
        count_C[b] += 1
