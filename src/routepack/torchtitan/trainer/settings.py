"""From plain config values to TorchTitan's Trainer.Config, with everything checked before a process group starts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

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
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import filesystem

from routepack.core.checks import real, whole
from routepack.core.errors import ConfigError
from routepack.torchtitan.checkpoints.checkpoint import PlacedCheckpointManager
from routepack.torchtitan.model.models import TrainedModel, num_experts_of
from routepack.torchtitan.moves.expert_moves import STAGING_BYTES
from routepack.torchtitan.moves.invariance import make_invariant

LEAST_STAGING_BYTES = 2**16
_RECOMPUTE: dict[str, type[ActivationCheckpointing] | None] = {"none": None, "selective": SelectiveAC, "full": FullAC}
PARTIAL_DTENSOR, SPMD_TYPES = "partial_dtensor", "spmd_types"
SPMD_TYPES_SINCE = (2, 14)
"""The first torch whose FSDP shards parameters that carry ``spmd_types``."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """How to train: parallel degrees, optimizer and the rest of what TorchTitan's Trainer needs to know."""

    data_parallel_shard_degree: int = -1
    """Ranks that FSDP shards over; -1: all that data_parallel_replicate_degree leaves."""
    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model (HSDP)."""
    expert_parallel_degree: int = 1
    """R, the ranks that share one copy of every layer's experts; divides data_parallel_shard_degree."""
    learning_rate: float = 1e-3
    """Constant after warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the first and second moment."""
    epsilon: float = 1e-8
    """AdamW's denominator is at least this."""
    weight_decay: float = 0.1
    """AdamW's decoupled decay."""
    max_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly."""
    num_steps: int = 10_000
    """TorchTitan's ``training.steps``; only its own loop ends there, ``update`` may be called on."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What FSDP casts parameters to for compute."""
    storage_dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters and both moments are kept and updated in. bfloat16 loses small updates."""
    staging_bytes: int = STAGING_BYTES
    """The most memory that a rank uses beside its experts while they move."""
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    """What to recompute in the backward pass, as TorchTitan names it."""
    gather: Literal["layer", "step"] = "layer"
    """When FSDP's ranks meet. ``layer``: in every layer of every microbatch, whose parameters are gathered, used and freed.
    ``step``: once a window, with parameters and gradients unsharded on every rank from its first to its last microbatch."""
    pad_to_multiple_of: int = 1
    """Microbatches are padded to a multiple of this many tokens."""
    spmd_backend: str = PARTIAL_DTENSOR
    """How TorchTitan writes its parallelism down: ``partial_dtensor``, on any torch, or ``spmd_types``, TorchTitan's default,
    from torch 2.14 on. Layouts and results are the same."""
    initial_weights: str = ""
    """A folder of weights in Hugging Face's format to start from; empty: draw them. A checkpoint to resume from comes after."""
    seed: int = 0
    """Of the initial parameters; the same parameters whatever the parallel degrees."""
    deterministic: bool = False
    """Use deterministic algorithms only, or fail."""
    placement_invariant: bool = False
    """Add in an order that does not depend on where experts are: a run with moves has the bits of one without."""
    dump_folder: str = "outputs"
    """Where TensorBoard files and checkpoints go."""
    enable_tensorboard: bool = False
    """Write TensorBoard scalars on rank 0."""
    checkpoint_interval: int = 0
    """Save weights, moments and placement every so many steps; 0: never."""
    checkpoints_kept: int = 2
    """The latest checkpoints to keep, at least 2; 0: all."""
    async_checkpoints: bool = False
    """Copy the state to host memory and write it while training goes on."""
    step_log: str = ""
    """Append every step's loads and seconds to this file, for ``routepack calibrate``; empty: do not."""
    timeout_seconds: int = 300
    """A collective that takes longer fails."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for name in ("data_parallel_replicate_degree", "expert_parallel_degree", "pad_to_multiple_of", "timeout_seconds"):
            whole(f"trainer.{name}", getattr(self, name), least=1)
        for name, least in (("learning_rate", 0.0), ("weight_decay", 0.0), ("epsilon", 1e-30), ("max_norm", 1e-30)):
            real(f"trainer.{name}", getattr(self, name), least=least)
        for beta in self.betas:
            real("trainer.betas", beta, least=0.0, most=1.0 - 1e-12)
        if self.data_parallel_shard_degree != -1:
            whole("trainer.data_parallel_shard_degree (or -1, all)", self.data_parallel_shard_degree, least=1)
        if self.activation_checkpoint not in _RECOMPUTE:
            raise ConfigError(
                f"trainer.activation_checkpoint={self.activation_checkpoint!r} is unknown: choose {', '.join(_RECOMPUTE)}."
            )
        if self.gather not in ("layer", "step"):
            raise ConfigError(f"trainer.gather={self.gather!r} is unknown: choose layer or step.")
        for name in ("param_dtype", "storage_dtype"):
            if getattr(self, name) not in ("float32", "bfloat16"):
                raise ConfigError(f"trainer.{name}={getattr(self, name)!r} is unknown: choose float32 or bfloat16.")
        _check_spmd_backend(self.spmd_backend)
        if self.placement_invariant and self.data_parallel_replicate_degree > 2:
            raise ConfigError(
                f"trainer.placement_invariant=true cannot order the sum over data_parallel_replicate_degree="
                f"{self.data_parallel_replicate_degree} replicas, which FSDP hands to the transport: use 2 or 1."
            )
        whole("trainer.checkpoint_interval (0: never)", self.checkpoint_interval, least=0)
        if whole("trainer.checkpoints_kept (0: all)", self.checkpoints_kept, least=0) == 1:
            raise ConfigError(
                f"trainer.checkpoints_kept={self.checkpoints_kept} must be at least 2, as the latest may be in writing, or 0 "
                "for all."
            )
        if whole("trainer.staging_bytes", self.staging_bytes, least=0) < LEAST_STAGING_BYTES:
            raise ConfigError(
                f"trainer.staging_bytes={self.staging_bytes} must be at least {LEAST_STAGING_BYTES}: every moving expert needs "
                "a part of it."
            )

    def shard_degree(self, world_size: int, num_experts: int) -> int:
        """The ranks that FSDP shards over. Raises ConfigError where the degrees do not fit the world or the experts."""
        shard, replicate = self.data_parallel_shard_degree, self.data_parallel_replicate_degree
        if shard == -1:
            shard = max(world_size // replicate, 1)
        if shard * replicate != world_size:
            raise ConfigError(
                f"trainer.data_parallel_shard_degree={shard} x data_parallel_replicate_degree={replicate} needs "
                f"{shard * replicate} ranks; {world_size} were started: change a degree or start as many."
            )
        if shard % self.expert_parallel_degree:
            raise ConfigError(
                f"trainer.expert_parallel_degree={self.expert_parallel_degree} does not divide "
                f"data_parallel_shard_degree={shard}: choose a divisor of {shard}."
            )
        if num_experts % self.expert_parallel_degree:
            raise ConfigError(
                f"trainer.expert_parallel_degree={self.expert_parallel_degree} does not divide the model's {num_experts} "
                f"experts: choose a divisor of {num_experts}."
            )
        return shard


def _check_spmd_backend(name: str) -> None:
    if name == "full_dtensor":
        raise ConfigError(
            "trainer.spmd_backend='full_dtensor' is not supported: its logits are DTensors, and losses here take each rank's "
            f"own tokens. Choose {PARTIAL_DTENSOR}, or {SPMD_TYPES} from torch 2.14 on."
        )
    if name not in (PARTIAL_DTENSOR, SPMD_TYPES):
        raise ConfigError(f"trainer.spmd_backend={name!r} is unknown: choose {PARTIAL_DTENSOR} or {SPMD_TYPES}.")
    if name == SPMD_TYPES and torch_version() < SPMD_TYPES_SINCE:
        raise ConfigError(
            f"trainer.spmd_backend={SPMD_TYPES!r} needs torch 2.14 or newer, whose FSDP shards such parameters; this is torch "
            f"{torch.__version__}: choose {PARTIAL_DTENSOR}."
        )


def torch_version() -> tuple[int, int]:
    """Major and minor version of the torch that is installed."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


