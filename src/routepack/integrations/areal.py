"""AReaL: the allocation function that ``get_allocate_fn`` gives, planned. Imports nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from routepack.core.plans import PackingRules
from routepack.integrations.schedule import Hook, fewest_microbatches


@dataclass(kw_only=True, eq=False)
class ArealHook(Hook):
    """Stands in for ``ffd_allocate`` and ``kk_allocate``: groups of even work, no more than are needed.

    AReaL asks twice. To share trajectories out over ranks, with all of them, no cap, and a group a rank: there routes can be
    given to :meth:`expect`. And on every rank, with the cap, to cut its own into microbatches: a rank alone does not see what
    the others send to an expert, so that goes by length.

    >>> groups = ArealHook()([7, 5, 4, 4, 2, 2], capacity=8, min_groups=1, n_groups_divisor=2)
    >>> len(groups), max(sum([7, 5, 4, 4, 2, 2][i] for i in group) for group in groups) <= 8
    (4, True)
    """

    def __call__(
        self, values: Sequence[int], capacity: int, min_groups: int | None = 1, n_groups_divisor: int = 1
    ) -> list[list[int]]:
        """Places in *values* of each group: at least *min_groups*, a multiple of *n_groups_divisor*, none empty or too full.

        As many as asked for, where that is enough: ranks that agree on the largest number get it the next time.

        Raises InfeasibleError for a value above *capacity* or fewer values than groups.
        """
        self._begin(len(values))
        value_S = np.asarray(values, dtype=np.int64)
        rules = PackingRules(min_microbatches=max(1, min_groups or 1), microbatch_multiple=n_groups_divisor)
        groups = rules.allowed(1)
        if len(value_S) and value_S.max() <= capacity:
            groups = fewest_microbatches(value_S, capacity, 1, rules)
        # A group is a cell of its own rank, so that what is evened out is the groups.
        return self._schedule(value_S, data_parallel_degree=groups, max_tokens=int(capacity)).cells()
