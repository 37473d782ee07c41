import threading
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.packer import Packer
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import ConfigError, InfeasibleError, PlanError, TraceError
from routepack.core.plans import ExpertPlacement, Topology
from routepack.planning.background import BackgroundPlanner
from routepack.planning.planner import Planner
from routepack.testing import synthetic_batch, synthetic_demand

TOPOLOGY = Topology(data_parallel_degree=4, expert_parallel_degree=2)
BATCH = synthetic_batch(num_sequences=48, max_length=128)
DEMAND = synthetic_demand(num_sequences=48, max_length=128)
SHORT = synthetic_demand(num_sequences=16, max_length=64)


def planner(**options):
    return Planner(**{"topology": TOPOLOGY, "packer": AttentionAwarePacker(max_tokens=512), "num_proposals": 20_000} | options)


@dataclass(frozen=True, kw_only=True)
class Waiting(Packer):
    """Packs when it is let go, or 10 s later."""

    go: threading.Event
    improves = False

    def assign(self, problem):
        self.go.wait(10)
        return problem.feasible_cell_of_S


@given(st.integers(0, 2**32))
@settings(max_examples=10)
def test_a_background_plan_is_the_synchronous_plan(seed):
    window = synthetic_demand(num_sequences=24, max_length=64, seed=seed)
    with BackgroundPlanner(planner=planner(seed=seed)) as background:
        background.submit(window)
        assert background.result().digest == planner(seed=seed).plan(window).digest


def test_where_the_experts_are_is_passed_on():
    previous = ExpertPlacement(physical_to_logical_LP=np.tile(np.arange(16)[::-1], (4, 1)))
    with BackgroundPlanner(planner=planner()) as background:
        background.submit(DEMAND, previous)
        made = background.result()
    assert made.digest == planner().plan(DEMAND, previous).digest != planner().plan(DEMAND).digest


def streamed(background, batch):
    for s in range(batch.num_sequences):
        background.add(batch.routed_experts_of(s), num_tokens=int(batch.num_tokens_S[s]), group=int(batch.group_S[s]))


def test_a_streamed_window_gives_the_plan_of_its_batch():
    collector = RoutingDemandCollector(num_experts=BATCH.num_experts)
    with BackgroundPlanner(planner=planner(collector=collector)) as background:
        streamed(background, BATCH)
        background.finish()
        made = background.result()
    assert made.demand_digest == DEMAND.digest
    assert made.digest == planner().plan(BATCH).digest


def test_the_next_window_streams_while_this_one_is_planned():
    go, collector = threading.Event(), RoutingDemandCollector(num_experts=BATCH.num_experts)
    waiting = planner(packer=Waiting(max_tokens=512, go=go), collector=collector)
    other = synthetic_batch(num_sequences=32, max_length=128, seed=1)
    with BackgroundPlanner(planner=waiting, max_in_flight=2) as background:
        streamed(background, BATCH)
        background.finish()
        streamed(background, other)
        background.finish()
        assert background.in_flight == 2
        assert not background.ready
        go.set()
        digests = [background.result().demand_digest for _ in range(2)]
    assert digests == [DEMAND.digest, RoutingDemandCollector().collect(other).digest]


def test_only_so_many_windows_are_on_their_way():
    with BackgroundPlanner(planner=planner()) as background:
        background.submit(SHORT)
        with pytest.raises(PlanError, match="max_in_flight=1 windows are being planned"):
            background.submit(SHORT)
        with pytest.raises(PlanError, match="max_in_flight=1 windows are being planned"):
            background.finish()
        background.result()
        background.submit(SHORT)
        background.result()


def test_results_come_in_order():
    with BackgroundPlanner(planner=planner(), max_in_flight=3) as background:
        for window in (DEMAND, SHORT, DEMAND):
            background.submit(window)
        digests = [background.result().demand_digest for _ in range(3)]
    assert digests == [DEMAND.digest, SHORT.digest, DEMAND.digest]


def test_what_planning_raises_is_raised_by_result_and_the_next_window_is_planned():
    with BackgroundPlanner(planner=planner(packer=AttentionAwarePacker(max_tokens=64))) as background:
        background.submit(DEMAND)
        with pytest.raises(InfeasibleError, match="max_tokens=64 is shorter than sequence"):
            background.result()
        background.submit(replace_lengths(SHORT, 64))
        assert background.result().max_tokens == 64


def replace_lengths(demand, most):
    kept = demand.length_S <= most
    return replace(demand, tokens_SLE=demand.tokens_SLE[kept], length_S=demand.length_S[kept], group_S=demand.group_S[kept])


def test_a_sequence_that_contradicts_itself_is_raised_by_the_result_of_its_window_alone():
    collector = RoutingDemandCollector(num_experts=BATCH.num_experts)
    with BackgroundPlanner(planner=planner(collector=collector)) as background:
        streamed(background, BATCH)
        background.add(np.full((4, 4, 2), 99, dtype=np.uint8), num_tokens=5)
        background.finish()
        with pytest.raises(TraceError, match="not below num_experts=16"):
            background.result()
        streamed(background, BATCH)
        background.finish()
        assert background.result().demand_digest == DEMAND.digest


