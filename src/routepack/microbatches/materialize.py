"""From a plan and a batch to what one data-parallel rank feeds its model, and back. Letters: :mod:`routepack.core`.

A sequence of n tokens feeds in its first n - 1 (one of one token feeds in that one); the output at fed token t predicts
token t + 1, its *target*. Token fields are taken at the target, routes at the fed token. n below counts the fed tokens
of one microbatch, padding included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from routepack.core.checks import whole
from routepack.core.errors import ConfigError, PlanError, TraceError
from routepack.core.plans import ExpertPlacement, Plan
from routepack.core.rollouts import RolloutBatch

NO_TARGET = -1
"""In ``target_index_n``: this fed token predicts nothing."""
NATIVE = -1
"""In ``routed_experts_nLK``: nothing was recorded here, so the router decides."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """The sequences of one cell, end to end."""

    sequences_S: np.ndarray
    """int64 [S of this cell]: their numbers in the batch."""
    cu_seqlens: np.ndarray
    """int64 [S + 1]: where each sequence's fed tokens begin and end; padding comes after the last."""
    token_ids_n: np.ndarray
    """int64 [n]: the tokens fed in."""
    positions_n: np.ndarray
    """int64 [n]: 0, 1, ... inside each sequence, and again inside the padding."""
    targets_n: np.ndarray
    """int64 [n]: the token that each predicts; 0 where there is none."""
    target_index_n: np.ndarray
    """int64 [n]: that token's place in the batch's token fields; NO_TARGET where there is none."""
    routed_experts_nLK: np.ndarray
    """int16 or int32 [n, L, K]: logical experts to replay; NATIVE rows are left to the router."""
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Token fields [n, ...] at the targets, zero where there is none."""

    @property
    def num_tokens(self) -> int:
        """n, padding included."""
        return len(self.token_ids_n)

    @property
    def num_padding(self) -> int:
        """Fed tokens that belong to no sequence."""
        return self.num_tokens - int(self.cu_seqlens[-1])


def microbatches(plan: Plan, batch: RolloutBatch, rank: int, *, pad_to_multiple_of: int = 1) -> list[Microbatch]:
    """The M microbatches of data-parallel rank *rank*, in order.

    Padding, where asked for, routes to experts that are distinct in a row and spread evenly over the EP ranks.
    Raises PlanError where the plan was not made for this batch, TraceError where ``token_ids`` are missing or a recorded
    row cannot be replayed, ConfigError where *rank* or *pad_to_multiple_of* is out of range.
    """
    check_fit(plan, batch)
    if not 0 <= rank < plan.topology.data_parallel_degree:
        raise ConfigError(f"rank={rank} is not one of the plan's {plan.topology.data_parallel_degree} data-parallel ranks.")
    whole("pad_to_multiple_of", pad_to_multiple_of, least=1)
    cells = [plan.packing.sequences_of(microbatch, rank) for microbatch in range(plan.num_microbatches)]
    return of_cells(plan, batch, cells, rank, pad_to_multiple_of=pad_to_multiple_of)


def of_cells(
    plan: Plan, batch: RolloutBatch, cells: Sequence[np.ndarray], rank: int, *, pad_to_multiple_of: int = 1
) -> list[Microbatch]:
    """The microbatches of these sequences of *batch*, int64 [S of the cell] each; padded as on *rank* under *plan*."""
    return [_padded(microbatch_of(batch, sequences), plan, rank, pad_to_multiple_of) for sequences in cells]


def scatter_back(microbatches: Sequence[Microbatch], results: Sequence[np.ndarray], num_tokens: int) -> np.ndarray:
    """[num_tokens, ...]: each microbatch's results [n, ...], moved to their targets in the batch's token order.

    Tokens that no given microbatch predicts, first tokens among them, get zero.
    """
    sample = np.asarray(results[0])
    flat_N = np.zeros((num_tokens, *sample.shape[1:]), dtype=sample.dtype)
    for microbatch, result_n in zip(microbatches, results, strict=True):
        predicts_n = microbatch.target_index_n != NO_TARGET
        flat_N[microbatch.target_index_n[predicts_n]] = np.asarray(result_n)[predicts_n]
    return flat_N


def check_fit(plan: Plan, batch: RolloutBatch) -> None:
    """Raise PlanError unless the plan is of this batch's lengths, layers and experts; TraceError where it has no tokens."""
    if plan.packing.num_sequences != batch.num_sequences or (plan.length_S != batch.num_tokens_S).any():
        raise PlanError(
            f"the plan packs {plan.packing.num_sequences} sequences of {plan.length_S.sum()} tokens; the batch has "
            f"{batch.num_sequences} of {batch.num_tokens_S.sum()}, or other lengths: plan this batch."
        )
    placed, recorded = plan.placement.physical_to_logical_LP.shape, (batch.num_layers, batch.num_experts)
    if placed != recorded:
        raise PlanError(f"the plan places {placed} [layers, experts]; the batch recorded {recorded}: plan this batch.")
    if batch.modality_S is not None:
        _check_modalities(plan, batch.modality_S)
    if "token_ids" not in batch.token_fields:
        raise TraceError(
            f"the batch has token fields {sorted(batch.token_fields)} but no token_ids: record them to train on it."
        )


