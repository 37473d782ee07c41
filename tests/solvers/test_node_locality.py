from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack.core.plans import Topology
from routepack.cost.links import traffic_of
from routepack.solvers.node_locality import Group, Prices, hierarchical_ranks, refine_near, seat_cells, swap_sequences
from routepack.solvers.placement import keep_in_place
from routepack.solvers.rank_loads import node_copies

GROUP = Group(num_ranks=4, num_nodes=2, num_cells=4)


def across(rows_Sn, cell_of_S, group):
    node_of_S = group.node_of_seat[cell_of_S % group.num_cells]
    return int(rows_Sn.sum() - rows_Sn[np.arange(len(rows_Sn)), node_of_S].sum())


@given(st.integers(0, 2**32), st.sampled_from([(4, 2), (8, 2), (8, 4), (8, 1)]))
def test_hierarchical_ranks_hold_equally_many_experts(seed, shape):
    ranks, nodes = shape
    tokens_LE = np.random.default_rng(seed).integers(0, 1000, (3, 16))
    rank_of_LE = hierarchical_ranks(tokens_LE, nodes, ranks)
    assert (np.stack([(rank_of_LE == r).sum(axis=1) for r in range(ranks)]) == 16 // ranks).all()


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_cells_take_the_seats_that_send_least_across(seed):
    rows_Sn = np.random.default_rng(seed).integers(0, 100, (4, 2))
    cell_of_S = np.arange(4, dtype=np.int32)
    seated = seat_cells(rows_Sn, cell_of_S, 4, GROUP)
    least = min(across(rows_Sn, np.array(seats), GROUP) for seats in permutations(range(4)))
    assert across(rows_Sn, seated, GROUP) == least
    assert sorted(seated.tolist()) == [0, 1, 2, 3]


def test_cells_that_gain_nothing_stay():
    cell_of_S = np.arange(8, dtype=np.int32)
    assert (seat_cells(np.ones((8, 2), dtype=np.int64), cell_of_S, 8, GROUP) == cell_of_S).all()


@given(st.integers(0, 2**32))
def test_swapped_sequences_keep_every_limit(seed):
    rng = np.random.default_rng(seed)
    rows_Sn, cell_of_S, length_S = rng.integers(0, 100, (40, 2)), np.arange(40) % 8, rng.integers(1, 50, 40)
    # Costs that say nothing of lengths, so that the cap is a limit of its own.
    cost_SI = rng.integers(1, 50, (40, 2)).astype(float)
    cap = int(np.bincount(cell_of_S, length_S).max())
    swapped = swap_sequences(rows_Sn, cell_of_S, length_S, cost_SI, num_cells=8, max_tokens=cap, group=GROUP)
    assert across(rows_Sn, swapped, GROUP) <= across(rows_Sn, cell_of_S, GROUP)
    assert (np.bincount(swapped, minlength=8) == np.bincount(cell_of_S)).all()
    assert np.bincount(swapped, length_S).max() <= cap
    assert (swapped // 4 == cell_of_S // 4).all()
    for cost_S in cost_SI.T:
        costliest = [np.bincount(cells, cost_S).reshape(2, 4).max(axis=1) for cells in (swapped, cell_of_S)]
        assert (costliest[0] <= costliest[1] * (1 + 1e-12)).all()


def test_sequences_come_to_the_node_they_send_to():
    rows_Sn = np.array([[0, 9], [0, 9], [9, 0], [9, 0]])
    swapped = swap_sequences(
        rows_Sn, np.arange(4), np.ones(4, dtype=np.int64), np.ones((4, 1)), num_cells=4, max_tokens=1, group=GROUP
    )
    assert across(rows_Sn, swapped, GROUP) == 0


def waited(load_LEC, rank_of_LE, prices, topology, joined):
    """What units wait for, from the cost's own count of traffic."""
    layers, _, cells = load_LEC.shape
    load_CRL = np.zeros((cells, topology.expert_parallel_degree, layers), dtype=np.int64)
    for layer in range(layers):
        for e, rank in enumerate(rank_of_LE[layer]):
            load_CRL[:, rank, layer] += load_LEC[layer, e]
    traffic = traffic_of(load_CRL, topology)
    units, width = len(traffic.across_UL), topology.expert_parallel_degree // topology.model_parallel_degree
    peak_UL = load_CRL.reshape(units, width, -1, layers).sum(axis=1).max(axis=1)
    links_UL = prices.inside * traffic.inside_UL + prices.across * traffic.across_UL
    return sum(
        terms.reshape(units // joined, joined, layers).max(axis=1).sum() for terms in (prices.expert * peak_UL, links_UL)
    )


@given(st.integers(0, 2**32), st.sampled_from([(4, 1, 2), (4, 2, 2), (8, 2, 4), (8, 1, 8)]), st.sampled_from([1, 2]))
@settings(max_examples=40)
def test_refining_never_raises_what_units_wait_for_by_the_cost_model(seed, shape, joined):
    ranks, m, per_node = shape
    rng = np.random.default_rng(seed)
    topology = Topology(
        data_parallel_degree=2 * ranks // m, expert_parallel_degree=ranks, model_parallel_degree=m, ranks_per_node=per_node
    )
    group = Group(num_ranks=ranks, num_nodes=ranks // per_node, num_cells=ranks // m)
    load_LEC = rng.integers(0, 100, (2, 16, 4 * ranks // m)).astype(np.int32)
    before = np.stack([rng.permutation(16) % ranks for _ in range(2)])
    prices = Prices(expert=float(rng.random()), inside=float(rng.random()), across=float(rng.random()))
    after = refine_near(load_LEC, before, prices, group, joined_units=joined)
    limits = [waited(load_LEC, placed, prices, topology, joined) for placed in (after, before)]
    assert limits[0] <= limits[1] * (1 + 1e-12)
    assert (np.sort(after, axis=1) == np.sort(before, axis=1)).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_refining_does_not_depend_on_threads(threads):
    load_LEC = np.random.default_rng(0).integers(0, 100, (5, 16, 8)).astype(np.int32)
    prices = Prices(expert=1.0, inside=0.1, across=1.0)
    start = np.tile(np.arange(16) % 4, (5, 1))
    expected = refine_near(load_LEC, start, prices, GROUP, threads=2)
    assert (refine_near(load_LEC, start, prices, GROUP, threads=threads) == expected).all()


def test_experts_come_to_the_cells_that_send_to_them():
    # Experts 0 and 2 are fed by cells 2 and 3 on node 1, 1 and 3 by cells 0 and 1 on node 0.
    load_LEC = np.zeros((1, 4, 4), dtype=np.int32)
    load_LEC[0, [0, 2], 2:] = load_LEC[0, [1, 3], :2] = 10
    ranks = refine_near(load_LEC, np.array([[0, 1, 2, 3]]), Prices(expert=1.0, inside=0.0, across=1.0), GROUP)
    assert GROUP.node_of_R[ranks[0]].tolist() == [1, 0, 1, 0]


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]))
def test_copies_a_node_are_those_counted_token_by_token(seed, nodes):
    rng = np.random.default_rng(seed)
    ids_TLK, node_of_LE = rng.integers(0, 8, (12, 2, 3)), rng.permutation(np.arange(16) % nodes).reshape(2, 8)
    node_of_LE[0, 0] = nodes - 1
    valid_T, cu_seqlens = rng.random(12) < 0.8, np.array([0, 5, 5, 12])
    expected = np.zeros((3, 2, nodes), dtype=int)
    for s in range(3):
        for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
            for layer in range(2):
                for node in {node_of_LE[layer, e] for e in ids_TLK[t, layer]} if valid_T[t] else ():
                    expected[s, layer, node] += 1
    assert (node_copies(ids_TLK, cu_seqlens, node_of_LE, valid_T) == expected).all()


@given(st.integers(0, 2**32))
def test_ranks_are_renumbered_within_their_node(seed):
    rng = np.random.default_rng(seed)
    new, old = rng.permutation(16)[None], rng.permutation(16)[None]
    kept = keep_in_place(new, old, 4, num_nodes=2)
    for node in (slice(0, 8), slice(8, 16)):
        assert set(kept[0, node].tolist()) == set(new[0, node].tolist())
