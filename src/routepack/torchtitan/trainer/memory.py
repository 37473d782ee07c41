"""What training needs of a device's memory: counted from shapes, before any rank starts.

Letters: L layers, D model dim, F hidden dim of an expert, K experts a token, V vocabulary, n tokens of a microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from torch import Tensor, nn
from torchtitan.models.common.decoder import Decoder

from routepack.core.errors import ConfigError
from routepack.torchtitan.model import overrides
from routepack.torchtitan.model.models import TrainedModel, build_meta_model, num_experts_of, top_k_of
from routepack.torchtitan.trainer.settings import TrainerSettings

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
REDUCED = 4
"""Bytes of an element while gradients are summed over ranks: TorchTitan reduces in float32."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the fullest rank. What lasts is exact; what comes and goes is the least that it takes."""

    num_ranks: int
    expert_parallel_degree: int
    weights: int
    """This rank's part of every parameter, in ``storage_dtype``."""
    gradients: int
    """As large, once the backward pass has summed them over ranks."""
    optimizer: int
    """AdamW's two moments, each as large."""
    rotary: int
    """Tables of rotary angles, one for each layer, on every rank."""
    staging: int
    """``staging_bytes``: the most that moving experts uses; free during a step."""
    gathered: int
    """Parameters and gradients that FSDP holds whole for a moment (``gather: step``: for the whole step)."""
    activations: int
    """Layer inputs that are kept, and one layer's expert rows under an even load. More without
    ``activation_checkpoint: full``, and where load is uneven."""
    logits: int
    """Three float32 [n, V] arrays at the start of the backward pass."""

    @property
    def lasting(self) -> int:
        """What is there all the time."""
        return self.weights + self.gradients + self.optimizer + self.rotary

    @property
    def total(self) -> int:
        """The most at one time: what lasts, and what a step or a move needs beside it."""
        # Logits are there before the backward pass has gathered a layer; moves happen between steps.
        return self.lasting + max(self.staging, self.activations + max(self.logits, self.gathered))

    def __str__(self) -> str:
        named = ", ".join(f"{name} {_text(getattr(self, name))}" for name in _PARTS)
        return (
            f"Memory per rank of {self.num_ranks} at EP {self.expert_parallel_degree}, counted, not measured: {named}; "
            f"at least {_text(self.total)} together."
        )

    def check(self, device_memory_gib: float) -> None:
        """Raise ConfigError where *device_memory_gib* is too little."""
        if self.total <= device_memory_gib * GIB:
            return
        largest = max((name for name in _PARTS if name != "rotary"), key=lambda name: getattr(self, name))
        raise ConfigError(
            f"launch.device_memory_gib={device_memory_gib:g} is too little: {_lowered(str(self))} The largest part is "
            f"{largest}: {_REMEDIES[largest]}."
        )


_PARTS = tuple(field.name for field in fields(MemoryEstimate) if field.name not in ("num_ranks", "expert_parallel_degree"))
_MORE_RANKS = "use more ranks (topology.data_parallel_degree), or trainer.storage_dtype=bfloat16"
_REMEDIES = {
    "weights": _MORE_RANKS,
    "gradients": _MORE_RANKS,
    "optimizer": _MORE_RANKS,
    "staging": "lower trainer.staging_bytes",
    "gathered": "use trainer.gather=layer, or a larger topology.expert_parallel_degree",
    "activations": "lower packer.max_tokens",
    "logits": "lower packer.max_tokens",
}


def estimate_memory(model: TrainedModel, settings: TrainerSettings, *, num_ranks: int, max_tokens: int) -> MemoryEstimate:
    """Count the memory of the fullest rank of *num_ranks*, with microbatches of *max_tokens*.

    A parameter [d0, ...] that FSDP shards over n ranks takes ceil(d0 / n) rows. Experts are cut into EP blocks first, and each
    block over the ranks that are left, by experts or, where those are too few, inside each. No process group and no memory is
    needed. Raises ConfigError where the degrees do not fit.
    """
    spec = model.model_spec()
    shard = settings.shard_degree(num_ranks, num_experts_of(spec))
    settings = replace(settings, data_parallel_shard_degree=shard)
    local = build_meta_model(model)
    experts = {id(weight) for layer in overrides.placed_layers(local) for weight in layer.inner_experts.parameters()}
    elements = sum(_sharded(p, settings, is_expert=id(p) in experts) for p in local.parameters())
    stored = elements * BYTES[settings.storage_dtype]
    config = cast(Decoder.Config, spec.model)
    return MemoryEstimate(
        num_ranks=num_ranks,
        expert_parallel_degree=settings.expert_parallel_degree,
        weights=stored,
        gradients=stored,
        optimizer=2 * stored,
        rotary=sum(buffer.nbytes for name, buffer in local.named_buffers() if name.endswith("rope.cache")),
        staging=settings.staging_bytes if settings.expert_parallel_degree > 1 or shard > 1 else 0,
        gathered=_gathered(local, settings, experts),
        activations=_activations(config, settings, max_tokens, top_k_of(spec)),
        logits=3 * 4 * max_tokens * config.vocab_size,
    )


def _sharded(parameter: Tensor, settings: TrainerSettings, *, is_expert: bool) -> int:
    """Elements of a parameter on the fullest rank."""
    shard, ep = settings.data_parallel_shard_degree, settings.expert_parallel_degree
    if not is_expert:
        return -(-parameter.shape[0] // shard) * math.prod(parameter.shape[1:])
    rows, columns, rest = parameter.shape[0] // ep, parameter.shape[1], math.prod(parameter.shape[2:])
    # Without EP TorchTitan counts replicas too when it asks whether there are enough experts.
    if shard * (settings.data_parallel_replicate_degree if ep == 1 else 1) > parameter.shape[0]:
        return rows * -(-columns // (shard // ep)) * rest
    return -(-rows // (shard // ep)) * columns * rest


def _gathered(local: nn.Module, settings: TrainerSettings, experts: set[int]) -> int:
    """Bytes that FSDP holds whole, of which every rank has its EP block of the experts."""
    computed, ep = BYTES[settings.param_dtype], settings.expert_parallel_degree
    units = [sum(p.numel() // (ep if id(p) in experts else 1) for p in unit.parameters()) for unit in _units(local)]
    if settings.gather == "step":
        return sum(units) * (computed + REDUCED) + max(units) * computed
    # One unit in use and one on its way; the gradient of one, and what is summed of it.
    return max(units) * (3 * computed + REDUCED)


def _units(local: nn.Module) -> Iterator[nn.Module]:
    """What FSDP gathers at a time."""
    decoder = cast(Any, local)
    yield decoder.tok_embeddings
    yield from decoder.layers.values()
    yield decoder.lm_head


def _activations(config: Decoder.Config, settings: TrainerSettings, max_tokens: int, top_k: int) -> int:
    moe = next(layer.moe for layer in config.layers if getattr(layer, "moe", None) is not None)
    hidden = moe.routed_experts.inner_experts.hidden_dim
    kept = (len(config.layers) + 1) * config.dim
    # Rows sent, arrived, computed and back; gate, up and their product.
    one_layer = top_k * (4 * config.dim + 3 * hidden)
    return max_tokens * (kept + one_layer) * BYTES[settings.param_dtype]


def _text(num_bytes: int) -> str:
    """As memory is counted on devices: in powers of 1024."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def _lowered(text: str) -> str:
    return text[0].lower() + text[1:]
