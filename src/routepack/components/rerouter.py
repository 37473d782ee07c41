"""Experts to EP ranks, one placement per layer and window. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from routepack.core.checks import whole
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
