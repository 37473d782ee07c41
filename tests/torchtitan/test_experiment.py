"""Wrong configs: each one message that names the option, before any process starts."""

from pathlib import Path

import pytest

from routepack.components.packer import FirstFitPacker
from routepack.components.rerouter import IdentityRerouter
from routepack.core.config import load
from routepack.core.errors import ConfigError
from routepack.torchtitan.rl.rl_experiment import WarmupSettings, build_experiment

CONFIGS = Path(__file__).parents[2] / "configs"


def built(*overrides, files=("tiny_rl.yaml",)):
    return build_experiment(load([CONFIGS / name for name in files], overrides))


def test_the_shipped_config_builds():
    experiment = built()
    assert experiment.num_ranks == 4
    assert experiment.trainer.expert_parallel_degree == 2
    assert experiment.task.vocab_size == experiment.model.vocab_size


def test_first_fit_switches_both_components_and_keeps_the_cap():
    planner = built(files=("tiny_rl.yaml", "first_fit.yaml")).planner
    assert isinstance(planner.packer, FirstFitPacker)
    assert isinstance(planner.rerouter, IdentityRerouter)
    assert planner.packer.max_tokens == built().planner.packer.max_tokens


def test_one_seed_sets_them_all():
    experiment = built("seed=7")
    assert (experiment.seed, experiment.trainer.seed, experiment.planner.seed) == (7, 7, 7)


def test_demonstrations_must_fit_a_microbatch_too():
    with pytest.raises(ConfigError, match=r"packer.max_tokens=64 .* demonstrations up to 105"):
        built("rollout.max_new_tokens=20", "packer.max_tokens=64")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollot.temperature=1", r"rollot is no option of a training config: did you mean rollout\?"),
        ("rollout.temprature=1", r"rollout.temprature .* did you mean temperature\?"),
        ("trainer.max_nrom=1", r"trainer.max_nrom .* did you mean max_norm\?"),
        ("trainer.learning_rate=1", "trainer.learning_rate is not set here: it follows from warmup.learning_rate"),
        ("packer._target_=routepack.ExpertRerouter", "packer._target_=routepack.ExpertRerouter is not a Packer"),
        ("task._target_=routepack.Planner", "task._target_=routepack.Planner is not a Task"),
        ("model._target_=routepack.torchtitan.model.models.Nothing", "model._target_: cannot import"),
        ("topology.expert_parallel_degree=3", "topology.expert_parallel_degree=3 does not divide the 4 ranks"),
        ("model.num_experts=15", "topology.expert_parallel_degree=2 does not divide the 15 experts"),
        ("topology.model_parallel_degree=2", "topology.model_parallel_degree=2"),
        ("model.vocab_size=100", "model.vocab_size=100 is less than the task's 239"),
        ("model.max_seq_len=64", "model.max_seq_len=64 is less than .*rollout.max_new_tokens=104"),
        ("packer.max_tokens=100", "packer.max_tokens=100 is less than .*rollout.max_new_tokens=104"),
        ("rollout.max_new_tokens=500", "model.max_seq_len=128 is less than .*rollout.max_new_tokens=500"),
        ("rollout.rollouts_per_prompt=1", "rollout.rollouts_per_prompt=1 must be a whole number of at least 2"),
        ("rollout.prompts_per_step=zero", "rollout.prompts_per_step='zero'"),
        ("warmup.batch_size=3", "3 sequences a step are fewer than topology.data_parallel_degree=4"),
        ("rl.num_steps=-1", "rl.num_steps=-1 must be a whole number of at least 0"),
        ("rl.minibatches_per_window=2", "rl.minibatches_per_window=2 does not divide packer.microbatch_multiple=1"),
        ("rl.async_level=2", "rl.async_level=2 must be at most 1"),
        ("rl.plan_ready_seconds=0", "rl.plan_ready_seconds=0 must lie between 0.01 and 86400"),
        ("rl.learning_rate=-1", "rl.learning_rate=-1 must lie between 0 and inf"),
        ("collector={num_experts: 4}", "collector.num_experts=4 is not the model's 16"),
        ("launch.port=70000", "launch.port=70000 must be at most 65535"),
        ("sync=sometimes", "sync='sometimes' is unknown"),
        ("out=null", "out is not set"),
    ],
)
def test_a_wrong_option_is_named(override, message):
    with pytest.raises(ConfigError, match=message):
        built(override)


def test_an_out_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(ConfigError, match="results is a file: name a folder"):
        built(f"out={tmp_path / 'results'}")


def test_the_warmup_rate_rises_then_falls():
    rates = [WarmupSettings(num_steps=50, learning_rate=1.0).rate_at(step) for step in range(50)]
    assert rates.index(max(rates)) == 4
    assert rates[0] < 0.25
    assert rates[-1] == pytest.approx(0.1, abs=0.03)
