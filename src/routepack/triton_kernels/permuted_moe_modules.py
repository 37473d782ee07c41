"""The layer as modules. Letters: T tokens, K top-k, E experts, D model dim, F hidden dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .argument_checks import (
    Implementation,
    Recompute,
    check_choice,
    check_leading,
    check_operand,
    check_scores,
    check_sizes,
    dtype_of,
)
from .permuted_moe_functions import grouped_experts, moe_experts
from .routing import signed


class PermutedExperts(nn.Module):
    """The weights of E SwiGLU experts, by TorchTitan's names and in its layout.

    ``experts(x, ids, scores)`` where all experts are here, ``experts.grouped(rows, counts)`` after a dispatch. Of weights that
    are DTensors the local shard is taken: under FSDP that is all of them, under expert parallelism those of the rank's experts,
    for which only ``grouped`` has a meaning.

    *recompute* and *implementation* are those of :func:`.moe_experts`; *dtype* is one of torch's or its name, as a config
    gives it: ``bfloat16``, ``float16``, ``float32`` or ``float64``. Raises ValueError or TypeError for options that are none.
    """

    def __init__(
        self,
        *,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        recompute: Recompute = "none",
        implementation: Implementation = "auto",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("recompute", recompute, Recompute)
        check_choice("implementation", implementation, Implementation)
        check_sizes(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts)
        self.dim, self.hidden_dim, self.num_experts = dim, hidden_dim, num_experts
        self.recompute, self.implementation = recompute, implementation
        made: dict[str, Any] = {"device": device, "dtype": dtype_of(dtype)}
        self.w1_EFD = nn.Parameter(torch.empty(num_experts, hidden_dim, dim, **made))
        self.w2_EDF = nn.Parameter(torch.empty(num_experts, dim, hidden_dim, **made))
        self.w3_EFD = nn.Parameter(torch.empty(num_experts, hidden_dim, dim, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within one over the square root of what an output sums over, as ``nn.Linear``."""
        for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_scores: Tensor) -> Tensor:
        """As x [..., D]; ids and scores are [..., K]. See :func:`.moe_experts`.

        Raises as :func:`.moe_experts`, and ValueError where only some of the experts are here: ids count all of them.
        """
        weights = self._weights()
        if weights[0].shape[0] != self.num_experts:
            raise ValueError(
                f"{weights[0].shape[0]} of num_experts={self.num_experts} experts are on this rank, and ids name all of them: "
                "bring the rows here and call .grouped(rows, counts)."
            )
        check_leading(x, self.dim, topk_ids)
        check_scores(topk_scores, topk_ids, x)
        flat_TD = x.reshape(-1, x.shape[-1])
        ids_TK, scores_TK = topk_ids.reshape(-1, topk_ids.shape[-1]), topk_scores.reshape(-1, topk_scores.shape[-1])
        return moe_experts(flat_TD, ids_TK, scores_TK, *weights, **self._options()).view(x.shape)

    def grouped(
        self, rows: Tensor, counts: Tensor, *, row_index: Tensor | None = None, row_scores: Tensor | None = None
    ) -> Tensor:
        """[R, D]. See :func:`.grouped_experts`."""
        return grouped_experts(rows, counts, *self._weights(), row_index=row_index, row_scores=row_scores, **self._options())

    def _weights(self) -> Sequence[Tensor]:
        return [local(weight) for weight in (self.w1_EFD, self.w3_EFD, self.w2_EDF)]

    def _options(self) -> dict[str, Any]:
        return {"recompute": self.recompute, "implementation": self.implementation}

    def extra_repr(self) -> str:
        """The sizes, for ``print(module)``."""
        return f"dim={self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}, recompute={self.recompute!r}"


def local(weight: Tensor) -> Tensor:
    """The shard of a DTensor that is here; any other tensor as it is."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()


class PermutedMoE(nn.Module):
    """A whole MoE layer: a router and :class:`PermutedExperts`.

    A score is the softmax over all experts, of the experts chosen. *normalize_scores*: a token's K scores are divided by their
    sum where K > 1. With K = 1 that would make every score 1, whatever the router says, so that it learns nothing; there the
    softmax is the score, as in Switch Transformers and in DeepSeek-V3's code (``if top_k > 1 and norm_topk_prob``).

    The router multiplies in the dtype of x and the weights, or of autocast; the scores are float32. The other options are
    those of :class:`PermutedExperts`.

    >>> moe = PermutedMoE(dim=16, hidden_dim=32, num_experts=8, top_k=2)
    >>> x = torch.randn(2, 5, 16)
    >>> y, ids = moe(x), moe.last_topk_ids
    >>> torch.equal(moe(x, topk_ids=ids), y)
    True
    """

    def __init__(
        self,
        *,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        normalize_scores: bool = True,
        recompute: Recompute = "none",
        implementation: Implementation = "auto",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts, top_k=top_k)
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k} must be between 1 and num_experts={num_experts}.")
        self.top_k, self.normalize_scores = top_k, normalize_scores
        self.router = nn.Linear(dim, num_experts, bias=False, device=device, dtype=dtype_of(dtype))
        self.experts = PermutedExperts(
            dim=dim, hidden_dim=hidden_dim, num_experts=num_experts,
            recompute=recompute, implementation=implementation, device=device, dtype=dtype,
        )  # fmt: skip
        self.last_topk_ids: Tensor | None = None

    def forward(self, x: Tensor, topk_ids: Tensor | None = None) -> Tensor:
        """As x [..., D]. *topk_ids* [..., K] replays a route: its scores still come from the router, which so keeps learning.

        ``last_topk_ids`` holds the ids that were used. Captured in a CUDA graph, it is the graph's own tensor: each replay
        writes it anew, so copy it before the next.

        Raises what :func:`.moe_experts` raises: TypeError where x has another dtype than the layer, ValueError where it lies
        on another device.
        """
        check_leading(x, self.experts.dim, topk_ids)
        check_operand("x", x, self.router.weight, "router.weight")
        probabilities = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        if topk_ids is None:
            topk_ids = probabilities.topk(self.top_k, dim=-1).indices
        ids = signed(topk_ids).long()
        # A slot without an expert (-1) has no score. Chosen, not multiplied by zero: the token may be NaN.
        known = (ids >= 0) & (ids < probabilities.shape[-1])
        scores = torch.where(known, probabilities.gather(-1, torch.where(known, ids, 0)), 0.0)
        if self.normalize_scores and scores.shape[-1] > 1:
            scores = scores / scores.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
        self.last_topk_ids = topk_ids
        return self.experts(x, topk_ids, scores)
