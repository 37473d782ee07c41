"""The rerouter that evens out ranks by the demand of every packed unit. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from routepack.components.rerouter import Rerouter
from routepack.core.checks import whole
from routepack.core.plans import ExpertPlacement
from routepack.core.rollouts import RoutingDemand


@dataclass(frozen=True, kw_only=True)
class ExpertRerouter(Rerouter):
    """Evens out the ranks: longest first with equal counts, best-pair swaps, then swaps on the packed units.

    The last step lowers what the trainer waits for, the sum over units of the fullest rank, rather than
    the window's largest rank.
    """

    refines: ClassVar[bool] = True

    sweeps: int = 8
    """At most so many passes over all pairs of ranks when refining a layer."""
    swaps_per_layer: int = 16000
    """Swaps of experts tried in a layer, each time that a placement is annealed on the packed units."""

    def __post_init__(self) -> None:
        whole("rerouter.sweeps", self.sweeps, least=0, most=2**31 - 1)
        whole("rerouter.swaps_per_layer", self.swaps_per_layer, least=1, most=2**31 - 1)

    def assign(self, tokens_LE: np.ndarray, num_ranks: int) -> np.ndarray:
        """LPT with equal counts, then the best swap of the fullest rank until none helps."""
        from routepack.solvers import placement

        return placement.slots_of_ranks(placement.balanced_ranks(tokens_LE, num_ranks))

    def refine(
        self, slots_LP: np.ndarray, demand: RoutingDemand, unit_of_S: np.ndarray, num_ranks: int, joined_units: int
    ) -> np.ndarray:
        """Swaps that lower the sum over units of the fullest rank; never raises it."""
        from routepack.solvers import placement

        load_LEU, rank_of_LE = _packed(slots_LP, demand, unit_of_S, num_ranks, joined_units)
        ranks_LE = placement.refine_ranks(load_LEU, rank_of_LE, num_ranks, joined_units=joined_units, sweeps=self.sweeps)
        return placement.slots_of_ranks(ranks_LE)

    def anneal(
        self,
        slots_LP: np.ndarray,
        demand: RoutingDemand,
        unit_of_S: np.ndarray,
        num_ranks: int,
        joined_units: int,
        *,
        temperature: float,
        seed: int,
        effort: float,
    ) -> np.ndarray:
        """Swaps of experts by Metropolis, layer by layer, on what the packed units wait for."""
        from routepack.solvers import placement

        load_LEU, rank_of_LE = _packed(slots_LP, demand, unit_of_S, num_ranks, joined_units)
        ranks_LE = placement.anneal_ranks(
            load_LEU,
            rank_of_LE,
            num_ranks,
            temperature=temperature,
            swaps_per_layer=max(1, round(effort * self.swaps_per_layer)),
            seed=seed,
            joined_units=joined_units,
        )
        return placement.slots_of_ranks(ranks_LE)


def _packed(
    slots_LP: np.ndarray, demand: RoutingDemand, unit_of_S: np.ndarray, num_ranks: int, joined_units: int
) -> tuple[np.ndarray, np.ndarray]:
    """(routed rows of each unit per expert [L, E, U], rank of each expert [L, E])."""
    from routepack.solvers import rank_loads

    num_units = -(-int(unit_of_S.max() + 1) // joined_units) * joined_units
    rank_of_LE = ExpertPlacement(physical_to_logical_LP=slots_LP).rank_of_LE(num_ranks)
    return rank_loads.unit_load(demand.tokens_SLE, unit_of_S, num_units), rank_of_LE
