"""How to train, as a config says it, with everything checked before a process group starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from routepack.core.component import Component, Count, CountOrZero, Limits, NotNegative, Positive
from routepack.core.errors import ConfigError
from routepack.training.expert_moves import STAGING_BYTES

LEAST_STAGING_BYTES = 2**16
PARTIAL_DTENSOR, SPMD_TYPES = "partial_dtensor", "spmd_types"
SPMD_TYPES_SINCE = (2, 14)
"""The first torch whose FSDP shards parameters that carry ``spmd_types``."""
Decay = Annotated[float, Limits(least=0.0, most=1.0 - 1e-12)]


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(Component):
    """How to train: parallel degrees, optimizer and the rest of what TorchTitan's Trainer needs to know."""

    section: ClassVar[str] = "trainer"

    data_parallel_shard_degree: Annotated[int, Limits(least=-1)] = -1
    """Ranks that FSDP shards over; -1: all that data_parallel_replicate_degree leaves."""
    data_parallel_replicate_degree: Count = 1
    """Copies of the sharded model (HSDP)."""
    expert_parallel_degree: Count = 1
    """R, the ranks that share one copy of every layer's experts; divides data_parallel_shard_degree."""
    learning_rate: NotNegative = 1e-3
    """Constant after warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay of the first and second moment."""
    epsilon: Positive = 1e-8
    """AdamW's denominator is at least this."""
    weight_decay: NotNegative = 0.1
    """AdamW's decoupled decay."""
    max_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps over which the learning rate rises linearly."""
    num_steps: Count = 10_000
    """TorchTitan's ``training.steps``; only its own loop ends there, ``update`` may be called on."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What FSDP casts parameters to for compute."""
    storage_dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters and both moments are kept and updated in. bfloat16 loses small updates."""
    staging_bytes: Annotated[int, Limits(least=LEAST_STAGING_BYTES)] = STAGING_BYTES
    """The most memory that a rank uses beside its experts while they move; every moving expert needs a part of it."""
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    """What to recompute in the backward pass, as TorchTitan names it."""
    gather: Literal["layer", "step"] = "layer"
    """When FSDP's ranks meet. ``layer``: in every layer of every microbatch, whose parameters are gathered, used and freed.
    ``step``: once a window, with parameters and gradients unsharded on every rank from its first to its last microbatch."""
    pad_to_multiple_of: Count = 1
    """Microbatches are padded to a multiple of this many tokens."""
    spmd_backend: str = PARTIAL_DTENSOR
    """How TorchTitan writes its parallelism down: ``partial_dtensor``, on any torch, or ``spmd_types``, TorchTitan's default,
    from torch 2.14 on. Layouts and results are the same."""
    initial_weights: str = ""
    """A folder of weights in Hugging Face's format to start from; empty: draw them. A checkpoint to resume from comes after."""
    seed: CountOrZero = 0
    """Of the initial parameters; the same parameters whatever the parallel degrees."""
    deterministic: bool = False
    """Use deterministic algorithms only, or fail."""
    placement_invariant: bool = False
    """Add in an order that does not depend on where experts are: a run with moves has the bits of one without."""
    dump_folder: str = "outputs"
    """Where TensorBoard files and checkpoints go."""
    enable_tensorboard: bool = False
    """Write TensorBoard scalars on rank 0."""
    checkpoint_interval: CountOrZero = 0
    """Save weights, moments and placement every so many steps; 0: never."""
    checkpoints_kept: CountOrZero = 2
    """The latest checkpoints to keep, at least 2 as the latest may be in writing; 0: all."""
    async_checkpoints: bool = False
    """Copy the state to host memory and write it while training goes on."""
    step_log: str = ""
    """Append every step's loads and seconds to this file, for ``routepack calibrate``; empty: do not."""
    timeout_seconds: Count = 300
    """A collective that takes longer fails."""

    def check_options(self) -> None:
        """Raise ConfigError where options do not go together, or not with the torch that is installed."""
        if self.data_parallel_shard_degree == 0:
            raise ConfigError("trainer.data_parallel_shard_degree=0 must be at least 1, or -1 for all ranks.")
        _check_spmd_backend(self.spmd_backend)
        if self.placement_invariant and self.data_parallel_replicate_degree > 2:
            raise ConfigError(
                f"trainer.placement_invariant=true cannot order the sum over data_parallel_replicate_degree="
                f"{self.data_parallel_replicate_degree} replicas, which FSDP hands to the transport: use 2 or 1."
            )
        if self.checkpoints_kept == 1:
            raise ConfigError("trainer.checkpoints_kept=1 must be at least 2, as the latest may be in writing, or 0 for all.")

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