def _check_modalities(plan: Plan, modality_S: np.ndarray) -> None:
    row_of_S = plan.packing.cell_of_S // plan.topology.data_parallel_degree
    first_M = modality_S[np.unique(row_of_S, return_index=True)[1]]
    wrong = np.flatnonzero(first_M[row_of_S] != modality_S)
    if len(wrong):
        s = int(wrong[0])
        raise PlanError(
            f"microbatch {row_of_S[s]} holds sequence {s} of modality {modality_S[s]} and others of {first_M[row_of_S[s]]}; "
            "ranks would wait for one another's collectives: plan this batch, with its modalities."
        )


def microbatch_of(batch: RolloutBatch, sequences: np.ndarray) -> Microbatch:
    """These sequences of the batch, end to end, without padding; what :func:`microbatches` does for every cell."""
    tokens_S = batch.num_tokens_S[sequences]
    fed_S = np.maximum(tokens_S - 1, 1)
    cu_seqlens = np.concatenate([[0], np.cumsum(fed_S)])
    positions_n = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], fed_S)
    fed_index_n = np.repeat(batch.cu_tokens[sequences], fed_S) + positions_n
    has_target_n = positions_n + 1 < np.repeat(tokens_S, fed_S)
    token_ids_N = batch.token_fields["token_ids"].astype(np.int64, copy=False)
    return Microbatch(
        sequences_S=sequences,
        cu_seqlens=cu_seqlens,
        token_ids_n=token_ids_N[fed_index_n],
        positions_n=positions_n,
        targets_n=_at_targets(token_ids_N, fed_index_n, has_target_n),
        target_index_n=np.where(has_target_n, fed_index_n + 1, NO_TARGET),
        routed_experts_nLK=_routes(batch, sequences, fed_S, positions_n),
        fields={
            name: _at_targets(value, fed_index_n, has_target_n)
            for name, value in batch.token_fields.items()
            if name != "token_ids"
        },
    )


def _at_targets(value_N: np.ndarray, fed_index_n: np.ndarray, has_target_n: np.ndarray) -> np.ndarray:
    value_n = np.zeros((len(fed_index_n), *value_N.shape[1:]), dtype=value_N.dtype)
    value_n[has_target_n] = value_N[fed_index_n[has_target_n] + 1]
    return value_n


def _routes(batch: RolloutBatch, sequences: np.ndarray, fed_S: np.ndarray, positions_n: np.ndarray) -> np.ndarray:
    dtype = np.int16 if batch.num_experts <= np.iinfo(np.int16).max else np.int32
    routed_nLK = np.full((len(positions_n), batch.num_layers, batch.top_k), NATIVE, dtype=dtype)
    rows_S = np.diff(batch.cu_seqlens)[sequences]
    row_n = np.repeat(batch.cu_seqlens[sequences], fed_S) + positions_n
    recorded_n = positions_n < np.repeat(rows_S, fed_S)
    if batch.valid_T is not None:
        recorded_n[recorded_n] = batch.valid_T[row_n[recorded_n]]
    rows_LK = batch.routed_experts_TLK[row_n[recorded_n]]
    _check_replayable(batch, rows_LK, np.repeat(sequences, fed_S)[recorded_n], positions_n[recorded_n])
    routed_nLK[recorded_n] = rows_LK
    return routed_nLK


