"""The layer in plain torch, one expert after another: any device, dtype and size, deterministic.

What runs on the CPU. On a GPU the loop waits for the counts. Rounds where the kernels round: gate and up, the
activation and each expert's output in the dtype of x, sums over a token's experts in fp32 at least.
Letters: N slots, R sorted rows, E experts, D model dim, F hidden dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from .routing import Needs, Routing


def _experts(routing: Routing, x: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """Each expert that has rows, its sorted rows, and their slots; none where there are no rows, or none of x to read."""
    if x.shape[0] == 0 or routing.num_rows(x) == 0:
        return
    for expert, (start, end) in enumerate(pairwise(routing.offsets_E1.tolist())):
        if start < end:
            rows = slice(start, end)
            yield expert, rows, slots_of(routing, rows)


def slots_of(routing: Routing, rows: slice) -> Tensor:
    """int64: the slots of sorted rows, -1 where there is none."""
    if routing.order_R is None:
        return torch.arange(rows.start, rows.stop, device=routing.offsets_E1.device)
    return routing.order_R[rows].long()


def _take(x: Tensor, slots: Tensor, top_k: int) -> Tensor:
    """Rows of x for slots; zeros for a slot of -1."""
    rows = x[slots.clamp(min=0) // top_k]
    return rows.masked_fill((slots < 0)[:, None], 0)


def _score(scores_N: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, 1]: the scores of slots; zeros for a slot of -1, whatever the scores hold."""
    return scores_N[slots.clamp(min=0)].to(dtype).masked_fill(slots < 0, 0)[:, None]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def forward(
    x: Tensor, scores_N: Tensor | None, w1: Tensor, w3: Tensor, w2: Tensor, routing: Routing, *, save_h: bool
) -> tuple[Tensor, Tensor]:
    """Output, shaped as x, and gate and up [2, R, F] ([2, 0, F] unless *save_h*)."""
    h = x.new_zeros((2, routing.num_rows(x) if save_h else 0, w1.shape[1]))
    wide = _wide(x.dtype)
    out_ND = x.new_zeros((x.shape[0] * routing.top_k, x.shape[1]), dtype=x.dtype if routing.top_k == 1 else wide)
    for expert, rows, slots in _experts(routing, x):
        x_rows = _take(x, slots, routing.top_k)
        gate, up = x_rows @ w1[expert].T, x_rows @ w3[expert].T
        if save_h:
            h[0, rows], h[1, rows] = gate, up
        y = (F.silu(gate.to(wide)) * up.to(wide)).to(x.dtype) @ w2[expert].T
        if scores_N is not None:
            y = y.to(wide) * _score(scores_N, slots, wide)
        out_ND[slots[slots >= 0]] = y[slots >= 0].to(out_ND.dtype)
    return out_ND.view(x.shape[0], routing.top_k, x.shape[1]).sum(dim=1).to(x.dtype), h


def backward(
    dout: Tensor, x: Tensor, scores_N: Tensor | None, w1: Tensor, w3: Tensor, w2: Tensor, h: Tensor, routing: Routing,
    needs: Needs, *, sums: Sequence[Tensor] | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of x, scores [N] (wide), w1, w3, w2, each None unless it *needs* to be known.

    With *sums*, those of the weights are added to them, without being rounded to the dtype of x first, and not given.
    """
    wide = _wide(x.dtype)
    top_k = routing.top_k
    dx_ND = x.new_zeros((x.shape[0] * top_k, x.shape[1]), dtype=wide)
    dscores_N = None if scores_N is None else scores_N.new_zeros(scores_N.shape, dtype=wide)
    dws = _targets((w1, w3, w2), needs[2:], sums)
    for expert, rows, slots in _experts(routing, x):
        x_rows, dout_rows = _take(x, slots, top_k), _take(dout, slots, top_k)
        if h.shape[1]:
            gate, up = h[0, rows].to(wide), h[1, rows].to(wide)
        else:
            gate, up = (x_rows @ w1[expert].T).to(wide), (x_rows @ w3[expert].T).to(wide)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        act = silu * up
        dact = (dout_rows @ w2[expert]).to(wide)
        if scores_N is not None and dscores_N is not None:
            dscores_N[slots[slots >= 0]] = (dact * act).sum(dim=1)[slots >= 0]
            score = _score(scores_N, slots, wide)
            dact, act = dact * score, act * score
        dgate = (dact * up * (sigmoid + silu * (1 - sigmoid))).to(x.dtype)
        dup = (dact * silu).to(x.dtype)
        if needs.x:
            dx_ND[slots[slots >= 0]] = (dgate @ w1[expert] + dup @ w3[expert]).to(wide)[slots >= 0]
        for dw, a, b in zip(dws, (dgate, dup, dout_rows), (x_rows, x_rows, act.to(x.dtype)), strict=True):
            if dw is not None:
                dw[expert] += a.T @ b if sums is None else a.T.to(wide) @ b.to(wide)
    dx = dx_ND.view(x.shape[0], top_k, x.shape[1]).sum(dim=1).to(x.dtype) if needs.x else None
    return [dx, dscores_N if needs.scores else None, *(dws if sums is None else (None, None, None))]


def _targets(weights: Sequence[Tensor], needs: Sequence[bool], sums: Sequence[Tensor] | None) -> list[Tensor | None]:
    """What each weight's gradient is added to; None where it is not needed."""
    candidates = weights if sums is None else sums
    wanted = [one if need else None for one, need in zip(candidates, needs, strict=True)]
    return wanted if sums is not None else [None if w is None else torch.zeros_like(w) for w in wanted]
