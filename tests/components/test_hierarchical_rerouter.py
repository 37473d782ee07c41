import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.expert_rerouter import ExpertRerouter
from routepack.components.hierarchical_rerouter import HierarchicalRerouter
from routepack.core.errors import ConfigError
from routepack.core.plans import Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.links import WindowNormalizedLinks
from routepack.planning.planner import Planner
from routepack.planning.verification import verify
from routepack.testing import check_rerouter, synthetic_demand

TWO_NODES = Topology(data_parallel_degree=8, expert_parallel_degree=8, ranks_per_node=4)


def test_it_holds_the_invariants_of_a_rerouter():
    check_rerouter(HierarchicalRerouter(), num_windows=20)


@given(st.integers(0, 2**32))
def test_nodes_are_even_before_ranks_are(seed):
    tokens_LE = np.random.default_rng(seed).integers(1, 1000, (3, 32))
    placement = HierarchicalRerouter().place(tokens_LE, TWO_NODES)
    slots_LP = placement.physical_to_logical_LP
    node_Ln = np.take_along_axis(tokens_LE, slots_LP.astype(np.int64), axis=1).reshape(3, 2, -1).sum(axis=2)
    # 16 experts of up to 1000 rows each on two nodes: the best swap leaves nearly nothing.
    assert (node_Ln.max(axis=1) / node_Ln.mean(axis=1)).max() < 1.02


def test_an_uneven_cut_is_placed_as_if_there_were_no_nodes():
    # EP 9 on two nodes of eight and one.
    uneven = Topology(data_parallel_degree=9, expert_parallel_degree=9)
    tokens_LE = np.random.default_rng(0).integers(1, 1000, (2, 18))
    flat = ExpertRerouter().place(tokens_LE, uneven)
    assert (HierarchicalRerouter().place(tokens_LE, uneven).physical_to_logical_LP == flat.physical_to_logical_LP).all()


def test_a_plan_says_that_it_fell_back():
    rng = np.random.default_rng(0)
    demand = families(rng, num_experts=18)
    packer = AttentionAwarePacker(max_tokens=200)
    for topology, nodes in ((Topology(data_parallel_degree=9, expert_parallel_degree=9), 0.0), (TWO_NODES, 2.0)):
        window = demand if nodes == 0 else families(rng, num_experts=16)
        planner = Planner(topology=topology, packer=packer, rerouter=HierarchicalRerouter(), links=WindowNormalizedLinks())
        plan = planner.plan(window)
        assert plan.parts["planned.nodes_per_group"] == nodes
        assert verify(plan, window) == []


def families(rng, *, num_experts, sequences=64, rows=20):
    """Two families of sequences, each with its own half of the experts, which lie mixed."""
    expert_of_hand = rng.permutation(num_experts).reshape(2, -1)
    tokens_SLE = np.zeros((sequences, 1, num_experts), dtype=np.int32)
    for s in range(sequences):
        np.add.at(tokens_SLE[s, 0], rng.choice(expert_of_hand[s % 2], rows), 1)
    return RoutingDemand(tokens_SLE=tokens_SLE, length_S=np.full(sequences, rows), top_k=1)


def test_families_of_sequences_get_a_node_of_their_own():
    demand = families(np.random.default_rng(0), num_experts=16)
    plans = {
        name: Planner(
            topology=TWO_NODES, packer=AttentionAwarePacker(max_tokens=200), rerouter=rerouter, links=WindowNormalizedLinks()
        ).plan(demand)
        for name, rerouter in (("near", HierarchicalRerouter()), ("blind", HierarchicalRerouter(traffic_weight=0.0)))
    }
    assert plans["near"].parts["planned.across_share"] < 0.1 < 0.3 < plans["blind"].parts["planned.across_share"]
    assert plans["near"].value < plans["blind"].value


@pytest.mark.parametrize("seed", range(3))
def test_cells_keep_their_seats_where_ranks_must_hold_equally_many_sequences(seed):
    demand = synthetic_demand(num_sequences=64, max_length=128, skew=2.0, seed=seed)
    topology = Topology(data_parallel_degree=4, expert_parallel_degree=4, ranks_per_node=2)
    packer = AttentionAwarePacker(max_tokens=256, equal_sequences=True)
    links = WindowNormalizedLinks(across_share=5.0)
    plan = Planner(topology=topology, packer=packer, rerouter=HierarchicalRerouter(), links=links, num_proposals=2000).plan(
        demand
    )
    assert verify(plan, demand) == []


def test_experts_that_do_not_divide_name_the_nearest_degrees_that_do():
    topology = Topology(data_parallel_degree=8, expert_parallel_degree=8)
    with pytest.raises(ConfigError, match=r"=8 does not divide the 60 experts.* the nearest are 6 or 10"):
        HierarchicalRerouter().place(np.ones((1, 60), dtype=np.int64), topology)


def test_more_ranks_than_experts_name_the_degree_that_does():
    topology = Topology(data_parallel_degree=8, expert_parallel_degree=8)
    with pytest.raises(ConfigError, match="the nearest are 4"):
        HierarchicalRerouter().place(np.ones((1, 4), dtype=np.int64), topology)
