"""What a task and its rollouts become: the batch of an optimizer-step window. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from routepack.core.rollouts import RolloutBatch, RoutingDemand, id_dtype
from routepack.training.rollout import Rollout
from routepack.training.tasks import Prompt, Task


def graded_window(
    rollouts: Sequence[Rollout],
    prompts: Sequence[Prompt],
    task: Task,
    *,
    num_experts: int,
    layer_ids: Sequence[int],
    advantage_epsilon: float,
    weights_version: str = "",
) -> RolloutBatch:
    """The batch of sampled sequences, graded: ``rewards`` a sequence; ``loss_mask``, ``advantages``, ``logprobs`` a token.

    Rollout s answers prompt ``s // (S / prompts)``. Trained are the response's tokens that its reward depends on: what
    comes after the first mistake changed nothing, so leaving it out changes the expected gradient in nothing but noise.
    """
    group_S = np.repeat(np.arange(len(prompts)), len(rollouts) // len(prompts))
    grades = [task.grade(prompts[int(group)], rollout.response) for group, rollout in zip(group_S, rollouts, strict=True)]
    rewards_S = np.asarray([grade.reward for grade in grades])
    lengths_S = np.asarray([len(rollout.token_ids) for rollout in rollouts])
    advantages_S = group_advantages(rewards_S, group_S, epsilon=advantage_epsilon)
    masks = [_judged(rollout, grade.num_judged) for rollout, grade in zip(rollouts, grades, strict=True)]
    return RolloutBatch(
        routed_experts_TLK=np.concatenate([rollout.routed_experts for rollout in rollouts]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths_S - 1)]),
        num_tokens_S=lengths_S,
        num_experts=num_experts,
        layer_ids_L=np.asarray(layer_ids, dtype=np.int32),
        group_S=group_S,
        token_fields={
            "token_ids": np.concatenate([rollout.token_ids for rollout in rollouts]),
            "loss_mask": np.concatenate(masks),
            "logprobs": np.concatenate([rollout.logprobs for rollout in rollouts]),
            "advantages": np.repeat(advantages_S, lengths_S).astype(np.float32),
        },
        sequence_fields={"rewards": rewards_S.astype(np.float32)},
        source="routepack.torchtitan.rl.sampling",
        weights_version=weights_version,
    )


def group_advantages(rewards_S: np.ndarray, group_S: np.ndarray, *, epsilon: float) -> np.ndarray:
    """float64 [S]: (reward - mean) / (standard deviation + epsilon), each within its group (DeepSeekMath, arXiv 2402.03300).

    >>> group_advantages(np.asarray([1.0, 0.0, 0.5, 0.5]), np.asarray([0, 0, 1, 1]), epsilon=0.0).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    _, group_S = np.unique(group_S, return_inverse=True)
    size_G = np.bincount(group_S)
    mean_G = np.bincount(group_S, weights=rewards_S) / size_G
    centered_S = rewards_S - mean_G[group_S]
    deviation_G = np.sqrt(np.bincount(group_S, weights=centered_S**2) / size_G)
    scale_S = deviation_G[group_S] + epsilon
    # A group whose rewards are all equal teaches nothing; its centred rewards are zero, or rounding.
    return np.divide(centered_S, scale_S, out=np.zeros_like(centered_S), where=deviation_G[group_S] > 1e-12)


def demonstration_window(
    prompts: Sequence[Prompt], task: Task, *, num_experts: int, layer_ids: Sequence[int], top_k: int, seed: Sequence[int]
) -> RolloutBatch:
    """Demonstrations to imitate, one for each prompt. Nobody sampled them, so no route is recorded."""
    rng = np.random.default_rng(list(seed))
    responses = [task.demonstration(prompt, rng) for prompt in prompts]
    pairs = list(zip(prompts, responses, strict=True))
    return RolloutBatch(
        routed_experts_TLK=np.zeros((0, len(layer_ids), top_k), dtype=id_dtype(num_experts)),
        cu_seqlens=np.zeros(len(pairs) + 1, dtype=np.int64),
        num_tokens_S=np.asarray([len(prompt.token_ids) + len(response) for prompt, response in pairs]),
        num_experts=num_experts,
        layer_ids_L=np.asarray(layer_ids, dtype=np.int32),
        token_fields={
            "token_ids": np.concatenate([part for prompt, response in pairs for part in (prompt.token_ids, response)]),
            "loss_mask": np.concatenate(
                [part for prompt, response in pairs for part in (np.zeros(len(prompt.token_ids)), np.ones(len(response)))]
            ).astype(bool),
        },
        source="demonstrations",
    )


def even_demand(batch: RolloutBatch) -> RoutingDemand:
    """The demand to plan by where no route is recorded: every expert alike, to within the rounding of a sequence."""
    experts, top_k = batch.num_experts, batch.top_k
    rows_S = batch.num_tokens_S * top_k
    # The remainders go round: sequence s starts where the one before ended.
    start_S = np.concatenate([[0], np.cumsum(rows_S)[:-1]]) % experts
    distance_SE = (np.arange(experts) - start_S[:, None]) % experts
    tokens_SE = rows_S[:, None] // experts + (distance_SE < rows_S[:, None] % experts)
    tokens_SLE = np.repeat(tokens_SE[:, None, :], batch.num_layers, axis=1).astype(np.int32)
    return RoutingDemand(
        tokens_SLE=tokens_SLE, length_S=batch.num_tokens_S, top_k=top_k, layer_ids_L=batch.layer_ids_L, name="even"
    )


def _judged(rollout: Rollout, num_judged: int) -> np.ndarray:
    mask = np.zeros(len(rollout.token_ids), dtype=bool)
    mask[rollout.num_prompt_tokens : rollout.num_prompt_tokens + num_judged] = True
    return mask
