from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.expert_rerouter import ExpertRerouter
from routepack.components.hierarchical_rerouter import HierarchicalRerouter
from routepack.components.move_policy import AlwaysMove, MoveChoice, MoveIfItPays, MovePolicy, moved_between
from routepack.components.rerouter import IdentityRerouter
from routepack.core.errors import ConfigError, PlanError
from routepack.core.plans import SYNCS, ExpertPlacement, Packing, Topology
from routepack.cost.evaluation import evaluate
from routepack.cost.links import WindowNormalizedLinks
from routepack.cost.models import CostModel, WindowNormalizedCost
from routepack.planning.planner import Planner
from routepack.planning.verification import verify
from routepack.solvers.rank_loads import rank_load
from routepack.testing import synthetic_demand

TOPOLOGY = Topology(data_parallel_degree=4, expert_parallel_degree=2)
DEMAND = synthetic_demand(num_sequences=96, max_length=256)
IDENTITY = ExpertPlacement.identity(4, 16)


def planner(**options):
    return Planner(**{"topology": TOPOLOGY, "packer": AttentionAwarePacker(max_tokens=512), "num_proposals": 5000} | options)


def paying(**options):
    """One expert on the whole link takes as long as a millionth of an even step, unless said otherwise."""
    figures = {"parameters_per_expert": 1000, "bytes_per_parameter": 1.0, "across_bytes_per_second": 1e9, "step_seconds": 1.0}
    return MoveIfItPays(**figures | {"inside_bytes_per_second": 1e9, "shard_degree": 1} | options)


def at(seconds_per_expert, **options):
    return paying(
        inside_bytes_per_second=1000 / seconds_per_expert, across_bytes_per_second=1000 / seconds_per_expert, **options
    )


def placement(*rows):
    return ExpertPlacement(physical_to_logical_LP=np.array(rows))


def test_moved_experts_are_counted_between_ranks():
    moved_LRR = moved_between(placement([0, 1, 2, 3], [0, 1, 2, 3]), placement([0, 2, 1, 3], [1, 0, 3, 2]), 2)
    assert moved_LRR.tolist() == [[[0, 1], [1, 0]], [[0, 0], [0, 0]]]


def test_a_layer_takes_as_long_as_its_busiest_rank():
    topology = Topology(data_parallel_degree=4, expert_parallel_degree=4, ranks_per_node=2)
    # Ranks 0 and 1 exchange one of their two experts inside a node, 1 and 2 their other across nodes.
    old, new = placement([0, 1, 2, 3, 4, 5, 6, 7]), placement([0, 2, 1, 4, 3, 5, 6, 7])
    policy = paying(
        parameters_per_expert=10, bytes_per_parameter=2.0, inside_bytes_per_second=10.0, across_bytes_per_second=1.0
    )
    assert policy.seconds_L(old, new, topology).tolist() == [2.0 + 20.0]


def test_experts_inside_a_node_take_the_fast_links():
    policy = paying(inside_bytes_per_second=1e9, across_bytes_per_second=1.0)
    old, new = placement([0, 1, 2, 3]), placement([0, 2, 1, 3])
    assert policy.seconds_L(old, new, replace(TOPOLOGY, data_parallel_degree=2)) == pytest.approx([1e-6])
    assert policy.seconds_L(old, new, replace(TOPOLOGY, data_parallel_degree=2, ranks_per_node=1)) == pytest.approx([1e3])


def test_bytes_are_weights_master_and_both_moments():
    # 3 x 2048 x 768 parameters, 14 bytes each, of which every one of the two groups' ranks moves half.
    policy = AlwaysMove(parameters_per_expert=3 * 2048 * 768)
    assert policy.expert_bytes(TOPOLOGY) == 3 * 2048 * 768 * 14 / 2
    plan = planner(move_policy=policy).plan(DEMAND, previous=IDENTITY)
    assert plan.parts["bytes_moved"] == plan.parts["experts_moved"] * 3 * 2048 * 768 * 14


def test_moving_always_is_what_a_planner_does_unasked():
    plans = [planner(**options).plan(DEMAND, previous=IDENTITY) for options in ({}, {"move_policy": AlwaysMove()})]
    assert plans[0].digest == plans[1].digest
    assert plans[0].value == planner().plan(DEMAND).value
    assert plans[0].parts["experts_moved"] > 0
    assert "experts_moved" not in planner().plan(DEMAND).parts


def moved(plan, previous=IDENTITY):
    return int(moved_between(previous, plan.placement, plan.topology.expert_parallel_degree).sum())


