"""Random problems and the reference's answers, for tests and benchmarks of any implementation.

Letters: T tokens, K top-k, E experts, D model dim, F hidden dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import reference

ROUTINGS = ("uniform", "empty", "hot", "duplicate", "skipped", "none")
"""Each expert alike; even experts get nothing; all tokens name the last expert; tokens repeat an expert; some slots have
none (-1); no slot has one."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The arguments of ``moe_experts`` and a gradient of its result."""

    x: Tensor
    ids: Tensor
    scores: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor
    dout: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What can be differentiated: x, scores, w1, w3, w2."""
        return self.x, self.scores, self.w1, self.w3, self.w2

    def requiring_grad(self) -> Problem:
        """The same numbers in leaves that collect gradients."""
        return replace(
            self, **{name: getattr(self, name).detach().requires_grad_() for name in ("x", "scores", "w1", "w3", "w2")}
        )

    def reference(self) -> list[Tensor]:
        """In float64: the output, then the gradients of :attr:`inputs`."""
        leaves = [tensor.detach().double().requires_grad_() for tensor in self.inputs]
        out = reference.moe_experts(leaves[0], self.ids, leaves[1], *leaves[2:])
        return [out.detach(), *torch.autograd.grad(out, leaves, self.dout.double(), materialize_grads=True)]


def random_ids(routing: str, T: int, K: int, E: int, generator: torch.Generator | None = None) -> Tensor:
    """int64 [T, K] on the CPU, of one of :data:`ROUTINGS`."""
    if routing == "none":
        return torch.full((T, K), -1)
    choices = torch.rand(T, E, generator=generator)
    if routing == "empty":
        choices[:, ::2] -= 2.0
    if routing == "hot":
        choices[:, -1] += 2.0
    ids = choices.topk(K, dim=1).indices
    if routing == "duplicate":
        return ids[:, :1].expand(T, K).clone()
    if routing == "skipped":
        return ids.masked_fill(torch.rand(T, K, generator=generator) < 0.3, -1)
    return ids


def random_problem(
    *, T: int, D: int, F: int, K: int, E: int, routing: str = "uniform", dtype: torch.dtype = torch.float32, seed: int = 0,
    device: torch.device | str = "cpu", score_dtype: torch.dtype = torch.float32,
) -> Problem:  # fmt: skip
    """Numbers of the size that training has: outputs of order one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    return Problem(
        x=normal(T, D),
        ids=random_ids(routing, T, K, E, generator).to(device),
        scores=torch.rand(T, K, generator=generator).to(device, score_dtype),
        w1=normal(E, F, D, scale=D**-0.5),
        w3=normal(E, F, D, scale=D**-0.5),
        w2=normal(E, D, F, scale=F**-0.5),
        dout=normal(T, D),
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of *expected*; infinite where *actual* has a number that is not finite."""
    if actual.shape != expected.shape or not torch.isfinite(actual).all():
        return float("inf")
    difference, size = float((actual.double() - expected).detach().norm()), float(expected.detach().double().norm())
    return difference / size if size > 0 else difference


def relative_errors(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """:func:`relative_error` of each pair."""
    return [relative_error(one, other) for one, other in zip(actual, expected, strict=True)]
