"""Who brings how much to whom: routed rows of each sequence per EP rank, and of each unit per expert.

A unit is one microbatch of one EP group; unit ``m * G + g``. Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

LANES = 16
"""The layer axis of a rank load is padded to a multiple of this, so that every row starts a vector register."""


def rank_load(tokens_SLE: np.ndarray, rank_of_LE: np.ndarray, num_ranks: int, *, threads: int = 2) -> np.ndarray:
    """int32 [S, R, L]: routed rows that each sequence sends to each EP rank in each layer, E / R experts a rank.

    L is padded with zeros to a multiple of :data:`LANES`; layers are contiguous, so that a maximum over
    ranks runs elementwise over layers.
    """
    sequences, layers, _ = tokens_SLE.shape
    load_SRL = np.zeros((sequences, num_ranks, -(-layers // LANES) * LANES), dtype=np.int32)
    held_LRK = np.argsort(rank_of_LE, axis=1, kind="stable").reshape(layers, num_ranks, -1)
    held_LRK = held_LRK.astype(np.uint16 if held_LRK.shape[1] * held_LRK.shape[2] <= 2**16 else np.int64)
    parts = [slice(a[0], a[-1] + 1) for a in np.array_split(np.arange(sequences), threads) if len(a)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda part: _rank_load(tokens_SLE[part], held_LRK, load_SRL[part]), parts))
    return load_SRL


@njit(nogil=True, cache=True)
def _rank_load(tokens_SLE, held_LRK, load_SRL):
    for s in range(tokens_SLE.shape[0]):
        for layer in range(tokens_SLE.shape[1]):
            for r in range(held_LRK.shape[1]):
                # A sum of its own for each rank: adding to sums in memory would wait for each to be written.
                rows = np.int32(0)
                for k in range(held_LRK.shape[2]):
                    rows += np.int32(tokens_SLE[s, layer, held_LRK[layer, r, k]])
                load_SRL[s, r, layer] = rows


def unit_load(tokens_SLE: np.ndarray, unit_of_S: np.ndarray, num_units: int, *, threads: int = 2) -> np.ndarray:
    """int32 [L, E, units]: routed rows that each unit sends to each expert."""
    _, layers, experts = tokens_SLE.shape
    load_LEU = np.empty((layers, experts, num_units), dtype=np.int32)
    parts = [slice(a[0], a[-1] + 1) for a in np.array_split(np.arange(layers), threads) if len(a)]
    unit_of_S = np.ascontiguousarray(unit_of_S, dtype=np.int64)
    by_unit = np.argsort(unit_of_S, kind="stable")
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda part: _unit_load(tokens_SLE, part.start, by_unit, unit_of_S, load_LEU[part]), parts))
    return load_LEU


@njit(nogil=True, cache=True)
def _unit_load(tokens_SLE, first, by_unit, unit_of_S, load_LEU):
    """Of the layers from *first* on; a slice of them would hide that experts are contiguous, and run at half the speed."""
    layers, experts, units = load_LEU.shape
    load_ULE = np.zeros((units, layers, experts), np.int32)
    for s in by_unit:
        u = unit_of_S[s]
        for layer in range(layers):
            for e in range(experts):
                load_ULE[u, layer, e] += np.int32(tokens_SLE[s, first + layer, e])
    for layer in range(layers):
        for e in range(experts):
            for u in range(units):
                load_LEU[layer, e, u] = load_ULE[u, layer, e]


def node_copies(
    routed_experts_TLK: np.ndarray, cu_seqlens: np.ndarray, node_of_LE: np.ndarray, valid_T: np.ndarray | None = None
) -> np.ndarray:
    """int32 [S, L, n]: tokens of each sequence that have at least one expert on each node.

    What a dispatcher sends that copies a token to a node once, however many of its experts are there: exact, where
    counts alone bound it by the rows (and by the tokens) from above.

    >>> node_copies(np.array([[[0, 1]], [[1, 3]]]), np.array([0, 2]), np.array([[0, 0, 1, 1]])).tolist()
    [[[2, 1]]]
    """
    valid_T = np.ones(len(routed_experts_TLK), dtype=np.bool_) if valid_T is None else valid_T
    nodes = int(node_of_LE.max()) + 1
    copies_SLn = np.zeros((len(cu_seqlens) - 1, routed_experts_TLK.shape[1], nodes), dtype=np.int32)
    ids_TLK = np.ascontiguousarray(routed_experts_TLK)
    _node_copies(ids_TLK, np.asarray(cu_seqlens), np.asarray(node_of_LE, dtype=np.int64), valid_T, copies_SLn)
    return copies_SLn


@njit(nogil=True, cache=True)
def _node_copies(ids_TLK, cu_seqlens, node_of_LE, valid_T, copies_SLn):
    _, layers, top_k = ids_TLK.shape
    for s in range(copies_SLn.shape[0]):
        for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
            if not valid_T[t]:
                continue
            for layer in range(layers):
                for k in range(top_k):
                    node, before = node_of_LE[layer, ids_TLK[t, layer, k]], False
                    for earlier in range(k):
                        before |= node_of_LE[layer, ids_TLK[t, layer, earlier]] == node
                    copies_SLn[s, layer, node] += not before


def summed_by_unit(load_SRL: np.ndarray, unit_of_S: np.ndarray, num_units: int, dtype: type = np.int64) -> np.ndarray:
    """[units, R, L]: what the sequences of each unit send to each rank."""
    load_URL = np.zeros((num_units, *load_SRL.shape[1:]), dtype=dtype)
    _summed_by_unit(load_SRL, np.ascontiguousarray(unit_of_S, dtype=np.int64), load_URL)
    return load_URL


@njit(nogil=True, cache=True)
def _summed_by_unit(load_SRL, unit_of_S, load_URL):
    for s in range(unit_of_S.size):
        load_RL = load_URL[unit_of_S[s]]
        for r in range(load_RL.shape[0]):
            for i in range(load_RL.shape[1]):
                load_RL[r, i] += load_SRL[s, r, i]
