"""NeMo-RL: a ``SequencePacker``'s packing, and how ``shard_by_batch_size`` deals it, planned. Imports nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from routepack.core.checks import whole
from routepack.integrations.schedule import Hook, chunks


@dataclass(frozen=True, kw_only=True)
class Shards:
    """What ``shard_by_batch_size`` leaves on its shards, as numbers of the batch's sequences."""

    indices: list[list[int]]
    """Of each shard, its sequences in order."""
    micro_batch_indices: list[list[list[list[int]]]]
    """Of each shard and chunk, ``[begin, end]`` of its microbatches, counted inside the chunk."""
    micro_batch_lengths: list[list[list[int]]]
    """Of each shard and chunk, padded tokens of its microbatches."""
    elem_counts_per_gb: list[list[int]]
    """Of each shard, its sequences in each chunk."""

    @property
    def batch_sorted_indices(self) -> list[int]:
        """The shards' sequences, shard after shard: the second result of ``shard_by_batch_size``."""
        return [s for shard in self.indices for s in shard]


@dataclass(kw_only=True, eq=False)
class NemoHook(Hook):
    """Stands in for ``SequencePacker._pack_implementation`` or for the dealing of ``shard_by_batch_size``.

    NeMo-RL gives bin i to shard ``i % shards``. Bins come in that order here: bin i is microbatch ``i // shards`` of its shard.

    >>> bins = NemoHook().pack([5, 3, 4, 4, 6], bin_capacity=8, bin_count_multiple=2)
    >>> len(bins), sorted(s for one in bins for s in one)
    (4, [0, 1, 2, 3, 4])
    """

    def pack(
        self,
        sequence_lengths: Sequence[int],
        bin_capacity: int,
        *,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        padded_to: int = 1,
    ) -> list[list[int]]:
        """Bins of places in *sequence_lengths*, as many as ``_adjust_bin_count`` would ask for, so it changes nothing.

        *bin_count_multiple* is the number of shards. Raises InfeasibleError for a sequence above the cap, or too few.
        """
        self._begin(len(sequence_lengths))
        shards = bin_count_multiple or 1
        planned = self._schedule(
            [int(length) for length in sequence_lengths],
            data_parallel_degree=shards,
            max_tokens=bin_capacity,
            min_microbatches=-(-(min_bin_count or 1) // shards) or 1,
            padded_to=padded_to,
        )
        return planned.cells()

    def shard_by_batch_size(
        self,
        input_lengths: Sequence[int],
        shards: int,
        batch_size: int | None = None,
        *,
        max_tokens_per_microbatch: int,
        sequence_length_pad_multiple: int = 1,
    ) -> Shards:
        """Every chunk of *batch_size* sequences, an optimizer step, dealt to *shards* ranks in equally many microbatches.

        A chunk need not be a multiple of *shards*. Raises ConfigError where *batch_size* does not divide the batch.
        """
        whole("shards", shards, least=1)
        multiple = whole("sequence_length_pad_multiple", sequence_length_pad_multiple, least=1)
        self._begin(len(input_lengths))
        steps = chunks(len(input_lengths), batch_size, "batch_size")
        found = Shards(
            indices=[[] for _ in range(shards)],
            micro_batch_indices=[[] for _ in range(shards)],
            micro_batch_lengths=[[] for _ in range(shards)],
            elem_counts_per_gb=[[] for _ in range(shards)],
        )
        asked = {"data_parallel_degree": shards, "max_tokens": max_tokens_per_microbatch, "padded_to": multiple}
        for step in steps:
            padded = [-(-int(input_lengths[s]) // multiple) * multiple for s in step]
            planned = self._schedule(padded, of=step, **asked)
            for shard in range(shards):
                _append(found, shard, planned.rank(shard), padded, step.start)
        return found


def _append(found: Shards, shard: int, cells: list[list[int]], padded: Sequence[int], first: int) -> None:
    """A chunk's cells of one shard."""
    ends, end = [], 0
    for cell in cells:
        ends.append([end, end + len(cell)])
        end += len(cell)
    found.indices[shard].extend(first + s for cell in cells for s in cell)
    found.micro_batch_indices[shard].append(ends)
    found.micro_batch_lengths[shard].append([sum(padded[s] for s in cell) for cell in cells])
    found.elem_counts_per_gb[shard].append(end)
