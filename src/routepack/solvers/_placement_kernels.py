"""The compiled inner loops of :func:`routepack.solvers.placement.anneal_ranks`; whole numbers only."""

from __future__ import annotations

import numpy as np
from numba import njit

from routepack.solvers._proposal_kernels import _below, _next

SWAPS_PER_PAIR = 32
"""Swaps tried between two ranks before the next two are drawn; the others' fullest is found once for all of them."""


@njit(nogil=True, cache=True)
def _peaks(load_a, load_b, e_U, f_U, others_U):
    """Sum over units of the fullest rank, once e goes from a to b and f from b to a."""
    total = np.int64(0)
    for u in range(others_U.size):
        given = e_U[u] - f_U[u]
        total += max(others_U[u], max(load_a[u] - given, load_b[u] + given))
    return total


@njit(nogil=True, cache=True)
def _joined_peaks(load_a, load_b, e_U, f_U, others_U, joined):
    """The same where so many consecutive units wait for the fullest rank of any of them."""
    total = np.int64(0)
    for first in range(0, others_U.size, joined):
        most = np.int32(0)
        for u in range(first, first + joined):
            given = e_U[u] - f_U[u]
            most = max(most, max(others_U[u], max(load_a[u] - given, load_b[u] + given)))
        total += most
    return total


@njit(nogil=True, cache=True)
def _waited(load_a, load_b, e_U, f_U, others_U, joined):
    if joined == 1:
        return _peaks(load_a, load_b, e_U, f_U, others_U)
    return _joined_peaks(load_a, load_b, e_U, f_U, others_U, joined)


@njit(nogil=True, cache=True)
def _others_fullest(load_RU, a, b, others_U):
    """The fullest rank of each unit but a and b."""
    others_U[:] = 0
    for r in range(load_RU.shape[0]):
        if r != a and r != b:
            row_U = load_RU[r]
            for u in range(others_U.size):
                others_U[u] = max(others_U[u], row_U[u])


@njit(nogil=True, cache=True)
def _held(load_EU, rank_of_E, num_ranks):
    """The experts of each rank, [R, K], and what they load each unit with, [R, U]."""
    held_RK = np.empty((num_ranks, rank_of_E.size // num_ranks), np.int64)
    load_RU = np.zeros((num_ranks, load_EU.shape[1]), np.int32)
    count_R = np.zeros(num_ranks, np.int64)
    for e in range(rank_of_E.size):
        r = rank_of_E[e]
        held_RK[r, count_R[r]] = e
        count_R[r] += 1
        load_RU[r] += load_EU[e]
    return held_RK, load_RU


@njit(nogil=True, cache=True)
def _swap(load_EU, load_RU, held_RK, a, i, b, j):
    e, f = held_RK[a, i], held_RK[b, j]
    for u in range(load_EU.shape[1]):
        given = load_EU[e, u] - load_EU[f, u]
        load_RU[a, u] -= given
        load_RU[b, u] += given
    held_RK[a, i], held_RK[b, j] = f, e


@njit(nogil=True, cache=True)
def anneal_layer(load_EU, rank_of_E, num_ranks, joined, num_pairs, temperature, state):
    """Metropolis on the sum over units of the fullest rank, by swaps of experts; returns the change of the sum."""
    held_RK, load_RU = _held(load_EU, rank_of_E, num_ranks)
    slots, change = held_RK.shape[1], np.int64(0)
    others_U = np.empty(load_EU.shape[1], np.int32)
    nothing_U = np.zeros(load_EU.shape[1], np.int32)
    for _ in range(num_pairs):
        a, b = _below(state, num_ranks), _below(state, num_ranks - 1)
        b += b >= a
        _others_fullest(load_RU, a, b, others_U)
        load_a, load_b = load_RU[a], load_RU[b]
        now = _waited(load_a, load_b, nothing_U, nothing_U, others_U, joined)
        for _ in range(SWAPS_PER_PAIR):
            i, j = _below(state, slots), _below(state, slots)
            total = _waited(load_a, load_b, load_EU[held_RK[a, i]], load_EU[held_RK[b, j]], others_U, joined)
            if total > now and (temperature <= 0.0 or np.exp((now - total) / temperature) * 4294967296.0 < _next(state)):
                continue
            _swap(load_EU, load_RU, held_RK, a, i, b, j)
            change += total - now
            now = total
    for r in range(num_ranks):
        for e in held_RK[r]:
            rank_of_E[e] = r
    return change


@njit(nogil=True, cache=True)
def swap_best(load_EU, load_RU, held_RK, a, b, joined, others_U):
    """Apply the swap between ranks a and b that lowers the sum of peaks most; False where none does."""
    _others_fullest(load_RU, a, b, others_U)
    load_a, load_b, nothing_U = load_RU[a], load_RU[b], np.zeros(others_U.size, np.int32)
    best = _waited(load_a, load_b, nothing_U, nothing_U, others_U, joined)
    best_i, best_j = -1, -1
    for i in range(held_RK.shape[1]):
        for j in range(held_RK.shape[1]):
            total = _waited(load_a, load_b, load_EU[held_RK[a, i]], load_EU[held_RK[b, j]], others_U, joined)
            if total < best:
                best, best_i, best_j = total, i, j
    if best_i < 0:
        return False
    _swap(load_EU, load_RU, held_RK, a, best_i, b, best_j)
    return True


@njit(nogil=True, cache=True)
def refine_layer(load_EU, rank_of_E, num_ranks, joined, sweeps):
    """Sweeps of best swaps over all pairs of ranks, until none helps."""
    held_RK, load_RU = _held(load_EU, rank_of_E, num_ranks)
    others_U = np.empty(load_EU.shape[1], np.int32)
    for _ in range(sweeps):
        improved = False
        for a in range(num_ranks):
            for b in range(a + 1, num_ranks):
                improved |= swap_best(load_EU, load_RU, held_RK, a, b, joined, others_U)
        if not improved:
            break
    for r in range(num_ranks):
        for e in held_RK[r]:
            rank_of_E[e] = r
