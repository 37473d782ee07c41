"""From a config to everything that a training run is made of; all of it checked before a process starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from omegaconf import DictConfig, OmegaConf
from torchtitan.models.common.decoder import Decoder

from routepack.core.checks import real, whole
from routepack.core.config import build, check_keys, instantiate, section_options
from routepack.core.errors import ConfigError
from routepack.planning.background import MIN_READY_SECONDS
from routepack.planning.from_config import PLANNER_KEYS, build_planner
from routepack.planning.planner import Planner
from routepack.torchtitan.model import cpu_device
from routepack.torchtitan.model.models import TinyQwen3MoE, TrainedModel, num_experts_of
from routepack.torchtitan.trainer.memory import MemoryEstimate, estimate_memory
from routepack.torchtitan.trainer.settings import TrainerSettings
from routepack.training.losses import GRPOTokenLoss, TokenLoss
from routepack.training.tasks import CountingTask, Task

SET_ELSEWHERE = {
    "data_parallel_shard_degree": "topology.data_parallel_degree",
    "data_parallel_replicate_degree": "topology.data_parallel_degree",
    "expert_parallel_degree": "topology.expert_parallel_degree",
    "seed": "seed",
    "dump_folder": "out",
}
"""Fields of TrainerSettings that follow from other sections in every training config, and from which."""
RL_SET_ELSEWHERE = SET_ELSEWHERE | {
    "learning_rate": "warmup.learning_rate and rl.learning_rate",
    "warmup_steps": "warmup.num_steps",
    "num_steps": "rl.num_steps",
}
"""As SET_ELSEWHERE, where a run samples its own windows."""


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """What is sampled for each optimizer step."""

    prompts_per_step: int = 24
    """Prompts of a window."""
    rollouts_per_prompt: int = 8
    """Responses to each prompt; they are compared with each other."""
    max_new_tokens: int = 112
    """A response is cut off after so many tokens."""
    temperature: float = 1.0
    """1 samples from the policy itself, which the policy gradient assumes; 0 takes the likeliest token."""

    def __post_init__(self) -> None:
        _check_wholes("rollout", self, prompts_per_step=1, rollouts_per_prompt=2, max_new_tokens=1)
        _check_reals("rollout", self, "temperature")

    @property
    def num_sequences(self) -> int:
        """S of a window."""
        return self.prompts_per_step * self.rollouts_per_prompt


@dataclass(frozen=True, kw_only=True)
class WarmupSettings:
    """Supervised steps on the task's demonstrations, so that the first rollouts earn some reward."""

    num_steps: int = 80
    """0: none."""
    batch_size: int = 128
    """Demonstrations of each step."""
    learning_rate: float = 1e-2
    """Its peak, after a tenth of the steps; then it falls to a tenth."""

    def __post_init__(self) -> None:
        _check_wholes("warmup", self, num_steps=0, batch_size=1)
        _check_reals("warmup", self, "learning_rate")

    def rate_at(self, step: int) -> float:
        """The learning rate of warm-up step *step*, counted from 0."""
        rising = (step + 1) / max(1, self.num_steps // 10)
        falling = 1.0 - 0.9 * step / max(1, self.num_steps)
        return self.learning_rate * min(1.0, rising) * falling


@dataclass(frozen=True, kw_only=True)
class WindowUpdates:
    """How often a window is trained, and when its plan has to be there."""

    section: ClassVar[str]
    """Of the config."""

    updates_per_window: int = 1
    """Passes over each window, all with its one plan; the clip matters from the second optimizer step on."""
    minibatches_per_window: int = 1
    """Optimizer steps of a pass, each on an equal part of the plan's microbatches; divides packer.microbatch_multiple."""
    plan_ready_seconds: float | None = None
    """Have the plan so many seconds after a window's last rollout, or after it was read, whatever the planner's own budget; the
    same seed then no longer gives the same run."""

    def __post_init__(self) -> None:
        _check_wholes(self.section, self, updates_per_window=1, minibatches_per_window=1)
        if self.plan_ready_seconds is not None:
            real(f"{self.section}.plan_ready_seconds", self.plan_ready_seconds, least=MIN_READY_SECONDS, most=86_400.0)


@dataclass(frozen=True, kw_only=True)
class RLSettings(WindowUpdates):
    """The reinforcement learning itself."""

    section: ClassVar[str] = "rl"

    num_steps: int = 30
    """Windows: rollouts, a plan, and updates on it."""
    learning_rate: float = 1e-3
    """Constant, after three steps of rising to it."""
    advantage_epsilon: float = 1e-4
    """Added to a group's standard deviation of rewards before dividing by it."""
    async_level: int = 0
    """Windows that sampling is ahead of training. 0: each is sampled from the weights that it then trains. 1: the next is
    sampled before this one's update and planned during it, so that it trains weights one step younger (one-step off-policy);
    ratios are then taken to the sampler's recorded log-probabilities."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_wholes("rl", self, num_steps=0)
        _check_reals("rl", self, "learning_rate", "advantage_epsilon")
        whole("rl.async_level", self.async_level, least=0, most=1)

    def rate_at(self, step: int) -> float:
        """The learning rate of RL step *step*, counted from 0."""
        return self.learning_rate * min(1.0, (step + 1) / 3)


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """What ranks run on, and how ``routepack train`` starts them where no launcher did."""

    port: int = 0
    """TCP port where the ranks meet; 0: a free one."""
    threads_per_rank: int = 1
    """``OMP_NUM_THREADS`` of each rank, unless the environment sets it."""
    device: str = ""
    """What every rank must have one of, such as ``cuda``; empty: an accelerator where there is one, else the CPU."""
    device_memory_gib: float = 0.0
    """Memory of a device. A config that needs more is refused; 0: not checked."""

    def __post_init__(self) -> None:
        _check_wholes("launch", self, port=0, threads_per_rank=1)
        _check_reals("launch", self, "device_memory_gib")
        if self.port > 65_535:
            raise ConfigError(f"launch.port={self.port} is no TCP port: choose 1 to 65535, or 0 for a free one.")
        if self.device and self.device not in cpu_device.KNOWN:
            raise ConfigError(
                f"launch.device={self.device!r} is unknown: choose {', '.join(cpu_device.KNOWN)}, or leave it empty."
            )


SECTIONS = ("model", "loss", "trainer", "launch")
TRAIN_KEYS = (*PLANNER_KEYS, *SECTIONS, "out")
"""What every training config may have."""
RL_SECTIONS = ("task", "rollout", "warmup", "rl")


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """Everything that a training run needs to know, wherever its windows come from."""

    planner: Planner
    model: TrainedModel
    loss: TokenLoss
    trainer: TrainerSettings
    launch: LaunchSettings
    out: Path
    """The folder that results are written to."""
    config: DictConfig
    """What it was built from."""

    @property
    def seed(self) -> int:
        """Of parameters, prompts, samples and plans."""
        return self.planner.seed

    @property
    def num_ranks(self) -> int:
        """Processes: the data-parallel degree."""
        return self.planner.topology.data_parallel_degree

    def check_ready(self) -> None:
        """Raise a RoutePackError where something is missing that a run needs: weights, or a folder for results."""
        check_folder(self.out)
        weights = self.trainer.initial_weights
        if weights and not Path(weights).is_dir():
            raise ConfigError(
                f"trainer.initial_weights={weights} is no folder: put safetensors of Hugging Face's format there, or leave "
                "it empty to start from random weights."
            )

    def memory(self) -> MemoryEstimate:
        """What a rank needs of its device's memory."""
        return estimate_memory(self.model, self.trainer, num_ranks=self.num_ranks, max_tokens=self.planner.packer.max_tokens)


@dataclass(frozen=True, kw_only=True, eq=False)
class RLExperiment(Experiment):
    """A run that samples its own windows."""

    task: Task
    rollout: RolloutSettings
    warmup: WarmupSettings
    rl: RLSettings


def build_experiment(config: DictConfig) -> RLExperiment:
    """Build every component that *config* names.

    Raises ConfigError naming the option that is wrong: an unknown key, a ``_target_`` of the wrong kind, degrees that do not
    divide, or sizes of two sections that do not fit each other.
    """
    check_keys(config, (*TRAIN_KEYS, *RL_SECTIONS), what="a training config")
    experiment = RLExperiment(
        **common_parts(config, default_model=TinyQwen3MoE, default_loss=GRPOTokenLoss, set_elsewhere=RL_SET_ELSEWHERE),
        task=build(config, "task", base=Task, default=CountingTask),
        rollout=build(config, "rollout", base=RolloutSettings),
        warmup=build(config, "warmup", base=WarmupSettings),
        rl=build(config, "rl", base=RLSettings),
    )
    check_model(experiment)
    check_minibatches(experiment, experiment.rl)
    _check_fit(experiment)
    return experiment


def common_parts(
    config: DictConfig,
    *,
    default_model: type[TrainedModel] | None,
    default_loss: type[TokenLoss],
    set_elsewhere: Mapping[str, str],
) -> dict[str, Any]:
    """The fields of :class:`Experiment`. *set_elsewhere*: what the trainer section may not set, and what it follows from."""
    planner = build_planner(config)
    return {
        "planner": planner,
        "model": build(config, "model", base=TrainedModel, default=default_model),
        "loss": build(config, "loss", base=TokenLoss, default=default_loss),
        "trainer": _trainer_settings(config, planner, set_elsewhere),
        "launch": build(config, "launch", base=LaunchSettings),
        "out": _folder(config),
        "config": config,
    }


def _trainer_settings(config: DictConfig, planner: Planner, set_elsewhere: Mapping[str, str]) -> TrainerSettings:
    options = section_options(config, "trainer")
    for name in options.keys() & set_elsewhere.keys():
        raise ConfigError(f"trainer.{name} is not set here: it follows from {set_elsewhere[name]}.")
    allowed = [field.name for field in fields(TrainerSettings) if field.name not in set_elsewhere]
    check_keys(options, allowed, where="trainer", what="the trainer section")
    topology = planner.topology
    if topology.model_parallel_degree != 1:
        raise ConfigError(
            f"topology.model_parallel_degree={topology.model_parallel_degree}: train supports 1, data-parallel ranks."
        )
    return replace(
        instantiate(TrainerSettings, options, where="trainer"),
        data_parallel_shard_degree=topology.data_parallel_degree,
        expert_parallel_degree=topology.expert_parallel_degree,
        seed=planner.seed,
        dump_folder=str(_folder(config)),
    )


def _folder(config: DictConfig) -> Path:
    if OmegaConf.is_missing(config, "out") or config.get("out") is None:
        raise ConfigError("out is not set: name a folder for the results, as in out=runs/tiny_rl.")
    folder = Path(str(config["out"]))
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out={folder} is a file: name a folder.")
    return folder


def check_folder(out: Path) -> None:
    """Raise ConfigError where *out* cannot be made or written; leaves nothing behind."""
    nearest = next((one for one in (out, *out.absolute().parents) if os.path.lexists(one)), Path("/"))
    try:
        with tempfile.TemporaryDirectory(prefix=".routepack-", dir=nearest):
            pass
    except OSError as error:
        raise ConfigError(f"out={out} cannot be made: {nearest}: {error.strerror}: choose another folder.") from error


def check_model(experiment: Experiment) -> None:
    """Raise ConfigError where model, topology, collector and device do not fit each other."""
    experts, counted = num_experts_of(experiment.model.model_spec()), experiment.planner.collector.num_experts
    experiment.planner.topology.slots_per_rank(experts)
    if counted not in (0, experts):
        raise ConfigError(
            f"collector.num_experts={counted} is not the model's {experts}: leave it out, it follows from the model."
        )
    if experiment.launch.device_memory_gib:
        experiment.memory().check(experiment.launch.device_memory_gib)


def check_minibatches(experiment: Experiment, updates: WindowUpdates) -> None:
    """Raise ConfigError where a plan's microbatches could not be dealt to the optimizer steps of a pass."""
    parts, multiple = updates.minibatches_per_window, experiment.planner.packer.rules.microbatch_multiple
    if multiple % parts:
        raise ConfigError(
            f"{updates.section}.minibatches_per_window={parts} does not divide packer.microbatch_multiple={multiple}: set that "
            f"to {parts}, so that every plan's microbatches can be dealt equally."
        )


def _check_fit(experiment: RLExperiment) -> None:
    task, rollout = experiment.task, experiment.rollout
    model = cast(Decoder.Config, experiment.model.model_spec().model)
    if model.vocab_size < task.vocab_size:
        raise ConfigError(f"model.vocab_size={model.vocab_size} is less than the task's {task.vocab_size} tokens: raise it.")
    longest = task.max_prompt_tokens + max(rollout.max_new_tokens, task.max_answer_tokens)
    limits = {"model.max_seq_len": model.max_seq_len, "packer.max_tokens": experiment.planner.packer.max_tokens}
    for option, limit in limits.items():
        if limit < longest:
            raise ConfigError(
                f"{option}={limit} is less than a prompt of {task.max_prompt_tokens} tokens and an answer of "
                f"{longest - task.max_prompt_tokens} (rollout.max_new_tokens={rollout.max_new_tokens}, the task's answers and "
                f"demonstrations up to {task.max_answer_tokens}): raise it."
            )
    smallest = min(rollout.num_sequences, experiment.warmup.batch_size)
    if smallest < experiment.num_ranks:
        raise ConfigError(
            f"{smallest} sequences a step are fewer than topology.data_parallel_degree={experiment.num_ranks}, and every rank "
            "needs one: raise rollout.prompts_per_step or warmup.batch_size."
        )


def _check_wholes(section: str, settings: object, **lowest: int) -> None:
    for name, least in lowest.items():
        whole(f"{section}.{name}", getattr(settings, name), least=least)


def _check_reals(section: str, settings: object, *names: str) -> None:
    for name in names:
        real(f"{section}.{name}", getattr(settings, name), least=0.0)
