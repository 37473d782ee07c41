"""The RL loop on two ranks: planned in the background, on and one step off policy."""

import numpy as np
import pytest


def same_weights(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_level_0_is_the_loop_that_plans_on_the_spot_bit_for_bit(rl_pair):
    for results in rl_pair:
        loop, spot = results["level 0"], results["on the spot"]
        assert loop["digests"] == spot["digests"]
        assert [{name: one[name] for name in other} for one, other in zip(loop["history"], spot["history"], strict=True)] == (
            spot["history"]
        )
        assert same_weights(loop["weights"], spot["weights"])
        assert max(one["grad_norm"] for one in spot["history"]) > 0


def test_level_1_gives_the_same_run_twice(rl_pair):
    for results in rl_pair:
        first, second = results["level 1"], results["level 1 again"]
        assert first["digests"] == second["digests"]
        assert first["history"] == second["history"]
        assert same_weights(first["weights"], second["weights"])


def test_another_seed_gives_another_run(rl_pair):
    first, other = rl_pair[0]["level 1"], rl_pair[0]["level 1, other seed"]
    assert first["history"][:1] != other["history"]
    assert not same_weights(first["weights"], other["weights"])


def test_level_1_trains_windows_sampled_one_step_before(rl_pair):
    assert [one["off_policy_steps"] for one in rl_pair[0]["level 1"]["history"]] == [0, 1, 1]
    assert [one["off_policy_steps"] for one in rl_pair[0]["level 0"]["history"]] == [0, 0, 0]


def test_the_first_two_windows_of_level_1_come_from_the_same_weights(rl_pair):
    """So the second is another than on policy, and the first the same."""
    ahead, on_policy = rl_pair[0]["level 1"], rl_pair[0]["level 0"]
    assert ahead["digests"][0] == on_policy["digests"][0]
    assert ahead["history"][0]["reward"] == on_policy["history"][0]["reward"]
    assert ahead["history"][1]["policy_kl"] > 1e-6 > on_policy["history"][1]["policy_kl"]


@pytest.mark.parametrize("level", ["level 0", "level 1"])
def test_what_planning_took_is_among_the_figures_of_every_rank(rl_pair, level):
    for results in rl_pair:
        assert results[level]["timings"] == rl_pair[0][level]["timings"]
        for timing in results[level]["timings"]:
            assert {"plan/exposed_ms", "plan/background_ms"} <= timing.keys()
        assert {"exposed_ms", "background_ms"} <= results[level]["summary"].keys()


def test_a_plan_for_a_deadline_gets_what_is_left_of_it(rl_pair):
    (budget,) = rl_pair[0]["in time"]["budgets"]
    assert 0.1 < budget["time_limit_seconds"] < 0.5


@pytest.mark.parametrize("key", ["fails", "fails ahead"])
def test_a_failed_plan_is_raised_on_every_rank_and_leaves_no_thread(rl_pair, key):
    assert rl_pair[0][key]["error"] == "ZeroDivisionError: no second plan"
    assert rl_pair[1][key]["error"] == "PlanError: rank 0 could not make the plan: ZeroDivisionError: no second plan"
    assert [results[key]["threads"] for results in rl_pair] == [[], []]


@pytest.mark.parametrize("key", ["level 0", "level 1"])
def test_no_thread_is_left_after_a_run(rl_pair, key):
    assert [results[key]["threads"] for results in rl_pair] == [[], []]


@pytest.mark.parametrize("level", ["level 0", "level 1"])
def test_plans_know_where_the_experts_will_be(rl_pair, level):
    """So what a plan says it moves is what the trainer moves."""
    history = rl_pair[0][level]["history"]
    assert [one["experts_moved"] for one in history] == [one["plan/experts_moved"] for one in history]
    assert sum(one["experts_moved"] for one in history) > 0