def test_free_moves_are_all_made():
    free, always = (planner(move_policy=policy).plan(DEMAND, previous=IDENTITY) for policy in (at(1e-30), AlwaysMove()))
    assert free.value <= always.value
    assert free.parts["experts_moved"] > 0


def test_moves_that_never_pay_are_not_made():
    plan = planner(move_policy=at(1e6)).plan(DEMAND, previous=IDENTITY)
    assert moved(plan) == plan.parts["experts_moved"] == plan.parts["bytes_moved"] == plan.parts["move_seconds"] == 0
    assert plan.parts["layers_kept"] == 4
    assert plan.parts["value_if_moved"] < plan.value < plan.baseline_value
    assert verify(plan, DEMAND) == []


def test_the_dearer_the_move_the_fewer_experts_move():
    counts = [moved(planner(move_policy=at(seconds)).plan(DEMAND, previous=IDENTITY)) for seconds in (1e-9, 3e-3, 1.0)]
    assert counts[0] > counts[1] > counts[2] == 0


def test_a_move_that_lasts_longer_pays_more_easily():
    counts = [
        moved(planner(move_policy=at(0.02, moves_last_steps=steps)).plan(DEMAND, previous=IDENTITY)) for steps in (1, 100)
    ]
    assert counts[0] < counts[1]


def test_packing_again_makes_up_for_experts_that_stay():
    kept = planner(move_policy=at(1e6), num_proposals=100_000).plan(DEMAND, previous=IDENTITY)
    assert kept.value < kept.parts["value_if_kept"]


def test_a_placement_below_the_baseline_is_left_whatever_it_costs():
    hottest_first = np.argsort(-DEMAND.tokens_LE, axis=1)
    worst = ExpertPlacement(physical_to_logical_LP=hottest_first)
    plan = planner(move_policy=at(1e6), rerouter=IdentityRerouter(), num_proposals=10).plan(DEMAND, previous=worst)
    assert plan.value <= plan.baseline_value < plan.parts["value_if_kept"]
    assert plan.parts["experts_moved"] > 0
    assert verify(plan, DEMAND) == []


def choice_of(seed, sync, *, layers=4, price=0.01, limit=np.inf):
    rng = np.random.default_rng(seed)
    demand = synthetic_demand(num_sequences=24, num_layers=layers, num_experts=8, max_length=64, seed=seed)
    packing = Packing(cell_of_S=np.arange(24) % 8, num_microbatches=2, data_parallel_degree=4)
    rates = WindowNormalizedCost().rates(demand, TOPOLOGY)
    placements = [
        ExpertPlacement(physical_to_logical_LP=rng.permuted(np.tile(np.arange(8), (layers, 1)), axis=1)) for _ in "ab"
    ]
    figures = {"length_S": demand.length_S, "packing": packing, "topology": TOPOLOGY, "rates": rates, "sync": sync}

    def priced(placed):
        return evaluate(load_SRL=rank_load(demand.tokens_SLE, placed.rank_of_LE(2), 2), **figures)

    choice = MoveChoice(
        moved=priced(placements[0]),
        kept=priced(placements[1]),
        rates=rates,
        num_layers=layers,
        move_seconds_L=price * rng.random(layers),
        limit=limit,
    )
    return choice, placements, priced


@given(st.integers(0, 2**32), st.sampled_from(SYNCS), st.lists(st.booleans(), min_size=4, max_size=4))
@settings(max_examples=40)
def test_the_value_of_a_decision_is_that_of_its_placement(seed, sync, decided):
    choice, (new, old), priced = choice_of(seed, sync)
    mixed = np.where(np.array(decided)[:, None], new.physical_to_logical_LP, old.physical_to_logical_LP)
    expected = priced(ExpertPlacement(physical_to_logical_LP=mixed)).value
    assert choice.value(np.array(decided)) == pytest.approx(expected, rel=1e-12)


def every_decision(choice):
    return [np.array(decided) for decided in product([False, True], repeat=choice.num_layers)]


@given(st.integers(0, 2**32), st.sampled_from(SYNCS), st.sampled_from([1e-4, 1e-2, 0.1]))
@settings(max_examples=60)
def test_decisions_are_the_best_there_are(seed, sync, price):
    choice, *_ = choice_of(seed, sync, price=price)
    policy = paying()

    def worth(moved_L):
        return policy.worth(choice.value(moved_L), float(choice.move_seconds_L[moved_L].sum()))

    found, best = worth(policy.moves(choice)), min(map(worth, every_decision(choice)))
    assert found <= best * (1 + (1e-12 if sync == "layer" else 0.005))
    assert found <= min(worth(np.ones(4, dtype=bool)), worth(np.zeros(4, dtype=bool)))


