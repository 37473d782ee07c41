from dataclasses import replace

import numpy as np
import pytest

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.expert_rerouter import ExpertRerouter
from routepack.core.errors import ConfigError, PlanError
from routepack.core.plans import SYNCS, Certificate, ExpertPlacement, Packing, PackingRules, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.models import CostModel
from routepack.planning.planner import Planner
from routepack.planning.verification import verify
from routepack.testing import synthetic_demand

DEMAND = synthetic_demand(num_sequences=48, max_length=256)


def planned(**options):
    options = {"sync": "step", "num_proposals": 5000, "packer": AttentionAwarePacker(max_tokens=400)} | options
    topology = options.pop("topology", Topology(data_parallel_degree=4, expert_parallel_degree=2))
    demand = options.pop("demand", DEMAND)
    return Planner(topology=topology, **options).plan(demand)


PLAN = planned()


def with_digest(plan, **changes):
    """A plan changed by someone who also renewed its digest."""
    return replace(plan, digest="", **changes)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("degrees", [(4, 2, 1), (4, 1, 1), (4, 4, 1), (4, 4, 2), (4, 1, 2), (1, 1, 1)])
def test_plans_are_accepted(sync, degrees):
    data, expert, model = degrees
    topology = Topology(data_parallel_degree=data, expert_parallel_degree=expert, model_parallel_degree=model)
    assert verify(planned(sync=sync, topology=topology), DEMAND) == []


@pytest.mark.parametrize("model", ["qwen3_30b_a3b", "gpt_oss_20b"])
def test_plans_in_seconds_are_accepted(model):
    assert verify(planned(cost_model=CostModel.for_model(model)), DEMAND) == []


@pytest.mark.parametrize("renew", [False, True])
def test_any_one_changed_cell_is_rejected(renew):
    for s in range(DEMAND.num_sequences):
        cell_of_S = PLAN.packing.cell_of_S.copy()
        cell_of_S[s] = (cell_of_S[s] + 1) % PLAN.packing.num_cells
        if np.bincount(cell_of_S, minlength=PLAN.packing.num_cells).min() == 0:
            continue
        packing = Packing(cell_of_S=cell_of_S, num_microbatches=PLAN.num_microbatches, data_parallel_degree=4)
        change = with_digest if renew else replace
        assert verify(change(PLAN, packing=packing), DEMAND), s


@pytest.mark.parametrize("renew", [False, True])
def test_any_two_swapped_slots_of_different_ranks_are_rejected(renew):
    for layer in range(DEMAND.num_layers):
        for slot in range(8):
            slots_LP = PLAN.placement.physical_to_logical_LP.copy()
            slots_LP[layer, [slot, slot + 8]] = slots_LP[layer, [slot + 8, slot]]
            change = with_digest if renew else replace
            assert verify(change(PLAN, placement=ExpertPlacement(physical_to_logical_LP=slots_LP)), DEMAND)


def test_two_swapped_slots_of_one_rank_are_rejected_by_the_digest():
    slots_LP = PLAN.placement.physical_to_logical_LP.copy()
    slots_LP[0, [0, 1]] = slots_LP[0, [1, 0]]
    assert verify(replace(PLAN, placement=ExpertPlacement(physical_to_logical_LP=slots_LP)), DEMAND)


@pytest.mark.parametrize("renew", [False, True])
def test_any_one_changed_length_is_rejected(renew):
    for s in range(DEMAND.num_sequences):
        length_S = PLAN.length_S.copy()
        length_S[s] += 1
        change = with_digest if renew else replace
        assert verify(change(PLAN, length_S=length_S), DEMAND), s


