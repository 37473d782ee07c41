"""The layer as torch operators: one node each in a graph, with shapes for tracing and a backward pass.

``routepack::route``, ``routepack::experts`` and ``routepack::experts_backward`` are opaque to torch.compile, so that no
Triton driver is needed to trace them. A selective checkpoint that must save ``routepack::experts`` and
``routepack::route`` computes neither again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from routepack.triton_kernels import eager, routing
from routepack.triton_kernels.routing import Routing

logger = logging.getLogger(__name__)
_announced: set[tuple[str, str]] = set()


@torch.library.custom_op("routepack::route", mutates_args=())
def route(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`routepack.triton_kernels.routing.route`."""
    return routing.route(topk_ids, num_experts)


@route.register_fake
def _(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = topk_ids.new_empty(topk_ids.numel(), dtype=torch.int32)
    return slots, torch.empty_like(slots), topk_ids.new_empty(num_experts + 1, dtype=torch.int32)


@torch.library.custom_op("routepack::experts", mutates_args=())
def experts(
    x: Tensor,
    scores: Tensor | None,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    inverse: Tensor | None,
    top_k: int,
    save_h: bool,
    implementation: str,
    permute_first: bool | None,
    tma: bool | None,
    w1_sum: Tensor | None,
    w3_sum: Tensor | None,
    w2_sum: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output [T, D] and h [2, R, F]; the sums are for the backward pass, which adds the weights' gradients to them."""
    plan = Routing(offsets_E1=offsets, order_R=order, inverse_N=inverse, top_k=top_k)
    flat = _flat(scores)
    _announce(implementation, x)
    if implementation == "eager":
        return eager.forward(x, flat, w1, w3, w2, plan, save_h=save_h)
    from routepack.triton_kernels import launch

    with _current(x):
        return launch.forward(x, flat, w1, w3, w2, plan, save_h=save_h, permute_first=permute_first, tma=tma)


@experts.register_fake
def _(x, scores, w1, w3, w2, offsets, order, inverse, top_k, save_h, *options):
    num_rows = x.shape[0] if order is None else order.shape[0]
    return x.new_empty(x.shape), x.new_empty((2, num_rows if save_h else 0, w1.shape[1]))


def _flat(scores: Tensor | None) -> Tensor | None:
    """One score for each slot, side by side: the kernels index them without a stride, and a reshape may keep one."""
    return None if scores is None else scores.reshape(-1).contiguous()


def _current(x: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device, which need not be that of x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _announce(implementation: str, x: Tensor) -> None:
    """One log line for each implementation and kind of device."""
    key = (implementation, x.device.type)
    if key in _announced:
        return
    _announced.add(key)
    if implementation == "triton":
        logger.info("MoE experts on %s: Triton kernels.", x.device.type)
    elif x.is_cuda:
        logger.warning("MoE experts on %s: a loop over the experts in plain torch, which waits for the device.", x.device.type)
    else:
        logger.info("MoE experts on %s: a loop over the experts in plain torch.", x.device.type)


@torch.library.custom_op("routepack::experts_backward", mutates_args=())
def experts_backward(
    dout: Tensor,
    x: Tensor,
    scores: Tensor | None,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    h: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    inverse: Tensor | None,
    top_k: int,
    needs: list[bool],
    implementation: str,
    permute_first: bool | None,
    tma: bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, scores, w1, w3, w2; without elements where not needed."""
    plan = Routing(offsets_E1=offsets, order_R=order, inverse_N=inverse, top_k=top_k)
    gradients = _backward(dout, x, scores, w1, w3, w2, h, plan, needs, implementation, permute_first, tma, None)
    dx, dscores, dw1, dw3, dw2 = _shaped(gradients, (x, scores, w1, w3, w2), needs)
    return dx, dscores, dw1, dw3, dw2


@experts_backward.register_fake
def _(dout, x, scores, w1, w3, w2, h, offsets, order, inverse, top_k, needs, *options):
    return _empties((x, scores, w1, w3, w2), needs)


@torch.library.custom_op("routepack::experts_backward_into", mutates_args=("w1_sum", "w3_sum", "w2_sum"))
def experts_backward_into(
    dout: Tensor,
    x: Tensor,
    scores: Tensor | None,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    h: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    inverse: Tensor | None,
    w1_sum: Tensor,
    w3_sum: Tensor,
    w2_sum: Tensor,
    top_k: int,
    needs: list[bool],
    implementation: str,
    permute_first: bool | None,
    tma: bool | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and scores; those of w1, w3, w2 are added to the sums."""
    plan = Routing(offsets_E1=offsets, order_R=order, inverse_N=inverse, top_k=top_k)
    gradients = _backward(
        dout, x, scores, w1, w3, w2, h, plan, needs, implementation, permute_first, tma, (w1_sum, w3_sum, w2_sum)
    )
    dx, dscores = _shaped(gradients[:2], (x, scores), needs[:2])
    return dx, dscores


@experts_backward_into.register_fake
def _(dout, x, scores, w1, w3, w2, h, offsets, order, inverse, w1_sum, w3_sum, w2_sum, top_k, needs, *options):
    return _empties((x, scores), needs[:2])


def _empties(likes: Sequence[Any], needs: Sequence[bool]) -> tuple[Tensor, ...]:
    """What the backward operators give: gradients of x and scores are dense, those of weights have the weights' strides."""
    makers = (_dense, _dense, torch.empty_like, torch.empty_like, torch.empty_like)
    triples = zip(makers, likes, needs, strict=False)
    return tuple(make(like) if need else likes[0].new_empty(0) for make, like, need in triples)


def _dense(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


def _shaped(gradients: Sequence[Tensor | None], likes: Sequence[Any], needs: Sequence[bool]) -> list[Tensor]:
    """Each gradient in shape and dtype of its tensor; one without elements where it is not needed."""
    shaped = []
    for gradient, like, need in zip(gradients, likes, needs, strict=True):
        if need and gradient is not None:
            shaped.append(gradient.reshape(like.shape).to(like.dtype))
        else:
            shaped.append(likes[0].new_empty(0))
    return shaped


def _backward(
    dout: Tensor, x: Tensor, scores: Tensor | None, w1: Tensor, w3: Tensor, w2: Tensor, h: Tensor, plan: Routing,
    needs: Sequence[bool], implementation: str, permute_first: bool | None, tma: bool | None, sums: Sequence[Tensor] | None,
) -> list[Tensor | None]:  # fmt: skip
    flat = _flat(scores)
    if implementation == "eager":
        return eager.backward(dout, x, flat, w1, w3, w2, h, plan, needs, sums=sums)
    from routepack.triton_kernels import launch_backward

    wanted = launch_backward.Needs(x=needs[0], scores=needs[1], w1=needs[2], w3=needs[3], w2=needs[4])
    with _current(dout):
        return launch_backward.backward(
            dout, x, flat, w1, w3, w2, h, plan, wanted, sums=sums, permute_first=permute_first, tma=tma
        )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, scores, w1, w3, w2, offsets, order, inverse, top_k, _, implementation, permute_first, tma, *sums = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.options = (top_k, implementation, permute_first, tma)
    ctx.sums = None if sums[0] is None else sums
    ctx.save_for_backward(x, scores, w1, w3, w2, output[1], offsets, order, inverse)


def _gradients(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dout is None:
        return (None,) * 16
    top_k, implementation, permute_first, tma = ctx.options
    needs = list(ctx.needs_input_grad[:5])
    options = (top_k, needs, implementation, permute_first, tma)
    if ctx.sums is None:
        gradients = experts_backward(dout, *ctx.saved_tensors, *options)
    else:
        gradients = (*experts_backward_into(dout, *ctx.saved_tensors, *ctx.sums, *options), None, None, None)
    return (*(gradient if need else None for gradient, need in zip(gradients, needs, strict=True)), *(None,) * 11)


def _refuse(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
    raise NotImplementedError(
        "Second derivatives of the MoE layer are not supported: leave it out of what create_graph=True is differentiated for, "
        "or use routepack.triton_kernels.reference."
    )


torch.library.register_autograd("routepack::experts", _gradients, setup_context=_setup)
torch.library.register_autograd("routepack::experts_backward", _refuse)