@given(st.integers(0, 2**32), st.sampled_from(SYNCS))
@settings(max_examples=30)
def test_decisions_keep_to_the_limit(seed, sync):
    choice, *_ = choice_of(seed, sync, price=100.0)
    limited = replace(choice, limit=choice.moved.value)
    assert limited.value(paying().moves(limited)) <= choice.moved.value


@dataclass(frozen=True, kw_only=True)
class Stubborn(MovePolicy):
    """Never moves."""

    def decide(self, choice):
        return np.zeros(choice.num_layers, dtype=bool)


def test_a_policy_that_ends_above_the_baseline_is_an_error():
    choice, *_ = choice_of(0, "step")
    with pytest.raises(PlanError, match="Stubborn keeps a placement worth"):
        Stubborn().moves(replace(choice, limit=0.1))


@given(st.integers(0, 2**32), st.sampled_from(SYNCS), st.sampled_from([1e-5, 3e-3, 1e-1]), st.booleans())
@settings(max_examples=40)
def test_plans_that_keep_layers_are_accepted_by_the_independent_checker(seed, sync, seconds, linked):
    demand = synthetic_demand(num_sequences=32, max_length=64, seed=seed)
    rng = np.random.default_rng(seed)
    previous = ExpertPlacement(physical_to_logical_LP=rng.permuted(np.tile(np.arange(16), (4, 1)), axis=1))
    options = {"links": WindowNormalizedLinks(inside_share=0.1), "rerouter": HierarchicalRerouter()} if linked else {}
    topology = Topology(data_parallel_degree=4, expert_parallel_degree=4, ranks_per_node=2) if linked else TOPOLOGY
    made = planner(sync=sync, move_policy=at(seconds), topology=topology, num_proposals=2000, **options)
    plan = made.plan(demand, previous=previous)
    assert verify(plan, demand) == []
    assert plan.parts["experts_moved"] == moved(plan, previous)
    assert plan.parts["layers_kept"] <= 4


@pytest.mark.parametrize("seconds", [1e-9, 3e-3, 1e6])
def test_equal_numbers_of_sequences_stay_equal(seconds):
    made = planner(
        topology=Topology(data_parallel_degree=4, expert_parallel_degree=4, ranks_per_node=2),
        packer=AttentionAwarePacker(max_tokens=512, equal_sequences=True),
        links=WindowNormalizedLinks(),
        rerouter=HierarchicalRerouter(),
        move_policy=at(seconds),
    )
    plan = made.plan(DEMAND, previous=IDENTITY)
    assert np.bincount(plan.packing.cell_of_S % 4).tolist() == [24] * 4
    assert verify(plan, DEMAND) == []


@pytest.mark.parametrize("sync", SYNCS)
def test_decisions_do_not_depend_on_threads(sync):
    plans = [
        planner(sync=sync, move_policy=at(3e-3), packer=AttentionAwarePacker(max_tokens=512, threads=n)).plan(DEMAND, IDENTITY)
        for n in (1, 2)
    ]
    assert plans[0].digest == plans[1].digest


def test_moves_are_weighed_in_seconds_where_values_are():
    cost_model = CostModel.for_model("qwen3_30b_a3b")
    policy = at(1.0, step_seconds=0.0)
    plan = planner(cost_model=cost_model, move_policy=policy, rerouter=ExpertRerouter()).plan(DEMAND, previous=IDENTITY)
    assert plan.parts["experts_moved"] == 0
    with pytest.raises(ConfigError, match=r"step_seconds=1.0 beside a cost model in seconds"):
        planner(cost_model=cost_model, move_policy=at(1.0)).plan(DEMAND, previous=IDENTITY)


def test_a_previous_placement_of_another_model_is_refused():
    with pytest.raises(PlanError, match="previous places 4 layers of 8 experts; the window has 4 of 16"):
        planner().plan(DEMAND, previous=ExpertPlacement.identity(4, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parameters_per_expert": 0}, "parameters_per_expert is not set"),
        ({"moves_last_steps": 0}, "moves_last_steps=0 must be a whole number of at least 1"),
        ({"inside_bytes_per_second": float("inf"), "across_bytes_per_second": float("inf")}, "would be free"),
        ({"bytes_per_parameter": 0.0}, "bytes_per_parameter=0.0 must be above 0"),
        ({"shard_degree": -1}, "shard_degree=-1 must be a whole number of at least 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        paying(**options)


def test_relative_values_need_the_seconds_of_a_step():
    with pytest.raises(ConfigError, match=r"step_seconds=0.0 beside a cost model in relative"):
        planner(move_policy=at(1.0, step_seconds=0.0)).plan(DEMAND, previous=IDENTITY)
