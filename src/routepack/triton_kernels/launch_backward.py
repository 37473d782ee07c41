"""Launches the backward kernels. Letters: N slots, R sorted rows, E experts, D model dim, F hidden dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import grouped_gemm_kernels, tile_configs
from .launch_forward import Schedule, described, gate_up, new_rows, precision, schedule_of, to_slots
from .routing import Needs, Routing, num_blocks

_DOWN_BACKWARD: Any = grouped_gemm_kernels.down_backward
_INPUT_GRADIENT: Any = grouped_gemm_kernels.input_gradient
_WEIGHT_GRADIENT: Any = grouped_gemm_kernels.weight_gradient


def new_parts(num_parts: int, num_slots: int, like: Tensor) -> Tensor:
    """fp32 [parts, N] of the scores' gradient: zeros, as no tile writes the slots without an expert."""
    return torch.zeros((num_parts, num_slots), dtype=torch.float32, device=like.device)


def down_backward(
    dout: Tensor, w2: Tensor, h: Tensor, scores: Tensor | None, schedule: Schedule, needs: Needs
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of gate and up [2, R, F], scaled activations [R, F], and the scores' gradient [N] (fp32) or None."""
    config = schedule.config(tile_configs.DOWN_BACKWARD)
    _, dim, hidden_dim = w2.shape
    needs_dh = needs.x or needs.w1 or needs.w3
    dh = new_rows(schedule.num_rows if needs_dh else 0, hidden_dim, dout, parts=2)
    scaled_act = new_rows(schedule.num_rows if needs.w2 else 0, hidden_dim, dout)[0]
    num_slots = scores.numel() if scores is not None and needs.scores else 0
    parts = new_parts(num_blocks(hidden_dim, config.BN), num_slots, dout)
    tma_w = schedule.has_tma(w2)
    schedule.launch(
        _DOWN_BACKWARD, config, dout, described(w2, [1, config.BK, config.BN], tma_w), h, scores, dh, scaled_act, parts,
        dim, hidden_dim, *dout.stride(), *w2.stride(),
        h.stride(0), h.stride(1), dh.stride(0), dh.stride(1), scaled_act.stride(0), parts.stride(0),
        columns=hidden_dim, depth=dim, TOP_K=schedule.routing.top_k, SPLIT=config.SPLIT, SCALE=scores is not None,
        ACT=needs.w2, DH=needs_dh, DSCORE=num_slots > 0, TMA_W=tma_w,
    )  # fmt: skip
    return dh, scaled_act, parts.sum(dim=0) if num_slots else None


def input_gradient(dh: Tensor, w1: Tensor, w3: Tensor, shape: torch.Size, schedule: Schedule) -> Tensor:
    """dx, in the rows of x."""
    config = schedule.config(tile_configs.INPUT_GRADIENT)
    _, hidden_dim, dim = w1.shape
    tma_w = schedule.has_tma(w1, w3)
    tma_dh = dh.is_contiguous() and schedule.has_tma(dh[0])
    block = [1, config.BK, config.BN]

    def write(out: Tensor, scatter: bool) -> None:
        schedule.launch(
            _INPUT_GRADIENT, config,
            described(dh.view(-1, hidden_dim), [config.BM, config.BK], True) if tma_dh else dh,
            described(w1, block, tma_w), described(w3, block, tma_w), out,
            dim, hidden_dim, schedule.num_rows, dh.stride(0), dh.stride(1), *w1.stride(), *w3.stride(), out.stride(0),
            columns=dim, depth=hidden_dim, SCATTER=scatter, TMA_DH=tma_dh, TMA_W=tma_w,
        )  # fmt: skip

    return to_slots(write, shape, dh, None, schedule)


def weight_gradient(
    a: Tensor, b: Tensor, dw: Tensor, schedule: Schedule, *, gather_a: bool, gather_b: bool, accumulate: bool
) -> None:
    """dw[e] = a^T b over the rows of expert e, zeros where it has none; added to dw under *accumulate*."""
    routing = schedule.routing
    config = schedule.config(tile_configs.WEIGHT_GRADIENT_SUM if accumulate else tile_configs.WEIGHT_GRADIENT)
    num_experts, rows, columns = dw.shape
    grid = (num_experts * num_blocks(rows, config.BM) * num_blocks(columns, config.BN),)
    gathers = routing.order_R is not None
    _WEIGHT_GRADIENT[grid](
        a, b, routing.order_R, routing.offsets_E1, schedule.busiest_first_E, dw,
        rows, columns, *a.stride(), *b.stride(), *dw.stride(),
        TOP_K=routing.top_k, GATHER=gathers, GATHER_A=gathers and gather_a, GATHER_B=gathers and gather_b,
        ACCUMULATE=accumulate, MASK_M=rows % config.BM > 0, MASK_N=columns % config.BN > 0,
        PRECISION=precision(schedule.dtype), **config.options,
    )  # fmt: skip


def backward(
    dout: Tensor, x: Tensor, scores: Tensor | None, w1: Tensor, w3: Tensor, w2: Tensor,
    h: Tensor, routing: Routing, needs: Needs,
    *, sums: Sequence[Tensor] | None = None, permute_first: bool | None = None, tma: bool | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of x, scores [N] (fp32), w1, w3, w2: None where not needed. h without rows is computed again.

    *sums* (of w1, w3, w2): the weights' gradients are added to them and not given.
    """
    schedule = schedule_of(x, routing, tma)
    if h.shape[1] == 0:
        h = gate_up(x, w1, w3, schedule, save_h=True, save_act=False, permute_first=permute_first)[1]
    dh, scaled_act, dscores = down_backward(dout, w2, h, scores, schedule, needs)
    dws: list[Tensor | None] = [None, None, None]
    operands = ((needs.w1, w1, dh[0], x, False), (needs.w3, w3, dh[1], x, False), (needs.w2, w2, dout, scaled_act, True))
    for which, (need, w, a, b, gather_a) in enumerate(operands):
        if need:
            dw = torch.empty_like(w) if sums is None else sums[which]
            weight_gradient(a, b, dw, schedule, gather_a=gather_a, gather_b=not gather_a, accumulate=sums is not None)
            dws[which] = dw if sums is None else None
    dx = input_gradient(dh, w1, w3, x.shape, schedule) if needs.x else None
    return [dx, dscores, *dws]
