import math

import numpy as np
import pytest

import routepack as rp
from routepack.core import checks


@pytest.mark.parametrize("value", [None, True, "3", 1.5, -1, math.nan, 2**80])
def test_whole_refuses_what_is_no_count_in_range(value):
    with pytest.raises(rp.ConfigError, match=r"^seed="):
        checks.whole("seed", value, least=0)


@pytest.mark.parametrize("value", [None, True, "3", math.nan, math.inf, 2.0])
def test_real_refuses_what_is_no_finite_number_in_range(value):
    with pytest.raises(rp.ConfigError, match=r"^share="):
        checks.real("share", value, least=0.0, most=1.0)


def test_numpy_numbers_become_python_s():
    assert type(checks.whole("seed", np.int64(3), least=0)) is int
    assert type(checks.real("share", np.float32(0.5))) is float


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seed", -1), ("seed", None), ("num_proposals", 1e20), ("num_proposals", 1.5), ("time_limit_seconds", math.inf),
        ("time_limit_seconds", "x"), ("packer", None), ("rerouter", rp.AttentionAwarePacker(max_tokens=9)),
        ("cost_model", rp.WindowNormalizedCost), ("collector", 3), ("topology", rp.Topology),
    ],
)  # fmt: skip
def test_a_planner_names_the_option_that_it_cannot_use(option, value):
    options = {"topology": rp.Topology(data_parallel_degree=2, expert_parallel_degree=2)}
    options["packer"] = rp.AttentionAwarePacker(max_tokens=64)
    with pytest.raises(rp.ConfigError, match=f"^{option}[= ]"):
        rp.Planner(**options | {option: value})


@pytest.mark.parametrize(
    ("component", "option", "value"),
    [
        (rp.AttentionAwarePacker, "max_tokens", 2**80),
        (rp.AttentionAwarePacker, "threads", 0),
        (rp.ExpertRerouter, "sweeps", "x"),
        (rp.HierarchicalRerouter, "sweeps", "x"),
        (rp.RoutingDemandCollector, "min_coverage", math.nan),
        (rp.RoutingDemandCollector, "num_threads", 1.5),
        (rp.WindowNormalizedCost, "linear_share", math.nan),
        (rp.Topology, "data_parallel_degree", 2**40),
    ],
)
def test_a_component_names_the_option_that_it_cannot_use(component, option, value):
    needed = {rp.AttentionAwarePacker: {"max_tokens": 64}, rp.Topology: {"expert_parallel_degree": 1}}.get(component, {})
    with pytest.raises(rp.ConfigError, match=f"{option}="):
        component(**needed | {option: value})


def test_a_window_of_another_kind_is_named():
    planner = rp.Planner(
        topology=rp.Topology(data_parallel_degree=2, expert_parallel_degree=2), packer=rp.AttentionAwarePacker(max_tokens=64)
    )
    with pytest.raises(rp.ConfigError, match="window=None is a NoneType"):
        planner.plan(None)


def test_a_cap_beyond_the_window_is_no_trouble():
    window = rp.testing.synthetic_batch(num_sequences=16)
    topology = rp.Topology(data_parallel_degree=2, expert_parallel_degree=2)
    plan = rp.Planner(topology=topology, packer=rp.AttentionAwarePacker(max_tokens=2**40), num_proposals=100).plan(window)
    assert plan.num_microbatches == 1
