"""Who brings how much to whom: routed rows of each sequence per EP rank, and of each unit per expert.

A unit is one microbatch of one EP group; unit ``m * G + g``. Letters: :mod:`routepack.types`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

LANES = 16
"""The layer axis of a rank load is padded to a multiple of this, so that every row starts a vector register."""


def rank_load(tokens_SLE: np.ndarray, rank_of_LE: np.ndarray, num_ranks: int, *, threads: int = 2) -> np.ndarray:
    """int32 [S, R, L]: routed rows that each sequence sends to each EP rank in each layer.

    L is padded with zeros to a multiple of :data:`LANES`; layers are contiguous, so that a maximum over
    ranks runs elementwise over layers.
    """
    sequences, layers, _ = tokens_SLE.shape
    load_SRL = np.zeros((sequences, num_ranks, -(-layers // LANES) * LANES), dtype=np.int32)
    rank_of_LE = np.ascontiguousarray(rank_of_LE, dtype=np.int64)
    parts = [slice(a[0], a[-1] + 1) for a in np.array_split(np.arange(sequences), threads) if len(a)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda part: _rank_load(tokens_SLE[part], rank_of_LE, load_SRL[part]), parts))
    return load_SRL


@njit(nogil=True, cache=True)
def _rank_load(tokens_SLE, rank_of_LE, load_SRL):
    sequences, layers, experts = tokens_SLE.shape
    row_R = np.zeros(load_SRL.shape[1], np.int32)
    for s in range(sequences):
        for layer in range(layers):
            row_R[:] = 0
            for e in range(experts):
                row_R[rank_of_LE[layer, e]] += np.int32(tokens_SLE[s, layer, e])
            for r in range(row_R.size):
                load_SRL[s, r, layer] = row_R[r]


def unit_load(tokens_SLE: np.ndarray, unit_of_S: np.ndarray, num_units: int, *, threads: int = 2) -> np.ndarray:
    """int32 [L, E, units]: routed rows that each unit sends to each expert."""
    _, layers, experts = tokens_SLE.shape
    load_LEU = np.empty((layers, experts, num_units), dtype=np.int32)
    parts = [slice(a[0], a[-1] + 1) for a in np.array_split(np.arange(layers), threads) if len(a)]
    unit_of_S = np.ascontiguousarray(unit_of_S, dtype=np.int64)
    by_unit = np.argsort(unit_of_S, kind="stable")
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda part: _unit_load(tokens_SLE[:, part], by_unit, unit_of_S, load_LEU[part]), parts))
    return load_LEU


@njit(nogil=True, cache=True)
def _unit_load(tokens_SLE, by_unit, unit_of_S, load_LEU):
    _, layers, experts = tokens_SLE.shape
    load_ULE = np.zeros((load_LEU.shape[2], layers, experts), np.int32)
    for s in by_unit:
        u = unit_of_S[s]
        for layer in range(layers):
            for e in range(experts):
                load_ULE[u, layer, e] += np.int32(tokens_SLE[s, layer, e])
    for layer in range(layers):
        for e in range(experts):
            for u in range(load_ULE.shape[0]):
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
