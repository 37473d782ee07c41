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


def split(plan: Plan, num_minibatches: int) -> list[np.ndarray]:
    """int64 for each mini-batch: its microbatches, every ``num_minibatches``-th, so that planned order favours none.

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
    """Tokens that these microbatches train: ``loss_mask`` over their sequences, first tokens excluded.

    Raises TraceError where there is none: the step's loss would be divided by zero.
    """
    return checked(num_trained(batch, sequences_of(plan, microbatches)), microbatches)


def num_trained(batch: RolloutBatch, sequences: np.ndarray) -> int:
    """Tokens that some sequences of a batch train."""
    mask_N = np.asarray(batch.token_fields["loss_mask"]).astype(bool).copy()
    mask_N[batch.cu_tokens[:-1]] = False
    before_N = np.concatenate([[0], np.cumsum(mask_N)])
    return int((before_N[batch.cu_tokens[sequences + 1]] - before_N[batch.cu_tokens[sequences]]).sum())


def checked(trained: int, microbatches: np.ndarray) -> int:
    """Tokens that some microbatches train, if there is any; else TraceError."""
    if not trained:
        raise TraceError(
            f"microbatches {microbatches.tolist()} train no token (loss_mask is 0 on all their sequences): a mini-batch needs "
            "some; use fewer mini-batches."
        )
    return trained
