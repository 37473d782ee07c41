"""The MoE layer as others compute it, and as we do: the same inputs, the same result, each through its own public call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from moe_cases import Inputs
from torch import Tensor


class MissingError(Exception):
    """An implementation cannot run here; the message says why."""


@dataclass(frozen=True)
class Layer:
    """One implementation, ready to run on its inputs."""

    forward: Callable[[], Tensor]
    leaves: list[Tensor]
    """What it gives gradients for; their order is that of ``Inputs.separate`` or ``Inputs.joined``."""

    def backward(self, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, dout, retain_graph=True)

    def both(self, dout: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.leaves, dout)


def ours(given: Inputs, *, permute_first: bool | None = False, recompute: str = "none") -> Layer:
    """``routepack.triton_kernels.moe_experts`` by its Triton kernels, gathering x while it is multiplied."""
    from routepack.triton_kernels import moe_experts

    x, scores, w1, w3, w2 = given.separate
    options = {"implementation": "triton", "permute_first": permute_first, "recompute": recompute}
    return Layer(lambda: moe_experts(x, given.ids_TK, scores, w1, w3, w2, **options), given.separate)


def ours_permuted(given: Inputs) -> Layer:
    """The same with x copied into expert order first, so that TMA can load it."""
    return ours(given, permute_first=True)


def ours_recompute(given: Inputs) -> Layer:
    """The same, keeping only x: gate and up are computed again in the backward pass."""
    return ours(given, recompute="gate_up")


def grouped_mm(given: Inputs) -> Layer:
    """torch's grouped_mm in the sequence in which TorchTitan 0.3.0 permutes, multiplies, scores and adds."""
    x, scores, w1, w3, w2 = given.separate
    top_k, num_experts = given.shape.top_k, given.shape.num_experts

    def forward() -> Tensor:
        counts_E = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
        ids_R = given.ids_TK.reshape(-1)
        counts_E.scatter_add_(0, ids_R, torch.ones_like(ids_R, dtype=torch.int32))
        order_R = torch.argsort(ids_R, stable=True)
        scores_R, token_R = scores.reshape(-1)[order_R], order_R // top_k
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        rows_RD = x[token_R]
        hidden_RF = functional.silu(torch._grouped_mm(rows_RD, w1.transpose(1, 2), offs=ends_E))
        hidden_RF = hidden_RF * torch._grouped_mm(rows_RD, w3.transpose(1, 2), offs=ends_E)
        out_RD = torch._grouped_mm(hidden_RF, w2.transpose(1, 2), offs=ends_E)
        out_RD = (out_RD.float() * scores_R[:, None]).to(x.dtype)
        return torch.zeros_like(x).scatter_add(0, token_R[:, None].expand_as(out_RD), out_RD)

    return Layer(forward, given.separate)


def transformers_grouped_mm(given: Inputs) -> Layer:
    """The experts of transformers' Qwen3 MoE with its ``grouped_mm`` implementation."""
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except ImportError as error:
        raise MissingError(f"transformers with Qwen3MoeExperts cannot be imported: {error}") from error
    x, scores, gate_up, w2 = given.joined
    config = Qwen3MoeConfig(
        hidden_size=given.shape.dim, moe_intermediate_size=given.shape.hidden_dim, num_experts=given.shape.num_experts
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(w2)
    leaves = [x, scores, experts.gate_up_proj, experts.down_proj]
    return Layer(lambda: experts(x, given.ids_TK, scores.to(x.dtype)), leaves)


def liger(given: Inputs) -> Layer:
    """Liger-Kernel's fused MoE; LIGER_FUSED_MOE_AUTOTUNE=0 pins its configs."""
    try:
        from liger_kernel.ops import LigerFusedMoEFunction
    except ImportError as error:
        raise MissingError(f"liger-kernel with LigerFusedMoEFunction cannot be imported: {error}") from error
    x, scores, gate_up, w2 = given.joined
    ids_TK = given.ids_TK.int()
    return Layer(lambda: LigerFusedMoEFunction.apply(x, gate_up, w2, ids_TK, scores), given.joined)


def sonic(given: Inputs) -> Layer:
    """SonicMoE on routes given from outside."""
    try:
        from sonicmoe import moe_general_routing_inputs
        from sonicmoe.enums import ActivationType
    except ImportError as error:
        raise MissingError(f"sonic-moe cannot be imported: {error}") from error
    if not given.x_TD.is_cuda:
        raise MissingError("sonic-moe needs a GPU")
    x, scores, gate_up, w2 = given.joined
    tokens_R = torch.arange(given.shape.num_tokens, device=x.device, dtype=torch.int32).repeat_interleave(given.shape.top_k)
    ids_R = given.ids_TK.reshape(-1).int()

    def forward() -> Tensor:
        out, _ = moe_general_routing_inputs(
            x,
            scores.reshape(-1),
            tokens_R,
            ids_R,
            gate_up.permute(1, 2, 0),
            None,
            w2.permute(1, 2, 0),
            None,
            E=given.shape.num_experts,
            stream_id=torch.cuda.current_stream().cuda_stream,
            activation_type=ActivationType.SWIGLU,
            concat_layout=True,
        )
        return out

    return Layer(forward, given.joined)


IMPLEMENTATIONS: dict[str, Callable[[Inputs], Layer]] = {
    "ours": ours,
    "ours_permuted": ours_permuted,
    "ours_recompute": ours_recompute,
    "grouped_mm": grouped_mm,
    "transformers": transformers_grouped_mm,
    "liger": liger,
    "liger_autotuned": liger,
    "sonic": sonic,
}
"""By the name that results carry."""
OURS = ("ours", "ours_permuted", "ours_recompute")
