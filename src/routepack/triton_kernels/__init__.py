"""The permuted grouped-GEMM MoE layer in Triton: any PyTorch model can use it.

The folder needs torch and triton alone (triton not before a kernel runs) and imports nothing around it: copied into another
project, under any name, it works. The public names are in ``permuted_moe_modules.py`` and ``permuted_moe_functions.py``. What
is computed is in ``reference.py``, in forty lines of einsum. A call goes

    permuted_moe_functions -> torch_operators -> launch_forward, launch_backward -> grouped_gemm_kernels, permute_kernels

or, without a GPU, from ``torch_operators`` to ``eager_experts``. Work on the kernels starts in ``grouped_gemm_kernels.py``;
their tile sizes are in ``tile_configs.py``.
"""

from .permuted_moe_functions import grouped_experts, moe_experts
from .permuted_moe_modules import PermutedExperts, PermutedMoE

__all__ = ["PermutedExperts", "PermutedMoE", "grouped_experts", "moe_experts"]
