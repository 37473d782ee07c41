"""Population annealing: chains that are cooled together, the good ones copied over the poor ones.

Source: *RoutePack*, arXiv 2608.12146; Machta, Phys. Rev. E 82, 026704 (2010), for the resampling. Chains run on
threads, one each, and draw from seeds of their own, so the packing depends on seed and proposals alone.
Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from routepack.solvers.anneal import COLD, FINISH_SHARE, HOT, PROPOSALS_PER_ROUND, near_places, typical_change
from routepack.solvers.packing_state import Layout


@dataclass(frozen=True, kw_only=True)
class PopulationSchedule:
    """How long to anneal, and when to resample."""

    num_proposals: int
    """Over all chains."""
    steps: int = 20
    """Temperatures, and so the times at which the population may be resampled."""
    effective_share: float = 0.8
    """Resample once the effective sample size of the weights has fallen below this share of the chains."""
    threads: int = 2
    deadline: float | None = None
    """``time.monotonic()`` at which to stop; then temperatures fall by the clock, and the packing depends on it."""


def canonical_cells(cell_of_S: np.ndarray, cells_per_unit: int) -> np.ndarray:
    """int64 [S]: the same packing with units, and the cells of a unit, numbered by their first sequence.

    Two packings that differ only by such numbers cost the same: any unit may be any microbatch of its group.

    >>> canonical_cells(np.array([3, 1, 2, 3]), 2)
    array([0, 2, 1, 0])
    """
    unit_of_S = _by_first_seen(cell_of_S // cells_per_unit)
    place_of_S = np.empty(len(cell_of_S), dtype=np.int64)
    for unit in range(int(unit_of_S.max()) + 1):
        members = unit_of_S == unit
        place_of_S[members] = _by_first_seen(cell_of_S[members])
    return unit_of_S * cells_per_unit + place_of_S


def _by_first_seen(label_S: np.ndarray) -> np.ndarray:
    _, first, inverse = np.unique(label_S, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


def effective_size(log_weight_P: np.ndarray) -> float:
    """The effective sample size, (sum w)^2 / sum w^2: from 1, where one chain has all the weight, to P."""
    weight_P = np.exp(log_weight_P - log_weight_P.max())
    return float(weight_P.sum() ** 2 / (weight_P**2).sum())


def systematic_parents(log_weight_P: np.ndarray, offset: float) -> np.ndarray:
    """int64 [P]: which chain each becomes a copy of; chain i is copied P w_i times, rounded up or down.

    >>> systematic_parents(np.log(np.array([0.5, 0.25, 0.25, 1e-9])), 0.5)
    array([0, 0, 1, 2])
    """
    weight_P = np.exp(log_weight_P - log_weight_P.max())
    share_P = np.cumsum(weight_P) / weight_P.sum()
    points_P = (np.arange(len(share_P)) + offset) / len(share_P)
    return np.minimum(np.searchsorted(share_P, points_P, side="right"), len(share_P) - 1)


@dataclass(kw_only=True, eq=False)
class Population:
    """Chains on their way down, and the best packing that any of them has met."""

    chains: list[Layout]
    rng: np.random.Generator
    best: tuple = ()
    best_cell_of_S: np.ndarray = field(default_factory=lambda: np.zeros(0))
    log_weight_P: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        self.log_weight_P = np.zeros(len(self.chains))
        self.archive()

    def archive(self) -> None:
        """Keep the best packing where resampling cannot lose it."""
        for chain in self.chains:
            objective = chain.objective()
            if not self.best or objective < self.best:
                self.best, self.best_cell_of_S = objective, chain.cell_of_S.copy()

    def run(self, pool: ThreadPoolExecutor, num_proposals: int, temperature: float) -> None:
        """Let every chain make its share of the proposals."""
        everyone = np.arange(len(self.chains[0].cell_of_S))
        state_P = self.rng.integers(1, 2**63, size=(len(self.chains), 1), dtype=np.uint64)
        share, near = -(-num_proposals // len(self.chains)), near_places(len(everyone))
        list(pool.map(lambda i: self.chains[i].run(everyone, share, temperature, near, state_P[i]), range(len(state_P))))
        self.archive()

    def reweigh(self, temperature: float, colder: float) -> None:
        """Weigh the chains for the next temperature; of those that have become the same packing only the first counts."""
        energy_P = np.array([chain.energy() for chain in self.chains], dtype=np.float64)
        if colder >= temperature:
            return
        self.log_weight_P -= (energy_P - energy_P.min()) * (1.0 / colder - 1.0 / temperature)
        seen = set()
        for i, chain in enumerate(self.chains):
            key = canonical_cells(chain.cell_of_S, chain.cells_per_unit).tobytes()
            if key in seen:
                self.log_weight_P[i] = -np.inf
            seen.add(key)

    def resample(self, effective_share: float) -> bool:
        """Copy good chains over poor ones where few have most of the weight; whether it did."""
        if effective_size(self.log_weight_P) >= effective_share * len(self.chains):
            return False
        parents = systematic_parents(self.log_weight_P, float(self.rng.random()))
        cells = [self.chains[parent].cell_of_S.copy() for parent in parents]
        for i, (chain, parent) in enumerate(zip(self.chains, parents, strict=True)):
            if i != parent:
                chain.restore(cells[i])
        self.log_weight_P[:] = 0.0
        return True


def anneal_population(layout: Layout, starts: list[np.ndarray], schedule: PopulationSchedule, *, seed: int) -> None:
    """Anneal a chain from each start (cells in the order the sequences were given); the best is left in *layout*."""
    rng = np.random.default_rng(seed)
    typical = typical_change(layout, rng)
    chains = [copy.copy(layout) for _ in starts]
    for chain, cell_of_S in zip(chains, starts, strict=True):
        chain.restore(cell_of_S[layout.order_S])
    population = Population(chains=chains, rng=rng)
    with ThreadPoolExecutor(schedule.threads) as pool:
        for num_proposals, temperature, colder in _ladder(schedule, typical, len(layout.cell_of_S)):
            population.run(pool, num_proposals, temperature)
            population.reweigh(temperature, colder)
            population.resample(schedule.effective_share)
        for chain in chains:
            chain.restore(population.best_cell_of_S)
        population.run(pool, round(schedule.num_proposals * FINISH_SHARE), 0.0)
    layout.restore(population.best_cell_of_S)


def _ladder(schedule: PopulationSchedule, typical: float, num_sequences: int) -> Iterator[tuple[int, float, float]]:
    """(proposals, temperature, the next temperature) of every step; under a deadline as many steps as there is time for."""

    def cooled(progress: float) -> float:
        return typical * HOT * (COLD / HOT) ** min(1.0, progress)

    if schedule.deadline is None:
        each = round(schedule.num_proposals * (1.0 - FINISH_SHARE) / schedule.steps)
        for step in range(schedule.steps):
            yield each, cooled(step / max(1, schedule.steps - 1)), cooled((step + 1) / max(1, schedule.steps - 1))
        return
    started = time.monotonic()
    last = 0.0
    while (now := time.monotonic()) < schedule.deadline:
        progress = (now - started) / (schedule.deadline - started)
        yield PROPOSALS_PER_ROUND * num_sequences, cooled(progress), cooled(2 * progress - last)
        last = progress
