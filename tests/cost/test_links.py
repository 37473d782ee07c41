from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.expert_rerouter import ExpertRerouter
from routepack.components.hierarchical_rerouter import HierarchicalRerouter
from routepack.components.rerouter import IdentityRerouter
from routepack.core.errors import ConfigError
from routepack.core.plans import SYNCS, Packing, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.evaluation import evaluate
from routepack.cost.links import (
    FreeLinks,
    LinkSpeeds,
    WindowNormalizedLinks,
    copies_across,
    node_of_ranks,
    nodes_per_group,
    traffic_of,
)
from routepack.cost.models import CostModel, CostRates, WindowNormalizedCost, ranks_per_group
from routepack.planning.planner import Planner
from routepack.planning.verification import verify
from routepack.testing import synthetic_batch, synthetic_demand

DEMAND = synthetic_demand(num_sequences=96, max_length=256)
TWO_NODES = Topology(data_parallel_degree=8, expert_parallel_degree=4, ranks_per_node=2)
TOPOLOGIES = [
    Topology(data_parallel_degree=w, expert_parallel_degree=r, model_parallel_degree=m, ranks_per_node=n)
    for w, r, m, n in [
        (4, 4, 1, 2),
        (8, 4, 1, 2),
        (8, 8, 1, 2),
        (8, 4, 1, 3),
        (4, 8, 2, 4),
        (4, 4, 2, 1),
        (4, 4, 4, 3),
        (4, 2, 1, 8),
        (4, 1, 1, 2),
    ]
]


def planner(**options):
    return Planner(**{"topology": TWO_NODES, "packer": AttentionAwarePacker(max_tokens=512), "num_proposals": 5000} | options)


