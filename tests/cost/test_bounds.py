"""Bounds against every plan of windows small enough to try them all."""

import itertools

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.core.errors import InfeasibleError
from routepack.core.plans import SYNCS, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.bounds import attention_bound, packing_bound, placement_bound, plan_bounds
from routepack.cost.models import CostRates, WindowNormalizedCost
from routepack.planning.planner import Planner


def placements(experts, ranks):
    """Every map of experts to ranks with equally many on each, up to a renumbering of ranks."""
    slots = experts // ranks
    for ranks_of_E in itertools.product(range(ranks), repeat=experts):
        seen = list(dict.fromkeys(ranks_of_E))
        if seen == sorted(seen) and all(ranks_of_E.count(r) == slots for r in range(ranks)):
            yield np.array(ranks_of_E)


def packings(length_S, num_cells, cap):
    """int [n, S]: every legal packing."""
    cells = np.array(list(itertools.product(range(num_cells), repeat=len(length_S))))
    onto = cells[:, None, :] == np.arange(num_cells)[:, None]
    return cells[((onto @ length_S) <= cap).all(axis=1) & onto.any(axis=2).all(axis=1)]


def optimum(demand, topology, rates, cap, rows, sync):
    """The least value over all placements of a one-layer window and all its packings into so many microbatches."""
    data, ranks = topology.data_parallel_degree, topology.expert_parallel_degree
    cells = packings(demand.length_S, rows * data, cap)
    onto = (cells[:, None, :] == np.arange(rows * data)[:, None]).astype(float)
    work = (onto @ rates.cost_SI(demand.length_S)).reshape(len(cells), rows, data // ranks, ranks, -1)
    best = np.inf
    for rank_of_E in placements(demand.num_experts, ranks):
        load_SR = np.stack([demand.tokens_SLE[:, 0, rank_of_E == r].sum(axis=1) for r in range(ranks)], axis=1)
        load = (onto @ load_SR).reshape(len(cells), rows, data // ranks, ranks, ranks).sum(axis=3)
        if sync == "layer":
            values = (work.max(axis=(2, 3)).sum(axis=-1) + rates.expert * load.max(axis=(2, 3))).sum(axis=1)
        else:
            cost = work.max(axis=3).sum(axis=-1) + rates.expert * load.max(axis=3)
            values = cost.sum(axis=1).max(axis=1) if sync == "step" else cost.max(axis=2).sum(axis=1)
        best = min(best, values.min())
    return best


@st.composite
def tiny_windows(draw):
    data, ranks = draw(st.sampled_from([(2, 2), (2, 1), (4, 2)]))
    topology = Topology(data_parallel_degree=data, expert_parallel_degree=ranks)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sequences = int(rng.integers(data, 6)) + (data == 2)
    length_S = np.ceil(20 * rng.random(sequences) ** rng.choice([0.3, 1, 4])).astype(int)
    popularity = rng.dirichlet(np.full(4, rng.choice([0.2, 1.0])))
    tokens_SLE = np.stack([rng.multinomial(n, popularity) for n in length_S])[:, None]
    demand = RoutingDemand(tokens_SLE=tokens_SLE, length_S=length_S, top_k=1)
    shares = rng.dirichlet(np.ones(3))
    cost = WindowNormalizedCost(expert_share=shares[0], linear_share=shares[1], quadratic_share=1.0 - shares[0] - shares[1])
    cap = max(int(length_S.max()), -(-int(length_S.sum()) // data), int(rng.integers(20, 40)))
    return demand, topology, cost, cap


@pytest.mark.parametrize("sync", SYNCS)
@given(window=tiny_windows())
@settings(max_examples=60)
def test_no_plan_beats_the_bound_and_none_beats_ours(sync, window):
    demand, topology, cost_model, cap = window
    packer = AttentionAwarePacker(max_tokens=cap)
    try:
        rows = packer.certify(demand.length_S, topology)[0].num_microbatches
    except InfeasibleError:
        reject()
    rates = cost_model.rates(demand, topology)
    best = optimum(demand, topology, rates, cap, rows, sync)
    bounds = plan_bounds(demand, topology, rates, max_tokens=cap, sync=sync)
    assert bounds["attention"] + bounds["expert"] <= best * (1 + 1e-9)
    for name in ("force_balanced", "no_replication", "whole_sequences"):
        assert bounds[name] <= best * (1 + 1e-9), name
    plan = Planner(topology=topology, packer=packer, cost_model=cost_model, sync=sync, num_proposals=4000).plan(demand)
    assert plan.value >= best * (1 - 1e-9)
    # So small a window is planned by trying them all.
    assert plan.value <= best * (1 + 1e-9)


@given(st.lists(st.integers(0, 30), min_size=6, max_size=6), st.sampled_from([1, 2, 3, 6]))
def test_placement_bound_is_never_above_the_best_placement(loads, ranks):
    loads = np.array(loads)
    best = min(np.bincount(rank_of_E, loads, ranks).max() for rank_of_E in placements(6, ranks))
    assert placement_bound(loads[None], ranks)[0] <= best


@pytest.mark.parametrize(
    ("loads", "ranks", "bound"),
    [([4, 4, 4, 4], 2, 8), ([9, 1, 1, 1], 2, 10), ([5, 5, 5, 0, 0, 0], 2, 10), ([3, 3, 3, 0], 4, 3)],
)
def test_placement_bounds_by_hand(loads, ranks, bound):
    assert placement_bound(np.array([loads]), ranks).tolist() == [bound]


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3]))
def test_attention_bound_is_never_above_the_best_packing(seed, width):
    rng = np.random.default_rng(seed)
    length_S = np.ceil(20 * rng.random(5) ** 3).astype(int)
    cap = max(int(length_S.max()), -(-int(length_S.sum()) // 2))
    cells = packings(length_S, 2 * width, cap) if 2 * width <= 5 else np.empty((0, 5), int)
    cost_S = length_S + 0.3 * length_S**2
    onto = cells[:, None, :] == np.arange(2 * width)[:, None]
    waited = (onto @ cost_S).reshape(len(cells), 2, width).max(axis=2).sum(axis=1)
    bound = attention_bound(cost_S, length_S, cells_per_unit=width, max_tokens=cap)
    assert not len(waited) or bound <= waited.min() * (1 + 1e-9)


def test_a_sequence_that_no_other_cell_can_match_raises_the_attention_bound():
    # 100 squares to 10,000; beside it the cap leaves 3 cells of at most 100 tokens, all in pieces of 10.
    length_S = np.array([100] + [10] * 70)
    cost_S = length_S.astype(float) ** 2
    bound = attention_bound(cost_S, length_S, cells_per_unit=4, max_tokens=100)
    assert bound == 10_000 + (cost_S.sum() - 10_000 - 30 * 100) / 4
    assert bound > cost_S.sum() / 4


def test_packing_bound_is_the_window_s_fullest_rank():
    assert packing_bound(np.array([[3, 5], [4, 4]])).tolist() == [5, 4]


def test_force_balanced_and_no_replication_are_kept_apart():
    demand = RoutingDemand(tokens_SLE=[[[9, 1, 1, 1]], [[9, 1, 1, 1]]], length_S=[12, 12], top_k=1)
    topology = Topology(data_parallel_degree=2, expert_parallel_degree=2)
    rates = CostRates(expert=1.0, linear_I=[1.0], quadratic_I=[0.0])
    bounds = plan_bounds(demand, topology, rates, max_tokens=12)
    assert bounds["force_balanced"] == 12 + 12
    assert bounds["no_replication"] == 12 + 20
