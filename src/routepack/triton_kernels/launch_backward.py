"""Launches the backward kernels. Letters as in :mod:`routepack.triton_kernels.launch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from routepack.triton_kernels import backward_kernels
from routepack.triton_kernels import configs as table
from routepack.triton_kernels.launch import (
    Schedule,
    _compiled,
    _described,
    _precision,
    _to_slots,
    gate_up,
    new_rows,
    schedule_of,
)
from routepack.triton_kernels.routing import Routing


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Which gradients are asked for."""

    x: bool
    scores: bool
    w1: bool
    w3: bool
    w2: bool

    @property
    def h(self) -> bool:
        """Whether gate and up need theirs."""
        return self.x or self.w1 or self.w3


def down_backward(
    dout: Tensor, w2: Tensor, h: Tensor, scores: Tensor | None, schedule: Schedule, needs: Needs
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of gate and up [2, R, F], scaled activations [R, F], and the scores' gradient [N] (fp32) or None."""
    routing, config = schedule.routing, schedule.config(table.DOWN_BACKWARD)
    num_experts, dim, hidden_dim = w2.shape
    dh = new_rows(schedule.num_rows if needs.h else 0, hidden_dim, dout, parts=2)
    scaled_act = new_rows(schedule.num_rows if needs.w2 else 0, hidden_dim, dout)[0]
    num_slots = scores.numel() if scores is not None and needs.scores else 0
    # Zeros, as no tile writes slots without an expert.
    parts = torch.zeros((triton.cdiv(hidden_dim, config.BN), num_slots), dtype=torch.float32, device=dout.device)
    tma_w = schedule.has_tma(w2)
    backward_kernels.down_backward[schedule.grid(config.BM, hidden_dim, config.BN)](
        dout, _described(w2, [1, config.BK, config.BN], tma_w), h, routing.order_R, scores,
        routing.offsets_E1, *schedule.tiles(config.BM), dh, scaled_act, parts,
        dim, hidden_dim, *dout.stride(), *w2.stride(),
        h.stride(0), h.stride(1), dh.stride(0), dh.stride(1), scaled_act.stride(0), parts.stride(0),
        TOP_K=routing.top_k, GATHER=routing.order_R is not None, SCALE=scores is not None,
        ACT=needs.w2, DH=needs.h, DSCORE=num_slots > 0, TMA_W=tma_w,
        MASK_N=hidden_dim % config.BN > 0, MASK_K=dim % config.BK > 0, PRECISION=_precision(dout), **_compiled(config, "SPLIT"),
    )  # fmt: skip
    return dh, scaled_act, parts.sum(dim=0) if num_slots else None


def input_gradient(dh: Tensor, w1: Tensor, w3: Tensor, shape: torch.Size, schedule: Schedule) -> Tensor:
    """dx, in the rows of x."""
    routing, config = schedule.routing, schedule.config(table.INPUT_GRADIENT)
    num_experts, hidden_dim, dim = w1.shape
    tma_w = schedule.has_tma(w1, w3)
    tma_dh = dh.is_contiguous() and schedule.has_tma(dh[0])
    block = [1, config.BK, config.BN]

    def write(out: Tensor, scatter: bool) -> None:
        backward_kernels.input_gradient[schedule.grid(config.BM, dim, config.BN)](
            _described(dh.view(-1, hidden_dim), [config.BM, config.BK], True) if tma_dh else dh,
            _described(w1, block, tma_w), _described(w3, block, tma_w),
            routing.order_R, routing.offsets_E1, *schedule.tiles(config.BM), out,
            dim, hidden_dim, schedule.num_rows, dh.stride(0), dh.stride(1), *w1.stride(), *w3.stride(), out.stride(0),
            GATHER=routing.order_R is not None, SCATTER=scatter, TMA_DH=tma_dh, TMA_W=tma_w,
            MASK_N=dim % config.BN > 0, MASK_K=hidden_dim % config.BK > 0, PRECISION=_precision(dh), **_compiled(config),
        )  # fmt: skip

    return _to_slots(write, shape, dh, None, schedule)


def weight_gradient(
    a: Tensor, b: Tensor, dw: Tensor, schedule: Schedule, *, gather_a: bool, gather_b: bool, accumulate: bool
) -> None:
    """dw[e] = a^T b over the rows of expert e, zeros where it has none; added to dw under *accumulate*."""
    routing, config = schedule.routing, schedule.config(table.WEIGHT_GRADIENT)
    num_experts, rows, columns = dw.shape
    counts_E = routing.offsets_E1.diff()
    busiest_first_E = torch.argsort(counts_E, descending=True, stable=True).to(torch.int32)
    grid = (num_experts * triton.cdiv(rows, config.BM) * triton.cdiv(columns, config.BN),)
    gathers = routing.order_R is not None
    backward_kernels.weight_gradient[grid](
        a, b, routing.order_R, routing.offsets_E1, busiest_first_E, dw, rows, columns, *a.stride(), *b.stride(), *dw.stride(),
        TOP_K=routing.top_k, GATHER=gathers, GATHER_A=gathers and gather_a, GATHER_B=gathers and gather_b, ACCUMULATE=accumulate,
        MASK_M=rows % config.BM > 0, MASK_N=columns % config.BN > 0, PRECISION=_precision(a), **_compiled(config),
    )  # fmt: skip


def backward(
    dout: Tensor, x: Tensor, scores: Tensor | None, w1: Tensor, w3: Tensor, w2: Tensor, h: Tensor, routing: Routing, needs: Needs,
    *, accumulators: Sequence[Tensor] | None = None, permute_first: bool | None = None, tma: bool | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, scores [N] (fp32), w1, w3, w2; None where not needed, or where added to *accumulators* (of w1, w3, w2).

    Without h it is computed again.
    """
    schedule = schedule_of(x, routing, tma)
    empty = schedule.num_rows == 0 or x.shape[0] == 0
    if empty:
        return _zero_gradients(x, scores, (w1, w3, w2), needs, accumulators)
    if h.shape[1] == 0:
        h = gate_up(x, w1, w3, schedule, save_h=True, save_act=False, permute_first=permute_first)[1]
    dh, scaled_act, dscores = down_backward(dout, w2, h, scores, schedule, needs)
    accumulate = accumulators is not None
    dw1, dw3, dw2 = accumulators or [torch.empty_like(w) for w in (w1, w3, w2)]
    if needs.w1:
        weight_gradient(dh[0], x, dw1, schedule, gather_a=False, gather_b=True, accumulate=accumulate)
    if needs.w3:
        weight_gradient(dh[1], x, dw3, schedule, gather_a=False, gather_b=True, accumulate=accumulate)
    if needs.w2:
        weight_gradient(dout, scaled_act, dw2, schedule, gather_a=True, gather_b=False, accumulate=accumulate)
    dx = input_gradient(dh, w1, w3, x.shape, schedule) if needs.x else None
    given = [dw if need and not accumulate else None for dw, need in ((dw1, needs.w1), (dw3, needs.w3), (dw2, needs.w2))]
    return dx, dscores, *given


def _zero_gradients(x, scores, weights, needs: Needs, accumulators):  # type: ignore[no-untyped-def]
    dx = x.new_zeros(x.shape) if needs.x else None
    dscores = scores.new_zeros(scores.numel(), dtype=torch.float32) if scores is not None and needs.scores else None
    wanted = (needs.w1, needs.w3, needs.w2)
    dws = [torch.zeros_like(w) if need and accumulators is None else None for w, need in zip(weights, wanted, strict=True)]
    return dx, dscores, *dws
