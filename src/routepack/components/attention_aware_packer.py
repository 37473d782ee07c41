"""The packer that plans with attention and experts in view. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np

from routepack.components.packer import Packer, PackingProblem
from routepack.core.component import ONLY_SPEED, Limits
from routepack.cost.models import num_packed_groups, ranks_per_group


@dataclass(frozen=True, kw_only=True)
class AttentionAwarePacker(Packer):
    """Anneals the packing on what its units wait for: attention of the costliest rank, experts of the fullest.

    Starts from the sequences dealt by tokens, longest first, and searches on the objective of the problem's
    ``sync``: under ``microbatch`` and ``layer`` the groups of a microbatch wait for one another.
    """

    improves: ClassVar[bool] = True
    thread_safe: ClassVar[bool] = True

    threads: Annotated[int, Limits(least=1, most=1024)] = field(default=2, metadata=ONLY_SPEED)
    """Threads that anneal at once; the plan does not depend on it."""

    def assign(self, problem: PackingProblem) -> np.ndarray:
        """The best packing met."""
        from routepack.solvers import anneal

        layout = self._layout(problem)
        temperatures = problem.temperatures and tuple(heat * layout.energy_per_cost for heat in problem.temperatures)
        schedule = anneal.Schedule(
            num_proposals=problem.num_proposals,
            temperatures=temperatures,
            deadline=problem.deadline,
            threads=self.threads,
        )
        anneal.anneal(layout, schedule, seed=problem.seed)
        return layout.packed()

    def typical_change(self, problem: PackingProblem) -> float:
        """The median change by a feasible proposal, either way."""
        from routepack.solvers import anneal

        layout = self._layout(problem)
        return anneal.typical_change(layout, np.random.default_rng(problem.seed)) / layout.energy_per_cost

    def _layout(self, problem: PackingProblem) -> Any:
        from routepack.solvers.packing_state import JoinedLayout, Layout, Weights

        figures = {
            "cell_of_S": self._start(problem),
            "length_S": problem.length_S,
            "load_SRL": problem.load_SRL,
            "weights": Weights.of(problem.cost_SI, problem.rates.expert, int(problem.load_SRL.sum(dtype=np.int64))),
            # A cell never holds more than the window, however large the cap; the search counts rows in 32 bits.
            "max_tokens": min(self.max_tokens, int(problem.length_S.sum())),
            "num_cells": problem.num_cells,
            "cells_per_unit": ranks_per_group(problem.topology),
            "num_groups": num_packed_groups(problem.topology),
            "only_swaps": self.equal_sequences,
        }
        if problem.sync == "step" or figures["num_groups"] == 1:
            return Layout(**figures)
        return JoinedLayout(by_layer=problem.sync == "layer", **figures)

    def _start(self, problem: PackingProblem) -> np.ndarray:
        from routepack.solvers import start_packings

        if problem.start_cell_of_S is not None:
            return problem.start_cell_of_S
        cell_of_S = start_packings.by_tokens(problem.length_S, problem.num_cells, self.max_tokens)
        if cell_of_S is None:
            return problem.feasible_cell_of_S
        equal = self._equalized(cell_of_S, problem.length_S, problem.topology.data_parallel_degree)
        return problem.feasible_cell_of_S if equal is None else equal
