"""Experts to ranks by the window's totals: longest processing time first, then best swaps; and slots for ranks."""

from __future__ import annotations

import numpy as np
from numba import njit
from scipy.optimize import linear_sum_assignment


def balanced_ranks(tokens_LE: np.ndarray, num_ranks: int) -> np.ndarray:
    """int32 [L, E]: an EP rank for every expert, E / R a rank, with a low largest load in every layer.

    Longest processing time first, then the best swap of the fullest rank with any other until none helps.
    """
    rank_of_LE = np.empty(tokens_LE.shape, dtype=np.int32)
    order_LE = np.argsort(-tokens_LE, axis=1, kind="stable")
    _balanced_ranks(np.ascontiguousarray(tokens_LE, dtype=np.int64), order_LE, num_ranks, rank_of_LE)
    return rank_of_LE


@njit(nogil=True, cache=True)
def _balanced_ranks(tokens_LE, order_LE, num_ranks, rank_of_LE):
    layers, experts = tokens_LE.shape
    slots = experts // num_ranks
    for layer in range(layers):
        load_R = np.zeros(num_ranks, np.int64)
        count_R = np.zeros(num_ranks, np.int64)
        for e in order_LE[layer]:
            best = -1
            for r in range(num_ranks):
                if count_R[r] < slots and (best < 0 or load_R[r] < load_R[best]):
                    best = r
            rank_of_LE[layer, e] = best
            load_R[best] += tokens_LE[layer, e]
            count_R[best] += 1
        while _swap_fullest(tokens_LE[layer], rank_of_LE[layer], load_R):
            pass


@njit(nogil=True, cache=True)
def _swap_fullest(tokens_E, rank_of_E, load_R):
    """Swap that lowers the fullest rank most; False where none does."""
    full = np.argmax(load_R)
    best, best_e, best_f = load_R[full], -1, -1
    for e in range(tokens_E.size):
        if rank_of_E[e] != full:
            continue
        for f in range(tokens_E.size):
            other = rank_of_E[f]
            given = tokens_E[e] - tokens_E[f]
            if other == full or given <= 0:
                continue
            larger = max(load_R[full] - given, load_R[other] + given)
            if larger < best:
                best, best_e, best_f = larger, e, f
    if best_e < 0:
        return False
    other = rank_of_E[best_f]
    given = tokens_E[best_e] - tokens_E[best_f]
    load_R[full] -= given
    load_R[other] += given
    rank_of_E[best_e], rank_of_E[best_f] = other, full
    return True


def slots_of_ranks(rank_of_LE: np.ndarray) -> np.ndarray:
    """int32 [L, P]: logical expert of each slot, ranks in order, experts of a rank in ascending order."""
    return np.argsort(rank_of_LE, axis=1, kind="stable").astype(np.int32)


def keep_in_place(slots_LP: np.ndarray, previous_LP: np.ndarray, num_ranks: int, *, num_nodes: int = 1) -> np.ndarray:
    """int32 [L, P]: the same experts together, ranks numbered and slots filled so that few experts move.

    Ranks are matched to the previous ones by the experts they share (Hungarian method), within each of *num_nodes*
    equal blocks of ranks; an expert that stays on its rank keeps its slot.

    >>> keep_in_place(np.array([[2, 3, 0, 1]]), np.array([[0, 1, 2, 3]]), 2)
    array([[0, 1, 2, 3]], dtype=int32)
    """
    kept_LP = np.empty(slots_LP.shape, dtype=np.int32)
    node_of_R = np.arange(num_ranks) // (num_ranks // num_nodes)
    # Worse than all that could be shared.
    elsewhere_RR = np.where(node_of_R[:, None] == node_of_R, 0, -2 * slots_LP.shape[1])
    for layer, (slots_P, previous_P) in enumerate(zip(slots_LP, previous_LP, strict=True)):
        new_RK, old_RK = slots_P.reshape(num_ranks, -1), previous_P.reshape(num_ranks, -1)
        rank_of_E = np.empty(slots_P.size, dtype=np.int64)
        rank_of_E[old_RK] = np.arange(num_ranks)[:, None]
        shared_RR = np.stack([np.bincount(rank_of_E[held], minlength=num_ranks) for held in new_RK])
        _, old_of_R = linear_sum_assignment(shared_RR + elsewhere_RR, maximize=True)
        for held_K, old in zip(new_RK, old_of_R, strict=True):
            kept_LP[layer].reshape(num_ranks, -1)[old] = _keep_slots(held_K, old_RK[old])
    return kept_LP


def _keep_slots(held_K: np.ndarray, old_K: np.ndarray) -> np.ndarray:
    slots_K = np.where(np.isin(old_K, held_K), old_K, -1)
    slots_K[slots_K < 0] = np.setdiff1d(held_K, old_K)
    return slots_K
