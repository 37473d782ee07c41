"""Which tokens a step trains. Every count of them is made here, so that losses are divided by what they sum over."""

from __future__ import annotations

import numpy as np

from routepack.core.rollouts import RolloutBatch


def trained_mask(batch: RolloutBatch) -> np.ndarray:
    """bool [N]: True where ``loss_mask`` is not 0, except at the first token of a sequence, which nothing predicts.

    Without a ``loss_mask``, all tokens but the first ones are trained.
    """
    trained_N = np.ones(int(batch.num_tokens_S.sum()), dtype=bool)
    if "loss_mask" in batch.token_fields:
        trained_N = np.asarray(batch.token_fields["loss_mask"]).astype(bool)
    trained_N[batch.cu_tokens[:-1]] = False
    return trained_N


def count_trained(batch: RolloutBatch, sequences: np.ndarray | None = None) -> int:
    """How many tokens of these sequences are trained.

    Args:
        sequences: int64, their numbers in the batch; None: all.
    """
    before_N = np.concatenate([[0], np.cumsum(trained_mask(batch))])
    per_sequence_S = np.diff(before_N[batch.cu_tokens])
    return int((per_sequence_S if sequences is None else per_sequence_S[sequences]).sum())
