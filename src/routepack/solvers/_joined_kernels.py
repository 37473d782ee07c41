"""The compiled inner loop of :mod:`routepack.solvers.anneal` where a microbatch's groups wait for one another."""

from __future__ import annotations

import numpy as np
from numba import njit

from routepack.solvers._anneal_kernels import _apply, _attention_after, _below, _next, _peaks_after

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
def _slowest(attention_U, peak_U, expert, row, groups, a, cost_a, b, cost_b):
    """The costliest unit of a microbatch, with the costs of units a and b replaced."""
    most = np.int64(0)
    for u in range(row * groups, (row + 1) * groups):
        cost = attention_U[u] + expert * peak_U[u]
        if u == a:
            cost = cost_a
        elif u == b:
            cost = cost_b
        most = max(most, cost)
    return most


@njit(nogil=True, cache=True)
def anneal_joined(
    load_SRL, length_S, cost_SI, cell_of_S, tokens_C, count_C, cost_CI, load_URL, peak_UL, peak_U, attention_U, value_M,
    by_layer, expert, max_tokens, members, num_proposals, temperature, near, state, changes,
):  # fmt: skip
    """Like ``anneal_domain``, on the sum over microbatches of what its groups wait for; a domain is whole microbatches.

    With *by_layer* they wait in every attention stage and layer, else once a microbatch. *value_M* holds that
    for each microbatch and is kept up, as is *peak_UL*, the fullest rank of each unit and layer.
    """
    rows = value_M.size
    width, row_width = cost_CI.shape[0] // load_URL.shape[0], cost_CI.shape[0] // rows
    groups = row_width // width
    nobody = length_S.size - 1
    peak_L = np.empty(load_SRL.shape[2], np.int32)
    other_L = np.empty(load_SRL.shape[2], np.int32)
    joined_L = np.empty(load_SRL.shape[2], np.int32)
    gain_a = np.empty(cost_SI.shape[1], np.int64)
    gain_b = np.empty(cost_SI.shape[1], np.int64)
    accepted, recorded = 0, 0
    place = _below(state, members.size)
    for _ in range(num_proposals):
        place = place + 1 if place + 1 < members.size else 0
        kind = _below(state, 20)
        if kind < 16:
            reach = near if kind < 12 else 8 * near
            partner = place + _below(state, 2 * reach + 1) - reach
            if partner < 0 or partner >= members.size:
                continue
        else:
            partner = _below(state, members.size)
        s, t = members[place], members[partner]
        a, b = cell_of_S[s], cell_of_S[t]
        if a == b:
            continue
        if kind == 19:
            t = nobody
            if count_C[a] < 2:
                continue
        gain = length_S[t] - length_S[s]
        if tokens_C[a] + gain > max_tokens or tokens_C[b] - gain > max_tokens:
            continue
        for i in range(gain_a.size):
            gain_a[i] = cost_SI[t, i] - cost_SI[s, i]
            gain_b[i] = -gain_a[i]
        ua, ub, ra, rb = a // width, b // width, a // row_width, b // row_width
        attention_a = _attention_after(cost_CI, width, a, gain_a, b, gain_b)
        attention_b, peak_a, peak_b = attention_a, peak_U[ua], peak_U[ub]
        if ua == ub:
            peak_L[:] = peak_UL[ua]
            other_L[:] = peak_L
        else:
            attention_b = _attention_after(cost_CI, width, b, gain_b, a, gain_a)
            peak_a, peak_b = _peaks_after(load_URL[ua], load_URL[ub], load_SRL[t], load_SRL[s], peak_L, other_L)
        cost_a, cost_b = attention_a + expert * peak_a, attention_b + expert * peak_b
        total = cost_a - attention_U[ua] - expert * peak_U[ua]
        if ua != ub:
            total += cost_b - attention_U[ub] - expert * peak_U[ub]
        if by_layer:
            value_a = _attention_after(cost_CI, row_width, a, gain_a, b, gain_b)
            value_a += expert * _joined_peak(peak_UL, ra, groups, ua, peak_L, ub, other_L, joined_L)
        else:
            value_a = _slowest(attention_U, peak_U, expert, ra, groups, ua, cost_a, ub, cost_b)
        value_b = value_a
        change = value_a - value_M[ra]
        if ra != rb:
            if by_layer:
                value_b = _attention_after(cost_CI, row_width, b, gain_b, a, gain_a)
                value_b += expert * _joined_peak(peak_UL, rb, groups, ua, peak_L, ub, other_L, joined_L)
            else:
                value_b = _slowest(attention_U, peak_U, expert, rb, groups, ua, cost_a, ub, cost_b)
            change += value_b - value_M[rb]
        energy = SLOPE * groups * change + total
        if changes.size:
            changes[recorded] = energy
            recorded += 1
            if recorded == changes.size:
                break
            continue
        if temperature > 0.0:
            if energy > 0 and np.exp(-energy / temperature) * 4294967296.0 < _next(state):
                continue
        elif change > 0 or (change == 0 and total >= 0):
            continue
        accepted += 1
        value_M[ra], value_M[rb] = value_a, value_b
        attention_U[ua], attention_U[ub] = attention_a, attention_b
        peak_U[ua], peak_U[ub] = peak_a, peak_b
        if ua != ub:
            peak_UL[ua] = peak_L
            peak_UL[ub] = other_L
            _apply(load_URL[ua], load_URL[ub], load_SRL[t], load_SRL[s])
        cell_of_S[s] = b
        tokens_C[a] += gain
        tokens_C[b] -= gain
        for i in range(gain_a.size):
            cost_CI[a, i] += gain_a[i]
            cost_CI[b, i] += gain_b[i]
        if t == nobody:
            count_C[a] -= 1
            count_C[b] += 1
        else:
            cell_of_S[t] = a
    return accepted
