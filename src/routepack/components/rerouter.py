"""Experts to EP ranks, one placement per layer and window. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from routepack.components.placement_search import PlacementSearch, checked_placement
from routepack.core.component import Component
from routepack.core.plans import ExpertPlacement, Topology


@dataclass(frozen=True, kw_only=True)
class Rerouter(Component):
    """Chooses the slot of every expert. Subclasses implement :meth:`assign` and cannot return an illegal placement."""

    section: ClassVar[str] = "rerouter"

    @abstractmethod
    def assign(self, tokens_LE: np.ndarray, num_ranks: int) -> np.ndarray:
        """int [L, P]: ``physical_to_logical_LP``, given the routed rows of each expert (int64 [L, E])."""

    def assign_on(self, tokens_LE: np.ndarray, topology: Topology) -> np.ndarray:
        """int [L, P]: a placement that looks at nodes too. Calls :meth:`assign` unless overridden."""
        return self.assign(tokens_LE, topology.expert_parallel_degree)

    def search(self) -> PlacementSearch | None:
        """What improves a placement once sequences are packed. None unless overridden: the placement stays as it is."""
        return None

    @final
    def place(self, tokens_LE: np.ndarray, topology: Topology) -> ExpertPlacement:
        """The placement for a window, checked.

        Raises ConfigError where the ranks do not divide the experts, PlanError where :meth:`assign` gave
        anything but one permutation of the experts per layer.
        """
        topology.slots_per_rank(tokens_LE.shape[1])
        slots_LP = self.assign_on(tokens_LE.copy(), topology)
        return checked_placement(type(self).__name__, slots_LP, tokens_LE.shape)


@dataclass(frozen=True, kw_only=True)
class IdentityRerouter(Rerouter):
    """Leaves expert e in slot e: the baseline."""

    def assign(self, tokens_LE: np.ndarray, num_ranks: int) -> np.ndarray:
        """The identity in every layer."""
        return ExpertPlacement.identity(*tokens_LE.shape).physical_to_logical_LP
