"""TorchTitan's experts by the permuted grouped-GEMM layer: same parameters, same names, same sharding.

``TritonExperts`` computes rows that a dispatcher has brought. Where all experts are on this rank, :class:`PlacedRoutedExperts`
hands it the tokens before they are sorted, and nothing is copied K times. With RoutePack's trainer name it in the config,
``model.experts: routepack.torchtitan.model.experts.TritonExperts``; with TorchTitan's own add
``--override.imports routepack.torchtitan.model.experts.triton_experts``. Take the line out to switch it off: nothing
needs converting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import RoutedExperts

from routepack.torchtitan.model.overrides import PlacedRoutedExperts, TokenExperts
from routepack.triton_kernels import grouped_experts, moe_experts
from routepack.triton_kernels.permuted_moe_modules import local


class TritonExperts(TokenExperts):
    """SwiGLU experts in Triton on a GPU, one after another in plain torch on a CPU, in the parameters' own precision.

    Under mixed precision FSDP hands over bfloat16 parameters and activations, as to TorchTitan's own experts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenExperts.Config):
        """As TorchTitan's, and how to compute."""

        recompute: Literal["none", "gate_up"] = "none"
        """What the backward pass computes again, see ``routepack.triton_kernels.moe_experts``."""
        implementation: Literal["auto", "triton", "eager"] = "auto"
        """Triton on a GPU and plain torch elsewhere, or one of them by name."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recompute, self.implementation = config.recompute, config.implementation

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """[R, D]: rows come sorted by expert, as from any of TorchTitan's dispatchers; rows beyond the counts give zeros."""
        w1, w3, w2 = self._weights()
        return grouped_experts(
            x_RD.to(w1.dtype), num_tokens_per_expert_E, w1, w3, w2, recompute=self.recompute, implementation=self.implementation
        ).to(x_RD.dtype)

    def forward_tokens(self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor) -> Tensor:
        """[T, D]: all experts are here, so sorting, scoring and adding up are part of the layer."""
        w1, w3, w2 = self._weights()
        return moe_experts(
            x_TD.to(w1.dtype), topk_expert_ids_TK, topk_scores_TK, w1, w3, w2,
            recompute=self.recompute, implementation=self.implementation,
        ).to(x_TD.dtype)  # fmt: skip

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return local(self.w1_EFD), local(self.w3_EFD), local(self.w2_EDF)


class RecomputingTritonExperts(TritonExperts):
    """:class:`TritonExperts` that keep only their input and compute gate and up again in the backward pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(TritonExperts.Config):
        """As its base's."""

        recompute: Literal["none", "gate_up"] = "gate_up"


@override(target=RoutedExperts.Config, exact=True, description="permuted grouped-GEMM experts in Triton")
def triton_experts(
    config: RoutedExperts.Config, *, recompute: str = "none", implementation: str = "auto"
) -> PlacedRoutedExperts.Config:
    """Replace every layer's experts by :class:`TritonExperts`, for TorchTitan's own trainer: placement stays as it is there."""
    inner_experts = derive(config.inner_experts, TritonExperts.Config, recompute=recompute, implementation=implementation)
    return derive(config, PlacedRoutedExperts.Config, inner_experts=inner_experts)
