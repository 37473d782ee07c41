import numpy as np
import pytest

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.packer import FirstFitPacker
from routepack.components.rerouter import IdentityRerouter
from routepack.core.errors import ConfigError, TraceError
from routepack.core.plans import SYNCS, Topology
from routepack.cost import calibration
from routepack.cost.calibration import TERMS, Forecaster, MeasuredCost, best_sync, calibrate, fit
from routepack.cost.step_log import StepLoads, StepRecord
from routepack.planning.planner import Planner
from routepack.testing import synthetic_demand

RATES = MeasuredCost(
    token_seconds=2e-4,
    pair_seconds=3e-7,
    expert_seconds=1e-5,
    microbatch_seconds=0.05,
    step_seconds=0.2,
    shared_token_seconds=1e-4,
)


def loads_of(rng, *, microbatches=None, ranks=4, groups=2):
    shape = (microbatches or int(rng.integers(2, 6)), ranks)
    tokens_MW = rng.integers(500, 1024, shape)
    rows_MG = rng.integers(5000, 9000, (shape[0], groups))
    return StepLoads(
        tokens_MW=tokens_MW,
        pairs_MW=tokens_MW * rng.integers(50, 400, shape),
        rows_MG=rows_MG,
        joined_rows_M=rows_MG.max(axis=1) + (rng.integers(0, 500, shape[0]) if groups > 1 else 0),
    )


def steps(number, sync, *, noise=0.0, seed=0, **shape):
    """Steps that take what RATES says, up to *noise*."""
    rng = np.random.default_rng(seed)
    records = []
    for step in range(number):
        loads = loads_of(rng, **shape)
        seconds = RATES.predicted_seconds(loads, sync) * np.exp(noise * rng.standard_normal())
        records.append(StepRecord(loads=loads, seconds=seconds, step=step))
    return records


def rates(model):
    return np.array([getattr(model, name) for name in TERMS])


def by_loops(loads, sync):
    """Seconds under RATES, waiting written out."""
    units = []
    for m in range(loads.num_microbatches):
        cells = RATES.token_seconds * loads.tokens_MW[m] + RATES.pair_seconds * loads.pairs_MW[m]
        units.append([max(cells[2 * g : 2 * g + 2]) + RATES.expert_seconds * loads.rows_MG[m, g] for g in range(2)])
    units = np.array(units)
    if sync == "layer":
        cells = RATES.token_seconds * loads.tokens_MW + RATES.pair_seconds * loads.pairs_MW
        busy = cells.max(axis=1).sum() + RATES.expert_seconds * loads.joined_rows_M.sum()
    else:
        busy = units.max(axis=1).sum() if sync == "microbatch" else units.sum(axis=0).max()
    shared = sum(sum(cells) / len(cells) for cells in loads.tokens_MW) * RATES.shared_token_seconds
    return busy + shared + loads.num_microbatches * RATES.microbatch_seconds + RATES.step_seconds


@pytest.mark.parametrize("sync", SYNCS)
def test_predicted_seconds_are_the_waiting_written_out(sync):
    loads = loads_of(np.random.default_rng(3))
    assert RATES.predicted_seconds(loads, sync) == pytest.approx(by_loops(loads, sync), rel=1e-12)


@pytest.mark.parametrize("sync", SYNCS)
def test_a_prediction_is_the_plans_value_and_the_overheads(sync):
    demand = synthetic_demand(num_sequences=24, max_length=60)
    topology = Topology(data_parallel_degree=4, expert_parallel_degree=2)
    planner = Planner(
        topology=topology,
        packer=AttentionAwarePacker(max_tokens=256),
        cost_model=RATES,
        sync=sync,
        num_proposals=500,
    )
    plan = planner.plan(demand)
    overhead = RATES.step_seconds + plan.num_microbatches * RATES.microbatch_seconds
    overhead += demand.length_S.sum() / topology.data_parallel_degree * RATES.shared_token_seconds
    predicted = RATES.predicted_seconds(StepLoads.planned(plan, demand), sync)
    assert predicted == pytest.approx(plan.value + overhead, rel=1e-9)
    assert plan.unit == "seconds"


@pytest.mark.parametrize("sync", SYNCS)
def test_known_rates_are_found(sync):
    found = fit(steps(40, sync), sync)
    assert rates(found.cost_model) == pytest.approx(rates(RATES), rel=1e-6)
    assert found.error < 1e-9
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_what_ranks_share_is_left_out_where_all_steps_are_balanced_alike():
    records = []
    for record in steps(40, "layer"):
        loads = record.loads
        even = {
            name: np.broadcast_to(getattr(loads, name)[:, :1], (loads.num_microbatches, 4))
            for name in ("tokens_MW", "pairs_MW")
        }
        loads = StepLoads(**even, rows_MG=loads.rows_MG, joined_rows_M=loads.joined_rows_M)
        records.append(StepRecord(loads=loads, seconds=RATES.predicted_seconds(loads, "layer"), step=record.step))
    found = fit(records, "layer")
    assert found.cost_model.shared_token_seconds == 0.0
    assert found.cost_model.token_seconds == pytest.approx(RATES.token_seconds + RATES.shared_token_seconds)
    assert found.error < 1e-9


def test_stragglers_that_leave_others_their_part_would_be_priced_too_high_without_it(monkeypatch):
    monkeypatch.setattr(calibration, "SHARED_UNCERTAIN", -1.0)
    with pytest.raises((AssertionError, TraceError)):
        test_known_rates_are_found("step")


