"""Rates counted from a model's dimensions and a device's speed, for when nothing has been measured yet.

Letters: :mod:`routepack.core`; D model dim, F hidden dim of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from routepack.core.errors import ConfigError
from routepack.core.plans import Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.models import CostModel, CostRates


@dataclass(frozen=True, kw_only=True)
class FlopsCost(CostModel):
    """Seconds of a training step, from FLOPs per token, per token pair and per routed row.

    Multiply-adds count two. A matrix product costs its forward three times in training (once forward, twice
    backward), attention 3.5 times (its backward recomputes the scores). Sequences are causal: t^2 / 2 pairs.
    """

    unit: ClassVar[str] = "seconds"

    dim: int
    """D."""
    moe_hidden_dim: int
    """F, of one routed expert (three projections: gate, up, down)."""
    num_heads: int
    qk_head_dim: int
    """Width of a query or key head, rotary part included."""
    v_head_dim: int
    attention_params: int
    """Weights of one layer's attention projections."""
    num_full_layers: int
    """Layers with attention over the whole sequence."""
    num_sliding_layers: int = 0
    """Layers with attention over ``sliding_window`` tokens."""
    num_linear_layers: int = 0
    """Layers with linear attention."""
    sliding_window: int = 0
    dense_params_per_token: int = 0
    """Other weights that every token meets, all layers together: shared experts, dense MLPs, routers, output head."""
    peak_flops: float
    """FLOP/s of the device in the training dtype, dense."""
    dense_efficiency: float = 0.6
    """Share of the peak that projections reach."""
    attention_efficiency: float = 0.5
    """Share of the peak that attention reaches."""
    expert_efficiency: float = 0.5
    """Share of the peak that grouped expert products reach."""
    recompute: bool = False
    """Whether activations are recomputed, which adds one forward."""

    def __post_init__(self) -> None:
        for name in ("peak_flops", "dense_efficiency", "attention_efficiency", "expert_efficiency"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"cost_model.{name}={getattr(self, name)!r} must be above 0.")
        if self.num_full_layers + self.num_sliding_layers + self.num_linear_layers < 1:
            raise ConfigError("cost_model needs a layer: num_full_layers, num_sliding_layers or num_linear_layers above 0.")
        if self.num_sliding_layers and self.sliding_window < 1:
            raise ConfigError(f"cost_model.sliding_window={self.sliding_window} must be above 0 for sliding layers.")

    def rates(self, demand: RoutingDemand, topology: Topology) -> CostRates:
        """Seconds per token, pair and row on one rank; a DP rank's m model-parallel ranks share its tokens."""
        shared = topology.model_parallel_degree
        again = 1.0 if self.recompute else 0.0
        per_weight = 2.0 * (3.0 + again) / (self.peak_flops * self.dense_efficiency * shared)
        pair = self.num_heads * (self.qk_head_dim + self.v_head_dim)
        per_pair = pair * (3.5 + again) / (self.peak_flops * self.attention_efficiency * shared)
        stages = [
            (layers, quadratic, window)
            for layers, quadratic, window in (
                (self.num_full_layers, 1.0, 0),
                (self.num_sliding_layers, 1.0, self.sliding_window),
                (self.num_linear_layers, 0.0, 0),
            )
            if layers
        ]
        other = self.dense_params_per_token / sum(layers for layers, _, _ in stages)
        row = 2.0 * 3.0 * self.dim * self.moe_hidden_dim * (3.0 + again) / (self.peak_flops * self.expert_efficiency)
        return CostRates(
            expert=row / (shared if topology.expert_parallel_degree == 1 else 1),
            linear_I=np.array([layers * (self.attention_params + other) * per_weight for layers, _, _ in stages]),
            quadratic_I=np.array([layers * quadratic * per_pair for layers, quadratic, _ in stages]),
            window_I=np.array([window for _, _, window in stages]),
            unit=self.unit,
        )


DEVICE_PEAK_FLOPS = {
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
}
"""Dense bf16 FLOP/s of the SXM parts, from NVIDIA's data sheets (half of the figures quoted with sparsity)."""


def _grouped_query(dim: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    params = dim * head_dim * (2 * heads + 2 * kv_heads)
    return {"dim": dim, "num_heads": heads, "qk_head_dim": head_dim, "v_head_dim": head_dim, "attention_params": params}


def _latent(dim: int, heads: int, *, kv_rank: int, nope: int, rope: int, value: int) -> dict[str, Any]:
    params = dim * heads * (nope + rope) + dim * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * dim
    return {"dim": dim, "num_heads": heads, "qk_head_dim": nope + rope, "v_head_dim": value, "attention_params": params}


MODELS: dict[str, dict[str, Any]] = {
    # Qwen/Qwen3-30B-A3B config.json: 48 MoE layers of 128 experts, no shared expert, vocabulary 151,936.
    "qwen3_30b_a3b": _grouped_query(2048, 32, 4, 128)
    | {"moe_hidden_dim": 768, "num_full_layers": 48, "dense_params_per_token": 48 * 2048 * 128 + 2048 * 151_936},
    # deepseek-ai/DeepSeek-V2-Lite config.json: 27 layers, the first dense (10,944), two shared experts (1,408 each), no q_lora.
    "deepseek_v2_lite": _latent(2048, 16, kv_rank=512, nope=128, rope=64, value=128)
    | {
        "moe_hidden_dim": 1408,
        "num_full_layers": 27,
        "dense_params_per_token": 3 * 2048 * (10_944 + 26 * 2 * 1408) + 26 * 2048 * 64 + 2048 * 102_400,
    },
    # openai/gpt-oss-20b config.json: 24 layers, every other one sliding over 128 tokens, 32 experts, vocabulary 201,088.
    "gpt_oss_20b": _grouped_query(2880, 64, 8, 64)
    | {
        "moe_hidden_dim": 2880,
        "num_full_layers": 12,
        "num_sliding_layers": 12,
        "sliding_window": 128,
        "dense_params_per_token": 24 * 2880 * 32 + 2880 * 201_088,
    },
}
"""Dimensions from the models' published configurations."""


def flops_cost(name: str, *, device: str) -> FlopsCost:
    """The cost model of a known model on a known device. Raises ConfigError naming the known ones."""
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is not known: choose {', '.join(MODELS)}, or give FlopsCost its dimensions.")
    if device not in DEVICE_PEAK_FLOPS:
        raise ConfigError(f"device {device!r} is not known: choose {', '.join(DEVICE_PEAK_FLOPS)}, or set peak_flops.")
    return FlopsCost(**MODELS[name], peak_flops=DEVICE_PEAK_FLOPS[device])
