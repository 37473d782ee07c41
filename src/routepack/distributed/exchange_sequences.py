"""Sequences to the ranks that train them, where every rank holds its own rollouts. Letters: :mod:`routepack.core`.

A single controller that has the whole window needs none of this: every rank cuts its cells out of it. Elsewhere a window is
what all ranks hold together: each counts its own (:func:`gathered_demand`), one plans, and :func:`to_planned_ranks` sends
tokens, masks, advantages and routes where the plan wants them, as bytes, in one ragged all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.arrays import checked_array, digest_of
from routepack.core.errors import PlanError, RoutePackError, TraceError
from routepack.core.plans import Plan
from routepack.core.rollouts import RolloutBatch, RoutingDemand
from routepack.distributed import collectives
from routepack.distributed.gather_demand import collect_demand
from routepack.microbatches import materialize
from routepack.microbatches.materialize import Microbatch

BY_SEQUENCE = ("group_S", "modality_S")
"""A batch's own arrays by sequence, each of which may be missing."""


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
    numbers = held.sequences_S
    device = collectives.backend_device()
    return collect_demand(collector, held.batch, positions_S=numbers, device=device, called="sequences_S")


def to_planned_ranks(held: HeldSequences, plan: Plan) -> HeldSequences:
    """Every rank gets the sequences that *plan* wants it to train, in the order of its cells. Collective.

    Every rank passes its own sequences and the same plan. Nothing is rounded: fields and routes travel as bytes.

    Raises:
        PlanError: the plan is of other sequences or ranks, or a sequence is held by no rank or by two. On every rank.
        TraceError: ranks hold different fields or dtypes.
    """
    rank, ranks = collectives.this_rank(), collectives.num_ranks()
    agreed = digest_of(np.frombuffer(bytes.fromhex(plan.content_digest()), np.uint8), _schema(held.batch))
    collectives.agree(agreed, "plan or kind of batch", error=_error(held, plan, ranks))
    rank_of_S = plan.packing.cell_of_S % plan.topology.data_parallel_degree
    leaving = [_packed(held, np.flatnonzero(rank_of_S[held.sequences_S] == other)) for other in range(ranks)]
    arrived = _exchanged(leaving)
    received = dict(_unpacked(arrived, held.batch))
    planned = np.concatenate([plan.packing.sequences_of(m, rank) for m in range(plan.num_microbatches)])
    missing = sorted(set(planned.tolist()) - received.keys())
    error = (
        PlanError(f"no rank holds sequence {missing[0]} ({len(missing)} such sequences of rank {rank}).") if missing else None
    )
    collectives.agree(agreed, "window", error=error)
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
    """Everything that travels: by row, by token, by sequence."""
    yield "row/routed_experts", batch.routed_experts_TLK
    if batch.valid_T is not None:
        yield "row/valid", batch.valid_T
    yield from ((f"token/{name}", batch.token_fields[name]) for name in sorted(batch.token_fields))
    yield from ((f"sequence/{name}", batch.sequence_fields[name]) for name in sorted(batch.sequence_fields))
    own = ((name, getattr(batch, name)) for name in BY_SEQUENCE)
    yield from ((f"sequence/{name}", value) for name, value in own if value is not None)


def _slice_of(name: str, batch: RolloutBatch, s: int) -> slice:
    offsets = {"row": batch.cu_seqlens, "token": batch.cu_tokens}.get(name.partition("/")[0])
    return slice(s, s + 1) if offsets is None else slice(int(offsets[s]), int(offsets[s + 1]))


def _packed(held: HeldSequences, places: np.ndarray) -> np.ndarray:
    """uint8: some sequences one after another, each its number, tokens and rows, then its part of every array."""
    batch, parts = held.batch, [np.zeros(0, np.uint8)]
    rows_S = np.diff(batch.cu_seqlens)
    for s in places.tolist():
        header = np.array([held.sequences_S[s], batch.num_tokens_S[s], rows_S[s]], np.int64)
        slices = (value[_slice_of(name, batch, s)] for name, value in _arrays(batch))
        parts += [_bytes(header), *map(_bytes, slices)]
    return np.concatenate(parts)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _exchanged(leaving: list[np.ndarray]) -> np.ndarray:
    """uint8: what all ranks sent to this one, by rank."""
    if len(leaving) == 1:
        return leaving[0]
    device = collectives.backend_device()
    sizes = torch.tensor([len(part) for part in leaving], dtype=torch.int64, device=device)
    arriving_sizes = torch.empty_like(sizes)
    collectives.exchange(arriving_sizes, sizes, [1] * len(leaving), [1] * len(leaving))
    arriving = torch.empty(int(arriving_sizes.sum()), dtype=torch.uint8, device=device)
    payload = torch.from_numpy(np.concatenate(leaving)).to(device)
    collectives.exchange(arriving, payload, arriving_sizes.tolist(), sizes.tolist())
    return arriving.cpu().numpy()


Sequence = dict[str, np.ndarray]
"""Each array's part of one sequence, by name; and ``num_tokens``, ``num_rows``."""


def _unpacked(data: np.ndarray, like: RolloutBatch) -> Iterator[tuple[int, Sequence]]:
    """(number, parts) of every sequence that arrived."""
    at = 0

    def taken(count: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        nonlocal at
        size = count * dtype.itemsize * int(np.prod(shape))
        # A copy, as bytes need not lie where the dtype may be read from.
        value = data[at : at + size].copy().view(dtype).reshape(count, *shape)
        at += size
        return value

    while at < len(data):
        number, tokens, rows = taken(3, np.dtype(np.int64), ()).tolist()
        counts = {"row": rows, "token": tokens, "sequence": 1}
        parts = {name: taken(counts[name.partition("/")[0]], value.dtype, value.shape[1:]) for name, value in _arrays(like)}
        yield number, parts | {"num_tokens": np.array(tokens), "num_rows": np.array(rows)}


def _joined(sequences: list[Sequence], like: RolloutBatch) -> RolloutBatch:
    """The sequences, end to end."""
    whole = {name: np.concatenate([sequence[name] for sequence in sequences]) for name, _ in _arrays(like)}
    own: dict[str, Any] = {name: whole.get(f"sequence/{name}") for name in BY_SEQUENCE}
    return replace(
        like,
        routed_experts_TLK=whole["row/routed_experts"],
        cu_seqlens=np.concatenate([[0], np.cumsum([int(sequence["num_rows"]) for sequence in sequences])]),
        num_tokens_S=np.array([int(sequence["num_tokens"]) for sequence in sequences]),
        valid_T=whole.get("row/valid"),
        **own,
        token_fields={name: whole[f"token/{name}"] for name in like.token_fields},
        sequence_fields={name: whole[f"sequence/{name}"] for name in like.sequence_fields},
    )