def counted_by_hand(load_CRL, topology):
    """(inside, across) of the busiest rank [U, L]: every pair of ranks, one after another."""
    ranks, m = topology.expert_parallel_degree, topology.model_parallel_degree
    cells, _, layers = load_CRL.shape
    width = ranks_per_group(topology)
    busiest = np.zeros((2, cells // width, layers))
    for unit in range(cells // width):
        first = unit % topology.num_groups * ranks
        for layer in range(layers):
            sent, received = np.zeros((2, ranks)), np.zeros((2, ranks))
            for j in range(ranks):
                for r in range(ranks):
                    if j == r:
                        continue
                    kind = int((first + j) // topology.ranks_per_node != (first + r) // topology.ranks_per_node)
                    rows = load_CRL[unit * width + j // m, r, layer] / m
                    sent[kind, j] += rows
                    received[kind, r] += rows
            busiest[:, unit, layer] = np.maximum(sent.max(axis=1), received.max(axis=1))
    return busiest


@given(st.integers(0, 2**32), st.sampled_from([t for t in TOPOLOGIES if t.expert_parallel_degree > 1]))
@settings(max_examples=40)
def test_busiest_links_are_those_counted_pair_by_pair(seed, topology):
    shape = (2 * topology.data_parallel_degree, topology.expert_parallel_degree, 3)
    load_CRL = np.random.default_rng(seed).integers(0, 100, shape)
    traffic = traffic_of(load_CRL, topology)
    np.testing.assert_allclose([traffic.inside_UL, traffic.across_UL], counted_by_hand(load_CRL, topology))


@given(st.integers(0, 2**32), st.sampled_from([t for t in TOPOLOGIES if t.expert_parallel_degree > 1]))
def test_rows_stay_on_their_rank_or_go_inside_or_across(seed, topology):
    shape = (topology.data_parallel_degree, topology.expert_parallel_degree, 2)
    load_CRL, m = np.random.default_rng(seed).integers(0, 100, shape), topology.model_parallel_degree
    traffic = traffic_of(load_CRL, topology)
    width = ranks_per_group(topology)
    own = sum(load_CRL[c, (c % width) * m + i].sum() / m for c in range(len(load_CRL)) for i in range(m))
    assert own + traffic.rows_inside + traffic.rows_across == pytest.approx(load_CRL.sum())


def test_one_rank_a_group_sends_nothing():
    traffic = traffic_of(np.ones((4, 1, 2)), Topology(data_parallel_degree=4, expert_parallel_degree=1))
    assert traffic.rows_inside == traffic.rows_across == 0
    assert traffic.rows == 8


def test_nodes_that_do_not_divide_groups_are_told_from_those_that_do():
    # Nine ranks on nodes of eight, and nodes that cut a DP rank of four in two: no equal parts.
    uneven = Topology(data_parallel_degree=9, expert_parallel_degree=9)
    cut = Topology(data_parallel_degree=4, expert_parallel_degree=8, model_parallel_degree=4, ranks_per_node=2)
    assert nodes_per_group(uneven) == nodes_per_group(cut) == 0
    assert np.bincount(node_of_ranks(uneven)[0]).tolist() == [8, 1]
    assert nodes_per_group(TWO_NODES) == 2
    assert nodes_per_group(Topology(data_parallel_degree=8, expert_parallel_degree=4)) == 1


@pytest.mark.parametrize("topology", [t for t in TOPOLOGIES if t.expert_parallel_degree > 1 and t.ranks_per_node < 8], ids=str)
def test_an_even_window_costs_its_shares(topology):
    ranks, width = topology.expert_parallel_degree, topology.data_parallel_degree
    demand = RoutingDemand(
        tokens_SLE=np.full((width, 2, ranks), 12 * topology.model_parallel_degree, dtype=np.int32),
        length_S=np.full(width, 12 * topology.model_parallel_degree * ranks),
        top_k=1,
    )
    links = WindowNormalizedLinks(inside_share=0.1, across_share=0.2)
    inside, across = links.prices(demand, topology)
    rates = replace(WindowNormalizedCost().rates(demand, topology), inside=inside, across=across)
    evaluation = evaluate(
        load_SRL=np.moveaxis(demand.tokens_SLE, 1, 2).astype(np.int32),
        length_S=demand.length_S,
        packing=Packing(cell_of_S=np.arange(width), num_microbatches=1, data_parallel_degree=width),
        topology=topology,
        rates=rates,
        sync="step",
    )
    has_inside = any(len(set(row.tolist())) < ranks for row in node_of_ranks(topology))
    if nodes_per_group(topology):
        assert evaluation.communication == pytest.approx(0.2 + 0.1 * has_inside)
    else:
        # The busiest rank of an uneven cut sends no less than the mean rank.
        assert evaluation.communication > 0.2 - 1e-9


def test_free_links_change_nothing():
    plain = Planner(topology=replace(TWO_NODES, ranks_per_node=8), packer=AttentionAwarePacker(max_tokens=512)).plan(DEMAND)
    free = Planner(topology=TWO_NODES, packer=AttentionAwarePacker(max_tokens=512), links=FreeLinks()).plan(DEMAND)
    assert (free.packing.cell_of_S == plain.packing.cell_of_S).all()
    assert free.value == plain.value
    assert free.parts == plain.parts


@given(st.integers(0, 2**32), st.sampled_from(SYNCS), st.sampled_from(TOPOLOGIES))
@settings(max_examples=30)
def test_plans_with_links_are_accepted_by_the_independent_checker(seed, sync, topology):
    demand = synthetic_demand(num_sequences=32, max_length=64, seed=seed)
    links = WindowNormalizedLinks(inside_share=0.1, across_share=0.3)
    plan = planner(topology=topology, sync=sync, links=links, rerouter=HierarchicalRerouter(), num_proposals=2000).plan(demand)
    assert verify(plan, demand) == []


@pytest.mark.parametrize("changed", [{"across": 0.0}, {"inside": 1.0}])
def test_a_plan_that_hides_what_links_cost_is_rejected(changed):
    plan = planner(links=WindowNormalizedLinks()).plan(DEMAND)
    hidden = replace(plan, cost={**plan.cost, **changed}, digest="")
    assert any("the plan is worth" in problem for problem in verify(hidden, DEMAND))


def test_links_inside_one_node_cost_nothing_across():
    one_node = replace(TWO_NODES, ranks_per_node=8)
    assert (
        planner(topology=one_node, links=WindowNormalizedLinks()).plan(DEMAND).value
        == planner(topology=one_node).plan(DEMAND).value
    )


def test_rows_are_reported_in_bytes_where_their_size_is_known():
    cost_model = CostModel.for_model("qwen3_30b_a3b")
    links = LinkSpeeds(dim=2048, inside_bytes_per_second=450e9, across_bytes_per_second=50e9)
    plan = planner(cost_model=cost_model, links=links).plan(DEMAND)
    assert plan.unit == "seconds"
    rows = plan.parts["planned.across_share"] * float(DEMAND.tokens_LE.sum())
    assert plan.parts["planned.bytes_across"] == pytest.approx(rows * 2048 * 2 * 4)
    assert verify(plan, DEMAND) == []


@given(st.integers(0, 2**32), st.sampled_from(TOPOLOGIES))
@settings(max_examples=25)
def test_copies_across_are_those_counted_token_by_token(seed, topology):
    batch = synthetic_batch(num_sequences=16, max_length=32, num_layers=2, seed=seed)
    plan = planner(topology=topology, num_proposals=500).plan(batch)
    node_GR, m = node_of_ranks(topology), topology.model_parallel_degree
    rank_LE, copies, rows = plan.placement.rank_of_LE(topology.expert_parallel_degree), 0.0, 0.0
    for s, cell in enumerate(plan.packing.cell_of_S):
        w = cell % topology.data_parallel_degree
        for i in range(m):
            home = (w * m + i) // topology.ranks_per_node
            group = (w * m + i) // topology.expert_parallel_degree
            for ids_LK in batch.routed_experts_of(s):
                for layer, ids_K in enumerate(ids_LK):
                    nodes = [int(node_GR[group, rank_LE[layer, e]]) for e in ids_K]
                    copies += len(set(nodes) - {home}) / m
                    rows += sum(node != home for node in nodes) / m
    assert copies_across(batch, plan) == pytest.approx(copies if topology.expert_parallel_degree > 1 else 0.0)
    assert copies_across(batch, plan) <= rows + 1e-9


def test_links_may_be_free_and_still_be_counted():
    links = LinkSpeeds(dim=8, inside_bytes_per_second=float("inf"), across_bytes_per_second=float("inf"))
    plan = planner(cost_model=CostModel.for_model("qwen3_30b_a3b"), links=links).plan(DEMAND)
    assert plan.parts["planned.bytes_across"] > 0
    assert "planned.communication" not in plan.parts


def test_the_slower_links_are_the_less_goes_across():
    shares = [
        planner(rerouter=HierarchicalRerouter(), links=WindowNormalizedLinks(across_share=share)).plan(DEMAND)
        for share in (0.01, 2.0)
    ]
    assert shares[1].parts["planned.across_share"] < shares[0].parts["planned.across_share"] - 0.005


@pytest.mark.parametrize(
    "rerouter", [IdentityRerouter(), ExpertRerouter(), HierarchicalRerouter()], ids=lambda r: type(r).__name__
)
def test_plans_with_links_are_repeatable(rerouter):
    plans = [
        planner(links=WindowNormalizedLinks(), rerouter=rerouter, packer=AttentionAwarePacker(max_tokens=512, threads=n)).plan(
            DEMAND
        )
        for n in (1, 2)
    ]
    assert plans[0].digest == plans[1].digest


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LinkSpeeds(dim=0, inside_bytes_per_second=1.0, across_bytes_per_second=1.0),
            "links.dim=0 must be a whole number",
        ),
        (lambda: WindowNormalizedLinks(across_share=-0.1), "links.across_share=-0.1 must lie between 0 and inf"),
        (lambda: CostRates(expert=1.0, linear_I=[1.0], quadratic_I=[0.0], across=-1.0), "across=-1.0 must lie between 0"),
        (lambda: HierarchicalRerouter(traffic_weight=-1.0), "rerouter.traffic_weight=-1.0 must lie between 0 and inf"),
    ],
)
def test_options_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_seconds_beside_relative_costs_are_refused():
    links = LinkSpeeds(dim=8, inside_bytes_per_second=1.0, across_bytes_per_second=1.0)
    with pytest.raises(ConfigError, match="links are priced in seconds and the cost model in relative"):
        planner(links=links).plan(DEMAND)
