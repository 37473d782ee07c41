"""The compiled inner loops of :mod:`routepack.solvers.exact`; whole numbers only."""

from __future__ import annotations

import numpy as np
from numba import njit

STEP, MICROBATCH, LAYER = 0, 1, 2
CELLS = 3
"""Only the cells of a unit are equal."""
FAR = np.int64(2**59)
"""Above every cost (their total is scaled to 2^56), and far enough from the largest number to be multiplied by G."""


@njit(nogil=True, cache=True)
def _attention(cost_CI, cells_per_block, attention_B):
    """Sum over stages of the costliest cell, for each block of consecutive cells."""
    for block in range(attention_B.size):
        attention_B[block] = 0
        for i in range(cost_CI.shape[1]):
            most = np.int64(0)
            for c in range(block * cells_per_block, (block + 1) * cells_per_block):
                most = max(most, cost_CI[c, i])
            attention_B[block] += most


@njit(nogil=True, cache=True)
def _separable(peak_LXP, mask_U, joined, choice_L):
    """Least sum over layers and rows of the fullest rank of so many units, each layer placed for itself."""
    total = np.int64(0)
    for layer in range(peak_LXP.shape[0]):
        least = FAR
        for p in range(peak_LXP.shape[2]):
            waited = np.int64(0)
            for first in range(0, mask_U.size, joined):
                most = np.int32(0)
                for u in range(first, first + joined):
                    most = max(most, peak_LXP[layer, mask_U[u], p])
                waited += most
            if waited < least:
                least = waited
                choice_L[layer] = p
        total += least
    return total


@njit(nogil=True, cache=True)
def _value(cost_U, groups, sync):
    """Largest sum of a group, or sum over microbatches of the costliest unit."""
    rows = cost_U.size // groups
    value = np.int64(0)
    if sync == STEP:
        for g in range(groups):
            cost = np.int64(0)
            for m in range(rows):
                cost += cost_U[m * groups + g]
            value = max(value, cost)
        return value
    for m in range(rows):
        most = np.int64(0)
        for g in range(groups):
            most = max(most, cost_U[m * groups + g])
        value += most
    return value


@njit(nogil=True, cache=True)
def _coupled(peak_LXP, mask_U, expert, cost_U, groups, sync, best, choice_L, nodes):
    """The least value below *best* over all choices of a placement for each layer, depth first; *best* where none is.

    A prefix is given up once its units, with the least that each can still cost alone, or all of them
    together, are no better. *nodes* counts what may still be tried.
    """
    layers, units, options = peak_LXP.shape[0], mask_U.size, peak_LXP.shape[2]
    alone_LU = np.zeros((layers + 1, units), np.int64)
    all_L = np.zeros(layers + 1, np.int64)
    order_LP = np.empty((layers, options), np.int64)
    for layer in range(layers - 1, -1, -1):
        sums_P = np.zeros(options, np.int64)
        for u in range(units):
            least = FAR
            for p in range(options):
                peak = np.int64(peak_LXP[layer, mask_U[u], p])
                least = min(least, peak)
                sums_P[p] += peak
            alone_LU[layer, u] = alone_LU[layer + 1, u] + expert * least
        all_L[layer] = all_L[layer + 1] + expert * sums_P.min()
        order_LP[layer] = np.argsort(sums_P)
    cost_LU = np.empty((layers + 1, units), np.int64)
    cost_LU[0] = cost_U
    tried_L = np.full(layers, -1)
    layer = 0
    while layer >= 0 and nodes[0] > 0:
        nodes[0] -= 1
        tried_L[layer] += 1
        if tried_L[layer] == options:
            tried_L[layer] = -1
            layer -= 1
            continue
        p = order_LP[layer, tried_L[layer]]
        for u in range(units):
            cost_LU[layer + 1, u] = cost_LU[layer, u] + expert * peak_LXP[layer, mask_U[u], p]
        together = cost_LU[layer + 1].sum() + all_L[layer + 1]
        if together > groups * (best - 1) or _value(cost_LU[layer + 1] + alone_LU[layer + 1], groups, sync) >= best:
            continue
        if layer + 1 < layers:
            layer += 1
            continue
        best = _value(cost_LU[layers], groups, sync)
        for i in range(layers):
            choice_L[i] = order_LP[i, tried_L[i]]
    return best


