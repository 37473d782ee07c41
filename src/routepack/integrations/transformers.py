"""The permuted grouped-GEMM experts in Hugging Face transformers: ``experts_implementation="routepack"``.

transformers keeps gate and up projection in one parameter, one after the other or interleaved, transposed or not. The layer
takes any strides, so it gets views: parameters, names, sharding and checkpoints stay as they are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

# An extra: type checking does not need it.
from transformers.activations import ACT2FN  # pyrefly: ignore[missing-import]
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # pyrefly: ignore[missing-import]

from routepack.core.errors import ConfigError
from routepack.triton_kernels import moe_experts

NAME = "routepack"
_DEFAULT_GATE = "transformers.integrations.moe"
"""The module of the gating that every experts class has unless it brings its own."""


def register(name: str = NAME) -> None:
    """Make ``experts_implementation=name`` known to transformers; calling it again changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)


def experts_forward(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls in place of an experts class's forward: [T, D] from hidden states [T, D], ids and weights [T, K].

    Under transformers' expert parallelism ids beyond the local experts mark rows of other ranks; they add nothing here.
    Raises ConfigError where the class computes something else than SwiGLU without biases.
    """
    check_supported(experts)
    w1_EFD, w3_EFD, w2_EDF = weight_views(experts)
    return moe_experts(hidden_states, top_k_index, top_k_weights, w1_EFD, w3_EFD, w2_EDF)


def weight_views(experts: Any) -> tuple[Tensor, Tensor, Tensor]:
    """w1 and w3 [E, F, D] and w2 [E, D, F] as views of ``gate_up_proj`` and ``down_proj``, whatever their layout."""
    gate_up_EHD, down_EDF = experts.gate_up_proj, experts.down_proj
    if experts.is_transposed:
        gate_up_EHD, down_EDF = gate_up_EHD.transpose(1, 2), down_EDF.transpose(1, 2)
    # chunk and unbind, not slices: their backward joins both gradients at once, a slice's adds two that are padded with zeros.
    if experts.is_concatenated:
        w1_EFD, w3_EFD = gate_up_EHD.chunk(2, dim=1)
    else:
        w1_EFD, w3_EFD = gate_up_EHD.unflatten(1, (-1, 2)).unbind(2)
    return w1_EFD, w3_EFD, down_EDF


def check_supported(experts: Any) -> None:
    """Raise ConfigError, with the reason, unless *experts* computes SwiGLU without biases."""
    reasons = {
        "has no gate projection": not experts.has_gate,
        "has biases": experts.has_bias,
        "normalises each expert's output": experts.has_post_expert_norm,
        "has a gating of its own": type(experts)._apply_gate.__module__ != _DEFAULT_GATE,
        "has an activation other than SiLU": not isinstance(getattr(experts, "act_fn", None), nn.SiLU | type(ACT2FN["silu"])),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ConfigError(
            f'experts_implementation="{NAME}": {type(experts).__name__} {" and ".join(found)}; only SwiGLU without '
            'biases is computed: choose "grouped_mm" for this model.'
        )
