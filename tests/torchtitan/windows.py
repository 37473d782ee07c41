"""Recorded windows and legal plans for the trainer's tests: pure functions of their seeds, so every rank makes the same."""

from __future__ import annotations

import numpy as np

from routepack.core.plans import Certificate, ExpertPlacement, Packing, Plan, Topology
from routepack.core.rollouts import RolloutBatch

NUM_EXPERTS, TOP_K, NUM_LAYERS, VOCAB_SIZE = 16, 2, 4, 64
MAX_TOKENS = 96


def window(seed: int, *, num_sequences: int = 16, num_experts: int = NUM_EXPERTS, top_k: int = TOP_K) -> RolloutBatch:
    """Sequences of 2 to 40 tokens that count up in threes, with skewed routes; rows n - 1 or n, some not recorded."""
    rng = np.random.default_rng(seed)
    num_tokens_S = rng.integers(2, 41, num_sequences)
    rows_S = num_tokens_S - rng.integers(0, 2, num_sequences)
    routed, first_S = skewed_routes(rng, int(rows_S.sum()), num_experts, top_k), rng.integers(0, VOCAB_SIZE, num_sequences)
    position_N = np.arange(num_tokens_S.sum()) - np.repeat(np.cumsum(num_tokens_S) - num_tokens_S, num_tokens_S)
    loss_mask_N = position_N > np.repeat(rng.integers(0, 2, num_sequences), num_tokens_S)
    logprobs_N = np.where(position_N > 0, rng.uniform(-6.0, -2.0, len(position_N)), 0.0).astype(np.float32)
    return RolloutBatch(
        routed_experts_TLK=routed,
        cu_seqlens=np.concatenate([[0], np.cumsum(rows_S)]),
        num_tokens_S=num_tokens_S,
        num_experts=num_experts,
        valid_T=rng.random(len(routed)) < 0.9,
        token_fields={
            "token_ids": (np.repeat(first_S, num_tokens_S) + 3 * position_N) % VOCAB_SIZE,
            "loss_mask": loss_mask_N,
            "logprobs_old": logprobs_N,
            "advantages": np.repeat(rng.normal(size=num_sequences), num_tokens_S).astype(np.float32),
        },
    )


def skewed_routes(rng: np.random.Generator, rows: int, num_experts: int, top_k: int) -> np.ndarray:
    """uint8 [rows, L, K]: distinct ids in a row, some experts far hotter than others."""
    heat_LE = rng.gumbel(size=(NUM_LAYERS, num_experts))
    noisy = heat_LE + rng.gumbel(size=(rows, NUM_LAYERS, num_experts))
    return np.argsort(-noisy, axis=2)[:, :, :top_k].astype(np.uint8)


def unrecorded(batch: RolloutBatch) -> RolloutBatch:
    """The same sequences without any route."""
    return with_routes(
        batch, np.zeros((0, batch.num_layers, batch.top_k), np.uint8), np.zeros(batch.num_sequences + 1, np.int64)
    )


def with_routes(
    batch: RolloutBatch, routed: np.ndarray, cu_seqlens: np.ndarray, valid_T: np.ndarray | None = None
) -> RolloutBatch:
    """The same sequences with other routes."""
    return RolloutBatch(
        routed_experts_TLK=routed,
        cu_seqlens=cu_seqlens,
        num_tokens_S=batch.num_tokens_S,
        num_experts=batch.num_experts,
        valid_T=valid_T,
        token_fields=batch.token_fields,
    )


def topology(ranks: int, expert_parallel_degree: int) -> Topology:
    return Topology(data_parallel_degree=ranks, expert_parallel_degree=expert_parallel_degree)


def plan_of(batch: RolloutBatch, topology: Topology, placement: ExpertPlacement, cell_of_S: np.ndarray) -> Plan:
    """A plan as decided; its figures are not a planner's."""
    num_microbatches = int(cell_of_S.max()) // topology.data_parallel_degree + 1
    return Plan(
        topology=topology,
        placement=placement,
        packing=Packing(
            cell_of_S=cell_of_S, num_microbatches=num_microbatches, data_parallel_degree=topology.data_parallel_degree
        ),
        length_S=batch.num_tokens_S,
        max_tokens=int(batch.num_tokens_S.sum()),
        sync="step",
        value=1.0,
        bound=1.0,
        baseline_value=1.0,
        certificate=Certificate(num_microbatches=num_microbatches, lower_bound=1, method="none"),
    )


def first_fit_plan(batch: RolloutBatch, topology: Topology) -> Plan:
    """No planning: identity placement, each sequence into the first cell with room for it."""
    room, cell_of_S = [], []
    for length in batch.num_tokens_S:
        cell = next((cell for cell, left in enumerate(room) if left >= length), len(room))
        room = room if cell < len(room) else [*room, MAX_TOKENS]
        room[cell] -= int(length)
        cell_of_S.append(cell)
    identity = ExpertPlacement.identity(batch.num_layers, batch.num_experts)
    return plan_of(batch, topology, identity, without_empty_cells(np.asarray(cell_of_S), topology.data_parallel_degree))


def without_empty_cells(cell_of_S: np.ndarray, num_ranks: int) -> np.ndarray:
    cell_of_S = cell_of_S.copy()
    for cell in range(-(-(int(cell_of_S.max()) + 1) // num_ranks) * num_ranks):
        if cell not in cell_of_S:
            fullest = np.bincount(cell_of_S).argmax()
            cell_of_S[np.flatnonzero(cell_of_S == fullest)[-1]] = cell
    return cell_of_S


def shuffled_plan(batch: RolloutBatch, topology: Topology, seed: int, *, num_microbatches: int | None = None) -> Plan:
    """A legal plan with another random placement of every layer, random cells and 1 to 3 microbatches."""
    rng = np.random.default_rng(10_000 + seed)
    num_cells = (num_microbatches or int(rng.integers(1, 4))) * topology.data_parallel_degree
    cell_of_S = rng.permutation(np.arange(batch.num_sequences) % num_cells)
    return plan_of(batch, topology, random_placement(seed, batch.num_experts), cell_of_S)


def random_placement(seed: int, num_experts: int = NUM_EXPERTS) -> ExpertPlacement:
    rng = np.random.default_rng(20_000 + seed)
    return ExpertPlacement(physical_to_logical_LP=np.argsort(rng.random((NUM_LAYERS, num_experts)), axis=1))
