"""The permuted grouped-GEMM MoE layer in Triton: any PyTorch model can use it.

Imports nothing else of routepack, so the folder lifts out whole; importing it needs torch, not triton.
:mod:`~routepack.triton_kernels.reference` says what is computed.
"""

from routepack.triton_kernels.functional import grouped_experts, moe_experts
from routepack.triton_kernels.permuted_moe import PermutedExperts, PermutedMoE

__all__ = ["PermutedExperts", "PermutedMoE", "grouped_experts", "moe_experts"]