@pytest.mark.parametrize("sync", SYNCS)
def test_the_sync_that_steps_obey_predicts_them_best(sync):
    errors = {name: one.error for name, one in calibrate(steps(60, sync)).items()}
    assert min(errors, key=errors.__getitem__) == sync
    assert best_sync(errors, configured="step" if sync != "step" else "layer") == sync


def test_noise_moves_predictions_little():
    found = fit(steps(120, "layer", noise=0.02), "layer")
    for record in steps(20, "layer", seed=9):
        assert found.cost_model.predicted_seconds(record.loads, "layer") == pytest.approx(record.seconds, rel=0.02)


def test_a_few_disturbed_steps_do_not_spoil_the_fit():
    records = steps(60, "step", noise=0.005)
    for n in (5, 17, 40):
        records[n] = StepRecord(loads=records[n].loads, seconds=4.0 * records[n].seconds)
    found = fit(records, "step").cost_model
    for record in steps(20, "step", seed=9):
        assert found.predicted_seconds(record.loads, "step") == pytest.approx(record.seconds, rel=0.02)


def test_without_weights_disturbed_steps_would(monkeypatch):
    monkeypatch.setattr(calibration, "_weights", np.ones_like)
    with pytest.raises((AssertionError, TraceError)):
        test_a_few_disturbed_steps_do_not_spoil_the_fit()


def test_an_overhead_per_microbatch_counts_to_the_step_where_all_have_as_many():
    found = fit(steps(40, "layer", microbatches=3), "layer").cost_model
    assert found.microbatch_seconds == 0.0
    assert found.step_seconds == pytest.approx(RATES.step_seconds + 3 * RATES.microbatch_seconds)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (steps(3, "step"), "3 steps with 3 different loads cannot tell 5 terms"),
        (steps(1, "step") * 40, "40 steps with 1 different loads"),
        (steps(40, "step", noise=0.5), "is only known to within"),
    ],
)
def test_steps_that_do_not_tell_the_rates_are_refused(records, message):
    with pytest.raises(TraceError, match=message):
        fit(records, "step")


def test_loads_that_rise_and_fall_together_are_named():
    records = []
    for record in steps(40, "step", groups=1, ranks=2):
        together = StepLoads(
            tokens_MW=record.loads.tokens_MW,
            pairs_MW=record.loads.tokens_MW * 100,
            rows_MG=record.loads.rows_MG,
            joined_rows_M=record.loads.joined_rows_M,
        )
        records.append(StepRecord(loads=together, seconds=RATES.predicted_seconds(together, "step")))
    with pytest.raises(TraceError, match="token_seconds and pair_seconds cannot be told apart"):
        fit(records, "step")


def test_one_step_of_another_size_does_not_stop_a_fit():
    records = [*steps(20, "step", microbatches=2), *steps(1, "step", seed=5, microbatches=4)]
    assert rates(fit(records, "step").cost_model) == pytest.approx(rates(RATES), rel=1e-6)


def test_logs_of_two_topologies_are_refused():
    with pytest.raises(TraceError, match=r"\[\(2, 1\), \(4, 2\)\] \[ranks, groups\]"):
        fit([*steps(20, "step"), *steps(20, "step", ranks=2, groups=1)], "step")


def test_with_one_group_every_sync_predicts_alike():
    errors = {one.error for one in calibrate(steps(40, "step", ranks=2, groups=1, noise=0.01)).values()}
    assert len(errors) == 1


def test_the_forecaster_predicts_steps_that_it_has_not_seen():
    forecaster = Forecaster(configured="step")
    predicted = []
    for record in steps(40, "layer"):
        forecast = forecaster.predict(record.loads)
        forecaster.observe(StepRecord(loads=record.loads, seconds=record.seconds, predicted_seconds=forecast))
        predicted.append(forecast)
    assert not predicted[0]
    assert predicted[-1]["layer"] == pytest.approx(record.seconds, rel=1e-6)
    assert forecaster.best == "layer"


def test_the_forecaster_keeps_what_is_configured_where_nothing_predicts_better():
    forecaster = Forecaster(configured="microbatch")
    for record in steps(20, "step", ranks=2, groups=1):
        forecast = forecaster.predict(record.loads)
        forecaster.observe(StepRecord(loads=record.loads, seconds=record.seconds, predicted_seconds=forecast))
    assert forecaster.errors()
    assert forecaster.best == "microbatch"


@pytest.mark.parametrize("changes", [{"token_seconds": -1.0}, {"step_seconds": float("nan")}])
def test_rates_out_of_range_are_refused(changes):
    with pytest.raises(ConfigError, match=f"cost_model.{next(iter(changes))}"):
        MeasuredCost(**{"expert_seconds": 1e-6, "token_seconds": 1e-6, "pair_seconds": 0.0, **changes})


def test_a_model_without_rates_is_refused():
    with pytest.raises(ConfigError, match="above 0"):
        MeasuredCost(expert_seconds=0.0, token_seconds=0.0, pair_seconds=0.0, step_seconds=1.0)


def test_plans_of_the_baseline_are_priced_too():
    demand = synthetic_demand(num_sequences=24, max_length=60)
    topology = Topology(data_parallel_degree=2, expert_parallel_degree=2)
    planner = Planner(topology=topology, packer=FirstFitPacker(max_tokens=256), rerouter=IdentityRerouter(), cost_model=RATES)
    plan = planner.plan(demand)
    assert plan.value == pytest.approx(plan.baseline_value)
