"""A step whose loss or gradients are not finite is not made: on every rank, before weights or moments change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from routepack.core.errors import RoutePackError
from routepack.distributed import collectives


class StepGuard:
    """Watches one optimizer step."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self._loss: Tensor | float = 0.0

    def after_backward(self, loss: Tensor, model: nn.Module, *, last: bool) -> None:
        """Count a microbatch's share of the loss; after the *last*, judge the step. Collective then.

        Gradients are looked at before TorchTitan clips them: clipping by an infinite norm makes them zero.
        Raises RoutePackError, on every rank.
        """
        self._loss = self._loss + loss.detach()
        if not last:
            return
        own = torch.stack([cast(Tensor, self._loss), local_norm(model).square()]).to(collectives.backend_device())
        loss_sum, square = collectives.sum_over_ranks(own).tolist()
        if not math.isfinite(loss_sum) or not math.isfinite(square):
            raise RoutePackError(
                f"step {self.step} was not made: its loss is {loss_sum:g} and its gradient norm {square**0.5:g}, and no update "
                "follows from what is not finite. Weights, moments and checkpoints are as before it: look at the window's "
                "advantages and old log-probabilities, lower trainer.learning_rate, or leave the window out."
            )


@torch.no_grad()
def local_norm(model: nn.Module) -> Tensor:
    """float32: the norm of the gradients that this rank holds."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    return torch.nn.utils.get_total_norm(local).float()


class CountsSteps(Protocol):
    """A trainer, for all that :func:`counted` needs of it."""

    step: int


@contextmanager
def counted(trainer: CountsSteps) -> Iterator[None]:
    """Count a step of *trainer*, unless it is not made."""
    trainer.step += 1
    try:
        yield
    except RoutePackError:
        trainer.step -= 1
        raise