class NoTokenizer(BaseTokenizer):
    """Batches come as token ids; TorchTitan wants a tokenizer all the same."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to set."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Raises NotImplementedError."""
        raise NotImplementedError("RoutePack trains on token ids.")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Raises NotImplementedError."""
        raise NotImplementedError("RoutePack trains on token ids.")

    def get_vocab_size(self) -> int:
        """Raises NotImplementedError."""
        raise NotImplementedError("RoutePack trains on token ids.")


class NoDataLoader(BaseDataLoader):
    """Windows come through ``RoutePackTrainer.update``; TorchTitan's own loop finds no data and ends."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to set."""

    def __init__(self, config: Config, **kwargs: Any) -> None: ...

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """No batch."""
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""


class StepMetrics(MetricsProcessor):
    """Keeps what TorchTitan's train step would print, for ``update`` to return."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """As TorchTitan's."""

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
    """The fields of a TorchTitan ``Trainer.Config``; raises ConfigError where they do not fit the ranks that were started."""
    spec = model.model_spec()
    if settings.placement_invariant:
        make_invariant(spec, max_norm=settings.max_norm)
    shard_degree = settings.shard_degree(int(os.environ.get("WORLD_SIZE", "1")), num_experts_of(spec))
    recompute = _RECOMPUTE[settings.activation_checkpoint]
    return {
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
        "training": _training(settings, spec),
        "parallelism": _parallelism(settings, shard_degree),
        "checkpoint": _checkpoint(settings),
        "activation_checkpoint": None if recompute is None else recompute.Config(),
        "comm": CommConfig(init_timeout_seconds=settings.timeout_seconds, trace_buf_size=0),
        "debug": DebugConfig(seed=settings.seed, deterministic=settings.deterministic, enable_structured_logging=False),
        "override": OverrideConfig(imports=model.override_imports()),
    }


def _training(settings: TrainerSettings, spec: ModelSpec) -> TrainingConfig:
    # TorchTitan cuts the table of rotary angles to seq_len, so this is what a sequence may have, not what a microbatch has.
    return TrainingConfig(
        local_batch_size=1,
        seq_len=cast(Decoder.Config, spec.model).max_seq_len,
        # Where sums are ordered the gradients are clipped just before the step.
        max_norm=math.inf if settings.placement_invariant else settings.max_norm,
        steps=settings.num_steps,
        disable_cuda_graphs=True,
        dtype=settings.storage_dtype,
        mixed_precision_param=settings.param_dtype,
    )


def _parallelism(settings: TrainerSettings, shard_degree: int) -> ParallelismConfig:
    return ParallelismConfig(
        data_parallel_replicate_degree=settings.data_parallel_replicate_degree,
        data_parallel_shard_degree=shard_degree,
        expert_parallel_degree=settings.expert_parallel_degree,
        spmd_backend=cast(Any, settings.spmd_backend),
    )


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
