"""Longer sequences cut to a limit: tokens, their fields and their routes in one go. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from routepack.core.checks import whole
from routepack.core.rollouts import RolloutBatch


def truncate(batch: RolloutBatch, max_tokens: int) -> RolloutBatch:
    """*batch* with no sequence longer than *max_tokens*: tokens, their fields, routes and validity are cut together."""
    whole("max_tokens", max_tokens, least=1)
    num_tokens_S = np.minimum(batch.num_tokens_S, max_tokens)
    rows_S = np.minimum(np.diff(batch.cu_seqlens), num_tokens_S)
    keeps_T = _first_of_each(batch.cu_seqlens, rows_S)
    keeps_N = _first_of_each(batch.cu_tokens, num_tokens_S)
    return replace(
        batch,
        routed_experts_TLK=batch.routed_experts_TLK[keeps_T],
        cu_seqlens=np.concatenate([[0], np.cumsum(rows_S)]),
        num_tokens_S=num_tokens_S,
        valid_T=None if batch.valid_T is None else batch.valid_T[keeps_T],
        token_fields={name: value[keeps_N] for name, value in batch.token_fields.items()},
    )


def _first_of_each(offsets: np.ndarray, count_S: np.ndarray) -> np.ndarray:
    """bool: the first ``count_S[s]`` entries of each sequence s, which owns ``offsets[s]:offsets[s + 1]``."""
    length_S = np.diff(offsets)
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], length_S) < np.repeat(count_S, length_S)
