"""The rerouter that evens out ranks, by the window's demand at first and by the packed units' later.

Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from routepack.components.placement_search import PackedUnits, PlacementSearch
from routepack.components.rerouter import Rerouter
from routepack.core.component import Count, CountOrZero
from routepack.core.plans import ExpertPlacement


@dataclass(frozen=True, kw_only=True)
class ExpertRerouter(Rerouter):
    """Evens out the ranks: longest first with equal counts, best-pair swaps, then swaps on the packed units.

    The last step lowers what the trainer waits for, the sum over units of the fullest rank, rather than
    the window's largest rank.
    """

    sweeps: CountOrZero = 8
    """At most so many passes over all pairs of ranks when refining a layer."""
    swaps_per_layer: Count = 16000
    """Swaps of experts tried in a layer, each time that a placement is annealed on the packed units."""

    def assign(self, tokens_LE: np.ndarray, num_ranks: int) -> np.ndarray:
        """LPT with equal counts, then the best swap of the fullest rank until none helps."""
        from routepack.solvers import placement

        return placement.slots_of_ranks(placement.balanced_ranks(tokens_LE, num_ranks))

    def search(self) -> PlacementSearch:
        """Swaps of two experts of a layer."""
        return SwapSearch(sweeps=self.sweeps, swaps_per_layer=self.swaps_per_layer)


@dataclass(frozen=True, kw_only=True)
class SwapSearch(PlacementSearch):
    """Swaps experts of two ranks where the packed units then wait less. Options as :class:`ExpertRerouter` has them."""

    thread_safe: ClassVar[bool] = True

    sweeps: CountOrZero
    swaps_per_layer: Count

    def refine(self, slots_LP: np.ndarray, units: PackedUnits) -> np.ndarray:
        """Swaps that lower the sum over units of the fullest rank; never raises it."""
        from routepack.solvers import placement

        load_LEU, rank_of_LE = _loads(slots_LP, units)
        limits = {"joined_units": units.joined_units, "sweeps": self.sweeps}
        return placement.slots_of_ranks(placement.refine_ranks(load_LEU, rank_of_LE, units.num_ranks, **limits))

    def anneal(self, slots_LP: np.ndarray, units: PackedUnits, *, temperature: float, seed: int, effort: float) -> np.ndarray:
        """Swaps by Metropolis, layer by layer, on what the packed units wait for."""
        from routepack.solvers import placement

        load_LEU, rank_of_LE = _loads(slots_LP, units)
        ranks_LE = placement.anneal_ranks(
            load_LEU,
            rank_of_LE,
            units.num_ranks,
            temperature=temperature,
            swaps_per_layer=max(1, round(effort * self.swaps_per_layer)),
            seed=seed,
            joined_units=units.joined_units,
        )
        return placement.slots_of_ranks(ranks_LE)


def _loads(slots_LP: np.ndarray, units: PackedUnits) -> tuple[np.ndarray, np.ndarray]:
    """(routed rows of each unit per expert [L, E, U], rank of each expert [L, E])."""
    from routepack.solvers import rank_loads

    num_units = -(-int(units.unit_of_S.max() + 1) // units.joined_units) * units.joined_units
    rank_of_LE = ExpertPlacement(physical_to_logical_LP=slots_LP).rank_of_LE(units.num_ranks)
    return rank_loads.unit_load(units.demand.tokens_SLE, units.unit_of_S, num_units), rank_of_LE
