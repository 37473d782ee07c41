"""What the layer refuses: by shapes, dtypes and devices alone, so that the host never waits for the device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .routing import signed

Recompute = Literal["none", "gate_up"]
Implementation = Literal["auto", "triton", "eager"]
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DTYPES = (*TRITON_DTYPES, torch.float64)


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise ValueError unless *value* is one of *choices*, a Literal."""
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r} is not known: choose one of {', '.join(map(repr, get_args(choices)))}.")


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype:
    """The dtype that weights are made in, given as such or by its name; None is torch's default.

    >>> dtype_of("bfloat16")
    torch.bfloat16
    """
    named = {str(one).removeprefix("torch."): one for one in DTYPES}
    found = torch.get_default_dtype() if dtype is None else named.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not computed in: choose one of {', '.join(named)}.")
    return found


def computed_dtype(tensor: Tensor) -> torch.dtype:
    """What *tensor* is multiplied in: under autocast in autocast's dtype, as by torch.matmul, unless it is float64."""
    device = tensor.device.type
    # Autocast knows nothing of the meta device, and asking is an error.
    if tensor.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return tensor.dtype
    return torch.get_autocast_dtype(device)


def check_operand(name: str, tensor: Tensor, other: Tensor, beside: str = "x") -> None:
    """Raise unless *tensor* can be multiplied with *other*: both tensors of one device and of one dtype that is computed in.

    Autocast makes dtypes equal, but for float64. It makes no float8 wider: that would leave out the scales of such numbers.
    """
    _check_floats(name, tensor, other, beside)
    if computed_dtype(tensor) != computed_dtype(other):
        raise TypeError(
            f"{name} is {tensor.dtype} and {beside} is {other.dtype}: convert one, or run under torch.autocast, which converts "
            "all but float64."
        )


def check_weights(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, called: str = "x") -> None:
    """Raise where x [., D] and the weights do not fit one another; *called*: how the caller names x."""
    for name, tensor in ((called, x), ("w1", w1), ("w3", w3), ("w2", w2)):
        check_operand(name, tensor, x, called)
    if x.ndim != 2:
        raise ValueError(f"{called} has {x.ndim} dimensions; give [T, D]: flatten with x.reshape(-1, x.shape[-1]).")
    if w1.ndim != 3:
        raise ValueError(f"w1 has {w1.ndim} dimensions; give [E, F, D].")
    num_experts, hidden_dim, dim = w1.shape
    for name, tensor, shape in (("w3", w3, (num_experts, hidden_dim, dim)), ("w2", w2, (num_experts, dim, hidden_dim))):
        if tensor.shape != shape:
            raise ValueError(
                f"{name} is {list(tensor.shape)}; beside w1 [E, F, D] = {list(w1.shape)} it must be {list(shape)}."
            )
    if x.shape[1] != dim:
        raise ValueError(f"{called} is {list(x.shape)}, but w1 [E, F, D] = {list(w1.shape)} takes rows of D = {dim}.")
    if 0 in (num_experts, hidden_dim, dim):
        raise ValueError(f"w1 is {list(w1.shape)}: E, F and D must be at least 1.")


def check_local(x: Tensor, topk_ids: Tensor, topk_scores: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> None:
    """Raise where the arguments of ``moe_experts`` do not fit one another."""
    check_weights(x, w1, w3, w2)
    _check_integers("topk_ids", topk_ids, x)
    if topk_ids.ndim != 2 or topk_ids.shape[0] != x.shape[0] or topk_ids.shape[1] == 0:
        raise ValueError(f"topk_ids is {list(topk_ids.shape)}; give [T, K] with T = {x.shape[0]} as in x and K of at least 1.")
    check_scores(topk_scores, topk_ids, x)
    _check_size("topk_ids", topk_ids.numel())


def check_grouped(
    rows: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, row_index: Tensor | None, row_scores: Tensor | None
) -> None:
    """Raise where the arguments of ``grouped_experts`` do not fit one another."""
    check_weights(rows, w1, w3, w2, "rows")
    _check_integers("counts", counts, rows, "rows")
    if counts.shape != w1.shape[:1]:
        raise ValueError(f"counts is {list(counts.shape)}; give one for each of the E = {w1.shape[0]} experts of w1.")
    if row_index is not None:
        _check_integers("row_index", row_index, rows, "rows")
        if row_index.ndim != 1:
            raise ValueError(f"row_index is {list(row_index.shape)}; give one dimension, a row for each entry.")
        _check_size("row_index", row_index.shape[0])
    if row_scores is not None:
        _check_floats("row_scores", row_scores, rows, "rows")
        if row_scores.shape != rows.shape[:1]:
            raise ValueError(f"row_scores is {list(row_scores.shape)}; give one for each of the {rows.shape[0]} rows.")
    _check_size("rows", rows.shape[0])
    if not rows.is_cuda and _is_readable(counts):
        _check_counts(signed(counts), rows.shape[0] if row_index is None else row_index.shape[0])


def _is_readable(tensor: Tensor) -> bool:
    """Whether there are numbers: not while tracing, nor in fake tensors (a subclass) or on the meta device."""
    return type(tensor) is Tensor and not tensor.is_meta and not torch.compiler.is_compiling()


def check_sizes(**sizes: int) -> None:
    """Raise unless every size is a whole number of at least 1."""
    for name, value in sizes.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is no whole number.")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")


