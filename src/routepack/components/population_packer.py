"""The paper's packer, to compare with: population annealing on a placement that is given. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.packer import PackingProblem
from routepack.core.component import Count, Share
from routepack.cost.models import ranks_per_group


@dataclass(frozen=True, kw_only=True)
class PopulationPacker(AttentionAwarePacker):
    """Chains from diverse packings, cooled together and resampled, the best packing kept outside (arXiv 2608.12146).

    Packs once, on the placement as it is. :class:`AttentionAwarePacker`, which a plan alternates with placing,
    finds better plans in the same time; docs/design/planning.md has the figures.
    """

    improves: ClassVar[bool] = False

    chains: Count = 8
    """Packings that are annealed side by side; the proposals are shared among them."""
    steps: Count = 20
    """Temperatures from hot to cold, and so times at which chains may be resampled."""
    effective_share: Share = 0.8
    """Resample once the effective sample size is below this share of the chains."""

    def assign(self, problem: PackingProblem) -> np.ndarray:
        """The best packing that any chain met."""
        from routepack.solvers import population, start_packings

        layout = self._layout(problem)
        seeds = start_packings.diverse(
            self.chains,
            length_S=problem.length_S,
            load_SRL=problem.load_SRL,
            feasible_cell_of_S=problem.feasible_cell_of_S,
            num_cells=problem.num_cells,
            max_tokens=self.max_tokens,
            cells_per_unit=ranks_per_group(problem.topology),
            seed=problem.seed,
        )
        schedule = population.PopulationSchedule(
            num_proposals=problem.num_proposals,
            steps=self.steps,
            effective_share=self.effective_share,
            threads=self.threads,
            deadline=problem.deadline,
        )
        population.anneal_population(layout, seeds, schedule, seed=problem.seed)
        return layout.packed()
