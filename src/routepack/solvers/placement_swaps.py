"""Swaps of experts between ranks on what the packed units wait for: the best ones, or annealed. Whole numbers only.

Letters: :mod:`routepack.core`; U units, K experts of a rank, N chunks of units.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

from routepack.solvers.metropolis import below, most_accepted

SWAPS_PER_PAIR = 32
"""Swaps tried between two ranks before the next two are drawn; the others' fullest is found once for all of them."""
ANYTHING = np.iinfo(np.int64).max
CHUNK = 32
"""Units after which a swap is given up where what they wait for, and the least that the rest can, is too much."""


def refine_ranks(
    load_LEU: np.ndarray,
    rank_of_LE: np.ndarray,
    num_ranks: int,
    *,
    joined_units: int = 1,
    sweeps: int = 8,
    threads: int = 2,
) -> np.ndarray:
    """int32 [L, E]: ranks after swaps that lower the sum over units of the fullest rank, layer by layer.

    With *joined_units* so many consecutive units wait for the fullest rank of any of them. That sum, not the
    window's largest load, is what the packed microbatches wait for. A sweep tries every pair of ranks and
    applies the best swap of each; it never raises the sum.
    """
    rank_of_LE = np.array(rank_of_LE, dtype=np.int32)

    def refine(layer: int) -> None:
        refine_layer(load_LEU[layer], rank_of_LE[layer], num_ranks, joined_units, sweeps)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(refine, range(len(rank_of_LE))))
    return rank_of_LE


def anneal_ranks(
    load_LEU: np.ndarray,
    rank_of_LE: np.ndarray,
    num_ranks: int,
    *,
    temperature: float,
    swaps_per_layer: int,
    seed: int,
    joined_units: int = 1,
    threads: int = 2,
) -> np.ndarray:
    """int32 [L, E]: ranks after so many swaps a layer, accepted by Metropolis at a temperature in routed rows.

    Annealed on the same sum as :func:`refine_ranks`, which it may raise. Each layer draws from its own seed,
    so the ranks do not depend on the threads.
    """
    rank_of_LE = np.array(rank_of_LE, dtype=np.int32)
    if num_ranks == 1:
        return rank_of_LE
    layers, num_pairs = len(rank_of_LE), -(-swaps_per_layer // SWAPS_PER_PAIR)
    state_L = np.random.default_rng(seed).integers(1, 2**63, size=(layers, 1), dtype=np.uint64)

    def anneal(layer: int) -> None:
        ranks_E = rank_of_LE[layer]
        anneal_layer(load_LEU[layer], ranks_E, num_ranks, joined_units, num_pairs, temperature, state_L[layer])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(anneal, range(layers)))
    return rank_of_LE


@njit(nogil=True, cache=True, inline="always")
def _peaks(load_RU, load_EU, others_U, a, b, e, f, first, last):
    """Sum over units of the fullest rank, once e goes from a to b and f from b to a."""
    total = np.int64(0)
    for u in range(np.uint64(first), np.uint64(last)):
        given = np.int32(load_EU[e, u] - load_EU[f, u])
        total += max(others_U[u], max(np.int32(load_RU[a, u] - given), np.int32(load_RU[b, u] + given)))
    return total


@njit(nogil=True, cache=True, inline="always")
def _joined_peaks(load_RU, load_EU, others_U, a, b, e, f, first, last, joined):
    """Sum over blocks of *joined* units of the fullest rank of any of them, once e goes from a to b and f from b to a."""
    total = np.int64(0)
    for block in range(first, last, joined):
        most = np.int32(0)
        for u in range(block, block + joined):
            given = np.int32(load_EU[e, u] - load_EU[f, u])
            most = max(most, max(others_U[u], max(np.int32(load_RU[a, u] - given), np.int32(load_RU[b, u] + given))))
        total += most
    return total


@njit(nogil=True, cache=True, inline="always")
def _waited(load_RU, load_EU, others_U, least_N, a, b, e, f, joined, chunk, most):
    """What units wait for once e and f have changed places; something above *most* where it is more than that."""
    units, total = others_U.size, np.int64(0)
    for n in range(least_N.size - 1):
        first, last = n * chunk, min(units, (n + 1) * chunk)
        if joined == 1:
            total += _peaks(load_RU, load_EU, others_U, a, b, e, f, first, last)
        else:
            total += _joined_peaks(load_RU, load_EU, others_U, a, b, e, f, first, last, joined)
        if total + least_N[n + 1] > most:
            return total + least_N[n + 1]
    return total


