"""The compiled loop of :mod:`routepack.solvers.anneal` where a microbatch's groups wait for one another."""

from __future__ import annotations

import numpy as np
from numba import njit

from routepack.solvers import packing_swaps as swaps
from routepack.solvers.metropolis import below, most_accepted

SLOPE = 8
"""What all wait for weighs so many times the groups' own mean cost, which only gives the search a slope on plateaus."""


@njit(nogil=True, cache=True)
def _joined_peak(peak_UL, row, groups, a, peak_a, b, peak_b, joined_L):
    """Sum over layers of the fullest rank of any group of a microbatch, with the peaks of units a and b replaced."""
    joined_L[:] = 0
    for u in range(row * groups, (row + 1) * groups):
        unit_L = peak_UL[u]
        if u == a:
            unit_L = peak_a
        elif u == b:
            unit_L = peak_b
        for i in range(joined_L.size):
            joined_L[i] = max(joined_L[i], unit_L[i])
    total = np.int64(0)
    for i in range(joined_L.size):
        total += joined_L[i]
    return total


@njit(nogil=True, cache=True)
def _slowest(top_MIT, unit_MIT, row, groups, a, cost_a, b, cost_b):
    """The costliest unit of a microbatch, with the costs of units a and b replaced."""
    most = swaps.costliest_other(top_MIT, unit_MIT, row, 0, a, b)
    if a // groups == row:
        most = max(most, cost_a)
    if b // groups == row:
        most = max(most, cost_b)
    return most


@njit(nogil=True, cache=True)
def _waited_after(cost_CI, cost_SI, top_MIT, cell_MIT, row_C, a, b, s, t):
    """Sum over stages of the costliest cell of a's microbatch, once cell a has given s for t to cell b of any microbatch."""
    row, total = row_C[a], np.int64(0)
    for i in range(cost_CI.shape[1]):
        gain = cost_SI[t, i] - cost_SI[s, i]
        most = max(cost_CI[a, i] + gain, swaps.costliest_other(top_MIT, cell_MIT, row, i, a, b))
        if row_C[b] == row:
            most = max(most, cost_CI[b, i] - gain)
        total += most
    return total


