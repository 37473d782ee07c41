"""Every rank gets what every rank sampled."""

from __future__ import annotations

import numpy as np

from routepack.distributed.collectives import from_all
from routepack.training.rollout import Rollout


def gather_rollouts(rollouts: list[Rollout], sequences: np.ndarray) -> list[Rollout]:
    """The rollouts of all ranks, on every rank, ordered by their numbers *sequences*, int64 [S of this rank]. Collective."""
    numbered = [pair for own in from_all((sequences.tolist(), rollouts), "rollouts") for pair in zip(*own, strict=True)]
    return [rollout for _, rollout in sorted(numbered, key=lambda pair: pair[0])]