def _check_replayable(batch: RolloutBatch, rows_nLK: np.ndarray, sequence_n: np.ndarray, position_n: np.ndarray) -> None:
    wrong_nL = (rows_nLK < 0).any(axis=2) | (rows_nLK >= batch.num_experts).any(axis=2)
    for k in range(1, batch.top_k):
        wrong_nL |= (rows_nLK[:, :, k:] == rows_nLK[:, :, :-k]).any(axis=2)
    if wrong_nL.any():
        row, layer = (int(index) for index in np.argwhere(wrong_nL)[0])
        raise TraceError(
            f"sequence {sequence_n[row]}, row {position_n[row]}, layer {batch.layer_ids_L[layer]} routes to experts "
            f"{rows_nLK[row, layer].tolist()}; {batch.top_k} different ids of 0 .. {batch.num_experts - 1} are needed "
            f"({int(wrong_nL.sum())} such rows in a microbatch). Mark rows that were not recorded in valid."
        )


def _padded(microbatch: Microbatch, plan: Plan, rank: int, multiple: int) -> Microbatch:
    padding = -microbatch.num_tokens % multiple
    if not padding:
        return microbatch
    routes_nLK, degree = microbatch.routed_experts_nLK, plan.topology.expert_parallel_degree
    # Ranks number their padding one after another, so that filler spreads over all ranks' microbatches as over one.
    filler_nLK = spread_routes(rank * padding + np.arange(padding), routes_nLK.shape[2], plan.placement, degree)
    return replace(
        microbatch,
        token_ids_n=_filled(microbatch.token_ids_n, padding),
        positions_n=np.concatenate([microbatch.positions_n, np.arange(padding)]),
        targets_n=_filled(microbatch.targets_n, padding),
        target_index_n=_filled(microbatch.target_index_n, padding, NO_TARGET),
        routed_experts_nLK=np.concatenate([routes_nLK, filler_nLK.astype(routes_nLK.dtype)]),
        fields={name: _filled(value_n, padding) for name, value_n in microbatch.fields.items()},
    )


def _filled(value_n: np.ndarray, padding: int, fill: int = 0) -> np.ndarray:
    return np.concatenate([value_n, np.full((padding, *value_n.shape[1:]), fill, dtype=value_n.dtype)])


def spread_routes(number_n: np.ndarray, top_k: int, placement: ExpertPlacement, num_ranks: int) -> np.ndarray:
    """int32 [n, L, K]: logical experts for padding, spread evenly over the *num_ranks* expert-parallel ranks.

    Padding token i makes choices i * K to i * K + K - 1. Choice c goes to EP rank c mod R, and there to slot (c // R) mod E/R.
    So any E choices in a row are different experts, and any R choices in a row are different ranks.

    Args:
        number_n: int [n]: the running number of each padding token.

    Raises ConfigError where a token cannot choose *top_k* different experts, or the experts do not divide over the ranks.
    """
    num_experts = placement.num_experts
    if top_k > num_experts:
        raise ConfigError(f"top_k={top_k} is more than the {num_experts} experts of the placement.")
    if num_ranks < 1 or num_experts % num_ranks:
        raise ConfigError(f"expert_parallel_degree={num_ranks} does not divide the {num_experts} experts.")
    slots = num_experts // num_ranks
    choice_nK = np.asarray(number_n)[:, None] * top_k + np.arange(top_k)
    slot_nK = (choice_nK % num_ranks) * slots + (choice_nK // num_ranks) % slots
    return placement.physical_to_logical_LP[:, slot_nK].transpose(1, 0, 2)
