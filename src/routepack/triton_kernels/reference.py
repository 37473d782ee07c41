"""The MoE layer as it is meant, dense over the experts: the specification that every implementation is tested against.

Letters: T tokens, K top-k, E experts, D model dim, F hidden dim, R rows. Any floating dtype; differentiable.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def expert_outputs(x_ND: Tensor, w1_EFD: Tensor, w3_EFD: Tensor, w2_EDF: Tensor) -> Tensor:
    """[N, E, D]: what every expert makes of every row."""
    gate_NEF = torch.einsum("nd,efd->nef", x_ND, w1_EFD)
    up_NEF = torch.einsum("nd,efd->nef", x_ND, w3_EFD)
    return torch.einsum("nef,edf->ned", F.silu(gate_NEF) * up_NEF, w2_EDF)


def moe_experts(
    x_TD: Tensor, topk_ids_TK: Tensor, topk_scores_TK: Tensor, w1_EFD: Tensor, w3_EFD: Tensor, w2_EDF: Tensor
) -> Tensor:
    """[T, D]: each token's experts, weighted by its scores. Ids outside of 0 .. E - 1 take no part."""
    experts_E = torch.arange(w1_EFD.shape[0], device=x_TD.device)
    chosen_TKE = topk_ids_TK[..., None] == experts_E
    # Selected, not multiplied by zero: what an expert makes of a row that is not its own may be infinite.
    weight_TE = torch.where(chosen_TKE, topk_scores_TK[..., None].to(x_TD.dtype), 0).sum(dim=1)
    output_TED = expert_outputs(x_TD, w1_EFD, w3_EFD, w2_EDF)
    output_TED = torch.where(chosen_TKE.any(dim=1)[..., None], output_TED, 0)
    return torch.einsum("ted,te->td", output_TED, weight_TE)


def grouped_experts(rows_RD: Tensor, counts_E: Tensor, w1_EFD: Tensor, w3_EFD: Tensor, w2_EDF: Tensor) -> Tensor:
    """[R, D]: rows in expert order, ``counts_E`` of them for each expert; zeros for rows beyond."""
    ends_E = torch.cumsum(counts_E, dim=0)
    row_R = torch.arange(rows_RD.shape[0], device=rows_RD.device)
    own_RE = (row_R[:, None] < ends_E) & (row_R[:, None] >= ends_E - counts_E)
    output_RED = expert_outputs(rows_RD, w1_EFD, w3_EFD, w2_EDF)
    return torch.where(own_RE[..., None], output_RED, 0).sum(dim=1)
