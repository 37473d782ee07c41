"""verl: ``_balance_batch`` and ``prepare_micro_batches``, planned. Imports nothing of it. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from routepack.core.arrays import to_numpy
from routepack.core.errors import InfeasibleError, PlanError
from routepack.core.plans import PackingRules
from routepack.integrations.schedule import Hook, chunks, fewest_microbatches

Gather = Callable[[tuple[int, int]], Sequence[tuple[int, int]]]
"""Every rank's pair, given this rank's: ``torch.distributed.all_gather_object`` as a function."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Balanced:
    """A batch dealt to ranks, with the microbatch of each sequence."""

    partitions: list[list[int]]
    """Of each rank, its sequences, mini-batch by mini-batch and microbatch by microbatch; equally many of each."""
    microbatch_of_S: np.ndarray
    """int64 [S], in the batch's order before it is reordered: numbers that ascend over the mini-batches."""

    @property
    def order(self) -> list[int]:
        """What ``batch.reorder`` takes."""
        return [s for partition in self.partitions for s in partition]


@dataclass(kw_only=True, eq=False)
class VerlHook(Hook):
    """Stands in for the partitioning of ``_balance_batch``, on the controller, and of ``prepare_micro_batches``, on each rank.

    The controller sees all sequences, so it plans both; ranks read off the field that it adds to the batch.

    >>> hook = VerlHook()
    >>> balanced = hook.balance_batch([5, 3, 4, 4, 8, 8], dp_size=2, max_token_len=8)
    >>> [len(partition) for partition in balanced.partitions]
    [3, 3]
    >>> rank_0 = balanced.microbatch_of_S[balanced.partitions[0]]
    >>> [len(cell) for cell in hook.planned_micro_batches(rank_0)]
    [1, 2]
    """

    def balance_batch(
        self,
        seqlens: ArrayLike,
        dp_size: int,
        *,
        max_token_len: int,
        minibatch_size: int | None = None,
        num_batches_divided_by: int | None = None,
        min_num_micro_batch: int | None = None,
    ) -> Balanced:
        """The batch dealt to *dp_size* ranks in equal numbers; every microbatch within *max_token_len* real tokens.

        Args:
            seqlens: int [S], ``attention_mask.sum(-1)``: real lengths, not the padded width.
            dp_size: data-parallel ranks.
            max_token_len: ``max_token_len_per_gpu`` x sequence-parallel size.
            minibatch_size: ``ppo_mini_batch_size`` in sequences, an optimizer step; None: the whole batch is one.
            num_batches_divided_by: the number of microbatches is a multiple of this.
            min_num_micro_batch: it is at least this.

        Raises:
            ConfigError: *minibatch_size* does not divide the batch.
            InfeasibleError: a sequence above the cap, or sequences that cannot be dealt equally.

        """
        length_S = to_numpy(seqlens, "seqlens")
        steps = chunks(len(length_S), minibatch_size, "minibatch_size")
        self._begin(len(length_S))
        partitions: list[list[int]] = [[] for _ in range(dp_size)]
        microbatch_of_S, done = np.empty(len(length_S), dtype=np.int64), 0
        for step in steps:
            planned = self._schedule(
                length_S[step],
                of=step,
                data_parallel_degree=dp_size,
                max_tokens=max_token_len,
                microbatch_multiple=num_batches_divided_by or 1,
                min_microbatches=min_num_micro_batch or 1,
                equal_sequences=True,
            )
            for rank in range(dp_size):
                for microbatch, cell in enumerate(planned.rank(rank)):
                    sequences = [step.start + s for s in cell]
                    partitions[rank] += sequences
                    microbatch_of_S[sequences] = done + microbatch
            done += planned.num_microbatches
        return Balanced(partitions=partitions, microbatch_of_S=microbatch_of_S)

    def planned_micro_batches(self, microbatch_ids: ArrayLike) -> list[list[int]]:
        """``batch_idx_list`` of one rank, from the part of ``microbatch_of_S`` that travelled with its sequences.

        Raises PlanError where a microbatch between the first and the last has no sequence here.
        """
        ids = to_numpy(microbatch_ids, "microbatch_ids")
        numbers = np.unique(ids)
        if not len(numbers) or numbers[-1] - numbers[0] + 1 != len(numbers):
            raise PlanError(
                f"microbatches {numbers.tolist()} of this rank have gaps: its sequences are not those that were dealt to it; "
                "reorder the batch by Balanced.order, and split it into equal parts."
            )
        return [np.flatnonzero(ids == number).tolist() for number in numbers]

    def prepare_micro_batches(
        self,
        seqlens: ArrayLike,
        *,
        max_token_len: int,
        gather: Gather | None = None,
        num_batches_divided_by: int | None = None,
        min_num_micro_batch: int | None = None,
    ) -> list[list[int]]:
        """``batch_idx_list`` of one rank that has only its own sequences: by length, evenly, within the cap.

        With *gather* all ranks come to the same number of microbatches, and where one has too few sequences for it, all raise
        the same InfeasibleError: none is left waiting.
        """
        length_S = to_numpy(seqlens, "seqlens").astype(np.int64)
        asked = {"min_microbatches": min_num_micro_batch or 1, "microbatch_multiple": num_batches_divided_by or 1}
        # Too long a sequence counts as a need that nobody can meet, so that every rank learns of it.
        needed, longest = len(length_S) + 1, int(length_S.max(initial=0))
        if longest <= max_token_len:
            needed = fewest_microbatches(length_S, max_token_len, 1, PackingRules(**asked))
        gathered = list(gather((needed, len(length_S)))) if gather else [(needed, len(length_S))]
        rows, fewest = max(need for need, _ in gathered), min(count for _, count in gathered)
        if rows > fewest:
            raise InfeasibleError(
                f"max_token_len={max_token_len} needs {rows} microbatches on some rank and one has only {fewest} sequences (or "
                f"one is longer than the cap; here the longest has {longest}): balance the batch first, or raise the cap."
            )
        self.schedules, self._demand = [], None
        return self._schedule(length_S, data_parallel_degree=rows, max_tokens=max_token_len).cells()
