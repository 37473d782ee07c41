import pytest

from routepack import testing
from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.core.errors import ConfigError
from routepack.core.plans import Topology
from routepack.planning.planner import Planner
from routepack.report.topology_gains import Outlook

WINDOW = testing.synthetic_demand(num_sequences=48, max_length=128)


def test_a_gain_is_the_plan_s():
    gain = next(Outlook(max_tokens=256, num_proposals=3000).gains(WINDOW, [2], [4]))
    topology = Topology(data_parallel_degree=4, expert_parallel_degree=2)
    plan = Planner(topology=topology, packer=AttentionAwarePacker(max_tokens=256), num_proposals=3000).plan(WINDOW)
    assert (gain.baseline, gain.planned, gain.bound) == (plan.baseline_value, plan.value, plan.bound)
    assert gain.gain == plan.baseline_value / plan.value - 1.0


@pytest.mark.parametrize(
    ("cap", "ep", "dp", "reason"),
    [
        (256, 3, 6, "does not divide the 16 experts"),
        (256, 4, 2, "does not divide the 2 ranks"),
        (256, 2, 64, "the window has 48"),
        (16, 2, 4, "shorter than sequence"),
    ],
)
def test_a_topology_that_does_not_go_says_why(cap, ep, dp, reason):
    gain = Outlook(max_tokens=cap).gain(WINDOW, ep, dp)
    assert reason in gain.reason
    assert gain.gain is None


def test_an_option_that_is_wrong_is_said_of_every_topology():
    gain = Outlook(max_tokens=256, sync="never").gain(WINDOW, 2, 4)
    assert "sync='never'" in gain.reason


def test_progress_counts_every_topology(monkeypatch):
    seen, gain = [], Outlook.gain
    monkeypatch.setattr(Outlook, "gain", lambda self, *topology: seen.append(1) or gain(self, *topology))
    gains = Outlook(max_tokens=256, num_proposals=10).gains(WINDOW, [2, 3], [2, 4])
    assert [len(seen) for _ in gains] == [1, 2, 3, 4]


def test_degrees_are_whole_numbers():
    from routepack.cli.inspect import degrees

    assert degrees("--ep", " 4,8 ") == [4, 8]
    for text in ("4,x", "0", "-2", "4.5", "²"):
        with pytest.raises(ConfigError, match="--ep"):
            degrees("--ep", text)
