"""Variable-length attention where values are narrower than queries, as in multi-head latent attention.

Flash attention of torch 2.13 takes and gives heads of one width: ``torch.nn.attention.varlen`` shapes its output like the
queries. TorchTitan 0.3.0 hands it DeepSeek's queries of 192 and values of 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenAttention


class EqualWidthAttention(VarlenAttention):
    """Fills values up to the width of queries with zeros and cuts the output: the same attention, at some more work.

    Heads of one width go through as they are.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """The options of TorchTitan's own."""

    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, **options: Any) -> Tensor:
        """As TorchTitan's, [B, L, N, width of the values]."""
        width = v_BLNH.shape[-1]
        filled = F.pad(v_BLNH, (0, q_BLNH.shape[-1] - width))
        return super().forward(q_BLNH, k_BLNH, filled, **options)[..., :width].contiguous()


@override(target=VarlenAttention.Config, exact=True, description="heads of one width")
def equal_width_attention(config: VarlenAttention.Config) -> EqualWidthAttention.Config:
    """Replace variable-length attention by one that takes values narrower than queries."""
    return derive(config, EqualWidthAttention.Config)
