"""What sampling gives for one sequence. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
