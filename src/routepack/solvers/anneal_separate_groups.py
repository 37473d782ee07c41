"""The compiled loop of :mod:`routepack.solvers.anneal` where a group's cost is its own: ``sync=step``, or one group."""

from __future__ import annotations

import numpy as np
from numba import njit

from routepack.solvers import packing_swaps as swaps
from routepack.solvers.metropolis import below, most_accepted


@njit(nogil=True, cache=True)
def _peak_sums(load_URL, load_SRL, ua, ub, s, t, peak_L, other_L):
    """What ``peaks_after`` returns. Eight ranks, the usual number, go through the registers in one pass."""
    if load_URL.shape[1] != 8:
        return swaps.peaks_after(load_URL, load_SRL, ua, ub, s, t, peak_L, other_L)
    x, w = load_SRL, load_URL
    peak, other = np.int64(0), np.int64(0)
    for i in range(peak_L.size):
        g0, g1 = np.int32(x[t, 0, i] - x[s, 0, i]), np.int32(x[t, 1, i] - x[s, 1, i])
        g2, g3 = np.int32(x[t, 2, i] - x[s, 2, i]), np.int32(x[t, 3, i] - x[s, 3, i])
        g4, g5 = np.int32(x[t, 4, i] - x[s, 4, i]), np.int32(x[t, 5, i] - x[s, 5, i])
        g6, g7 = np.int32(x[t, 6, i] - x[s, 6, i]), np.int32(x[t, 7, i] - x[s, 7, i])
        low = max(np.int32(w[ua, 0, i] + g0), np.int32(w[ua, 1, i] + g1))
        low = max(low, max(np.int32(w[ua, 2, i] + g2), np.int32(w[ua, 3, i] + g3)))
        high = max(np.int32(w[ua, 4, i] + g4), np.int32(w[ua, 5, i] + g5))
        high = max(high, max(np.int32(w[ua, 6, i] + g6), np.int32(w[ua, 7, i] + g7)))
        peak += max(low, high)
        low = max(np.int32(w[ub, 0, i] - g0), np.int32(w[ub, 1, i] - g1))
        low = max(low, max(np.int32(w[ub, 2, i] - g2), np.int32(w[ub, 3, i] - g3)))
        high = max(np.int32(w[ub, 4, i] - g4), np.int32(w[ub, 5, i] - g5))
        high = max(high, max(np.int32(w[ub, 6, i] - g6), np.int32(w[ub, 7, i] - g7)))
        other += max(low, high)
    return peak, other


@njit(nogil=True, cache=True, inline="always")
def _largest_after(cost_GI, top_BIT, cell_BIT, g, change_g, h, change_h):
    """The largest group cost once g and h have changed (both changes count where they are the same group)."""
    changed = cost_GI[g, 0] + change_g + change_h if g == h else max(cost_GI[g, 0] + change_g, cost_GI[h, 0] + change_h)
    return max(changed, swaps.costliest_other(top_BIT, cell_BIT, 0, 0, g, h))


