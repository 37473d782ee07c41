"""Shapes, routings, inputs and the float64 reference of the MoE layer's benchmark, and what a layer's work is worth.

T tokens, D model dim, F hidden dim of an expert, K experts a token, E experts, R = T x K rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as functional
from torch import Tensor

BYTES = 2
"""Of a bfloat16."""


@dataclass(frozen=True)
class Shape:
    """One layer's dimensions."""

    name: str
    num_tokens: int
    dim: int
    hidden_dim: int
    top_k: int
    num_experts: int

    @property
    def num_rows(self) -> int:
        return self.num_tokens * self.top_k


SHAPES = (
    Shape("qwen3_30b_a3b", 32_768, 2_048, 768, 8, 128),
    Shape("fine_grained_7b", 32_768, 1_536, 256, 8, 128),
    Shape("olmoe", 32_768, 2_048, 1_024, 8, 64),
    Shape("mixtral", 16_384, 4_096, 14_336, 2, 8),
    # One rank's share of DeepSeek-V3 at EP 32: rows that arrived for its 8 experts.
    Shape("deepseek_v3_rank", 32_768, 7_168, 2_048, 1, 8),
    Shape("qwen3_30b_a3b_small", 4_096, 2_048, 768, 8, 128),
)

EDGE_SHAPES = (
    Shape("no_tokens", 0, 256, 128, 2, 8),
    Shape("one_token", 1, 256, 128, 2, 8),
    Shape("odd_dims", 300, 200, 136, 3, 7),
    Shape("dims_of_no_vector", 150, 77, 45, 2, 5),
    Shape("all_experts", 130, 128, 256, 8, 8),
    Shape("many_experts", 513, 128, 64, 4, 257),
)


def shrunk(shape: Shape, *, num_tokens: int, dim: int, hidden_dim: int, num_experts: int, top_k: int) -> Shape:
    """*shape* with none of its dimensions above the given ones."""
    num_experts = min(shape.num_experts, num_experts)
    return replace(
        shape,
        num_tokens=min(shape.num_tokens, num_tokens),
        dim=min(shape.dim, dim),
        hidden_dim=min(shape.hidden_dim, hidden_dim),
        num_experts=num_experts,
        top_k=min(shape.top_k, top_k, num_experts),
    )


def routed(shape: Shape, routing: str, generator: torch.Generator) -> Tensor:
    """int64 [T, K], distinct experts for each token.

    ``balanced``: every expert gets the same number of rows, or one more. ``zipf``: popularity 1 / rank. ``hot``: expert E - 1
    is everybody's. ``empty``: only every other expert is chosen from (all, where that leaves fewer than K).
    """
    T, K, E = shape.num_tokens, shape.top_k, shape.num_experts
    device = generator.device
    if routing == "balanced":
        names_E, order_T = (torch.randperm(size, generator=generator, device=device) for size in (E, T))
        return names_E[(torch.arange(T * K, device=device) % E).view(T, K)[order_T]]
    popularity_E = 1.0 / torch.arange(1, E + 1, device=device) if routing == "zipf" else torch.ones(E, device=device)
    if routing == "hot":
        popularity_E[-1] = 1e30
    if routing == "empty" and E // 2 >= K:
        popularity_E[::2] = 0.0
    # The K largest of log popularity plus Gumbel noise are a draw without replacement.
    uniform_TE = torch.rand(T, E, generator=generator, device=device).clamp_min_(1e-20)
    return (popularity_E.log() - (-uniform_TE.log()).log()).topk(K, dim=-1).indices


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A layer's tensors. Every tensor that gets a gradient is a leaf; ``gate_up`` holds w1 and w3, one after the other."""

    shape: Shape
    x_TD: Tensor
    ids_TK: Tensor
    scores_TK: Tensor
    w1_EFD: Tensor
    w3_EFD: Tensor
    w2_EDF: Tensor
    gate_up_EGD: Tensor
    dout_TD: Tensor

    @property
    def separate(self) -> list[Tensor]:
        """What ours and TorchTitan's sequence get gradients for."""
        return [self.x_TD, self.scores_TK, self.w1_EFD, self.w3_EFD, self.w2_EDF]

    @property
    def joined(self) -> list[Tensor]:
        """What implementations with one gate-and-up parameter get gradients for."""
        return [self.x_TD, self.scores_TK, self.gate_up_EGD, self.w2_EDF]


