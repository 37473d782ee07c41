"""Megatron-core: ``get_groups_and_subsamples`` of its packing schedulers, planned. Imports nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from routepack.core.checks import whole
from routepack.integrations.schedule import Hook


@dataclass(kw_only=True, eq=False)
class MegatronHook(Hook):
    """Stands in for the method of a ``DpBalancedScheduler``, with the same figures.

    >>> hook = MegatronHook(max_seqlen_per_dp_cp_rank=4, cp_size=2, dp_size=1)
    >>> hook.get_groups_and_subsamples([(0, 5), (1, 3), (2, 8)])
    [[[2], [2]], [[0, 1], [0, 1]]]
    """

    max_seqlen_per_dp_cp_rank: int
    """Tokens that one rank holds; a microbatch holds this times ``cp_size``."""
    cp_size: int
    dp_size: int
    microbatch_group_size_per_vp_stage: int | None = None
    """The number of microbatches is a multiple of this."""
    padded_to: int = 1
    """What sequences were padded to a multiple of, as Megatron's context parallelism asks."""

    def __post_init__(self) -> None:
        for name in ("max_seqlen_per_dp_cp_rank", "cp_size", "dp_size"):
            whole(name, getattr(self, name), least=1)

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]], config: object = None
    ) -> list[list[list[int]]]:
        """Sample ids of each microbatch, for each rank of the DP x CP group; CP ranks of one DP rank get the same.

        Raises InfeasibleError for a sample above the cap, or fewer samples than cells.
        """
        self._begin(len(sample_id_seqlens))
        planned = self._schedule(
            [int(length) for _, length in sample_id_seqlens],
            data_parallel_degree=self.dp_size,
            max_tokens=self.max_seqlen_per_dp_cp_rank * self.cp_size,
            microbatch_multiple=self.microbatch_group_size_per_vp_stage or 1,
            padded_to=self.padded_to,
        )
        return [
            [
                [int(sample_id_seqlens[s][0]) for s in planned.cell(microbatch, rank // self.cp_size)]
                for rank in range(self.dp_size * self.cp_size)
            ]
            for microbatch in range(planned.num_microbatches)
        ]
