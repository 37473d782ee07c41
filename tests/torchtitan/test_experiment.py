"""Wrong configs: each one message that names the option, before any process starts."""

from pathlib import Path

import pytest

from routepack.components.packer import FirstFitPacker
from routepack.components.rerouter import IdentityRerouter
from routepack.core.config import load
from routepack.core.errors import ConfigError
from routepack.planning.from_config import build_planner
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


@pytest.mark.parametrize("gather", ["layer", "step"])
def test_plans_are_made_for_what_the_trainer_makes_ranks_wait_for(gather):
    assert built(f"trainer.gather={gather}").planner.sync == gather


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_a_sync_that_contradicts_the_trainer_is_refused_by_both_names(sync):
    with pytest.raises(ConfigError, match=rf"sync={sync} contradicts trainer.gather=layer, .* leave sync out"):
        built("trainer.gather=layer", f"sync={sync}")


def test_with_one_ep_group_any_sync_is_the_trainers():
    assert built("sync=microbatch", "topology.expert_parallel_degree=4").planner.sync == "microbatch"


def test_a_measured_cost_model_may_bring_the_sync_that_predicted_best():
    measured = "{_target_: routepack.MeasuredCost, expert_seconds: 1.0e-6, token_seconds: 1.0e-6, pair_seconds: 1.0e-9}"
    assert built("sync=layer", f"cost_model={measured}").planner.sync == "layer"


def test_links_moves_and_costs_follow_from_model_and_trainer():
    model = {"vocab_size": 239, "dim": 64, "moe_hidden_dim": 32}
    sections = [
        *(f"model.{name}={value}" for name, value in model.items()),
        "links={_target_: routepack.LinkSpeeds, inside_bytes_per_second: 1.0e+9, across_bytes_per_second: 1.0e+9}",
        "move_policy={_target_: routepack.MoveIfItPays, inside_bytes_per_second: 1.0e+9}",
        "cost_model={_target_: routepack.CostModel.for_model, name: qwen3_30b_a3b}",
    ]
    planner = built(*sections).planner
    assert (planner.links.bytes_per_row, planner.cost_model.recompute) == (64 * 2 * 4, False)
    assert (planner.move_policy.parameters_per_expert, planner.move_policy.bytes_per_parameter) == (3 * 64 * 32, 12)
    planner = built(*sections, "trainer.activation_checkpoint=full", "trainer.storage_dtype=bfloat16").planner
    assert (planner.links.bytes_per_row, planner.cost_model.recompute) == (64 * 2 * 6, True)
    assert planner.move_policy.bytes_per_parameter == 6


def test_what_is_given_is_not_derived_and_an_own_policy_needs_no_section():
    assert built("move_policy.parameters_per_expert=5").planner.move_policy.parameters_per_expert == 5
    assert built().planner.move_policy.parameters_per_expert == 3 * 64 * 64


def test_without_a_model_section_a_width_must_be_given():
    config = load([CONFIGS / "plan.yaml"], ["links={_target_: routepack.LinkSpeeds, inside_bytes_per_second: 1.0e+9}"])
    with pytest.raises(ConfigError, match=r"links.dim is not set, and LinkSpeeds needs it"):
        build_planner(config)
