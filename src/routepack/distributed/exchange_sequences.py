"""Sequences travel to the ranks that train them, where every rank holds its own rollouts. Letters: :mod:`routepack.core`.

Such a window is what all ranks hold together. Each rank counts its own sequences (:func:`gathered_demand`), one rank plans, and
:func:`to_planned_ranks` sends tokens, masks, advantages and routes where the plan wants them, in one ragged all-to-all. Where
every rank has the whole window, none of this is needed: each cuts its cells out of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.arrays import checked_array, digest_of
from routepack.core.errors import PlanError, RoutePackError, TraceError
from routepack.core.plans import Plan
from routepack.core.rollouts import RolloutBatch, RoutingDemand
from routepack.distributed import collectives
from routepack.distributed.gather_demand import collect_demand
from routepack.microbatches import materialize
from routepack.microbatches.materialize import Microbatch

BY_SEQUENCE = ("num_tokens_S", "group_S", "modality_S")
"""A batch's own arrays [S]; groups and modalities may be missing."""

Sequence = dict[str, np.ndarray]
"""One sequence's part of each array of a batch, by the array's name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldSequences:
    """The sequences of a window that one rank holds."""

    batch: RolloutBatch
    """These sequences alone."""
    sequences_S: np.ndarray
    """int64 [S of this rank]: their numbers in the window, which number all ranks' sequences 0, 1, ..."""

    def __post_init__(self) -> None:
        numbers = checked_array(self, "sequences_S", np.int64, ndim=1)
        if len(numbers) != self.batch.num_sequences or len(np.unique(numbers)) != len(numbers) or numbers.min(initial=0) < 0:
            raise TraceError(
                f"sequences_S={numbers.tolist()[:8]} must number the batch's {self.batch.num_sequences} sequences, each once."
            )


def gathered_demand(held: HeldSequences, collector: RoutingDemandCollector) -> RoutingDemand:
    """The demand of the whole window, on every rank, from what each counts of its own. Collective.

    Only counts travel. Raises TraceError where numbers are missing or held twice, and as
    :func:`routepack.distributed.gather_demand.collect_demand`.
    """
    return collect_demand(collector, held.batch, positions_S=held.sequences_S, called="sequences_S")


def to_planned_ranks(held: HeldSequences, plan: Plan) -> HeldSequences:
    """Every rank gets the sequences that *plan* wants it to train, in the order of its cells. Collective.

    Every rank passes its own sequences and the same plan. Nothing is rounded.

    Raises:
        PlanError: on every rank, where the plan is of other sequences or ranks, ranks hold different fields or dtypes, or a
            sequence is held by no rank or by two.
    """
    rank, ranks = collectives.this_rank(), collectives.num_ranks()
    agreed = digest_of(np.frombuffer(bytes.fromhex(plan.content_digest()), np.uint8), _schema(held.batch))
    collectives.agree(agreed, "plan or kind of batch", error=_error(held, plan, ranks))
    rank_of_S = plan.packing.cell_of_S % plan.topology.data_parallel_degree
    leaving = [_sequences(held, np.flatnonzero(rank_of_S[held.sequences_S] == other)) for other in range(ranks)]
    arrived = collectives.exchange(leaving, "sequences")
    planned = np.concatenate([plan.packing.sequences_of(m, rank) for m in range(plan.num_microbatches)])
    holders = Counter(number for sequences in arrived for number in sequences)
    error = None
    for how, wrong in (
        ("no rank holds", [s for s in planned.tolist() if not holders[s]]),
        ("two ranks hold", [s for s in planned.tolist() if holders[s] > 1]),
    ):
        if wrong and error is None:
            error = PlanError(f"{how} sequence {min(wrong)} ({len(wrong)} such sequences of rank {rank}).")
    collectives.agree(agreed, "window", error=error)
    received = {number: sequence for sequences in arrived for number, sequence in sequences.items()}
    return HeldSequences(batch=_joined([received[int(s)] for s in planned], held.batch), sequences_S=planned)