@njit(nogil=True, cache=True)
def _may_open(used_C, c, rows, groups, width, sync):
    """Whether c is the first of equal cells: of its unit, its unit of its row (or group), that of all."""
    unit, first = c // width, c // width * width
    for k in range(first, c):
        if not used_C[k]:
            return False
    if sync == CELLS:
        return True
    m, g = unit // groups, unit % groups
    if sync == STEP:
        for before in range(m):
            if not used_C[(before * groups + g) * width]:
                return False
        return g == 0 or used_C[(g - 1) * width] > 0
    for before in range(g):
        if not used_C[(m * groups + before) * width]:
            return False
    return m == 0 or used_C[(m - 1) * groups * width] > 0


@njit(nogil=True, cache=True)
def _mixes(cell_S, s, c, modality_S, row_width):
    """Whether cell c is in a microbatch that holds an earlier sequence of another modality than s."""
    mixed = False
    for t in range(s):
        mixed |= modality_S[t] != modality_S[s] and cell_S[t] // row_width == c // row_width
    return mixed


@njit(nogil=True, cache=True)
def _skew(used_C, ranks):
    """By how much the ranks' numbers of sequences differ."""
    least, most = np.int64(2**31), np.int64(0)
    for w in range(ranks):
        count = np.int64(0)
        for c in range(w, used_C.size, ranks):
            count += used_C[c]
        least, most = min(least, count), max(most, count)
    return most - least


@njit(nogil=True, cache=True)
def best_plan(
    length_S, cost_SI, peak_LXP, expert, max_tokens, rows, groups, width, sync, modality_S, skew, nodes, best_S, best_L
):  # fmt: skip
    """The least value of any legal packing and placement, which are written to *best_S* and *best_L*.

    Depth first over the cells of the sequences; equal cells are opened in order only. A microbatch holds one modality, and
    with a *skew* of 0 or more ranks' numbers of sequences differ by no more: then cells of a unit are not equal, and all
    are opened. *nodes* is what the search over placements may still try; where it ends at 0, the value is the best found.
    """
    sequences, num_cells, units = length_S.size, rows * groups * width, rows * groups
    cell_S = np.full(sequences, -1)
    tokens_C = np.zeros(num_cells, np.int64)
    used_C = np.zeros(num_cells, np.int64)
    cost_CI = np.zeros((num_cells, cost_SI.shape[1]), np.int64)
    mask_U = np.zeros(units, np.int64)
    attention_U, attention_M = np.zeros(units, np.int64), np.zeros(rows, np.int64)
    choice_L = np.zeros(peak_LXP.shape[0], np.int64)
    # Under STEP a group's units change places, but not where they are tied to those of other groups by modality.
    equal = CELLS if sync == STEP and (modality_S != modality_S[0]).any() else sync
    best, best_sum, empty, s = FAR, FAR, num_cells, 0
    while s >= 0:
        c = cell_S[s]
        if c >= 0:
            tokens_C[c] -= length_S[s]
            used_C[c] -= 1
            empty += used_C[c] == 0
            cost_CI[c] -= cost_SI[s]
            mask_U[c // width] ^= 1 << s
        c += 1
        while c < num_cells and (
            tokens_C[c] + length_S[s] > max_tokens
            or (skew < 0 and used_C[c] == 0 and not _may_open(used_C, c, rows, groups, width, equal))
            or _mixes(cell_S, s, c, modality_S, width * groups)
            or sequences - s - 1 < empty - (used_C[c] == 0)
        ):
            c += 1
        if c == num_cells:
            cell_S[s] = -1
            s -= 1
            continue
        cell_S[s] = c
        tokens_C[c] += length_S[s]
        empty -= used_C[c] == 0
        used_C[c] += 1
        cost_CI[c] += cost_SI[s]
        mask_U[c // width] ^= 1 << s
        if s + 1 < sequences:
            s += 1
            continue
        if skew >= 0 and _skew(used_C, width * groups) > skew:
            continue
        _attention(cost_CI, width, attention_U)
        if sync == LAYER or groups == 1:
            _attention(cost_CI, width * groups, attention_M)
            value = attention_M.sum()
            if value > best:
                continue
            value += expert * _separable(peak_LXP, mask_U, groups, choice_L)
            total = value
        else:
            together = attention_U.sum() + expert * _separable(peak_LXP, mask_U, 1, choice_L)
            if together > groups * (best - 1):
                continue
            value = _coupled(peak_LXP, mask_U, expert, attention_U, groups, sync, best, choice_L, nodes)
            if value == best:
                continue
            total = value
        if value < best or (value == best and total < best_sum):
            best, best_sum = value, total
            best_S[:] = cell_S
            best_L[:] = choice_L
    return best
