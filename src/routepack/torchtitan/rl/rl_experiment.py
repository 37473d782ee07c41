"""From a config to a run that samples its own windows; all of it checked before a process starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, cast

from omegaconf import DictConfig
from torchtitan.models.common.decoder import Decoder

from routepack.core.component import Component, Count, CountOrZero, Limits, NotNegative
from routepack.core.config import build, check_keys
from routepack.core.errors import ConfigError
from routepack.torchtitan.experiments.experiment import SET_ELSEWHERE, TRAIN_KEYS, Experiment, WindowUpdates, common_parts
from routepack.torchtitan.model.models import TinyQwen3MoE
from routepack.training.losses import GRPOTokenLoss
from routepack.training.tasks import CountingTask, Task

RL_SET_ELSEWHERE = SET_ELSEWHERE | {
    "learning_rate": "warmup.learning_rate and rl.learning_rate",
    "warmup_steps": "warmup.num_steps",
    "num_steps": "rl.num_steps",
}
"""Fields of TrainerSettings that follow from other sections, and from which."""


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Component):
    """What is sampled for each optimizer step."""

    section: ClassVar[str] = "rollout"

    prompts_per_step: Count = 24
    """Prompts of a window."""
    rollouts_per_prompt: Annotated[int, Limits(least=2)] = 8
    """Responses to each prompt; they are compared with each other."""
    max_new_tokens: Count = 112
    """A response is cut off after so many tokens."""
    temperature: NotNegative = 1.0
    """1 samples from the policy itself, which the policy gradient assumes; 0 takes the likeliest token."""

    @property
    def num_sequences(self) -> int:
        """S of a window."""
        return self.prompts_per_step * self.rollouts_per_prompt


@dataclass(frozen=True, kw_only=True)
class WarmupSettings(Component):
    """Supervised steps on the task's demonstrations, so that the first rollouts earn some reward."""

    section: ClassVar[str] = "warmup"

    num_steps: CountOrZero = 80
    """0: none."""
    batch_size: Count = 128
    """Demonstrations of each step."""
    learning_rate: NotNegative = 1e-2
    """Its peak, after a tenth of the steps; then it falls to a tenth."""

    def rate_at(self, step: int) -> float:
        """The learning rate of warm-up step *step*, counted from 0."""
        rising = (step + 1) / max(1, self.num_steps // 10)
        falling = 1.0 - 0.9 * step / max(1, self.num_steps)
        return self.learning_rate * min(1.0, rising) * falling


@dataclass(frozen=True, kw_only=True)
class RLSettings(WindowUpdates):
    """The reinforcement learning itself."""

    section: ClassVar[str] = "rl"

    num_steps: CountOrZero = 30
    """Windows: rollouts, a plan, and updates on it."""
    learning_rate: NotNegative = 1e-3
    """Constant, after three steps of rising to it."""
    advantage_epsilon: NotNegative = 1e-4
    """Added to a group's standard deviation of rewards before dividing by it."""
    async_level: Annotated[int, Limits(least=0, most=1)] = 0
    """Windows that sampling is ahead of training. 0: each is sampled from the weights that it then trains. 1: the next is
    sampled before this one's update and planned during it, so that it trains weights one step younger (one-step off-policy);
    ratios are then taken to the sampler's recorded log-probabilities."""

    def rate_at(self, step: int) -> float:
        """The learning rate of RL step *step*, counted from 0."""
        return self.learning_rate * min(1.0, (step + 1) / 3)


@dataclass(frozen=True, kw_only=True, eq=False)
class RLExperiment(Experiment):
    """A run that samples its own windows."""

    task: Task
    rollout: RolloutSettings
    warmup: WarmupSettings
    rl: RLSettings

    @property
    def updates(self) -> WindowUpdates:
        """The rl section."""
        return self.rl

    def check_parts(self) -> None:
        """Raise ConfigError where two sections do not fit each other, those of the task and the rollouts too."""
        super().check_parts()
        task, rollout = self.task, self.rollout
        model = cast(Decoder.Config, self.model.model_spec().model)
        if model.vocab_size < task.vocab_size:
            raise ConfigError(
                f"model.vocab_size={model.vocab_size} is less than the task's {task.vocab_size} tokens: raise it."
            )
        longest = task.max_prompt_tokens + max(rollout.max_new_tokens, task.max_answer_tokens)
        limits = {"model.max_seq_len": model.max_seq_len, "packer.max_tokens": self.planner.packer.max_tokens}
        for option, limit in limits.items():
            if limit < longest:
                raise ConfigError(
                    f"{option}={limit} is less than a prompt of {task.max_prompt_tokens} tokens and an answer of "
                    f"{longest - task.max_prompt_tokens} (rollout.max_new_tokens={rollout.max_new_tokens}, the task's answers "
                    f"and demonstrations up to {task.max_answer_tokens}): raise it."
                )
        smallest = min(rollout.num_sequences, self.warmup.batch_size)
        if smallest < self.num_ranks:
            raise ConfigError(
                f"{smallest} sequences a step are fewer than topology.data_parallel_degree={self.num_ranks}, and every rank "
                "needs one: raise rollout.prompts_per_step or warmup.batch_size."
            )


def build_experiment(config: DictConfig) -> RLExperiment:
    """Build every component that *config* names.

    Raises ConfigError naming the option that is wrong: an unknown key, a ``_target_`` of the wrong kind, degrees that do not
    divide, or sizes of two sections that do not fit each other.
    """
    check_keys(config, (*TRAIN_KEYS, "task", "rollout", "warmup", "rl"), what="a training config")
    experiment = RLExperiment(
        **common_parts(config, default_model=TinyQwen3MoE, default_loss=GRPOTokenLoss, set_elsewhere=RL_SET_ELSEWHERE),
        task=build(config, "task", base=Task, default=CountingTask),
        rollout=build(config, "rollout", base=RolloutSettings),
        warmup=build(config, "warmup", base=WarmupSettings),
        rl=build(config, "rl", base=RLSettings),
    )
    experiment.check_parts()
    return experiment