@njit(nogil=True, cache=True)
def _least_waited(load_RU, others_U, a, b, joined, chunk, least_N):
    """The least that units from each chunk on wait for, whatever a and b exchange: one of them holds half of both."""
    units = others_U.size
    least_N[-1] = 0
    for n in range(least_N.size - 2, -1, -1):
        least_N[n] = least_N[n + 1]
        for block in range(n * chunk, min(units, (n + 1) * chunk), joined):
            least = np.int32(0)
            for u in range(block, block + joined):
                half = np.int32((np.int64(load_RU[a, u]) + np.int64(load_RU[b, u]) + 1) >> 1)
                least = max(least, max(others_U[u], half))
            least_N[n] += least


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
def _begin(load_EU, rank_of_E, num_ranks, joined):
    """The experts of each rank, [R, K], what they load each unit with, [R, U]; room for others_U and least_N; units a chunk."""
    held_RK = np.empty((num_ranks, rank_of_E.size // num_ranks), np.int64)
    load_RU = np.zeros((num_ranks, load_EU.shape[1]), np.int32)
    count_R = np.zeros(num_ranks, np.int64)
    for e in range(rank_of_E.size):
        r = rank_of_E[e]
        held_RK[r, count_R[r]] = e
        count_R[r] += 1
        load_RU[r] += load_EU[e]
    chunk = -(-CHUNK // joined) * joined
    others_U = np.empty(load_EU.shape[1], np.int32)
    return held_RK, load_RU, others_U, np.empty(-(-others_U.size // chunk) + 1, np.int64), chunk


@njit(nogil=True, cache=True)
def _swap(load_EU, load_RU, held_RK, a, i, b, j):
    """Rank a gives its i-th expert to rank b for b's j-th."""
    e, f = held_RK[a, i], held_RK[b, j]
    for u in range(load_EU.shape[1]):
        given = load_EU[e, u] - load_EU[f, u]
        load_RU[a, u] -= given
        load_RU[b, u] += given
    held_RK[a, i], held_RK[b, j] = f, e


@njit(nogil=True, cache=True)
def anneal_layer(load_EU, rank_of_E, num_ranks, joined, num_pairs, temperature, state):
    """Metropolis on the sum over units of the fullest rank, by swaps of experts; returns the change of the sum."""
    held_RK, load_RU, others_U, least_N, chunk = _begin(load_EU, rank_of_E, num_ranks, joined)
    slots, change = held_RK.shape[1], np.int64(0)
    for _ in range(num_pairs):
        a, b = below(state, num_ranks), below(state, num_ranks - 1)
        b += b >= a
        _others_fullest(load_RU, a, b, others_U)
        _least_waited(load_RU, others_U, a, b, joined, chunk, least_N)
        now = _waited(load_RU, load_EU, others_U, least_N, a, b, 0, 0, joined, chunk, ANYTHING)
        for _ in range(SWAPS_PER_PAIR):
            i, j = below(state, slots), below(state, slots)
            most = now + (np.int64(most_accepted(temperature, state)) if temperature > 0.0 else 0)
            total = _waited(load_RU, load_EU, others_U, least_N, a, b, held_RK[a, i], held_RK[b, j], joined, chunk, most)
            if total > most:
                continue
            _swap(load_EU, load_RU, held_RK, a, i, b, j)
            change += total - now
            now = total
    for r in range(num_ranks):
        for e in held_RK[r]:
            rank_of_E[e] = r
    return change


@njit(nogil=True, cache=True)
def _swap_best(load_EU, load_RU, held_RK, a, b, joined, chunk, others_U, least_N):
    """Apply the swap between ranks a and b that lowers the sum of peaks most; False where none does."""
    _others_fullest(load_RU, a, b, others_U)
    _least_waited(load_RU, others_U, a, b, joined, chunk, least_N)
    best = _waited(load_RU, load_EU, others_U, least_N, a, b, 0, 0, joined, chunk, ANYTHING)
    best_i, best_j = -1, -1
    for i in range(held_RK.shape[1]):
        for j in range(held_RK.shape[1]):
            e, f = held_RK[a, i], held_RK[b, j]
            total = _waited(load_RU, load_EU, others_U, least_N, a, b, e, f, joined, chunk, best - 1)
            if total < best:
                best, best_i, best_j = total, i, j
    if best_i < 0:
        return False
    _swap(load_EU, load_RU, held_RK, a, best_i, b, best_j)
    return True


@njit(nogil=True, cache=True)
def refine_layer(load_EU, rank_of_E, num_ranks, joined, sweeps):
    """Sweeps of best swaps over all pairs of ranks, until none helps."""
    held_RK, load_RU, others_U, least_N, chunk = _begin(load_EU, rank_of_E, num_ranks, joined)
    for _ in range(sweeps):
        improved = False
        for a in range(num_ranks):
            for b in range(a + 1, num_ranks):
                improved |= _swap_best(load_EU, load_RU, held_RK, a, b, joined, chunk, others_U, least_N)
        if not improved:
            break
    for r in range(num_ranks):
        for e in held_RK[r]:
            rank_of_E[e] = r
