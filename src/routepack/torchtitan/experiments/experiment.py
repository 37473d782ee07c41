"""From a config to what every training run is made of; all of it checked before a process starts."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from omegaconf import DictConfig, OmegaConf

from routepack.core.component import Component, Count, Limits, NotNegative
from routepack.core.config import build, check_keys, instantiate, section_options
from routepack.core.errors import ConfigError
from routepack.planning.background import MIN_READY_SECONDS
from routepack.planning.from_config import PLANNER_KEYS, build_planner
from routepack.planning.planner import Planner
from routepack.torchtitan.experiments.derived_options import check_sync, with_derived_options
from routepack.torchtitan.model.models import TrainedModel, num_experts_of
from routepack.torchtitan.trainer.memory import MemoryEstimate, estimate_memory
from routepack.torchtitan.trainer.settings import TrainerSettings
from routepack.training.losses import TokenLoss

SET_ELSEWHERE = {
    "data_parallel_shard_degree": "topology.data_parallel_degree",
    "data_parallel_replicate_degree": "topology.data_parallel_degree",
    "expert_parallel_degree": "topology.expert_parallel_degree",
    "seed": "seed",
    "dump_folder": "out",
}
"""Fields of TrainerSettings that follow from other sections in every training config, and from which."""
TRAIN_KEYS = (*PLANNER_KEYS, "model", "loss", "trainer", "launch", "out")
"""What every training config may have."""


@dataclass(frozen=True, kw_only=True)
class WindowUpdates(Component):
    """How often a window is trained, and when its plan has to be there."""

    updates_per_window: Count = 1
    """Passes over each window, all with its one plan; the clip matters from the second optimizer step on."""
    minibatches_per_window: Count = 1
    """Optimizer steps of a pass, each on an equal part of the plan's microbatches; divides packer.microbatch_multiple."""
    plan_ready_seconds: Annotated[float, Limits(least=MIN_READY_SECONDS, most=86_400.0)] | None = None
    """Have the plan so many seconds after a window's last rollout, or after it was read, whatever the planner's own budget; the
    same seed then no longer gives the same run."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings(Component):
    """What ranks run on, and how ``routepack train`` starts them where no launcher did."""

    section: ClassVar[str] = "launch"

    port: Annotated[int, Limits(least=0, most=65_535)] = 0
    """TCP port where the ranks meet; 0: a free one."""
    threads_per_rank: Count = 1
    """``OMP_NUM_THREADS`` of each rank, unless the environment sets it."""
    device: Literal["cpu", "cuda", "xpu", "npu", "hpu", "mps"] | None = None
    """What every rank must have one of; None: an accelerator where there is one, else the CPU."""
    device_memory_gib: NotNegative = 0.0
    """Memory of a device. A config that needs more is refused; 0: not checked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment(ABC):
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
    @abstractmethod
    def updates(self) -> WindowUpdates:
        """How often each window is trained."""

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

    def check_parts(self) -> None:
        """Raise ConfigError where planner, model, trainer and device do not fit each other."""
        experts, counted = num_experts_of(self.model.model_spec()), self.planner.collector.num_experts
        self.planner.topology.slots_per_rank(experts)
        if counted not in (0, experts):
            raise ConfigError(
                f"collector.num_experts={counted} is not the model's {experts}: leave it out, it follows from the model."
            )
        check_sync(self.planner, self.trainer.gather)
        if self.launch.device_memory_gib:
            self.memory().check(self.launch.device_memory_gib)
        parts, multiple = self.updates.minibatches_per_window, self.planner.packer.rules.microbatch_multiple
        if multiple % parts:
            raise ConfigError(
                f"{self.updates.section}.minibatches_per_window={parts} does not divide packer.microbatch_multiple={multiple}: "
                f"set that to {parts}, so that every plan's microbatches can be dealt equally."
            )


def common_parts(
    config: DictConfig,
    *,
    default_model: type[TrainedModel] | None,
    default_loss: type[TokenLoss],
    set_elsewhere: Mapping[str, str],
) -> dict[str, Any]:
    """The fields of :class:`Experiment`. *set_elsewhere*: what the trainer section may not set, and what it follows from."""
    model = build(config, "model", base=TrainedModel, default=default_model)
    settings = _trainer_settings(config, set_elsewhere)
    planner = build_planner(with_derived_options(config, model.model_spec(), settings))
    topology, out = planner.topology, _folder(config)
    if topology.model_parallel_degree != 1:
        raise ConfigError(
            f"topology.model_parallel_degree={topology.model_parallel_degree}: train supports 1, data-parallel ranks."
        )
    return {
        "planner": planner,
        "model": model,
        "loss": build(config, "loss", base=TokenLoss, default=default_loss),
        "trainer": replace(
            settings,
            data_parallel_shard_degree=topology.data_parallel_degree,
            expert_parallel_degree=topology.expert_parallel_degree,
            seed=planner.seed,
            dump_folder=str(out),
        ),
        "launch": build(config, "launch", base=LaunchSettings),
        "out": out,
        "config": config,
    }


def _trainer_settings(config: DictConfig, set_elsewhere: Mapping[str, str]) -> TrainerSettings:
    options = section_options(config, "trainer")
    for name in options.keys() & set_elsewhere.keys():
        raise ConfigError(f"trainer.{name} is not set here: it follows from {set_elsewhere[name]}.")
    allowed = [field.name for field in fields(TrainerSettings) if field.name not in set_elsewhere]
    check_keys(options, allowed, where="trainer", what="the trainer section")
    return instantiate(TrainerSettings, options, where="trainer")


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
