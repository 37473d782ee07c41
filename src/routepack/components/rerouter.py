"""Experts to EP ranks, one placement per layer and window. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from routepack.core.errors import PlanError, RoutePackError
from routepack.core.plans import ExpertPlacement, Packing, Sync, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.models import CostRates


@dataclass(frozen=True, kw_only=True)
class Rerouter(ABC):
    """Chooses the slot of every expert. Subclasses implement :meth:`assign` and cannot return an illegal placement."""

    refines: ClassVar[bool] = False
    """Whether :meth:`refine` can do better once sequences are packed."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in {"place", "refine_placement"} & set(vars(cls)):
            raise TypeError(f"{cls.__name__}.{name} must not be overridden: implement assign, which {name} checks.")

    @abstractmethod
    def assign(self, tokens_LE: np.ndarray, num_ranks: int) -> np.ndarray:
        """int [L, P]: ``physical_to_logical_LP``, given the routed rows of each expert (int64 [L, E])."""

    def assign_on(self, tokens_LE: np.ndarray, topology: Topology) -> np.ndarray:
        """The same for a rerouter that looks at nodes: override it where :meth:`assign` needs to know more than R."""
        return self.assign(tokens_LE, topology.expert_parallel_degree)

    @final
    def place(self, tokens_LE: np.ndarray, topology: Topology) -> ExpertPlacement:
        """The placement for a window, checked.

        Raises ConfigError where the ranks do not divide the experts, PlanError where :meth:`assign` gave
        anything but one permutation of the experts per layer.
        """
        topology.slots_per_rank(tokens_LE.shape[1])
        slots_LP = self.assign_on(tokens_LE.copy(), topology)
        return self._checked(slots_LP, tokens_LE.shape)

    @final
    def refine_placement(
        self,
        placement: ExpertPlacement,
        demand: RoutingDemand,
        unit_of_S: np.ndarray,
        topology: Topology,
        *,
        joined_units: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
        effort: float = 1.0,
    ) -> ExpertPlacement:
        """The placement, refined for sequences packed into units (microbatch of an EP group), checked like :meth:`place`.

        Above a *temperature* of 0 (routed rows) it is annealed instead, with a share *effort* of the usual swaps, and may
        be worse than before.
        """
        ranks, slots_LP = topology.expert_parallel_degree, placement.physical_to_logical_LP
        if temperature > 0.0:
            heat = {"temperature": temperature, "seed": seed, "effort": effort}
            slots_LP = self.anneal(slots_LP, demand, unit_of_S, ranks, joined_units, **heat)
        else:
            slots_LP = self.refine(slots_LP, demand, unit_of_S, ranks, joined_units)
        return self._checked(slots_LP, demand.tokens_LE.shape)

    def refine(
        self, slots_LP: np.ndarray, demand: RoutingDemand, unit_of_S: np.ndarray, num_ranks: int, joined_units: int
    ) -> np.ndarray:
        """int [L, P]: a placement for the packed sequences, starting from one. Keeps it unless overridden.

        So many consecutive units wait for one another in every layer: G under ``sync=layer``, else 1.
        """
        return slots_LP

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
        """int [L, P]: a placement at a temperature, for a search that cools it and the packing together. As refined."""
        return self.refine(slots_LP, demand, unit_of_S, num_ranks, joined_units)

    @final
    def near_placement(
        self,
        placement: ExpertPlacement,
        demand: RoutingDemand,
        packing: Packing,
        topology: Topology,
        rates: CostRates,
        sync: Sync,
    ) -> ExpertPlacement:
        """The placement, refined for what links cost now that every sequence has its cell, checked like :meth:`place`."""
        slots_LP = self.bring_near(placement.physical_to_logical_LP, demand, packing, topology, rates, sync)
        return self._checked(slots_LP, demand.tokens_LE.shape)

    @final
    def gathered_placement(self, demand: RoutingDemand, topology: Topology) -> ExpertPlacement | None:
        """A placement that puts together what the same sequences use, to start from; checked like :meth:`place`."""
        slots_LP = self.gather(demand, topology)
        return None if slots_LP is None else self._checked(slots_LP, demand.tokens_LE.shape)

    def gather(self, demand: RoutingDemand, topology: Topology) -> np.ndarray | None:
        """int [L, P]: such a placement, asked for only where links cost something. None unless overridden."""
        return None

    def bring_near(
        self, slots_LP: np.ndarray, demand: RoutingDemand, packing: Packing, topology: Topology, rates: CostRates, sync: Sync
    ) -> np.ndarray:
        """int [L, P]: a placement that weighs balance against traffic, starting from one. Keeps it unless overridden.

        Asked only where the rates say that links cost something.
        """
        return slots_LP

    def _checked(self, slots_LP: np.ndarray, shape: tuple[int, int]) -> ExpertPlacement:
        name = type(self).__name__
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


@dataclass(frozen=True, kw_only=True)
class IdentityRerouter(Rerouter):
    """Leaves expert e in slot e: the baseline."""

    def assign(self, tokens_LE: np.ndarray, num_ranks: int) -> np.ndarray:
        """The identity in every layer."""
        return ExpertPlacement.identity(*tokens_LE.shape).physical_to_logical_LP
