"""RoutePack's collectives: agreeing on a plan, sharing it, and exchanging expert rows. Every function here is collective.

Without an initialised process group each acts as on a single rank.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from routepack.errors import PlanError, RoutePackError
from routepack.planned import Plan

T = TypeVar("T")


def num_ranks() -> int:
    """The ranks of the world; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    """This process's rank in the world; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def broadcast_plan(plan: Plan | None, *, source: int = 0) -> Plan:
    """Rank *source*'s plan, on every rank."""
    if num_ranks() > 1:
        shared = [plan if this_rank() == source else None]
        dist.broadcast_object_list(shared, src=source)
        plan = shared[0]
    if plan is None:
        raise PlanError(f"rank {source} has no plan to share.")
    return plan


def from_rank(source: int, make: Callable[[], T], what: str) -> T:
    """What *make* gives on rank *source*, on every rank. Only there is it called.

    Where it raises, every rank raises: rank *source* the error itself, the others a PlanError that quotes it. No rank is
    left waiting.

    Args:
        what: a name for errors, such as ``plan``.
    """
    value, error = None, None
    if this_rank() == source:
        try:
            value = make()
        except Exception as caught:
            # Raised below, once the others have heard of it.
            error = caught
    said = f"{type(error).__name__}: {error}" if error is not None else ""
    if num_ranks() > 1:
        shared = [(value, said)]
        dist.broadcast_object_list(shared, src=source)
        value, said = shared[0]
    if error is not None:
        raise error
    if said:
        raise PlanError(f"rank {source} could not make the {what}: {said}")
    return cast(T, value)


def agree(digest: str, what: str, *, error: RoutePackError | None = None, device: torch.device | str = "cpu") -> None:
    """Go on only if no rank has an *error* and all hold the same *digest* of *what*; otherwise every rank raises.

    A rank with an error raises that one, the others a PlanError: no rank is left waiting in a later collective.

    Args:
        digest: hexadecimal, such as ``plan.content_digest()``.
    """
    words = np.frombuffer(bytes.fromhex(digest)[:32].ljust(32, b"\0"), dtype=np.int64)
    mine = torch.tensor([int(error is not None), *words.tolist()], dtype=torch.int64, device=device)
    lowest, highest = mine, mine.clone()
    if num_ranks() > 1:
        lowest = mine.clone()
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if error is not None:
        raise error
    if highest[0]:
        raise PlanError(f"another rank could not use its {what}: see its error. Nothing was moved.")
    if not torch.equal(lowest, highest):
        raise PlanError(
            f"rank {this_rank()} holds {what} {digest[:12]}, another rank holds a different one: broadcast rank 0's, or plan "
            "on every rank with the same seed and a fixed number of proposals, not a time limit. Nothing was moved."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RowMoves:
    """Which rows of a sharded tensor go where; the same on all ranks that exchange. A row is an expert's slot.

    Afterwards slot p holds what slot ``source_P[p]`` held.
    """

    rank_of_P: np.ndarray
    """int64 [P]: the world rank that holds each slot."""
    row_of_P: np.ndarray
    """int64 [P]: the slot's row in that rank's shard."""
    source_P: np.ndarray
    """int64 [P]: a permutation."""

    def sent_rows(self, rank: int, world_size: int) -> list[np.ndarray]:
        """For each rank of the world, the rows of *rank*'s shard that go there, by target slot."""
        moved_P = np.flatnonzero(self.source_P != np.arange(len(self.source_P)))
        moved_P = moved_P[self.rank_of_P[self.source_P[moved_P]] == rank]
        return [self.row_of_P[self.source_P[moved_P[self.rank_of_P[moved_P] == other]]] for other in range(world_size)]

    def received_rows(self, rank: int, world_size: int) -> list[np.ndarray]:
        """For each rank of the world, the rows of *rank*'s shard that come from there, by target slot."""
        moved_P = np.flatnonzero((self.source_P != np.arange(len(self.source_P))) & (self.rank_of_P == rank))
        return [self.row_of_P[moved_P[self.rank_of_P[self.source_P[moved_P]] == other]] for other in range(world_size)]


@torch.no_grad()
def exchange_rows(shards: Sequence[Tensor], moves: RowMoves) -> int:
    """Carry out *moves* in place, in one ragged all-to-all for all *shards*; gives the rows that this rank sent to others.

    Rows travel as bytes, so shards may differ in dtype and nothing is rounded. Only rows that move are copied.

    Args:
        shards: this rank's shards, each [rows, ...] with the same rows; same number, dtypes and widths on every rank.
    """
    rank, world_size = this_rank(), num_ranks()
    sent, received = moves.sent_rows(rank, world_size), moves.received_rows(rank, world_size)
    payload = _pack(shards, np.concatenate(sent))
    arrived = payload.new_empty((sum(map(len, received)), payload.shape[1]))
    if world_size > 1:
        dist.all_to_all_single(arrived, payload, [len(rows) for rows in received], [len(rows) for rows in sent])
    else:
        arrived = payload
    _unpack(shards, np.concatenate(received), arrived)
    return sum(len(rows) for other, rows in enumerate(sent) if other != rank)


def _pack(shards: Sequence[Tensor], rows: np.ndarray) -> Tensor:
    index = torch.from_numpy(rows).to(shards[0].device)
    # An index copies, so the shards may be overwritten while the payload is still needed.
    parts = [shard[index].reshape(len(rows), _width(shard)).contiguous().view(torch.uint8) for shard in shards]
    return torch.cat(parts, dim=1)


def _unpack(shards: Sequence[Tensor], rows: np.ndarray, payload: Tensor) -> None:
    index = torch.from_numpy(rows).to(shards[0].device)
    widths = [_width(shard) * shard.element_size() for shard in shards]
    for shard, part in zip(shards, payload.split(widths, dim=1), strict=True):
        values = part.contiguous().view(shard.dtype).reshape(len(rows), *shard.shape[1:])
        shard.index_copy_(0, index, values)


def _width(shard: Tensor) -> int:
    return int(np.prod(shard.shape[1:]))


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of *values* over all ranks, in place."""
    if num_ranks() > 1:
        dist.all_reduce(values)
    return values


def gather_bytes(payload: bytes, *, device: torch.device | str = "cpu") -> list[bytes]:
    """Every rank's *payload*, by rank, on every rank; payloads may differ in size. They travel as bytes on *device*."""
    if num_ranks() == 1:
        return [payload]
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(num_ranks())]
    dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64, device=device))
    longest = max(int(size) for size in sizes)
    # Collectives want equal sizes; the ranks' windows are about equal, so little is padded.
    mine = torch.frombuffer(bytearray(payload.ljust(max(longest, 1), b"\0")), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(mine) for _ in range(num_ranks())]
    dist.all_gather(everyone, mine)
    return [part[: int(size)].cpu().numpy().tobytes() for part, size in zip(everyone, sizes, strict=True)]


def leave(status: int = 0) -> NoReturn:
    """End this rank's process, its work being done and saved: with the other ranks if *status* is 0, else alone.

    Python's ordinary way out takes the interpreter down while gloo's threads still run, and one of them that asks for the
    interpreter's lock at that moment aborts the whole process, after everything was complete. This way skips that.
    """
    if dist.is_initialized() and status == 0:
        dist.barrier()
        dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