def test_another_window_is_rejected():
    length_S = DEMAND.length_S.copy()
    length_S[0] += 1
    other = RoutingDemand(tokens_SLE=DEMAND.tokens_SLE, length_S=length_S, top_k=DEMAND.top_k)
    problems = verify(PLAN, other)
    assert any("sequence 0 has" in problem for problem in problems)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": PLAN.value * 0.999}, "is worth"),
        ({"baseline_value": PLAN.baseline_value * 1.01}, "first-fit packing are worth"),
        ({"baseline_value": PLAN.value * 0.99}, "worse than its baseline"),
        ({"baseline_microbatches": 99}, "first fit takes"),
        ({"bound": PLAN.bound * 1.0001}, "can be proven"),
        ({"sync": "layer"}, "is worth"),
        ({"max_tokens": 300}, "above the cap of 300"),
        ({"cost": dict(PLAN.cost) | {"expert": PLAN.cost["expert"] * 1.001}}, "not its share"),
        ({"cost": {}}, "does not keep the rates"),
        ({"certificate": Certificate(num_microbatches=99, lower_bound=99, method="L2")}, "claimed to be needed"),
        ({"certificate": Certificate(num_microbatches=99, lower_bound=1, method="L2")}, "does not fit"),
    ],
)
def test_each_false_claim_is_named(change, message):
    problems = verify(with_digest(PLAN, **change), DEMAND)
    assert any(message in problem for problem in problems), problems


def test_a_plan_of_other_shapes_is_rejected_without_pricing():
    other = synthetic_demand(num_sequences=40, max_length=256, num_layers=2)
    assert any("packs 48 sequences" in problem for problem in verify(PLAN, other))


def test_the_checker_shares_no_code_with_the_planner():
    import ast
    import inspect

    import routepack.planning.verification

    tree = ast.parse(inspect.getsource(routepack.planning.verification))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.startswith("routepack")} == {
        "routepack.core.checks",
        "routepack.core.errors",
        "routepack.core.plans",
        "routepack.core.rollouts",
    }


def test_a_cell_filled_to_the_cap_is_legal():
    tokens_SLE = np.full((4, 1, 2), 5)
    demand = RoutingDemand(tokens_SLE=tokens_SLE, length_S=[10] * 4, top_k=1)
    topology = Topology(data_parallel_degree=2, expert_parallel_degree=2)
    plan = planned(packer=AttentionAwarePacker(max_tokens=20), topology=topology, rerouter=ExpertRerouter(), demand=demand)
    assert plan.num_microbatches == 1
    assert verify(plan, demand) == []


def lengths_only(lengths):
    length_S = np.array(lengths)
    tokens_SLE = np.zeros((len(length_S), 1, 2), dtype=np.int32)
    tokens_SLE[:, 0, 0] = length_S
    return RoutingDemand(tokens_SLE=tokens_SLE, length_S=length_S, top_k=1)


BEYOND_L2 = lengths_only([53, 52, 45, 42, 39, 39, 29])
"""L2 shows three cells of 100 to be needed, a search four."""
ONE_RANK = Topology(data_parallel_degree=1, expert_parallel_degree=1)


def beyond_l2(demand=BEYOND_L2):
    return planned(topology=ONE_RANK, packer=AttentionAwarePacker(max_tokens=100), demand=demand)


def test_a_bound_that_took_a_search_is_proven_again():
    plan = beyond_l2()
    assert (plan.certificate.lower_bound, plan.certificate.method) == (4, "bin completion")
    assert verify(plan, BEYOND_L2) == []


def test_a_bound_that_a_search_would_not_give_is_named():
    possible = lengths_only([53, 47, 45, 42, 39, 29, 19])
    plan = beyond_l2(possible)
    assert plan.num_microbatches == 3
    four = Certificate(num_microbatches=3, lower_bound=4, method="bin completion")
    assert any("4 microbatches are claimed" in problem for problem in verify(with_digest(plan, certificate=four), possible))


