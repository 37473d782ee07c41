"""Experts and sequences near one another: nodes before ranks, cells seated on nodes, swaps that cut what goes across.

Within a group of N nodes, EP rank r is on node r // (R / N), and the cell of a unit's i-th DP rank on the node of EP rank
i * m. Letters: :mod:`routepack.core`; C cells, U units (microbatch of an EP group), n nodes of a group.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numba import njit
from scipy.optimize import linear_sum_assignment

from routepack.solvers.placement import balanced_ranks


@dataclass(frozen=True, kw_only=True)
class Group:
    """The shape of every EP group: its ranks, its nodes, and the DP ranks whose tokens meet in it."""

    num_ranks: int
    num_nodes: int
    num_cells: int
    """DP ranks of a group, so cells of a unit."""

    @property
    def node_of_R(self) -> np.ndarray:
        """int64 [R]: the node of every EP rank."""
        return np.arange(self.num_ranks) // (self.num_ranks // self.num_nodes)

    @property
    def node_of_seat(self) -> np.ndarray:
        """int64 [cells of a unit]: the node that each cell of a unit is on."""
        return self.node_of_R[:: self.num_ranks // self.num_cells]


def hierarchical_ranks(tokens_LE: np.ndarray, num_nodes: int, num_ranks: int) -> np.ndarray:
    """int32 [L, E]: experts evened out over nodes first, then over the ranks of each node.

    >>> hierarchical_ranks(np.array([[8, 1, 1, 1, 1, 1, 1, 0]]), 2, 4)[0] // 2
    array([0, 1, 1, 1, 1, 0, 0, 0], dtype=int32)
    """
    return ranks_in_nodes(tokens_LE, balanced_ranks(tokens_LE, num_nodes), num_nodes, num_ranks)


def ranks_in_nodes(tokens_LE: np.ndarray, node_of_LE: np.ndarray, num_nodes: int, num_ranks: int) -> np.ndarray:
    """int32 [L, E]: the experts of every node evened out over its ranks."""
    layers, experts = tokens_LE.shape
    experts_LnK = np.argsort(node_of_LE, axis=1, kind="stable").reshape(layers, num_nodes, -1)
    tokens_LnK = np.take_along_axis(tokens_LE, experts_LnK.reshape(layers, -1), axis=1).reshape(layers * num_nodes, -1)
    inside_LnK = balanced_ranks(tokens_LnK, num_ranks // num_nodes).reshape(experts_LnK.shape)
    ranks_LnK = inside_LnK + (np.arange(num_nodes) * (num_ranks // num_nodes))[:, None]
    rank_of_LE = np.empty((layers, experts), dtype=np.int32)
    np.put_along_axis(rank_of_LE, experts_LnK.reshape(layers, -1), ranks_LnK.reshape(layers, -1).astype(np.int32), axis=1)
    return rank_of_LE


def node_rows(load_SRL: np.ndarray, num_nodes: int) -> np.ndarray:
    """int64 [S, n]: routed rows of every sequence to each node of its group, all layers together."""
    return load_SRL.reshape(len(load_SRL), num_nodes, -1).sum(axis=-1, dtype=np.int64)


def seat_cells(rows_Sn: np.ndarray, cell_of_S: np.ndarray, num_cells: int, group: Group) -> np.ndarray:
    """int32 [S]: cells after the cells of every unit exchanged seats so that the fewest rows go across (Hungarian method).

    Neither attention nor experts notice: both wait for all cells of a unit, wherever they are.
    """
    rows_Cn = np.zeros((num_cells, group.num_nodes), dtype=np.int64)
    np.add.at(rows_Cn, cell_of_S, rows_Sn)
    seat_of_C = np.empty(num_cells, dtype=np.int32)
    for first in range(0, num_cells, group.num_cells):
        near = rows_Cn[first : first + group.num_cells][:, group.node_of_seat]
        # A cell that gains nothing keeps its seat.
        stays = 2 * group.num_cells * near + np.eye(group.num_cells, dtype=np.int64)
        seat_of_C[first : first + group.num_cells] = first + linear_sum_assignment(stays, maximize=True)[1]
    return seat_of_C[cell_of_S]


def swap_sequences(
    rows_Sn: np.ndarray,
    cell_of_S: np.ndarray,
    length_S: np.ndarray,
    cost_SI: np.ndarray,
    *,
    num_cells: int,
    max_tokens: int,
    group: Group,
    sweeps: int = 4,
) -> np.ndarray:
    """int32 [S]: cells after swaps of sequences between nodes, inside their unit, that send fewer rows across.

    A unit's experts see the same sequences; its costliest cell never gets costlier, in no attention stage; caps are kept.
    """
    cell_of_S = np.array(cell_of_S, dtype=np.int64)
    tokens_C = np.bincount(cell_of_S, length_S, num_cells).astype(np.int64)
    cost_CI = np.zeros((num_cells, cost_SI.shape[1]))
    np.add.at(cost_CI, cell_of_S, cost_SI)
    by_unit = np.argsort(cell_of_S // group.num_cells, kind="stable")
    units = cell_of_S[by_unit] // group.num_cells
    starts = np.searchsorted(units, np.arange(num_cells // group.num_cells + 1))
    _swap_sequences(rows_Sn, cell_of_S, length_S, cost_SI, tokens_C, cost_CI, max_tokens, by_unit, starts,
                    group.node_of_seat, sweeps)  # fmt: skip
    return cell_of_S.astype(np.int32)


@njit(nogil=True, cache=True)
def _swap_sequences(
    rows_Sn, cell_of_S, length_S, cost_SI, tokens_C, cost_CI, max_tokens, by_unit, starts, node_of_seat, sweeps
):
    seats, stages = node_of_seat.size, cost_SI.shape[1]
    for u in range(starts.size - 1):
        members = by_unit[starts[u] : starts[u + 1]]
        most_I = np.zeros(stages)
        for c in range(u * seats, (u + 1) * seats):
            most_I = np.maximum(most_I, cost_CI[c])
        for _ in range(sweeps):
            improved = False
            for i in range(members.size):
                s = members[i]
                best, best_t = 0, -1
                a = cell_of_S[s]
                for t in members:
                    b = cell_of_S[t]
                    na, nb = node_of_seat[a % seats], node_of_seat[b % seats]
                    gain = rows_Sn[s, nb] - rows_Sn[s, na] + rows_Sn[t, na] - rows_Sn[t, nb]
                    if gain <= best:
                        continue
                    longer = length_S[s] - length_S[t]
                    if tokens_C[a] - longer > max_tokens or tokens_C[b] + longer > max_tokens:
                        continue
                    costlier = False
                    for stage in range(stages):
                        change = cost_SI[s, stage] - cost_SI[t, stage]
                        costlier |= cost_CI[a, stage] - change > most_I[stage] or cost_CI[b, stage] + change > most_I[stage]
                    if not costlier:
                        best, best_t = gain, t
                if best_t < 0:
                    continue
                improved = True
                b = cell_of_S[best_t]
                cell_of_S[s], cell_of_S[best_t] = b, a
                tokens_C[a] += length_S[best_t] - length_S[s]
                tokens_C[b] += length_S[s] - length_S[best_t]
                for stage in range(stages):
                    change = cost_SI[s, stage] - cost_SI[best_t, stage]
                    cost_CI[a, stage] -= change
                    cost_CI[b, stage] += change
            if not improved:
                break


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What a row of the fullest rank, and of the busiest link inside and across nodes, costs."""

    expert: float
    inside: float
    across: float


