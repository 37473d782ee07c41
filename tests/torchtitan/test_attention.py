"""Attention for GPUs whose values are narrower than queries: the kernel itself is stood in for, with its one limit."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torchtitan.models.common import attention as theirs

from routepack.torchtitan.model.attention import EqualWidthAttention
from routepack.torchtitan.model.overrides import DocumentAttention


def kernel_of_one_width(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size, **options):
    """What flash attention gives, refusing what it refuses."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "heads of one width"
    outputs = [
        F.scaled_dot_product_attention(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=scale)[0]
        for a, b in pairwise(cu_seq_q.tolist())
    ]
    return torch.cat(outputs, dim=1).transpose(0, 1)


@pytest.fixture
def packed(monkeypatch):
    """Two documents of queries of 24 and values of 16; rounded, as TorchTitan hands bfloat16 to the kernel."""
    monkeypatch.setattr(theirs, "varlen_attn", kernel_of_one_width)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 12, 2, width, generator=generator).bfloat16().float() for width in (24, 24, 16))
    edges = torch.tensor([0, 5, 12], dtype=torch.int32)
    return q, k, v, theirs.VarlenMetadata(cu_seq_q=edges, cu_seq_k=edges, max_q=7, max_k=7)


def test_narrow_values_give_the_attention_of_the_documents(packed):
    q, k, v, masks = packed
    ours = EqualWidthAttention(EqualWidthAttention.Config())(q, k, v, attention_masks=masks, scale=0.2)
    wanted = DocumentAttention(DocumentAttention.Config())(q, k, v, attention_masks=masks, scale=0.2)
    assert ours.shape == (1, 12, 2, 16)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, wanted, atol=2e-2, rtol=0)


def test_torchtitans_own_hands_the_kernel_two_widths(packed):
    q, k, v, masks = packed
    with pytest.raises(AssertionError, match="heads of one width"):
        theirs.VarlenAttention(theirs.VarlenAttention.Config())(q, k, v, attention_masks=masks)


def test_heads_of_one_width_go_through_as_they_are(packed):
    q, k, _, masks = packed
    ours = EqualWidthAttention(EqualWidthAttention.Config())(q, k, k, attention_masks=masks)
    stock = theirs.VarlenAttention(theirs.VarlenAttention.Config())(q, k, k, attention_masks=masks)
    assert torch.equal(ours, stock)


def test_gradients_reach_narrow_values(packed):
    q, k, v, masks = packed
    v = v.clone().requires_grad_()
    EqualWidthAttention(EqualWidthAttention.Config())(q, k, v, attention_masks=masks).square().sum().backward()
    assert v.grad is not None
    assert v.grad.abs().sum() > 0
