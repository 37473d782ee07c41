"""The compiled inner loops of :mod:`routepack.solvers.anneal`; whole numbers only, no lock of the interpreter."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, inline="always")
def _next(state):
    """xorshift64*: 32 random bits as a whole number."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(32))


@njit(nogil=True, cache=True, inline="always")
def _below(state, bound):
    """A whole number in 0 .. bound - 1."""
    return (_next(state) * bound) >> 32


@njit(nogil=True, cache=True)
def _peak_sums(load_a, load_b, added, removed, peak_L, other_L):
    """What ``_peaks_after`` returns. Eight ranks, the usual number, go through the registers in one pass."""
    if load_a.shape[0] != 8:
        return _peaks_after(load_a, load_b, added, removed, peak_L, other_L)
    a, b, x, y = load_a, load_b, added, removed
    peak, other = np.int64(0), np.int64(0)
    for i in range(peak_L.size):
        g0, g1, g2, g3 = x[0, i] - y[0, i], x[1, i] - y[1, i], x[2, i] - y[2, i], x[3, i] - y[3, i]
        g4, g5, g6, g7 = x[4, i] - y[4, i], x[5, i] - y[5, i], x[6, i] - y[6, i], x[7, i] - y[7, i]
        low = max(max(a[0, i] + g0, a[1, i] + g1), max(a[2, i] + g2, a[3, i] + g3))
        peak += max(low, max(max(a[4, i] + g4, a[5, i] + g5), max(a[6, i] + g6, a[7, i] + g7)))
        low = max(max(b[0, i] - g0, b[1, i] - g1), max(b[2, i] - g2, b[3, i] - g3))
        other += max(low, max(max(b[4, i] - g4, b[5, i] - g5), max(b[6, i] - g6, b[7, i] - g7)))
    return peak, other


@njit(nogil=True, cache=True)
def _peaks_after(load_a, load_b, added, removed, peak_L, other_L):
    """Sums over layers of the fullest rank of two units, once *added* - *removed* goes from b to a. All [R, L]."""
    peak_L[:] = 0
    other_L[:] = 0
    for r in range(load_a.shape[0]):
        a, b, x, y = load_a[r], load_b[r], added[r], removed[r]
        for i in range(peak_L.size):
            given = x[i] - y[i]
            peak_L[i] = max(peak_L[i], a[i] + given)
            other_L[i] = max(other_L[i], b[i] - given)
    peak, other = np.int64(0), np.int64(0)
    for i in range(peak_L.size):
        peak += peak_L[i]
        other += other_L[i]
    return peak, other


@njit(nogil=True, cache=True)
def _apply(load_a, load_b, added, removed):
    for r in range(load_a.shape[0]):
        for i in range(load_a.shape[1]):
            given = added[r, i] - removed[r, i]
            load_a[r, i] += given
            load_b[r, i] -= given


@njit(nogil=True, cache=True)
def _attention_after(cost_CI, width, a, gain_a, b, gain_b):
    """Sum over stages of the costliest cell of the unit that holds cell a, with cells a and b changed."""
    first = a // width * width
    total = np.int64(0)
    for i in range(cost_CI.shape[1]):
        most = np.int64(0)
        for c in range(first, first + width):
            cost = cost_CI[c, i]
            if c == a:
                cost += gain_a[i]
            elif c == b:
                cost += gain_b[i]
            most = max(most, cost)
        total += most
    return total


@njit(nogil=True, cache=True)
def _largest_after(cost_G, g, gain_g, h, gain_h):
    """The largest group cost once g and h have changed (both changes count where they are the same group)."""
    largest = np.int64(0)
    for i in range(cost_G.size):
        cost = cost_G[i]
        if i == g:
            cost += gain_g
        if i == h:
            cost += gain_h
        largest = max(largest, cost)
    return largest


@njit(nogil=True, cache=True)
def anneal_domain(
    load_SRL, length_S, cost_SI, cell_of_S, tokens_C, count_C, cost_CI, load_URL, peak_U, attention_U, cost_G,
    expert, max_tokens, members, num_proposals, temperature, near, state, changes,
):  # fmt: skip
    """Move and swap the *members* among their cells; returns how many proposals were accepted.

    Temperature above zero: Metropolis on G * max U_g + sum U_g. Zero: only what lowers (max U_g, sum U_g).
    With a non-empty *changes* nothing is applied: changes of energy by feasible proposals are written there.
    The last sequence of the arrays is the empty one, so that a move is a swap with it. *cost_G* is the
    caller's own copy: U_g as it was, kept up with what is accepted here.
    """
    groups = cost_G.size
    width = cost_CI.shape[0] // load_URL.shape[0]
    nobody = length_S.size - 1
    peak_L = np.empty(load_SRL.shape[2], np.int32)
    other_L = np.empty(load_SRL.shape[2], np.int32)
    gain_a = np.empty(cost_SI.shape[1], np.int64)
    gain_b = np.empty(cost_SI.shape[1], np.int64)
    largest, accepted, recorded = cost_G.max(), 0, 0
    place = _below(state, members.size)
    for _ in range(num_proposals):
        # In turn, longest to shortest: neighbours lie together in memory, and nobody is left out.
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
        ua, ub = a // width, b // width
        attention_a = _attention_after(cost_CI, width, a, gain_a, b, gain_b)
        attention_b, peak_a, peak_b = attention_a, peak_U[ua], peak_U[ub]
        change_a, change_b = attention_a - attention_U[ua], np.int64(0)
        if ua != ub:
            attention_b = _attention_after(cost_CI, width, b, gain_b, a, gain_a)
            peak_a, peak_b = _peak_sums(load_URL[ua], load_URL[ub], load_SRL[t], load_SRL[s], peak_L, other_L)
            change_a += expert * (peak_a - peak_U[ua])
            change_b = attention_b - attention_U[ub] + expert * (peak_b - peak_U[ub])
        now = _largest_after(cost_G, ua % groups, change_a, ub % groups, change_b)
        total = change_a + change_b
        energy = groups * (now - largest) + total
        if changes.size:
            changes[recorded] = energy
            recorded += 1
            if recorded == changes.size:
                break
            continue
        if temperature > 0.0:
            if energy > 0 and np.exp(-energy / temperature) * 4294967296.0 < _next(state):
                continue
        elif now > largest or (now == largest and total >= 0):
            continue
        accepted += 1
        largest = now
        cost_G[ua % groups] += change_a
        cost_G[ub % groups] += change_b
        attention_U[ua], attention_U[ub] = attention_a, attention_b
        peak_U[ua], peak_U[ub] = peak_a, peak_b
        if ua != ub:
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