def refine_near(
    load_LEC: np.ndarray,
    rank_of_LE: np.ndarray,
    prices: Prices,
    group: Group,
    *,
    joined_units: int = 1,
    sweeps: int = 4,
    threads: int = 2,
) -> np.ndarray:
    """int32 [L, E]: ranks after swaps that lower what units wait for, experts and links together, layer by layer.

    The sum over units of ``expert`` x fullest rank + ``inside`` x busiest link inside its node + ``across`` x busiest link to
    other nodes; so balance is given up where traffic saved is worth more, and the reverse. With *joined_units* so many
    consecutive units wait for one another. Never raises the sum.

    Args:
        load_LEC: int32 [L, E, C] routed rows of every cell to every expert.
        rank_of_LE: int32 [L, E] ranks to start from.
        prices: of the three terms.
        group: the shape of the EP groups.
        joined_units: units of a microbatch under ``sync=layer``, else 1.
        sweeps: passes over all pairs of ranks.
        threads: layers are refined alone, so any number gives the same.

    """
    rank_of_LE, shared = np.array(rank_of_LE, dtype=np.int32), group.num_ranks // group.num_cells
    # As if each of a DP rank's model-parallel ranks sent all of its rows, at their share of the price.
    load_LEUJ = np.repeat(load_LEC, shared, axis=2).reshape(*rank_of_LE.shape, -1, group.num_ranks)
    rates, per_node = np.array([prices.expert, prices.inside, prices.across]) / shared, group.num_ranks // group.num_nodes

    def refine(layer: int) -> None:
        _refine_near(load_LEUJ[layer], rank_of_LE[layer], rates, per_node, joined_units, sweeps)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(refine, range(len(rank_of_LE))))
    return rank_of_LE


