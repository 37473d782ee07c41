import numpy as np
import pytest

from routepack import testing
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.plans import ExpertPlacement
from routepack.report import plan_page_figures as figures


@pytest.fixture(scope="module")
def demand(window):
    return RoutingDemandCollector().collect(window)


def sides(plan, demand):
    identity = ExpertPlacement.identity(plan.placement.num_layers, plan.placement.num_experts)
    before = figures.side_of(plan, figures.baseline_packing(plan), identity, demand)
    return before, figures.side_of(plan, plan.packing, plan.placement, demand)


@pytest.mark.parametrize("name", ["plan", "linked"])
def test_parts_of_the_step_add_up_to_its_value(name, request):
    plan = request.getfixturevalue(name)
    time = figures.time_of(plan)
    assert sum(time["baseline"].values()) == pytest.approx(plan.baseline_value)
    assert sum(time["planned"].values()) == pytest.approx(plan.value)
    assert sum(time["bound"].values()) == pytest.approx(plan.bound)


def test_work_is_the_shares_of_an_even_step(plan):
    time = figures.time_of(plan)["planned"]
    assert [time[name] for name in ("attention", "dense", "experts")] == pytest.approx([0.125, 0.375, 0.5])


def test_busy_time_agrees_with_a_recount_cell_by_cell(plan, demand):
    for side, packing, placed in zip(
        sides(plan, demand),
        (figures.baseline_packing(plan), plan.packing),
        (np.tile(np.arange(16), (5, 1)), plan.placement.physical_to_logical_LP),
        strict=True,
    ):
        rates = figures.rates_of(plan)
        for m in range(packing.num_microbatches):
            for rank in range(4):
                lengths = demand.length_S[packing.sequences_of(m, rank)].astype(float)
                work = (rates.linear_I[0] * lengths + rates.quadratic_I[0] * lengths**2).sum()
                group = np.concatenate([packing.sequences_of(m, 2 * (rank // 2) + w) for w in (0, 1)])
                owned = placed[:, 8 * (rank % 2) : 8 * (rank % 2) + 8]
                rows = sum(demand.tokens_SLE[group, layer][:, owned[layer]].sum() for layer in range(5))
                assert side.busy_DM[rank, m] == pytest.approx(work + rates.expert * rows)


def test_layer_loads_agree_with_a_recount(plan, demand):
    _, after = sides(plan, demand)
    for layer in range(5):
        peaks, means = [], []
        for m in range(plan.num_microbatches):
            for g in (0, 1):
                members = np.concatenate([plan.packing.sequences_of(m, 2 * g + w) for w in (0, 1)])
                rows_P = demand.tokens_SLE[members, layer].sum(axis=0)[plan.placement.physical_to_logical_LP[layer]]
                loads = rows_P.reshape(2, 8).sum(axis=1)
                peaks.append(loads.max())
                means.append(loads.mean())
        assert after.peak_over_mean_L[layer] == pytest.approx(sum(peaks) / sum(means))
        assert after.worst_over_mean_L[layer] == pytest.approx(max(np.divide(peaks, means)))


def test_the_baseline_packing_is_the_one_that_was_priced(plan, window):
    from routepack.cost.evaluation import evaluate
    from routepack.solvers.rank_loads import rank_load

    demand = RoutingDemandCollector().collect(window)
    identity = ExpertPlacement.identity(5, 16)
    value = evaluate(
        load_SRL=rank_load(demand.tokens_SLE, identity.rank_of_LE(2), 2),
        length_S=demand.length_S,
        packing=figures.baseline_packing(plan),
        topology=plan.topology,
        rates=figures.rates_of(plan),
        sync=plan.sync,
    ).value
    assert value == pytest.approx(plan.baseline_value, rel=1e-12)


def test_the_heaviest_sequence_is_the_longest(plan, demand):
    found = figures.worst_sequences(plan, demand)
    assert found[0]["tokens"] == demand.length_S.max()
    assert found[0]["group"] == demand.group_S[found[0]["sequence"]]
    assert found[0]["share_of_cell"] > found[-1]["share_of_cell"]


def test_the_worst_layers_come_first(plan, demand):
    before, after = sides(plan, demand)
    found = figures.worst_layers(plan, demand, before, after)
    assert found[0]["after"] == pytest.approx(after.peak_over_mean_L.max(), abs=1e-4)
    assert all(row["after"] >= row["floor"] - 1e-9 for row in found)


def test_devices_that_share_a_data_rank_have_rows_of_their_own():
    demand = testing.synthetic_demand(num_sequences=32, max_length=64)
    from routepack.components.attention_aware_packer import AttentionAwarePacker
    from routepack.core.plans import Topology
    from routepack.planning.planner import Planner

    topology = Topology(data_parallel_degree=4, expert_parallel_degree=4, model_parallel_degree=2)
    plan = Planner(topology=topology, packer=AttentionAwarePacker(max_tokens=256), num_proposals=500).plan(demand)
    busy_DM, rates = sides(plan, demand)[1].busy_DM, figures.rates_of(plan)
    assert busy_DM.shape == (8, plan.num_microbatches)
    for m in range(plan.num_microbatches):
        for device in range(8):
            cell = plan.packing.sequences_of(m, device // 2)
            group = np.concatenate([plan.packing.sequences_of(m, 2 * (device // 4) + w) for w in (0, 1)])
            owned_LE = plan.placement.rank_of_LE(4) == device % 4
            rows = (demand.tokens_SLE[group] * owned_LE).sum()
            work = rates.cost_SI(demand.length_S[cell]).sum()
            assert busy_DM[device, m] == pytest.approx(work + rates.expert * rows)


def test_without_expert_parallelism_every_rank_has_all_rows(plan_of):
    demand = testing.synthetic_demand(num_sequences=32, max_length=64)
    plan = plan_of(demand, expert=1)
    busy_DM = sides(plan, demand)[1].busy_DM
    assert busy_DM.shape == (4, plan.num_microbatches)
    assert busy_DM.sum() == pytest.approx(4 * sum(figures.time_of(plan)["planned"][name] for name in figures.WORK))