@njit(nogil=True, cache=True)
def anneal_separate(
    cost_G, members, num_proposals, temperature, near, state, changes,
    load_SRL, length_S, cost_SI, cell_of_S, tokens_C, count_C, cost_CI, load_URL, peak_U, attention_U, expert, max_tokens,
):  # fmt: skip
    """Move and swap the *members* among their cells; returns how many proposals were accepted.

    Temperature above zero: Metropolis on G * max U_g + sum U_g. Zero: only what lowers (max U_g, sum U_g).
    With a non-empty *changes* nothing is applied: changes of energy by feasible proposals are written there.
    *cost_G* is the caller's own copy: U_g as it was, kept up with what is accepted here.
    """
    groups, nobody = cost_G.size, length_S.size - 1
    width = cost_CI.shape[0] // load_URL.shape[0]
    peak_L, other_L = np.empty(load_SRL.shape[2], np.int32), np.empty(load_SRL.shape[2], np.int32)
    # Looked up, for a division takes as long as half of what most proposals need.
    unit_C, group_U = np.arange(cost_CI.shape[0]) // width, np.arange(load_URL.shape[0]) % groups
    cost_GI = cost_G.reshape(groups, 1)
    rest_CI = swaps.rest_of_units(cost_CI, width)
    top_GT, group_GT = swaps.ranked(cost_GI, groups)
    sample, sampled, least = np.empty(swaps.SAMPLE, np.int64), 0, np.int64(0)
    largest, made, recorded, most = cost_G.max(), 0, 0, 0.0
    place = below(state, members.size)
    for _ in range(num_proposals):
        # In turn, longest to shortest: neighbours lie together in memory, and nobody is left out.
        place = place + 1 if place + 1 < members.size else 0
        s, t, a, b = swaps.propose(place, members, near, cell_of_S, count_C, nobody, state)
        if s < 0:
            continue
        gain = length_S[t] - length_S[s]
        if tokens_C[a] + gain > max_tokens or tokens_C[b] - gain > max_tokens:
            continue
        ua, ub = unit_C[a], unit_C[b]
        ga, gb = group_U[ua], group_U[ub]
        peak_a, peak_b = peak_U[ua], peak_U[ub]
        if temperature > 0.0:
            most = most_accepted(temperature, state)
        if ua == ub:
            attention_a = attention_b = swaps.attention_within(cost_CI, cost_SI, width, a, b, s, t)
            change_a, change_b = attention_a - attention_U[ua], np.int64(0)
        else:
            attention_a = swaps.attention_after(cost_CI, cost_SI, rest_CI, a, s, t)
            attention_b = swaps.attention_after(cost_CI, cost_SI, rest_CI, b, t, s)
            change_a, change_b = attention_a - attention_U[ua], attention_b - attention_U[ub]
            if sampled == swaps.SAMPLE:
                # Most proposals cost more attention than experts could make up for.
                fall = min(least, np.int64(0))
                now = _largest_after(cost_GI, top_GT, group_GT, ga, change_a + fall, gb, change_b + fall)
                total = change_a + change_b + least
                if groups * (now - largest) + total > most:
                    continue
            peak_a, peak_b = _peak_sums(load_URL, load_SRL, ua, ub, s, t, peak_L, other_L)
            change_a += expert * (peak_a - peak_U[ua])
            change_b += expert * (peak_b - peak_U[ub])
            if sampled < swaps.SAMPLE and changes.size == 0:
                sample[sampled] = expert * (peak_a - peak_U[ua] + peak_b - peak_U[ub])
                sampled += 1
                if sampled == swaps.SAMPLE:
                    least = np.sort(sample)[swaps.SELDOM]
        now = _largest_after(cost_GI, top_GT, group_GT, ga, change_a, gb, change_b)
        total = change_a + change_b
        energy = groups * (now - largest) + total
        if changes.size:
            changes[recorded] = energy
            recorded += 1
            if recorded == changes.size:
                break
            continue
        if temperature > 0.0:
            if energy > most:
                continue
        elif now > largest or (now == largest and total >= 0):
            continue
        made += 1
        largest = now
        cost_G[ga] += change_a
        cost_G[gb] += change_b
        attention_U[ua], attention_U[ub] = attention_a, attention_b
        peak_U[ua], peak_U[ub] = peak_a, peak_b
        if ua != ub:
            swaps.move_loads(load_URL, load_SRL, ua, ub, s, t)
        swaps.exchange_cells(s, t, a, b, length_S, cost_SI, cell_of_S, tokens_C, count_C, cost_CI)
        swaps.find_rest(cost_CI, width, ua, rest_CI)
        swaps.find_rest(cost_CI, width, ub, rest_CI)
        swaps.rank_again(cost_GI, groups, ga, top_GT, group_GT)
        swaps.rank_again(cost_GI, groups, gb, top_GT, group_GT)
    return made