def test_a_window_without_sequences_is_refused():
    with BackgroundPlanner(planner=planner()) as background:
        background.finish()
        with pytest.raises(TraceError, match="no sequence was added"):
            background.result()


def test_a_result_without_a_window_is_refused():
    with BackgroundPlanner(planner=planner()) as background, pytest.raises(PlanError, match="no window is being planned"):
        background.result()


def test_a_result_that_is_not_there_in_time_can_be_asked_for_again():
    go = threading.Event()
    with BackgroundPlanner(planner=planner(packer=Waiting(max_tokens=512, go=go))) as background:
        background.submit(SHORT)
        with pytest.raises(TimeoutError):
            background.result(timeout=0.02)
        go.set()
        assert background.result().demand_digest == SHORT.digest
        assert background.timing.exposed_ms >= 20


def test_a_cancelled_window_gives_way_to_the_next():
    go = threading.Event()
    with BackgroundPlanner(planner=planner(packer=Waiting(max_tokens=512, go=go))) as background:
        background.submit(DEMAND)
        background.cancel()
        assert background.in_flight == 0
        go.set()
        background.submit(SHORT)
        assert background.result().demand_digest == SHORT.digest


def test_cancelled_sequences_are_in_no_window():
    collector = RoutingDemandCollector(num_experts=BATCH.num_experts)
    with BackgroundPlanner(planner=planner(collector=collector)) as background:
        streamed(background, synthetic_batch(num_sequences=8, seed=3))
        background.cancel()
        streamed(background, BATCH)
        background.finish()
        assert background.result().demand_digest == DEMAND.digest


def test_after_closing_nothing_is_taken_and_no_thread_is_left():
    background = BackgroundPlanner(planner=planner())
    background.submit(SHORT)
    background.close()
    with pytest.raises(PlanError, match="closed"):
        background.submit(SHORT)
    with pytest.raises(PlanError, match="closed"):
        background.add(BATCH.routed_experts_of(0), num_tokens=1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("routepack-")]


def test_a_caller_who_comes_late_waits_for_nothing(caplog):
    with BackgroundPlanner(planner=planner()) as background, caplog.at_level("INFO", logger="routepack.planning.background"):
        background.submit(DEMAND)
        while not background.ready:
            time.sleep(0.001)
        background.result()
    assert background.timing.exposed_ms < background.timing.plan_ms
    assert "exposed" in caplog.text


def test_a_caller_who_waits_at_once_sees_all_of_it():
    go = threading.Event()
    with BackgroundPlanner(planner=planner(packer=Waiting(max_tokens=512, go=go))) as background:
        background.submit(SHORT)
        timer = threading.Timer(0.2, go.set)
        timer.start()
        background.result()
        timer.join()
    assert background.timing.exposed_ms > 150
    assert set(background.timing.metrics()) == {"plan/exposed_ms", "plan/background_ms", "plan/queued_ms"}


def test_sequences_that_arrive_in_another_order_are_put_in_the_windows():
    collector = RoutingDemandCollector(num_experts=BATCH.num_experts)
    arrival = np.random.default_rng(0).permutation(BATCH.num_sequences)
    with BackgroundPlanner(planner=planner(collector=collector)) as background:
        for s in arrival:
            background.add(BATCH.routed_experts_of(s), num_tokens=int(BATCH.num_tokens_S[s]), group=int(BATCH.group_S[s]))
        background.finish(order_S=np.argsort(arrival).tolist())
        assert background.result().digest == planner().plan(BATCH).digest


def test_an_order_that_leaves_a_sequence_out_is_refused():
    collector = RoutingDemandCollector(num_experts=BATCH.num_experts)
    with BackgroundPlanner(planner=planner(collector=collector)) as background:
        streamed(background, BATCH)
        background.finish(order_S=[0] * BATCH.num_sequences)
        with pytest.raises(TraceError, match="order_S must name each of the 48 sequences added once"):
            background.result()


def test_a_plan_is_ready_in_time_and_says_that_it_was_planned_by_the_clock():
    with BackgroundPlanner(planner=planner(num_proposals=10**9), ready_seconds=0.5) as background:
        background.submit(SHORT)
        plan = background.result(timeout=30)
    assert 0.0 < plan.budget["time_limit_seconds"] < 0.5
    assert background.timing.queued_ms + background.timing.plan_ms > 300


def test_no_time_at_all_is_refused():
    with pytest.raises(ConfigError, match=r"ready_seconds=0\.0 must lie between 0\.01"):
        BackgroundPlanner(planner=planner(), ready_seconds=0.0)


def test_no_windows_at_all_are_refused():
    with pytest.raises(ConfigError, match="max_in_flight=0 must be a whole number of at least 1"):
        BackgroundPlanner(planner=planner(), max_in_flight=0)


def test_no_planner_at_all_is_refused():
    with pytest.raises(ConfigError, match="planner=None is a NoneType; give a Planner"):
        BackgroundPlanner(planner=None)
