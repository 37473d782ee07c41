"""TorchTitan's Trainer.Config for a model and its TrainerSettings, and stand-ins for the parts that RoutePack does not use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, DebugConfig
from torchtitan.config.override import OverrideConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import filesystem

from routepack.core.errors import ConfigError
from routepack.torchtitan.checkpoints.checkpoint import PlacedCheckpointManager
from routepack.torchtitan.model.models import TrainedModel, num_experts_of
from routepack.torchtitan.moves.invariance import make_invariant
from routepack.torchtitan.trainer.settings import TrainerSettings

_RECOMPUTE: dict[str, type[ActivationCheckpointing] | None] = {"none": None, "selective": SelectiveAC, "full": FullAC}


class NoTokenizer(BaseTokenizer):
    """Stands for the tokenizer that TorchTitan wants; windows come as token ids."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """There is nothing to set."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError, and so do the others."""
        raise NotImplementedError("RoutePack trains on token ids.")

    decode = get_vocab_size = encode


class NoDataLoader(BaseDataLoader):
    """Windows come through ``RoutePackTrainer.update``; TorchTitan's own loop finds no data and ends."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """There is nothing to set."""

    def __init__(self, config: Config, **kwargs: Any) -> None: ...

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """An iterator that has ended."""
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """An empty state: there is no position in the data to keep."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is no position in the data to load."""


class StepMetrics(MetricsProcessor):
    """Keeps what TorchTitan's train step would print, for ``update`` to return."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """The options of TorchTitan's own."""

    last: dict[str, float]

    def should_log(self, step: int) -> bool:
        """True: every step's figures are wanted."""
        return True

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Keep loss and gradient norm (before clipping)."""
        self.last = {"loss": global_avg_loss, "grad_norm": grad_norm}


def config_fields(model: TrainedModel, settings: TrainerSettings) -> dict[str, Any]:
    """The fields of ``RoutePackTrainer.Config``; raises ConfigError where they do not fit the ranks that were started."""
    spec = model.model_spec()
    if settings.placement_invariant:
        make_invariant(spec, max_norm=settings.max_norm)
    shard_degree = settings.shard_degree(int(os.environ.get("WORLD_SIZE", "1")), num_experts_of(spec))
    recompute = _RECOMPUTE[settings.activation_checkpoint]
    return {
        "model": model,
        "settings": settings,
        "model_spec": spec,
        "loss": CrossEntropyLoss.Config(),
        "tokenizer": NoTokenizer.Config(),
        "dataloader": NoDataLoader.Config(),
        "dump_folder": settings.dump_folder,
        "hf_assets_path": "",
        "metrics": StepMetrics.Config(enable_tensorboard=settings.enable_tensorboard, disable_color_printing=True),
        "optimizer": default_adamw(
            lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, weight_decay=settings.weight_decay
        ),
        # A decay to 1 times the rate is no decay, and unlike "no decay" it may go on past training.steps.
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=settings.warmup_steps, min_lr_factor=1.0),
        "training": TrainingConfig(
            local_batch_size=1,
            # TorchTitan cuts the table of rotary angles to seq_len: what a sequence may have, not what a microbatch has.
            seq_len=cast(Decoder.Config, spec.model).max_seq_len,
            # Where sums are ordered the gradients are clipped just before the step.
            max_norm=math.inf if settings.placement_invariant else settings.max_norm,
            steps=settings.num_steps,
            disable_cuda_graphs=True,
            dtype=settings.storage_dtype,
            mixed_precision_param=settings.param_dtype,
        ),
        "parallelism": ParallelismConfig(
            data_parallel_replicate_degree=settings.data_parallel_replicate_degree,
            data_parallel_shard_degree=shard_degree,
            expert_parallel_degree=settings.expert_parallel_degree,
            spmd_backend=cast(Any, settings.spmd_backend),
        ),
        "checkpoint": _checkpoint(settings),
        "activation_checkpoint": None if recompute is None else recompute.Config(),
        "comm": CommConfig(init_timeout_seconds=settings.timeout_seconds, trace_buf_size=0),
        "debug": DebugConfig(seed=settings.seed, deterministic=settings.deterministic, enable_structured_logging=False),
        "override": OverrideConfig(imports=model.override_imports()),
    }


def _checkpoint(settings: TrainerSettings) -> PlacedCheckpointManager.Config:
    if filesystem.is_remote(settings.dump_folder):
        raise ConfigError(f"out={settings.dump_folder} cannot be renamed in one go, as checkpoints are: name a mounted folder.")
    return PlacedCheckpointManager.Config(
        enable=bool(settings.checkpoint_interval),
        interval=settings.checkpoint_interval or 1,
        keep_latest_k=settings.checkpoints_kept,
        async_mode="async" if settings.async_checkpoints else "disabled",
        initial_load_model_only=False,
        last_save_model_only=False,
    )


def start_alone() -> None:
    """Start a process group of this process alone, unless a launcher prepared one: no port and no variables are needed."""
    if "RANK" in os.environ or dist.is_initialized():
        return
    os.environ.setdefault("LOCAL_RANK", "0")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
