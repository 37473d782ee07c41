"""TorchTitan's RL ``Batcher``: which samples share a row, and so which rank trains them, planned.

Array-only: imports nothing of TorchTitan. (For its trainer with moved experts: :mod:`routepack.torchtitan`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from routepack.core.checks import whole
from routepack.integrations.schedule import DUMMY, Hook

Sample = TypeVar("Sample")


@dataclass(kw_only=True, eq=False)
class TorchTitanBatcherHook(Hook):
    """Stands in for ``Batcher._assign_training_samples_to_rows``.

    The batcher deals row i to rank ``i % dp_degree``, and pads with rows of nothing. Rows come here in the order in which that
    dealing gives every rank what was planned for it, padding rows included and spread.

    >>> TorchTitanBatcherHook().rows([5, 5, 4, 1, 1], seq_len=6, local_batch_size=2, dp_degree=1)
    [[0], [1], [2], [3, 4]]
    """

    padded_to: int = 1
    """The batcher's ``per_sample_pad_multiple``."""

    def rows(self, lengths: Sequence[int], *, seq_len: int, local_batch_size: int, dp_degree: int) -> list[list[int]]:
        """Samples of each row, as places in *lengths* (``num_tokens_to_pack``); ``[]`` is a row of padding.

        Every rank gets equally many rows, a multiple of *local_batch_size*. Raises InfeasibleError for a sample above
        *seq_len*, which the batcher drops before it asks.
        """
        whole("local_batch_size", local_batch_size, least=1)
        self._begin(len(lengths))
        planned = self._schedule(
            [max(1, int(length)) for length in lengths],
            data_parallel_degree=dp_degree,
            max_tokens=seq_len,
            microbatch_multiple=local_batch_size,
            padded_to=self.padded_to,
            dummies=True,
        )
        # A rank's rows of padding last: dealt round-robin, no microbatch of it is padding alone before all have a row.
        of_rank = [sorted(planned.rank(rank), key=lambda row: row == [DUMMY]) for rank in range(dp_degree)]
        rows = [of_rank[rank][i] for i in range(planned.num_microbatches) for rank in range(dp_degree)]
        return [[] if row == [DUMMY] else row for row in rows]

    def assign_training_samples_to_rows(self, batcher: Any, training_samples: Sequence[Sample]) -> list[list[Sample]]:
        """The same for the method itself, of a *batcher* with ``seq_len``, ``local_batch_size`` and ``num_tokens_to_pack``."""
        rows = self.rows(
            [batcher.num_tokens_to_pack(sample) for sample in training_samples],
            seq_len=batcher.seq_len,
            local_batch_size=batcher.local_batch_size,
            dp_degree=batcher._dp_degree,
        )
        return [[training_samples[s] for s in row] for row in rows]