RULES = {"equal_sequences": True, "min_microbatches": 5, "microbatch_multiple": 3}


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("degrees", [(4, 2, 1), (4, 1, 1), (4, 4, 1)])
def test_plans_under_rules_are_accepted(sync, degrees):
    topology = Topology(data_parallel_degree=degrees[0], expert_parallel_degree=degrees[1])
    plan = planned(sync=sync, topology=topology, packer=AttentionAwarePacker(max_tokens=400, **RULES))
    assert verify(plan, DEMAND) == []
    assert plan.num_microbatches == 6
    assert np.bincount(plan.packing.cell_of_S % 4).tolist() == [12] * 4


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"min_microbatches": 40}, "fewer than min_microbatches=40"),
        ({"microbatch_multiple": 41}, "no multiple of microbatch_multiple=41"),
        ({"equal_sequences": True}, "ranks get .* sequences; at most 0 apart"),
    ],
)
def test_rules_that_a_plan_does_not_keep_are_named(rules, message):
    import re

    cell_of_S = PLAN.packing.cell_of_S.copy()
    giver = np.flatnonzero(np.bincount(cell_of_S)[cell_of_S] > 1)[0]
    cell_of_S[giver] = (cell_of_S[giver] + 1) % PLAN.packing.num_cells
    packing = Packing(cell_of_S=cell_of_S, num_microbatches=PLAN.num_microbatches, data_parallel_degree=4)
    uneven = packing if np.ptp(np.bincount(cell_of_S % 4)) else PLAN.packing
    problems = verify(with_digest(PLAN, rules=PackingRules(**rules), packing=uneven), DEMAND)
    assert any(re.search(message, problem) for problem in problems), problems


@pytest.mark.parametrize("options", [..., {}, {"expert_share": "a", "linear_share": "b", "quadratic_share": "c"}])
def test_shares_that_a_plan_does_not_keep_are_named(options):
    cost = {name: value for name, value in PLAN.cost.items() if name != "options"}
    problems = verify(with_digest(PLAN, cost=cost if options is ... else cost | {"options": options}), DEMAND)
    assert problems == ["the plan does not keep the shares of its WindowNormalizedCost."]


@pytest.mark.parametrize("rule", ["min_microbatches", "microbatch_multiple"])
def test_rules_without_bounds_are_rejected_at_once(rule):
    problems = verify(with_digest(PLAN, rules=PackingRules(**{rule: 2**31 - 1})), DEMAND)
    assert any(f"{rule}=2147483647" in problem for problem in problems)


def test_a_certificate_of_another_number_of_microbatches_is_named():
    fewer = replace(PLAN.certificate, num_microbatches=PLAN.num_microbatches - 1, possible=1, lower_bound=1)
    assert any("does not fit" in problem for problem in verify(with_digest(PLAN, certificate=fewer), DEMAND))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bound": 0.0}, "plan.bound=0.0 must be above 0"),
        ({"value": -1.0}, "plan.value=-1.0"),
        ({"cost": {"linear": [1.0], "quadratic": [1.0, 2.0]}}, "once for each attention stage"),
        ({"cost": {"linear": []}}, "once for each attention stage"),
        ({"cost": {"linear": 1.0}}, "give a list"),
        ({"cost": {"expert": [1.0]}}, "must be a finite number"),
        ({"cost": {"across": "abc"}}, "must be a finite number"),
        ({"cost": {"options": "abc"}}, "give a Mapping"),
        ({"versions": {"numpy": 2}}, "give a str"),
    ],
)
def test_figures_that_no_plan_has_are_refused(change, message):
    with pytest.raises(PlanError, match=message):
        with_digest(PLAN, **change)


def test_more_cells_than_sequences_are_refused_before_they_are_counted():
    with pytest.raises(PlanError, match="are 4611686014132420609 cells, and 2 sequences cannot fill them"):
        Packing(cell_of_S=[0, 1], num_microbatches=2**31 - 1, data_parallel_degree=2**31 - 1)


def test_an_expert_parallel_degree_without_bounds_is_refused_at_once():
    topology = Topology(data_parallel_degree=2**31 - 1, expert_parallel_degree=2**31 - 1)
    with pytest.raises(ConfigError, match="the nearest are 8"):
        topology.slots_per_rank(8)


def test_equal_sequences_is_a_yes_or_no():
    with pytest.raises(ConfigError, match=r"packer\.equal_sequences='yes' is a str; give a bool"):
        PackingRules(equal_sequences="yes")
