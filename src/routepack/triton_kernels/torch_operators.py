"""The layer as torch operators: one node each in a graph, with shapes for tracing and a backward pass.

``route``, ``experts`` and ``experts_backward`` are opaque to torch.compile, so that no Triton driver is needed to trace them.
A selective checkpoint that must save ``experts`` and ``route`` computes neither again. They are registered in the namespace
of the outermost package, ``torch.ops.routepack``, so that a copy of this folder in another project does not meet this one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import eager_experts, routing
from .routing import Needs, Routing

NAMESPACE = __name__.partition(".")[0]
"""Of the operators: ``routepack``."""

logger = logging.getLogger(__name__)


@torch.library.custom_op(f"{NAMESPACE}::route", mutates_args=())
def route(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`.routing.route`."""
    return routing.route(topk_ids, num_experts)


@route.register_fake
def _(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = topk_ids.new_empty(topk_ids.numel(), dtype=torch.int32)
    return slots, torch.empty_like(slots), topk_ids.new_empty(num_experts + 1, dtype=torch.int32)


@torch.library.custom_op(f"{NAMESPACE}::experts", mutates_args=())
def experts(
    x: Tensor, scores: Tensor | None, w1: Tensor, w3: Tensor, w2: Tensor,
    offsets: Tensor, order: Tensor | None, inverse: Tensor | None, top_k: int,
    save_h: bool, implementation: str, permute_first: bool | None, tma: bool | None,
    w1_sum: Tensor | None, w3_sum: Tensor | None, w2_sum: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [T, D] and h [2, R, F]; the sums are for the backward pass, which adds the weights' gradients to them."""
    plan = Routing(offsets_E1=offsets, order_R=order, inverse_N=inverse, top_k=top_k)
    flat = _flat(scores)
    _announce(implementation, x.device.type)
    if _is_eager(implementation, x, plan):
        return eager_experts.forward(x, flat, w1, w3, w2, plan, save_h=save_h)
    from . import launch_forward

    with _current(x):
        return launch_forward.forward(x, flat, w1, w3, w2, plan, save_h=save_h, permute_first=permute_first, tma=tma)


@experts.register_fake
def _(x, scores, w1, w3, w2, offsets, order, inverse, top_k, save_h, *options):
    num_rows = Routing(offsets_E1=offsets, order_R=order).num_rows(x)
    return x.new_empty(x.shape), x.new_empty((2, num_rows if save_h else 0, w1.shape[1]))


def _flat(scores: Tensor | None) -> Tensor | None:
    """One score for each slot, side by side: the kernels index them without a stride, and a reshape may keep one."""
    return None if scores is None else scores.reshape(-1).contiguous()


def _is_eager(implementation: str, x: Tensor, plan: Routing) -> bool:
    """Whether plain torch computes: also what there is of no rows, for which no kernel can be launched."""
    return implementation == "eager" or x.shape[0] == 0 or plan.num_rows(x) == 0


def _current(x: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device, which need not be that of x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@cache
def _announce(implementation: str, device: str) -> None:
    """One log line for each implementation and kind of device."""
    if implementation == "triton":
        logger.info("MoE experts on %s: Triton kernels.", device)
    elif device == "cuda":
        logger.warning("MoE experts on %s: a loop over the experts in plain torch, which waits for the device.", device)
    else:
        logger.info("MoE experts on %s: a loop over the experts in plain torch.", device)


_BACKWARD = (
    "Tensor dout, Tensor x, Tensor? scores, Tensor w1, Tensor w3, Tensor w2, Tensor h, Tensor offsets, Tensor? order, "
    "Tensor? inverse, SymInt top_k, bool[] needs, str implementation, bool? permute_first, bool? tma"
)
"""The parameters of both backward operators, those of :func:`_backward`: a schema, so that they stand here once."""


@torch.library.custom_op(
    f"{NAMESPACE}::experts_backward", mutates_args=(), schema=f"({_BACKWARD}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def experts_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of x, scores, w1, w3, w2; without elements where not needed."""
    return _backward(*arguments)


@experts_backward.register_fake
def _(dout, x, scores, w1, w3, w2, h, offsets, order, inverse, top_k, needs, *options):
    return _empties((x, scores, w1, w3, w2), needs)


@torch.library.custom_op(
    f"{NAMESPACE}::experts_backward_into",
    mutates_args=("w1_sum", "w3_sum", "w2_sum"),
    schema=f"(Tensor(a!) w1_sum, Tensor(b!) w3_sum, Tensor(c!) w2_sum, {_BACKWARD}) -> (Tensor, Tensor)",
)
def experts_backward_into(w1_sum: Tensor, w3_sum: Tensor, w2_sum: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of x and scores; those of w1, w3, w2 are added to the sums."""
    return _backward(*arguments, sums=(w1_sum, w3_sum, w2_sum))


@experts_backward_into.register_fake
def _(w1_sum, w3_sum, w2_sum, dout, x, scores, w1, w3, w2, h, offsets, order, inverse, top_k, needs, *options):
    return _empties((x, scores), needs)


def _empties(likes: Sequence[Any], needs: Sequence[bool]) -> tuple[Tensor, ...]:
    """What the backward operators give: gradients of x and scores are dense, those of weights have the weights' strides."""
    x = likes[0]
    return tuple(
        x.new_empty(0) if not need else like.new_empty(like.shape) if i < 2 else torch.empty_like(like)
        for i, (like, need) in enumerate(zip(likes, needs, strict=False))
    )


def _backward(
    dout: Tensor, x: Tensor, scores: Tensor | None, w1: Tensor, w3: Tensor, w2: Tensor, h: Tensor,
    offsets: Tensor, order: Tensor | None, inverse: Tensor | None, top_k: int,
    needs: Sequence[bool], implementation: str, permute_first: bool | None, tma: bool | None,
    *, sums: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of x, scores and, without *sums*, of w1, w3, w2: each in shape and dtype of its tensor."""
    plan = Routing(offsets_E1=offsets, order_R=order, inverse_N=inverse, top_k=top_k)
    arguments = (dout, x, _flat(scores), w1, w3, w2, h, plan, Needs(*needs))
    if _is_eager(implementation, x, plan):
        gradients = eager_experts.backward(*arguments, sums=sums)
    else:
        from . import launch_backward

        with _current(dout):
            gradients = launch_backward.backward(*arguments, sums=sums, permute_first=permute_first, tma=tma)
    likes: tuple[Any, ...] = (x, scores, w1, w3, w2) if sums is None else (x, scores)
    return tuple(
        gradient.reshape(like.shape).to(like.dtype) if need and gradient is not None else x.new_empty(0)
        for gradient, like, need in zip(gradients, likes, needs, strict=False)
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
    top_k, *options = ctx.options
    needs = list(ctx.needs_input_grad[:5])
    arguments = (dout, *ctx.saved_tensors, top_k, needs, *options)
    if ctx.sums is None:
        gradients = experts_backward(*arguments)
    else:
        gradients = (*experts_backward_into(*ctx.sums, *arguments), None, None, None)
    return (*(gradient if need else None for gradient, need in zip(gradients, needs, strict=True)), *(None,) * 11)


def _refuse(ctx: Any, *_: Any) -> tuple[Any, ...]:
    raise NotImplementedError(
        "Second derivatives of the MoE layer are not supported: leave it out of what create_graph=True is differentiated for, "
        "or use the functions of reference.py."
    )


torch.library.register_autograd(f"{NAMESPACE}::experts", _gradients, setup_context=_setup)
torch.library.register_autograd(f"{NAMESPACE}::experts_backward", _refuse)
