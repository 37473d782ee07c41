"""What sampling gives for one sequence, and how every rank gets what every rank sampled. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from routepack.distributed.collectives import from_all


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One sampled sequence of n tokens, prompt included."""

    token_ids: np.ndarray
    """int64 [n]."""
    num_prompt_tokens: int
    logprobs: np.ndarray
    """float32 [n]: the policy's log-probability of each sampled token, at temperature 1; 0 for prompt tokens."""
    routed_experts: np.ndarray
    """uint8, int16 or int32 [n - 1, L, K]: logical ids; row t is the route of token t, fed in to sample token t + 1."""

    @property
    def response(self) -> np.ndarray:
        """int64: the sampled tokens."""
        return self.token_ids[self.num_prompt_tokens :]


def gather_rollouts(rollouts: list[Rollout], sequences: np.ndarray) -> list[Rollout]:
    """The rollouts of all ranks, on every rank, ordered by their numbers *sequences*, int64 [S of this rank]. Collective."""
    numbered = [pair for own in from_all((sequences.tolist(), rollouts), "rollouts") for pair in zip(*own, strict=True)]
    return [rollout for _, rollout in sorted(numbered, key=lambda pair: pair[0])]