@njit(nogil=True, cache=True)
def _refine_near(load_EUJ, rank_of_E, rates, per_node, joined, sweeps):
    experts, units, ranks = load_EUJ.shape
    rows_URJ = np.zeros((units, ranks, ranks), np.int32)
    load_EU = np.zeros((experts, units), np.int32)
    load_RU = np.zeros((ranks, units), np.int32)
    near_En = np.zeros((experts, ranks // per_node), np.int64)
    for e in range(experts):
        for u in range(units):
            for j in range(ranks):
                rows_URJ[u, rank_of_E[e], j] += load_EUJ[e, u, j]
                load_EU[e, u] += load_EUJ[e, u, j]
                near_En[e, j // per_node] += load_EUJ[e, u, j]
        load_RU[rank_of_E[e]] += load_EU[e]
    value = _waited(rows_URJ, rates, per_node, joined)
    for _ in range(sweeps):
        before = value
        for a in range(ranks):
            for b in range(a + 1, ranks):
                e, f = _likeliest(load_EU, near_En, rank_of_E, load_RU, rates, per_node, a, b)
                if e < 0:
                    continue
                _exchange(rows_URJ, load_EUJ, e, f, a, b)
                now = _waited(rows_URJ, rates, per_node, joined)
                if now < value:
                    value = now
                    rank_of_E[e], rank_of_E[f] = b, a
                    for u in range(units):
                        given = load_EU[e, u] - load_EU[f, u]
                        load_RU[a, u] -= given
                        load_RU[b, u] += given
                else:
                    _exchange(rows_URJ, load_EUJ, e, f, b, a)
        if value == before:
            break


@njit(nogil=True, cache=True)
def _exchange(rows_URJ, load_EUJ, e, f, a, b):
    """Keep up the rows of every pair of ranks as rank a gives expert e for f of rank b."""
    for u in range(rows_URJ.shape[0]):
        for j in range(rows_URJ.shape[2]):
            given = load_EUJ[e, u, j] - load_EUJ[f, u, j]
            rows_URJ[u, a, j] -= given
            rows_URJ[u, b, j] += given


@njit(nogil=True, cache=True)
def _likeliest(load_EU, near_En, rank_of_E, load_RU, rates, per_node, a, b):
    """The swap between two ranks that promises most: exact for experts, the mean link standing for the busiest."""
    ranks, units = load_RU.shape
    others_U = np.zeros(units, np.int32)
    for r in range(ranks):
        if r != a and r != b:
            for u in range(units):
                others_U[u] = max(others_U[u], load_RU[r, u])
    before = np.int64(0)
    for u in range(units):
        before += max(others_U[u], max(load_RU[a, u], load_RU[b, u]))
    best, best_e, best_f = 0.0, -1, -1
    na, nb = a // per_node, b // per_node
    for e in range(rank_of_E.size):
        if rank_of_E[e] != a:
            continue
        for f in range(rank_of_E.size):
            if rank_of_E[f] != b:
                continue
            now = np.int64(0)
            for u in range(units):
                given = load_EU[e, u] - load_EU[f, u]
                now += max(others_U[u], max(load_RU[a, u] - given, load_RU[b, u] + given))
            saved = near_En[e, nb] - near_En[e, na] + near_En[f, na] - near_En[f, nb]
            change = rates[0] * (now - before) - (rates[2] - rates[1]) * saved / ranks
            if change < best:
                best, best_e, best_f = change, e, f
    return best_e, best_f


@njit(nogil=True, cache=True)
def _waited(rows_URJ, rates, per_node, joined):
    """What all units wait for in one layer."""
    total = 0.0
    for first in range(0, rows_URJ.shape[0], joined):
        fullest, links = 0.0, 0.0
        for u in range(first, first + joined):
            full, inside, across = _busiest(rows_URJ[u], per_node)
            fullest = max(fullest, rates[0] * full)
            links = max(links, rates[1] * inside + rates[2] * across)
        total += fullest + links
    return total


@njit(nogil=True, cache=True)
def _busiest(rows_RJ, per_node):
    """Rows of one unit: (of the fullest rank, of the busiest rank's links inside its node, and across)."""
    ranks = rows_RJ.shape[0]
    sent_J, near_J = np.zeros(ranks, np.int32), np.zeros(ranks, np.int32)
    full, inside, across = np.int32(0), np.int32(0), np.int32(0)
    for r in range(ranks):
        load, near, first = np.int32(0), np.int32(0), r // per_node * per_node
        for j in range(ranks):
            load += rows_RJ[r, j]
            sent_J[j] += rows_RJ[r, j]
        for j in range(first, first + per_node):
            near += rows_RJ[r, j]
            near_J[j] += rows_RJ[r, j]
        full, inside, across = max(full, load), max(inside, near - rows_RJ[r, r]), max(across, load - near)
    for j in range(ranks):
        inside = max(inside, near_J[j] - rows_RJ[j, j])
        across = max(across, sent_J[j] - near_J[j])
    return full, inside, across
