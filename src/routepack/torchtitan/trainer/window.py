"""What a trainer is given of a window: all of it on every rank, or on each what the plan wants it to train."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torchtitan.protocols.model_spec import ModelSpec

from routepack.core.plans import Plan
from routepack.core.rollouts import RolloutBatch
from routepack.distributed import collectives, exchange_sequences
from routepack.distributed.exchange_sequences import HeldSequences
from routepack.microbatches import materialize, minibatches
from routepack.microbatches.materialize import Microbatch
from routepack.microbatches.trained_tokens import count_trained
from routepack.torchtitan.trainer.microbatch_tensors import num_trained_tokens
from routepack.torchtitan.trainer.trainable_tokens import TokenCheck

Window = RolloutBatch | HeldSequences
"""The whole window, the same on every rank; or the part that :mod:`routepack.distributed.exchange_sequences` gave this rank."""


def own_batch(window: Window) -> RolloutBatch:
    """The sequences that this rank has."""
    return window.batch if isinstance(window, HeldSequences) else window


def check_tokens(window: Window, spec: ModelSpec | None, needs: Sequence[str]) -> None:
    """Raise TraceError where this rank's part of a window has tokens that the model or the loss, which *needs* fields, cannot
    take."""
    assert spec is not None
    numbers_S = window.sequences_S if isinstance(window, HeldSequences) else None
    TokenCheck(spec=spec, needs=needs).check(own_batch(window), numbers_S)


def cut(window: Window, plan: Plan, rank: int, *, pad_to_multiple_of: int) -> list[Microbatch]:
    """The microbatches of data-parallel rank *rank*. Raises as :func:`routepack.microbatches.materialize.microbatches`."""
    if isinstance(window, HeldSequences):
        return exchange_sequences.microbatches(plan, window, rank, pad_to_multiple_of=pad_to_multiple_of)
    num_trained_tokens(window)
    return materialize.microbatches(plan, window, rank, pad_to_multiple_of=pad_to_multiple_of)


def trained_tokens(window: Window, plan: Plan, microbatches: np.ndarray) -> int:
    """Tokens that these microbatches train on all ranks. Collective where ranks have sequences of their own."""
    if not isinstance(window, HeldSequences):
        return minibatches.trained_tokens(plan, window, microbatches)
    places = np.flatnonzero(np.isin(window.sequences_S, minibatches.sequences_of(plan, microbatches)))
    own = torch.tensor([count_trained(window.batch, places)], device=collectives.backend_device())
    return minibatches.checked(int(collectives.sum_over_ranks(own)), microbatches)


def by_token(window: Window, microbatches: Sequence[Microbatch], results: Sequence[np.ndarray]) -> np.ndarray:
    """[N]: results of all microbatches in the token order of what this rank was given; of all ranks where it has all."""
    result_N = materialize.scatter_back(microbatches, results, int(own_batch(window).num_tokens_S.sum()))
    if isinstance(window, HeldSequences):
        return result_N
    return collectives.sum_over_ranks(torch.from_numpy(result_N).to(collectives.backend_device())).cpu().numpy()
