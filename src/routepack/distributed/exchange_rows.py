"""Rows of sharded tensors change places among ranks: in place, bit for bit, through staging memory of a fixed size.

A row is an expert's slot. The move goes in rounds; in each, every moving row sends the same range of its bytes. All of these
have left before the first is overwritten, so any permutation can be carried out in place, and the width of the range sets
the memory (docs/design/moves.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from routepack.core.errors import PlanError
from routepack.distributed import collectives

ALIGNMENT = 512
"""Bytes of a range are a multiple of this where the staging memory allows it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowMoves:
    """Which rows of a sharded tensor go where; the same on all ranks that exchange.

    Afterwards slot p holds what slot ``source_P[p]`` held.
    """

    rank_of_P: np.ndarray
    """int64 [P]: the world rank that holds each slot."""
    row_of_P: np.ndarray
    """int64 [P]: the slot's row in that rank's shard."""
    source_P: np.ndarray
    """int64 [P]: a permutation."""

    @cached_property
    def moved_P(self) -> np.ndarray:
        """int64: the slots that get another row."""
        return np.flatnonzero(self.source_P != np.arange(len(self.source_P)))

    def sent_rows(self, rank: int, world_size: int) -> list[np.ndarray]:
        """For each rank of the world, the rows of *rank*'s shard that go there, by target slot."""
        mine_P = self.moved_P[self.rank_of_P[self.source_P[self.moved_P]] == rank]
        return [self.row_of_P[self.source_P[mine_P[self.rank_of_P[mine_P] == other]]] for other in range(world_size)]

    def received_rows(self, rank: int, world_size: int) -> list[np.ndarray]:
        """For each rank of the world, the rows of *rank*'s shard that come from there, by target slot."""
        mine_P = self.moved_P[self.rank_of_P[self.moved_P] == rank]
        return [self.row_of_P[mine_P[self.rank_of_P[self.source_P[mine_P]] == other]] for other in range(world_size)]

    @cached_property
    def most_staged_rows(self) -> int:
        """The most rows that any rank stages: those that arrive there, and those that change their place on it."""
        return int(np.bincount(self.rank_of_P[self.moved_P], minlength=1).max())


