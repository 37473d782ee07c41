"""The trainer's other promises: log-probabilities, checkpoints, and one clear error on every rank."""

import numpy as np
import pytest

from routepack.core.errors import ConfigError
from routepack.torchtitan.model.models import TinyQwen3MoE
from routepack.torchtitan.trainer.settings import TrainerSettings
from routepack.torchtitan.trainer.torchtitan_config import config_fields


@pytest.mark.parametrize("ranks", ["alone", "pair", pytest.param("slow_quad", marks=pytest.mark.slow)])
@pytest.mark.parametrize("weights", ["updated", "loaded"])
def test_log_probabilities_are_those_of_a_plain_forward(request, ranks, weights):
    result = request.getfixturevalue(ranks)[0]["log_probabilities"][weights]
    assert np.abs(result["local"]).sum() > 0
    np.testing.assert_allclose(result["trainer"], result["local"], atol=2e-6)


def test_log_probabilities_are_the_same_on_every_rank(pair):
    by_rank = [result["log_probabilities"]["updated"]["trainer"] for result in pair]
    assert np.array_equal(*by_rank)


def test_a_full_state_comes_back_as_it_was_loaded_wherever_the_experts_are(pair):
    assert [result["log_probabilities"]["loaded_distance"] for result in pair] == [0.0, 0.0]


def test_training_goes_on_from_a_state_that_was_loaded_after_a_forward(pair):
    # FSDP keeps the last layers gathered after a forward alone; a state loaded into those would be lost in the next step.
    learning_rate = TrainerSettings().learning_rate
    assert all(0 < result["log_probabilities"]["step"] < 10 * learning_rate for result in pair)


@pytest.mark.parametrize("attempt", ["other_plan", "other_placement"])
def test_ranks_that_disagree_all_refuse(pair, attempt):
    for rank, result in enumerate(pair):
        assert f"PlanError: rank {rank} holds pl" in result["refuses"][attempt]


def test_ranks_that_ask_for_different_things_all_refuse(pair):
    for rank, asked in enumerate(("update of 1 minibatches", "update of 2 minibatches")):
        assert f"PlanError: rank {rank} holds call" in pair[rank]["refuses"]["other_minibatches"]
        assert f"was asked for {asked}" in pair[rank]["refuses"]["other_minibatches"]
    for rank, asked in enumerate(("update of 1 minibatches", "log_probabilities")):
        assert f"was asked for {asked}" in pair[rank]["refuses"]["other_call"]


def test_an_error_on_one_rank_reaches_all(pair):
    assert "TraceError: sequence" in pair[0]["refuses"]["broken_batch_on_rank_0"]
    assert "PlanError: another rank could not use its plan" in pair[1]["refuses"]["broken_batch_on_rank_0"]


def test_a_rank_without_memory_for_a_move_keeps_all_from_moving(pair):
    assert "bytes of staging memory cannot be had: lower trainer.staging_bytes" in pair[1]["refuses"]["no_memory_on_rank_1"]
    assert "PlanError: another rank could not use its placement" in pair[0]["refuses"]["no_memory_on_rank_1"]


def test_a_plan_for_other_ranks_is_refused(pair):
    assert "the plan is for (4, 2)" in pair[0]["refuses"]["other_topology"]


def test_a_refused_plan_moves_nothing(pair):
    assert all(result["refuses"]["moved_nothing"] == "True" for result in pair)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_parallel_degree": 3}, "trainer.expert_parallel_degree=3 does not divide data_parallel_shard_degree=4"),
        ({"data_parallel_shard_degree": 3}, "needs 3 ranks; 4 were started"),
        ({"data_parallel_replicate_degree": 8}, "needs 8 ranks; 4 were started"),
        ({"data_parallel_replicate_degree": 2, "expert_parallel_degree": 4}, "does not divide data_parallel_shard_degree=2"),
    ],
)
def test_degrees_that_do_not_fit_the_ranks_are_refused(monkeypatch, changes, message):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=message):
        config_fields(TinyQwen3MoE(), TrainerSettings(**changes))


def test_experts_that_ranks_cannot_share_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="does not divide the model's 6 experts"):
        config_fields(TinyQwen3MoE(num_experts=6), TrainerSettings(expert_parallel_degree=4))


@pytest.mark.parametrize(
    "changes",
    [{"expert_parallel_degree": 0}, {"activation_checkpoint": "some"}, {"param_dtype": "fp8"}, {"pad_to_multiple_of": 0}],
)
def test_settings_out_of_range_are_refused(changes):
    with pytest.raises(ConfigError, match=f"trainer.{next(iter(changes))}"):
        TrainerSettings(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"staging_bytes": 1000}, "trainer.staging_bytes=1000 must be a whole number of at least 65536"),
        ({"checkpoints_kept": 1}, "trainer.checkpoints_kept=1 must be at least 2"),
        ({"checkpoints_kept": -1}, "trainer.checkpoints_kept=-1 must be a whole number of at least 0"),
        ({"checkpoint_interval": -1}, "trainer.checkpoint_interval=-1 must be a whole number of at least 0"),
        ({"checkpoint_interval": "often"}, "trainer.checkpoint_interval='often' must be a whole number"),
        ({"staging_bytes": 0.5}, "trainer.staging_bytes=0.5 must be a whole number"),
        ({"placement_invariant": True, "data_parallel_replicate_degree": 3}, "cannot order the sum over .*=3 replicas"),
        ({"storage_dtype": "float16"}, "trainer.storage_dtype='float16' is unknown"),
    ],
)
def test_settings_of_moves_and_checkpoints_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        TrainerSettings(**changes)


def test_initialization_holds_one_full_parameter_at_a_time(pair):
    assert [result["draws"] for result in pair] == [1, 1]


@pytest.mark.slow
def test_training_starts_from_the_local_copy_under_recomputation(slow_pair):
    assert all(result["starts recomputing"] for result in slow_pair)
