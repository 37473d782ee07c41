"""The layer as functions. Letters: T tokens, K top-k, R rows, E experts, D model dim, F hidden dim."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import argument_checks as checks
from . import torch_operators
from .argument_checks import Implementation, Recompute
from .routing import offsets_of_counts, signed


def moe_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_scores: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    *,
    recompute: Recompute = "none",
    implementation: Implementation = "auto",
    grad_accumulators: Sequence[Tensor] | None = None,
    permute_first: bool | None = None,
    tma: bool | None = None,
) -> Tensor:
    """[T, D]: ``out[t] = sum_k scores[t, k] * w2[e] (silu(w1[e] x[t]) * (w3[e] x[t]))`` with ``e = ids[t, k]``.

    For SwiGLU experts (other activations are not computed) that all lie on this device. Nothing is padded, no row is copied K
    times, and the host never waits for the device. The result does not depend on anything but the input, bit for bit.

    x and the weights have one dtype. Under autocast they are converted to autocast's, as by torch.matmul: all but float64.

    Args:
        x: [T, D], float32, bfloat16 or float16 (float64 too without Triton), of any strides.
        topk_ids: int [T, K]. An id outside of 0 .. E - 1 (use -1) marks a slot without an expert: it adds nothing and its
            score, whatever it is, gets no gradient. A token may name an expert twice.
        topk_scores: float [T, K], of any of these dtypes, whatever that of x, and of any strides (copied where they do not
            lie side by side); differentiable.
        w1: gate weights [E, F, D], of any strides, such as ``w13[:, :F]`` or ``w13.view(E, F, 2, D)[:, :, 0]``.
        w3: up weights [E, F, D].
        w2: down weights [E, D, F].
        recompute: what the backward pass computes again instead of keeping it: ``"none"`` keeps x and both projections
            (2 D + 4 K F bytes a token in 16 bits), ``"gate_up"`` only x (2 D bytes) for 2/9 more arithmetic in the layer.
        implementation: ``"auto"`` is Triton for tensors on a GPU and the loop over experts elsewhere; ``"triton"`` (on the
            CPU: with TRITON_INTERPRET=1 in the environment) or ``"eager"`` by name.
        grad_accumulators: three tensors shaped as (w1, w3, w2), fp32 as a rule, to which the backward pass adds the
            gradients of those weights that require one; the weights' ``.grad`` then stays as it is.
        permute_first: whether to copy x into expert order first, for loads by TMA; None decides by size and architecture.
        tma: whether to load by tensor descriptors; None decides by architecture and strides.

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices or options that do not fit, without waiting for the device.
        NotImplementedError: under forward-mode derivatives and torch.func transforms that differentiate, and from a second
            derivative's backward pass.

    >>> x, scores = torch.ones(2, 4), torch.tensor([[1.0], [2.0]])
    >>> w1 = w3 = torch.ones(3, 8, 4); w2 = torch.ones(3, 4, 8)
    >>> moe_experts(x, torch.tensor([[0], [2]]), scores, w1, w3, w2)[:, 0].round().tolist()
    [126.0, 251.0]
    """
    checks.check_local(x, topk_ids, topk_scores, w1, w3, w2)
    order, inverse, offsets = torch_operators.route(topk_ids, w1.shape[0])
    return _experts(
        x, topk_scores, w1, w3, w2, offsets, order, inverse, topk_ids.shape[1],
        recompute, implementation, permute_first, tma, grad_accumulators,
    )  # fmt: skip


def grouped_experts(
    rows: Tensor,
    counts: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    *,
    row_index: Tensor | None = None,
    row_scores: Tensor | None = None,
    recompute: Recompute = "none",
    implementation: Implementation = "auto",
    grad_accumulators: Sequence[Tensor] | None = None,
    permute_first: bool | None = None,
    tma: bool | None = None,
) -> Tensor:
    """[R, D]: the experts' outputs for rows that a dispatch has brought here, in the layout of *rows*.

    Args:
        rows: [R, D]. The first ``counts[0]`` are the first expert's, and so on, unless there is a *row_index*. Rows beyond
            ``counts.sum()`` come back as zeros, whatever they hold, and so do their gradients.
        counts: int [E], on the device: rows of each expert. On a GPU a sum beyond R is cut to R and a count below zero is
            zero; on the CPU both are errors.
        row_index: int [M]; entry i, in expert order, names the row of *rows* that it stands for, so that rows sorted by rank
            need no permutation by expert before and after. No row twice; an entry outside of 0 .. R - 1 is skipped; rows
            that no entry below ``counts.sum()`` names come back as zeros.
        row_scores: float [R], by which the outputs are multiplied; differentiable.

    The others, and what is raised, are those of :func:`moe_experts`.

    >>> rows, counts = torch.ones(3, 4), torch.tensor([1, 1])
    >>> w1 = w3 = torch.ones(2, 8, 4); w2 = torch.ones(2, 4, 8)
    >>> grouped_experts(rows, counts, w1, w3, w2)[:, 0].round().tolist()
    [126.0, 126.0, 0.0]
    """
    checks.check_grouped(rows, counts, w1, w3, w2, row_index, row_scores)
    num_rows = rows.shape[0] if row_index is None else row_index.shape[0]
    offsets = offsets_of_counts(counts, num_rows)
    order = None
    if row_index is not None:
        row_index = signed(row_index)
        named = (row_index >= 0) & (row_index < rows.shape[0])
        order = torch.where(named, row_index, -1).to(torch.int32)
    return _experts(
        rows, row_scores, w1, w3, w2, offsets, order, None, 1,
        recompute, implementation, permute_first, tma, grad_accumulators,
    )  # fmt: skip


def _experts(
    x: Tensor, scores: Tensor | None, w1: Tensor, w3: Tensor, w2: Tensor,
    offsets: Tensor, order: Tensor | None, inverse: Tensor | None, top_k: int, recompute: Recompute,
    implementation: Implementation, permute_first: bool | None, tma: bool | None, accumulators: Sequence[Tensor] | None,
) -> Tensor:  # fmt: skip
    x, w1, w3, w2 = (tensor.to(checks.computed_dtype(tensor)) for tensor in (x, w1, w3, w2))
    implementation = checks.choose_implementation(x, implementation)
    checks.check_choice("recompute", recompute, Recompute)
    if accumulators is not None:
        checks.check_accumulators(accumulators, (w1, w3, w2))
    differentiable = [tensor for tensor in (x, scores, w1, w3, w2) if tensor is not None]
    checks.check_transforms(differentiable)
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable)
    save_h = trains and recompute == "none"
    sums = (None, None, None) if accumulators is None else tuple(accumulators)
    return torch_operators.experts(
        x, scores, w1, w3, w2, offsets, order, inverse, top_k, save_h, implementation, permute_first, tma, *sums
    )[0]  # fmt: skip
