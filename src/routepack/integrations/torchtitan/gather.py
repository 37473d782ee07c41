"""Every rank gets what every rank sampled."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from routepack.distributed import num_ranks
from routepack.integrations.torchtitan.rollout import Rollout


def gather_rows(rows: np.ndarray, *, device: torch.device | str = "cpu") -> np.ndarray:
    """[sum of rows, ...]: the arrays of all ranks end to end, by rank; only the first axis may differ. Collective.

    Rows travel as bytes, so every dtype survives.
    """
    if num_ranks() == 1:
        return rows
    flat = torch.from_numpy(np.ascontiguousarray(rows).reshape(-1).view(np.uint8)).to(device)
    size = torch.tensor([flat.numel()], device=device)
    sizes = [torch.empty_like(size) for _ in range(num_ranks())]
    dist.all_gather(sizes, size)
    # gloo gathers equal sizes only.
    longest = max(int(one) for one in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: flat.numel()] = flat
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    joined = torch.cat([part[: int(one)] for part, one in zip(parts, sizes, strict=True)]).cpu().numpy()
    return joined.view(rows.dtype).reshape(-1, *rows.shape[1:])


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