@dataclass(frozen=True, kw_only=True, eq=False)
class RowExchange:
    """This rank's part of one exchange, checked and ready: what remains can fail in the transport alone."""

    rows: Sequence[Tensor]
    """uint8 [rows, bytes], a view of each shard's own storage."""
    moves: RowMoves
    width: int
    """Bytes of every moving row in one round, the same on every rank; two rounds are staged at a time."""

    @classmethod
    def of(cls, shards: Sequence[Tensor], moves: RowMoves, *, staging_bytes: int) -> RowExchange:
        """Prepare to move the rows of *shards*, each [rows, ...], through at most *staging_bytes* of memory on a rank.

        Raises PlanError where a shard's rows cannot be viewed as bytes in place, or the memory does not hold two bytes of each.
        """
        rows = [_as_bytes(shard) for shard in shards]
        width = staging_bytes // max(1, 2 * moves.most_staged_rows)
        width = width // ALIGNMENT * ALIGNMENT or width
        if not width:
            raise PlanError(
                f"trainer.staging_bytes={staging_bytes} is less than two bytes for each of the {moves.most_staged_rows} "
                "rows that a rank moves: raise it."
            )
        return cls(rows=rows, moves=moves, width=min(width, max(1, sum(row.shape[1] for row in rows))))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all shards."""
        return sum(row.shape[1] for row in self.rows)

    @property
    def staged_bytes(self) -> int:
        """What :meth:`run` needs as its staging memory, on the rank that needs most."""
        return 2 * self.moves.most_staged_rows * self.width

    @property
    def signature(self) -> np.ndarray:
        """int64: what must be the same on every rank that takes part, beside the moves."""
        return np.asarray([self.row_bytes, self.width], dtype=np.int64)

    @torch.no_grad()
    def run(self, staging: Tensor) -> int:
        """Move the rows, in place; gives the bytes that this rank sent to others. Collective.

        Args:
            staging: uint8 [at least staged_bytes].

        Raises:
            RankLostError: the transport failed; rows are torn between their old and new places.
        """
        rank, world_size = collectives.this_rank(), collectives.num_ranks()
        sent, received = self.moves.sent_rows(rank, world_size), self.moves.received_rows(rank, world_size)
        kept_from, kept_to = sent[rank], received[rank]
        sent[rank], received[rank] = kept_from[:0], kept_to[:0]
        arrives_at = np.concatenate(received)
        halves = staging[: len(staging) // 2], staging[len(staging) // 2 :]
        finish: Callable[[], None] | None = None
        for number, start in enumerate(range(0, self.row_bytes, self.width)):
            width = min(self.width, self.row_bytes - start)
            arriving, kept = _split(halves[number % 2], [len(arrives_at), len(kept_from)], width)
            self._copy(kept_from, kept, start, out=True)
            end = self._begin(arriving, sent, received, start)
            # The round before is put in place while this one travels.
            if finish is not None:
                finish()
            finish = partial(self._finish, end, [(arrives_at, arriving), (kept_to, kept)], start)
        if finish is not None:
            finish()
        return self.row_bytes * sum(map(len, sent))

    def _begin(self, arriving: Tensor, sent: list[np.ndarray], received: list[np.ndarray], start: int) -> Callable[[], None]:
        """Send a round's bytes straight from their rows; *arriving* gets those of other ranks, by rank and target slot."""
        ranges = list(self._ranges(start, start + arriving.shape[1]))
        sends = [
            (rank, shard[row, first:last]) for rank, rows in enumerate(sent) for row in rows for shard, first, last, _ in ranges
        ]
        sources = np.repeat(np.arange(len(received)), [len(rows) for rows in received]).tolist()
        receives = [
            (rank, line[to : to + last - first])
            for rank, line in zip(sources, arriving, strict=True)
            for _, first, last, to in ranges
        ]
        return collectives.begin_messages(sends, receives)

    def _finish(self, end: Callable[[], None], places: list[tuple[np.ndarray, Tensor]], start: int) -> None:
        end()
        for rows, staged in places:
            self._copy(rows, staged, start, out=False)

    def _copy(self, rows: np.ndarray, staged: Tensor, start: int, *, out: bool) -> None:
        if not len(rows):
            return
        ranges = list(self._ranges(start, start + staged.shape[1]))
        own = [shard[row, first:last] for row in rows for shard, first, last, _ in ranges]
        copies = [line[to : to + last - first] for line in staged for _, first, last, to in ranges]
        for target, value in zip(*((copies, own) if out else (own, copies)), strict=True):
            target.copy_(value)

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """The parts of bytes *start* to *stop* of a row: shard, first and last byte in it, and place in the round."""
        begin = 0
        for shard in self.rows:
            first, last = max(start - begin, 0), min(stop - begin, shard.shape[1])
            if first < last:
                yield shard, first, last, begin + first - start
            begin += shard.shape[1]


def _as_bytes(shard: Tensor) -> Tensor:
    if not shard.is_contiguous():
        raise PlanError(
            f"a shard of shape {tuple(shard.shape)} is not contiguous (strides {shard.stride()}), so its experts cannot move "
            "in place: give the experts their own contiguous storage."
        )
    row_bytes = int(np.prod(shard.shape[1:])) * shard.element_size()
    if not row_bytes or not len(shard):
        return torch.empty(len(shard), row_bytes, dtype=torch.uint8, device=shard.device)
    return shard.detach().view(len(shard), -1).view(torch.uint8)


def _split(staging: Tensor, counts: Sequence[int], width: int) -> list[Tensor]:
    sizes = [count * width for count in counts]
    parts = staging[: sum(sizes)].split(sizes)
    return [part.view(count, width) for part, count in zip(parts, counts, strict=True)]