def check_scores(topk_scores: Tensor, topk_ids: Tensor, x: Tensor) -> None:
    """Raise unless there is a score for each of the ids."""
    _check_floats("topk_scores", topk_scores, x)
    if topk_scores.shape != topk_ids.shape:
        raise ValueError(f"topk_scores is {list(topk_scores.shape)}; give one for each of topk_ids {list(topk_ids.shape)}.")


def check_leading(x: Tensor, dim: int, topk_ids: Tensor | None) -> None:
    """Raise unless x is [..., D] and the ids are integers [..., K] of the same leading axes."""
    _check_tensor("x", x)
    if x.ndim == 0 or x.shape[-1] != dim:
        raise ValueError(f"x is {list(x.shape)}; give [..., D] with D = {dim}.")
    if topk_ids is None:
        return
    _check_integers("topk_ids", topk_ids, x)
    if topk_ids.ndim != x.ndim or topk_ids.shape[:-1] != x.shape[:-1] or topk_ids.shape[-1] == 0:
        raise ValueError(
            f"topk_ids is {list(topk_ids.shape)}; beside x {list(x.shape)} give {[*x.shape[:-1], 'K']} with K of at least 1."
        )


def check_accumulators(sums: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Raise unless there is a tensor for each of the weights w1, w3, w2 that its gradient can be added to."""
    if len(sums) != 3 or not all(isinstance(total, Tensor) for total in sums):
        given = ", ".join(type(total).__name__ for total in sums)
        raise ValueError(f"grad_accumulators has {len(sums)} entries ({given}); give three tensors, for (w1, w3, w2).")
    for name, total, weight in zip(("w1", "w3", "w2"), sums, weights, strict=True):
        label = f"grad_accumulators for {name}"
        if total.shape != weight.shape:
            raise ValueError(f"{label} is {list(total.shape)}; it must be {list(weight.shape)}, as {name} is here.")
        _check_floats(label, total, weight, beside=name)
        if _overlaps(total):
            raise ValueError(f"{label} has strides {total.stride()}, by which elements share memory: give a dense one.")
    if sums[0] is sums[1] or sums[0] is sums[2] or sums[1] is sums[2]:
        raise ValueError("grad_accumulators names one tensor twice: each weight needs its own.")


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements may share memory: false where every axis steps over all that the axes within it reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def check_transforms(tensors: Sequence[Tensor]) -> None:
    """Raise under transforms whose derivatives would be wrong (forward mode: zeros) or fail with torch's own words."""
    if torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if _is_differentiated_by_func(tensor):
            raise NotImplementedError(
                "The MoE layer works under torch.autograd, not under torch.func.grad, vjp, jvp and what is built on them: "
                "use .backward() or torch.autograd.grad, or the functions of reference.py."
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "The MoE layer has no forward-mode derivative: use .backward() or torch.autograd.grad, or the "
                "functions of reference.py."
            )


def _is_differentiated_by_func(tensor: Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _check_counts(counts: Tensor, num_rows: int) -> None:
    if counts.numel() and int(counts.min()) < 0:
        raise ValueError(f"counts has {int(counts.min())}: a count is at least 0.")
    if int(counts.sum()) > num_rows:
        raise ValueError(
            f"counts add up to {int(counts.sum())}, but there are {num_rows} rows: drop rows or correct the counts."
        )


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; give a tensor.")


def _check_integers(name: str, tensor: Tensor, other: Tensor, beside: str = "x") -> None:
    _check_tensor(name, tensor)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise TypeError(f"{name} is {tensor.dtype}; give integers.")
    _check_device(name, tensor, other, beside)


def _check_floats(name: str, tensor: Tensor, other: Tensor, beside: str = "x") -> None:
    _check_tensor(name, tensor)
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} is {tensor.dtype}; give floating point: {', '.join(map(str, DTYPES))}.")
    _check_device(name, tensor, other, beside)


def _check_device(name: str, tensor: Tensor, other: Tensor, beside: str = "x") -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name} lies on {tensor.device} and {beside} on {other.device}: move one of them.")


def _check_size(name: str, count: int) -> None:
    if count >= 2**31:
        raise ValueError(f"{name} has {count} entries; rows are counted in 32 bits, at most {2**31 - 1}: split the tokens.")


def choose_implementation(x: Tensor, implementation: Implementation) -> Implementation:
    """``"triton"`` or ``"eager"``: what *implementation* means for x."""
    check_choice("implementation", implementation, Implementation)
    if implementation == "auto":
        return "triton" if x.is_cuda and x.dtype in TRITON_DTYPES and _has_triton() and _is_recent(x.device) else "eager"
    if implementation == "triton":
        _check_triton(x)
    return implementation


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_recent(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _check_triton(x: Tensor) -> None:
    if x.dtype not in TRITON_DTYPES:
        raise TypeError(f'implementation="triton" computes {", ".join(map(str, TRITON_DTYPES))}, not {x.dtype}: use "eager".')
    if not _has_triton():
        raise ValueError('implementation="triton", but triton is not installed: pip install triton, or use "auto".')
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET", "0") != "1":
        raise ValueError(
            f'implementation="triton" for tensors on {x.device} needs Triton\'s interpreter: set TRITON_INTERPRET=1 before '
            'triton is imported, or use "auto".'
        )
