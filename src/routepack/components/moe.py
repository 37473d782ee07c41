"""The MoE layer for configs and models of one's own: :mod:`routepack.triton_kernels` by the names a config uses.

Unlike the other components these are ``nn.Module``: their arguments are their config. Shapes: :class:`PermutedMoE` takes
[..., dim], :class:`PermutedExperts` also expert ids and scores [..., top_k].
"""

from routepack.triton_kernels import PermutedExperts, PermutedMoE

__all__ = ["PermutedExperts", "PermutedMoE"]
