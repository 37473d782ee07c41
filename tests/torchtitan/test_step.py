"""Steps as the trainer sees them: live loads and their log, gathering once a window, mini-batches, references, exchanges."""

import re

import numpy as np
import pytest

from routepack.report.plan_metrics import load_violations, rank_imbalance

RANKS = ["step_pair", pytest.param("step_quad", marks=pytest.mark.slow)]


@pytest.mark.parametrize("ranks", RANKS)
def test_gathering_once_trains_the_same(request, ranks):
    result = request.getfixturevalue(ranks)[0]
    assert result["gathers once"]["losses"] == pytest.approx(result["trains"]["losses"], rel=1e-5)
    for name, value in result["trains"]["state"].items():
        np.testing.assert_allclose(result["gathers once"]["state"][name], value, atol=3e-5, err_msg=name)


@pytest.mark.parametrize("ranks", RANKS)
def test_live_loads_are_those_counted_from_the_microbatches(request, ranks):
    for result in request.getfixturevalue(ranks):
        seen = result["observes"]
        expected = load_violations(seen["tokens_LE"], np.arange(len(seen["tokens_LE"])))
        expected |= rank_imbalance(seen["placed"]) | rank_imbalance(seen["unmoved"], prefix="moe/unmoved_")
        assert {name: seen["figures"][name] for name in expected} == pytest.approx(expected)
        assert expected["moe/imbalance_mean"] != pytest.approx(expected["moe/unmoved_imbalance_mean"])


def test_live_loads_do_not_count_what_is_computed_again(step_pair):
    plain, again = (step_pair[0][key]["figures"] for key in ("observes", "observes recomputing"))
    names = [name for name in plain if name.startswith("moe/")]
    assert names
    assert {name: again[name] for name in names} == {name: plain[name] for name in names}


@pytest.mark.parametrize("ranks", RANKS)
def test_the_step_log_has_what_the_ranks_did(request, ranks):
    seen = request.getfixturevalue(ranks)[0]["observes"]
    line, rows = seen["line"], seen["placed"]
    assert line["rows_MG"] == rows.max(axis=2).sum(axis=-1).tolist()
    assert line["joined_rows_M"] == rows.max(axis=(1, 2)).sum(axis=-1).tolist()
    assert line["seconds"] == seen["figures"]["step_seconds"] > 0


def test_figures_are_the_same_on_every_rank(step_pair):
    mine, others = (result["observes"]["figures"] for result in step_pair)
    assert {name: value for name, value in mine.items() if name != "move_ms"} == {
        name: value for name, value in others.items() if name != "move_ms"
    }


@pytest.mark.parametrize("check", ["mini-batches", "mini-batches, gathers once"])
def test_mini_batches_are_windows_of_their_own_under_one_placement(step_pair, check):
    result = step_pair[0][check]
    names = ("loss", "grad_norm", "trained_tokens", "num_microbatches")
    assert [[one[name] for name in names] for one in result["together"]] == [
        [one[name] for name in names] for one in result["alone"]
    ]
    assert result["unequal"] == []
    assert [one["experts_moved"] > 0 for one in result["together"]] == [True, False]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_reference_remembers_its_weights_wherever_experts_go(request, ranks):
    result = request.getfixturevalue(ranks)[0]["remembers"]
    assert result["moved"] > 0
    np.testing.assert_allclose(result["remembered"], result["expected"], atol=2e-6)
    np.testing.assert_allclose(result["again"], result["expected"], atol=2e-6)
    assert np.abs(result["learnt"] - result["expected"]).max() > 1e-2


def test_a_reference_leaves_the_trainer_as_it_is(step_pair):
    assert step_pair[0]["remembers"]["changed"] == []
    assert step_pair[0]["remembers, gathers once"]["changed"] == []


def test_a_reference_whose_experts_stay_would_be_noticed(step_pair):
    result = step_pair[0]["reference stays"]
    assert np.abs(result["remembered"] - result["expected"]).max() > 1e-3


def test_log_probabilities_are_those_of_a_plain_forward_where_parameters_are_gathered_once(step_pair):
    for result in step_pair[0]["log_probabilities"]["updated"], step_pair[0]["log_probabilities"]["loaded"]:
        np.testing.assert_allclose(result["trainer"], result["local"], atol=2e-6)


@pytest.mark.parametrize("ranks", RANKS)
def test_sequences_that_travelled_make_the_same_microbatches_bit_for_bit(request, ranks):
    results = request.getfixturevalue(ranks)
    for result in results:
        assert result["sends"]["unequal"] == [[], []]
        assert result["sends"]["came_from_others"] > 0
        assert result["sends"]["rewards"].tolist() == result["sends"]["sequences"].tolist()
        assert result["sends"]["groups"].tolist() == (result["sends"]["sequences"] // 3).tolist()
    everybodys = np.concatenate([result["sends"]["sequences"] for result in results])
    assert sorted(everybodys.tolist()) == list(range(23))


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_hold_their_sequences_train_as_with_the_whole_window_bit_for_bit(request, ranks):
    for result in request.getfixturevalue(ranks):
        assert all(whole == held for whole, held in result["trains what it holds"]["figures"])
        assert result["trains what it holds"]["logprobs"] == [True] * 3
        assert result["trains what it holds"]["unequal"] == []


def test_demand_gathered_from_all_ranks_is_the_windows(step_pair):
    assert all(result["sends"]["demand"] for result in step_pair)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("missing", "no rank holds sequence|another rank could not use its window"),
        ("held twice", "two ranks hold sequence|another rank could not use its window"),
        ("kinds", "plan or kind of batch"),
        ("longer", "tokens; the plan was made for|another rank could not use its plan"),
        ("not sent", "send sequences to their ranks first"),
        ("demand", "sequences_S of all ranks must be 0 .. .*, each once: . is held by rank"),
    ],
)
def test_sequences_that_do_not_make_up_the_window_are_refused_on_every_rank(step_pair, attempt, message):
    for result in step_pair:
        assert re.search(message, result["sends"]["refused"][attempt]), result["sends"]["refused"][attempt]