@njit(nogil=True, cache=True)
def anneal_joined(
    peak_UL, value_M, by_layer, members, num_proposals, temperature, near, state, changes,
    load_SRL, length_S, cost_SI, cell_of_S, tokens_C, count_C, cost_CI, load_URL, peak_U, attention_U, expert, max_tokens,
):  # fmt: skip
    """Move and swap the *members* among their cells; returns how many proposals were accepted.

    Temperature above zero: Metropolis on SLOPE * G * sum of *value_M* + sum U_g. Zero: only what lowers (sum of *value_M*, sum
    U_g). *value_M* is what each microbatch waits for: with *by_layer* its groups wait for one another in every attention stage
    and layer, else once. It is kept up, as is *peak_UL*, the fullest rank of each unit and layer.
    With a non-empty *changes* nothing is applied: changes of energy by feasible proposals are written there.
    """
    rows, nobody = value_M.size, length_S.size - 1
    width, row_width = cost_CI.shape[0] // load_URL.shape[0], cost_CI.shape[0] // rows
    groups = row_width // width
    peak_L, other_L = np.empty(load_SRL.shape[2], np.int32), np.empty(load_SRL.shape[2], np.int32)
    joined_L = np.empty(load_SRL.shape[2], np.int32)
    # Looked up, for a division takes as long as half of what most proposals need.
    unit_C, row_C = np.arange(cost_CI.shape[0]) // width, np.arange(cost_CI.shape[0]) // row_width
    cost_UI = (attention_U + expert * peak_U).reshape(attention_U.size, 1)
    rest_CI = swaps.rest_of_units(cost_CI, width)
    # What a whole microbatch waits for: of its cells in every stage, or of its units.
    top_MIT, cell_MIT = swaps.ranked(cost_CI, row_width) if by_layer else swaps.ranked(cost_UI, groups)
    sample, sampled, least = np.empty(swaps.SAMPLE, np.int64), 0, np.int64(0)
    made, recorded, most = 0, 0, 0.0
    place = below(state, members.size)
    for _ in range(num_proposals):
        place = place + 1 if place + 1 < members.size else 0
        s, t, a, b = swaps.propose(place, members, near, cell_of_S, count_C, nobody, state)
        if s < 0:
            continue
        gain = length_S[t] - length_S[s]
        if tokens_C[a] + gain > max_tokens or tokens_C[b] - gain > max_tokens:
            continue
        ua, ub, ra, rb = unit_C[a], unit_C[b], row_C[a], row_C[b]
        peak_a, peak_b = peak_U[ua], peak_U[ub]
        if ua == ub:
            attention_a = attention_b = swaps.attention_within(cost_CI, cost_SI, width, a, b, s, t)
        else:
            attention_a = swaps.attention_after(cost_CI, cost_SI, rest_CI, a, s, t)
            attention_b = swaps.attention_after(cost_CI, cost_SI, rest_CI, b, t, s)
        # What the attention term alone changes, with experts as they are.
        cost_a, cost_b = attention_a + expert * peak_a, attention_b + expert * peak_b
        total = cost_a - cost_UI[ua, 0]
        if ua != ub:
            total += cost_b - cost_UI[ub, 0]
        waits_a, waits_b, change = np.int64(0), np.int64(0), np.int64(0)
        if by_layer:
            waits_a = _waited_after(cost_CI, cost_SI, top_MIT, cell_MIT, row_C, a, b, s, t)
            if ra != rb:
                waits_b = _waited_after(cost_CI, cost_SI, top_MIT, cell_MIT, row_C, b, a, t, s)
            for i in range(cost_CI.shape[1]):
                change -= top_MIT[ra, i, 0]
                if ra != rb:
                    change -= top_MIT[rb, i, 0]
            change += waits_a + waits_b
        else:
            change = _slowest(top_MIT, cell_MIT, ra, groups, ua, cost_a, ub, cost_b) - value_M[ra]
            if ra != rb:
                change += _slowest(top_MIT, cell_MIT, rb, groups, ua, cost_a, ub, cost_b) - value_M[rb]
        by_attention = SLOPE * groups * change + total
        if temperature > 0.0:
            most = most_accepted(temperature, state)
        # Most proposals cost more attention than experts could make up for.
        if sampled == swaps.SAMPLE and by_attention + least > most:
            continue
        if ua == ub:
            peak_L[:] = peak_UL[ua]
            other_L[:] = peak_L
        else:
            peak_a, peak_b = swaps.peaks_after(load_URL, load_SRL, ua, ub, s, t, peak_L, other_L)
            total += expert * (peak_a - peak_U[ua] + peak_b - peak_U[ub])
            cost_a, cost_b = attention_a + expert * peak_a, attention_b + expert * peak_b
        if by_layer:
            value_a = waits_a + expert * _joined_peak(peak_UL, ra, groups, ua, peak_L, ub, other_L, joined_L)
        else:
            value_a = _slowest(top_MIT, cell_MIT, ra, groups, ua, cost_a, ub, cost_b)
        value_b, change = value_a, value_a - value_M[ra]
        if ra != rb:
            if by_layer:
                value_b = waits_b + expert * _joined_peak(peak_UL, rb, groups, ua, peak_L, ub, other_L, joined_L)
            else:
                value_b = _slowest(top_MIT, cell_MIT, rb, groups, ua, cost_a, ub, cost_b)
            change += value_b - value_M[rb]
        energy = SLOPE * groups * change + total
        if changes.size:
            changes[recorded] = energy
            recorded += 1
            if recorded == changes.size:
                break
            continue
        if sampled < swaps.SAMPLE:
            sample[sampled] = energy - by_attention
            sampled += 1
            if sampled == swaps.SAMPLE:
                least = np.sort(sample)[swaps.SELDOM]
        if temperature > 0.0:
            if energy > most:
                continue
        elif change > 0 or (change == 0 and total >= 0):
            continue
        made += 1
        value_M[ra], value_M[rb] = value_a, value_b
        attention_U[ua], attention_U[ub] = attention_a, attention_b
        peak_U[ua], peak_U[ub] = peak_a, peak_b
        cost_UI[ua, 0], cost_UI[ub, 0] = cost_a, cost_b
        if ua != ub:
            peak_UL[ua] = peak_L
            peak_UL[ub] = other_L
            swaps.move_loads(load_URL, load_SRL, ua, ub, s, t)
        swaps.exchange_cells(s, t, a, b, length_S, cost_SI, cell_of_S, tokens_C, count_C, cost_CI)
        swaps.find_rest(cost_CI, width, ua, rest_CI)
        swaps.find_rest(cost_CI, width, ub, rest_CI)
        if by_layer:
            swaps.rank_again(cost_CI, row_width, a, top_MIT, cell_MIT)
            swaps.rank_again(cost_CI, row_width, b, top_MIT, cell_MIT)
        else:
            swaps.rank_again(cost_UI, groups, ua, top_MIT, cell_MIT)
            swaps.rank_again(cost_UI, groups, ub, top_MIT, cell_MIT)
    return made
