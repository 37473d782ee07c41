"""Several optimizer steps on one window, under its one placement and packing. Letters: :mod:`routepack.core`.

A mini-batch is a group of a plan's microbatches: experts move once a window, and every old log-probability, reference
log-probability and update of the window is computed where the plan put it.
"""

from __future__ import annotations

import numpy as np

from routepack.core.checks import whole
from routepack.core.errors import ConfigError, TraceError
from routepack.core.plans import Plan
from routepack.core.rollouts import RolloutBatch
from routepack.microbatches.trained_tokens import count_trained


def split(plan: Plan, num_minibatches: int) -> list[np.ndarray]:
    """For each mini-batch the numbers of its microbatches, int64: every ``num_minibatches``-th, so that the planned order
    favours none.

    Raises ConfigError where the microbatches cannot be dealt equally.
    """
    whole("num_minibatches", num_minibatches, least=1)
    if plan.num_microbatches % num_minibatches:
        raise ConfigError(
            f"num_minibatches={num_minibatches} does not divide the plan's {plan.num_microbatches} microbatches: plan with "
            f"packer.microbatch_multiple={num_minibatches}."
        )
    return [np.arange(first, plan.num_microbatches, num_minibatches) for first in range(num_minibatches)]


def sequences_of(plan: Plan, microbatches: np.ndarray) -> np.ndarray:
    """int64: the sequences of these microbatches, on all ranks."""
    return np.flatnonzero(np.isin(plan.packing.cell_of_S // plan.topology.data_parallel_degree, microbatches))


def trained_tokens(plan: Plan, batch: RolloutBatch, microbatches: np.ndarray) -> int:
    """How many tokens these microbatches train. Raises as :func:`checked`."""
    return checked(count_trained(batch, sequences_of(plan, microbatches)), microbatches)


def checked(trained: int, microbatches: np.ndarray) -> int:
    """*trained*, the tokens that these microbatches train on all ranks.

    Raises TraceError where it is 0: the loss is divided by it.
    """
    if not trained:
        raise TraceError(
            f"microbatches {microbatches.tolist()} train no token (loss_mask is 0 on all their sequences): a mini-batch needs "
            "some; use fewer mini-batches."
        )
    return trained