def inputs(shape: Shape, routing: str, *, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Inputs:
    """Random inputs, of the size that they have after a normalised layer."""
    generator = torch.Generator(device).manual_seed(seed)
    T, D, F, E = shape.num_tokens, shape.dim, shape.hidden_dim, shape.num_experts

    def normal(*size: int, fan_in: int = 1) -> Tensor:
        # Drawn in slices: float32 of all experts at once is more memory than the layer itself needs.
        drawn = torch.empty(size, device=device, dtype=dtype)
        for part in drawn.split(max(1, 2**26 // max(1, drawn[:1].numel()))) if drawn.numel() else ():
            part.copy_(torch.randn(part.shape, generator=generator, device=device) / fan_in**0.5)
        return drawn

    gate_up_EGD = normal(E, 2 * F, D, fan_in=D)
    w1_EFD, w3_EFD = (half.contiguous() for half in gate_up_EGD.chunk(2, dim=1))
    leaves = {
        "x_TD": normal(T, D),
        "scores_TK": torch.rand(T, shape.top_k, generator=generator, device=device) + 0.1,
        "w1_EFD": w1_EFD,
        "w3_EFD": w3_EFD,
        "w2_EDF": normal(E, D, F, fan_in=F),
        "gate_up_EGD": gate_up_EGD,
    }
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    return Inputs(shape=shape, ids_TK=routed(shape, routing, generator), dout_TD=normal(T, D), **leaves)


def reference(given: Inputs) -> tuple[Tensor, list[Tensor]]:
    """The output and the gradients of ``given.separate``, in float64, one expert after another."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in given.separate]
    x, scores, w1, w3, w2 = leaves
    out = torch.zeros_like(x)
    for expert in range(given.shape.num_experts):
        token, choice = (given.ids_TK == expert).nonzero(as_tuple=True)
        rows = x[token]
        hidden = functional.silu(rows @ w1[expert].T) * (rows @ w3[expert].T)
        out = out.index_add(0, token, hidden @ w2[expert].T * scores[token, choice, None])
    return out.detach(), list(torch.autograd.grad(out, leaves, given.dout_TD.double()))


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Of the norms; infinite where *got* has a value that is not finite."""
    got, expected = got.detach().double(), expected.detach().double()
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30)) if got.numel() else 0.0


def flops(shape: Shape) -> dict[str, int]:
    """Floating-point operations of the matrix products, forward and backward, without recomputation."""
    product = 2 * shape.num_rows * shape.dim * shape.hidden_dim
    return {"forward": 3 * product, "backward": 6 * product, "both": 9 * product}


def floor_seconds(shape: Shape, flops_per_second: float, bytes_per_second: float) -> dict[str, float]:
    """What the kernels, one after another, take at least: each the longer of its arithmetic and its traffic."""
    T, D, F, R = shape.num_tokens, shape.dim, shape.hidden_dim, shape.num_rows
    product, weight = 2 * R * D * F, shape.num_experts * D * F * BYTES
    rows_D, rows_F, tokens_D = R * D * BYTES, R * F * BYTES, T * D * BYTES

    def longer(operations: int, traffic: int) -> float:
        return max(operations / flops_per_second, traffic / bytes_per_second)

    combine = longer(0, rows_D + tokens_D)
    forward = longer(2 * product, 2 * weight + tokens_D + 3 * rows_F) + longer(product, weight + rows_F + rows_D) + combine
    backward = (
        longer(product, weight + tokens_D + 5 * rows_F)
        + longer(2 * product, 2 * weight + 2 * rows_F + rows_D)
        + combine
        + longer(2 * product, 2 * weight + tokens_D + 2 * rows_F)
        + longer(product, weight + tokens_D + rows_F)
    )
    return {"forward": forward, "backward": backward, "both": forward + backward}
