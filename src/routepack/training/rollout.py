"""What sampling gives for one sequence, and how every rank gets what every rank sampled. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from routepack.distributed.collectives import gather_bytes


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


def gather_rows(rows: np.ndarray, *, device: torch.device | str = "cpu") -> np.ndarray:
    """[sum of rows, ...]: the arrays of all ranks end to end, by rank; only the first axis may differ. Collective.

    Rows travel as bytes, so every dtype survives.
    """
    parts = gather_bytes(np.ascontiguousarray(rows).tobytes(), device=device)
    return np.frombuffer(bytearray(b"".join(parts)), rows.dtype).reshape(-1, *rows.shape[1:])


def gather_rollouts(rollouts: list[Rollout], sequences: np.ndarray, *, device: torch.device | str = "cpu") -> list[Rollout]:
    """The rollouts of all ranks, on every rank, ordered by their numbers *sequences*, int64 [S of this rank]. Collective.

    Every rank brings at least one.
    """
    lengths_S = gather_rows(np.asarray([len(rollout.token_ids) for rollout in rollouts]), device=device)
    prompts_S = gather_rows(np.asarray([rollout.num_prompt_tokens for rollout in rollouts]), device=device)
    tokens_N = gather_rows(np.concatenate([rollout.token_ids for rollout in rollouts]), device=device)
    logprobs_N = gather_rows(np.concatenate([rollout.logprobs for rollout in rollouts]), device=device)
    routes_TLK = gather_rows(np.concatenate([rollout.routed_experts for rollout in rollouts]), device=device)
    by_number = np.argsort(gather_rows(sequences, device=device), kind="stable")
    cu_tokens, cu_rows = (np.cumsum(sizes)[:-1] for sizes in (lengths_S, lengths_S - 1))
    parts = zip(
        np.split(tokens_N, cu_tokens), np.split(logprobs_N, cu_tokens), np.split(routes_TLK, cu_rows), prompts_S, strict=True
    )
    gathered = [
        Rollout(token_ids=tokens, logprobs=logprobs, routed_experts=routes, num_prompt_tokens=int(num_prompt_tokens))
        for tokens, logprobs, routes, num_prompt_tokens in parts
    ]
    return [gathered[s] for s in by_number]