def microbatches(plan: Plan, held: HeldSequences, rank: int, *, pad_to_multiple_of: int = 1) -> list[Microbatch]:
    """The M microbatches of data-parallel rank *rank*, which holds what *plan* wants it to train.

    They equal those that :func:`routepack.microbatches.materialize.microbatches` makes of the whole window, bit for bit;
    only ``target_index_n`` counts the tokens that the rank holds.
    """
    position = {int(number): place for place, number in enumerate(held.sequences_S)}
    cells = [plan.packing.sequences_of(m, rank) for m in range(plan.num_microbatches)]
    missing = [int(s) for cell in cells for s in cell if int(s) not in position]
    if missing:
        raise PlanError(f"rank {rank} does not hold sequence {missing[0]}: send sequences to their ranks first.")
    places = [np.array([position[int(s)] for s in cell]) for cell in cells]
    made = materialize.of_cells(plan, held.batch, places, rank, pad_to_multiple_of=pad_to_multiple_of)
    return [replace(one, sequences_S=cell) for one, cell in zip(made, cells, strict=True)]


def _error(held: HeldSequences, plan: Plan, ranks: int) -> RoutePackError | None:
    if plan.topology.data_parallel_degree != ranks or plan.topology.model_parallel_degree != 1:
        return PlanError(f"the plan is for {plan.topology.data_parallel_degree} data-parallel ranks; {ranks} hold sequences.")
    numbers = held.sequences_S
    if numbers.max(initial=-1) >= plan.packing.num_sequences:
        return PlanError(f"sequence {numbers.max()} is not among the plan's {plan.packing.num_sequences}.")
    wrong = np.flatnonzero(plan.length_S[numbers] != held.batch.num_tokens_S)
    if len(wrong):
        s = int(wrong[0])
        return PlanError(
            f"sequence {numbers[s]} has {held.batch.num_tokens_S[s]} tokens; the plan was made for {plan.length_S[numbers[s]]}."
        )
    return None


def _schema(batch: RolloutBatch) -> np.ndarray:
    """uint8: what kinds of arrays the batch has; ranks must have the same."""
    kinds = [(name, str(value.dtype), value.shape[1:]) for name, value in _arrays(batch)]
    shape = (batch.num_experts, batch.num_layers, batch.top_k, batch.layer_ids_L.tolist())
    return np.frombuffer(repr((kinds, shape)).encode(), np.uint8)


def _arrays(batch: RolloutBatch) -> Iterator[tuple[str, np.ndarray]]:
    """Everything that travels. A name begins with what the array's first axis counts: row, token or sequence."""
    yield "row/routed_experts", batch.routed_experts_TLK
    if batch.valid_T is not None:
        yield "row/valid", batch.valid_T
    yield from ((f"token/{name}", batch.token_fields[name]) for name in sorted(batch.token_fields))
    yield from ((f"sequence/field/{name}", batch.sequence_fields[name]) for name in sorted(batch.sequence_fields))
    own = ((name, getattr(batch, name)) for name in BY_SEQUENCE)
    yield from ((f"sequence/{name}", value) for name, value in own if value is not None)


def _sequences(held: HeldSequences, places: np.ndarray) -> dict[int, Sequence]:
    """The sequences at these places of what this rank holds, by their numbers in the window."""
    batch = held.batch
    offsets_of = {"row": batch.cu_seqlens, "token": batch.cu_tokens, "sequence": np.arange(batch.num_sequences + 1)}

    def parts_of(s: int) -> Sequence:
        begin_end = {kind: slice(*offsets[s : s + 2]) for kind, offsets in offsets_of.items()}
        return {name: value[begin_end[name.partition("/")[0]]] for name, value in _arrays(batch)}

    return {int(held.sequences_S[s]): parts_of(s) for s in places.tolist()}


def _joined(sequences: list[Sequence], like: RolloutBatch) -> RolloutBatch:
    """The sequences end to end, as a batch with the fields of *like*."""
    whole = {name: np.concatenate([sequence[name] for sequence in sequences]) for name, _ in _arrays(like)}
    own: dict[str, Any] = {name: whole.get(f"sequence/{name}") for name in BY_SEQUENCE}
    return replace(
        like,
        routed_experts_TLK=whole["row/routed_experts"],
        cu_seqlens=np.cumsum([0, *(len(sequence["row/routed_experts"]) for sequence in sequences)]),
        valid_T=whole.get("row/valid"),
        **own,
        token_fields={name: whole[f"token/{name}"] for name in like.token_fields},
        sequence_fields={name: whole[f"sequence/field/{name}"] for name in like.sequence_fields},
    )
