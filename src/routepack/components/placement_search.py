"""Better placements once sequences are packed: what a rerouter that searches gives beside its first placement.

Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from routepack.core.component import Component
from routepack.core.errors import PlanError, RoutePackError
from routepack.core.plans import ExpertPlacement, Packing, Sync, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.models import CostRates


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedUnits:
    """A window's sequences, packed into units: a unit is one microbatch of one EP group."""

    demand: RoutingDemand
    unit_of_S: np.ndarray
    """int [S]: the unit of each sequence."""
    num_ranks: int
    """R."""
    joined_units: int = 1
    """So many consecutive units wait for one another in every layer: G under ``sync=layer``, else 1."""


@dataclass(frozen=True, kw_only=True)
class PlacementSearch(Component):
    """Improves a placement for packed sequences. Subclasses implement :meth:`refine`; what they give is checked.

    A planner calls :meth:`refined`, :meth:`annealed`, :meth:`gathered` and :meth:`brought_near`, which are final.
    """

    section: ClassVar[str] = "rerouter"
    thread_safe: ClassVar[bool] = False
    """Whether its methods may be called from several threads at once, each with units of its own. A subclass that overrides
    ``refine`` or ``anneal`` has to say so again; otherwise its calls never overlap."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if {"refine", "anneal"} & set(vars(cls)) and "thread_safe" not in vars(cls):
            cls.thread_safe = False

    @abstractmethod
    def refine(self, slots_LP: np.ndarray, units: PackedUnits) -> np.ndarray:
        """int [L, P]: a placement that the units wait less for, found from *slots_LP*."""

    def anneal(self, slots_LP: np.ndarray, units: PackedUnits, *, temperature: float, seed: int, effort: float) -> np.ndarray:
        """int [L, P]: a placement at a temperature (routed rows), for a search that cools it and the packing together.

        *effort* is the share of the usual number of tries. The placement may be worse than *slots_LP*. Refines unless
        overridden.
        """
        return self.refine(slots_LP, units)

    def gather(self, demand: RoutingDemand, topology: Topology) -> np.ndarray | None:
        """int [L, P]: a placement with what the same sequences use on one node, to start from. None unless overridden.

        Asked for only where links cost something.
        """
        return None

    def bring_near(
        self, slots_LP: np.ndarray, demand: RoutingDemand, packing: Packing, topology: Topology, rates: CostRates, sync: Sync
    ) -> np.ndarray:
        """int [L, P]: a placement that weighs balance against traffic, found from *slots_LP*. Keeps that unless overridden.

        Asked for only where links cost something.
        """
        return slots_LP

    @final
    def refined(self, placement: ExpertPlacement, units: PackedUnits) -> ExpertPlacement:
        """The placement that :meth:`refine` finds, checked. Raises PlanError where it is none."""
        return self._checked(self.refine(placement.physical_to_logical_LP, units), units.demand)

    @final
    def annealed(
        self, placement: ExpertPlacement, units: PackedUnits, *, temperature: float, seed: int, effort: float
    ) -> ExpertPlacement:
        """The placement that :meth:`anneal` finds, checked."""
        slots_LP = placement.physical_to_logical_LP
        return self._checked(self.anneal(slots_LP, units, temperature=temperature, seed=seed, effort=effort), units.demand)

    @final
    def gathered(self, demand: RoutingDemand, topology: Topology) -> ExpertPlacement | None:
        """The placement that :meth:`gather` finds, checked; None where it finds none."""
        slots_LP = self.gather(demand, topology)
        return None if slots_LP is None else self._checked(slots_LP, demand)

    @final
    def brought_near(
        self,
        placement: ExpertPlacement,
        demand: RoutingDemand,
        packing: Packing,
        topology: Topology,
        rates: CostRates,
        sync: Sync,
    ) -> ExpertPlacement:
        """The placement that :meth:`bring_near` finds, checked."""
        slots_LP = self.bring_near(placement.physical_to_logical_LP, demand, packing, topology, rates, sync)
        return self._checked(slots_LP, demand)

    def _checked(self, slots_LP: np.ndarray, demand: RoutingDemand) -> ExpertPlacement:
        return checked_placement(type(self).__name__, slots_LP, demand.tokens_LE.shape)


def checked_placement(name: str, slots_LP: np.ndarray, shape: tuple[int, ...]) -> ExpertPlacement:
    """What a component called *name* gave, as a placement of *shape* [L, E]. Raises PlanError where it is none."""
    try:
        slots_LP = np.asarray(slots_LP)
    except ValueError as error:
        raise PlanError(f"{name} placed experts in slots that are no array: {error}.") from error
    if np.shape(slots_LP) != shape:
        raise PlanError(f"{name} placed experts in shape {np.shape(slots_LP)}; {shape} [layers, experts] is needed.")
    try:
        return ExpertPlacement(physical_to_logical_LP=slots_LP)
    except RoutePackError as error:
        raise PlanError(f"{name}: {error}") from error
