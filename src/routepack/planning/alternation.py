"""Placement and packing in turn, cooled together: what a plan is searched with. Letters: :mod:`routepack.core`.

A phase packs for a while on the placement as it is, then swaps experts on the units as they are packed, both at
the same temperature. The last phases only accept what lowers the objective, and every pair they meet is priced.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from routepack.components.placement_search import PackedUnits
from routepack.core.plans import ExpertPlacement, Packing
from routepack.cost import models
from routepack.planning.search import Candidate, Search

PHASE_PROPOSALS, LARGE_WINDOW, LARGE_PHASE_PROPOSALS = 64, 16_384, 256
"""Proposals of a phase, per sequence; and in windows of at least so many sequences, whose rows no cache holds."""
FEWEST_PHASES = 16
FINISHING = 3
"""Last phases, at temperature zero."""
HOT, COLD = 0.3, 0.02
"""Temperatures at the begin and end, in typical changes of the energy."""
SMALL_WINDOW = 512
"""Sequences up to which searches share the proposals: two of them, and all up to half as many."""
CHAIN_PROPOSALS = 500
"""Proposals per sequence that a search of its own takes at least."""
CHAINS = (HOT, 1.0, HOT, 8.0)
"""From how hot each of them starts: where a few long sequences weigh much, their moves need more than is typical."""
LARGE_HOT = 1.2
"""The same in a large window: annealed in proposals too few to settle, it is better stirred first."""


def usual_proposals(num_sequences: int) -> int:
    """Proposals of a phase where there is time."""
    return (LARGE_PHASE_PROPOSALS if num_sequences >= LARGE_WINDOW else PHASE_PROPOSALS) * num_sequences


def candidates(search: Search) -> Iterator[Candidate]:
    """Priced pairs of placement and packing, each legal, the last ones the best searched for."""
    placement = search.rerouter.place(search.demand.tokens_LE, search.topology)
    if not (search.placement_search and search.packer.improves):
        yield from _packed_once(search, placement)
        return
    optimum, proven = _optimum(search)
    if optimum is not None:
        yield optimum
    if proven and not search.rates.links_cost:
        return
    yield from _chains(search, placement)


def _optimum(search: Search) -> tuple[Candidate | None, bool]:
    """The best pair there is, in a window so small that all can be tried, and whether all were; else None."""
    from routepack.solvers import exact, packing_state, placement

    demand, topology = search.demand, search.topology
    rows = int(demand.tokens_LE.sum())
    tiny = exact.TinyWindow(
        length_S=demand.length_S,
        tokens_SLE=demand.tokens_SLE,
        weights=packing_state.Weights.of(search.rates.cost_SI(demand.length_S), search.rates.expert, rows),
        max_tokens=search.packer.max_tokens,
        num_microbatches=search.certificate.num_microbatches,
        num_groups=models.num_packed_groups(topology),
        cells_per_unit=models.ranks_per_group(topology),
        num_ranks=topology.expert_parallel_degree,
        sync=search.planner.sync,
        modality_S=demand.modality_S,
        skew=search.packer.sequence_skew if search.packer.equal_sequences else -1,
    )
    solved = tiny.solve() if tiny.is_tiny else None
    if solved is None:
        return None, False
    cell_of_S, rank_of_LE, proven = solved
    packing = Packing(
        cell_of_S=cell_of_S,
        num_microbatches=tiny.num_microbatches,
        data_parallel_degree=topology.data_parallel_degree,
    )
    placed = ExpertPlacement(physical_to_logical_LP=placement.slots_of_ranks(rank_of_LE))
    return search.priced(placed, packing, search.load_of(placed)), proven


def _chains(search: Search, placement: ExpertPlacement) -> Iterator[Candidate]:
    """What one search finds; in a small window what several find, each from a temperature of its own.

    A large window is annealed in domains, on all cores. A small one is not worth cutting, but its few long sequences
    make local minima that a single search may end in.
    """
    if search.demand.num_sequences > SMALL_WINDOW:
        yield from _Alternation(search=search, placement=placement, num_proposals=search.num_proposals).run()
        return

    concurrent = search.packer.thread_safe and search.placement_search is not None and search.placement_search.thread_safe
    chains = 2 if 2 * search.demand.num_sequences > SMALL_WINDOW else len(CHAINS)
    if search.deadline is None:
        # A chain that may try little is better joined to another.
        chains = min(chains, max(1, search.num_proposals // (CHAIN_PROPOSALS * search.demand.num_sequences)))
    elif not concurrent:
        # One after another they would each have to end in a part of the time.
        chains = 1

    def run(chain: int) -> list[Candidate]:
        share = search.num_proposals // chains
        return list(_Alternation(search=search, placement=placement, chain=chain, num_proposals=share).run())

    if not concurrent:
        for chain in range(chains):
            yield from run(chain)
        return
    # All at once, so that a time limit is the same for all of them.
    with ThreadPoolExecutor(chains) as pool:
        for found in pool.map(run, range(chains)):
            yield from found


def _packed_once(search: Search, placement: ExpertPlacement) -> Iterator[Candidate]:
    load_SRL = search.load_of(placement)
    packing = search.packer.pack(search.problem(load_SRL))
    yield from dealt(search, search.priced(placement, packing, load_SRL), load_SRL)
    if search.placement_search:
        placement = refined(search, placement, packing)
        load_SRL = search.load_of(placement)
        yield from dealt(search, search.priced(placement, packing, load_SRL), load_SRL)


def refined(search: Search, placement: ExpertPlacement, packing: Packing, **heat: Any) -> ExpertPlacement:
    """The placement refined on the packed units, or annealed at a ``temperature`` above 0; as it was without a search."""
    if search.placement_search is None:
        return placement
    joined = models.num_packed_groups(search.topology) if search.planner.sync == "layer" else 1
    unit_of_S = packing.cell_of_S // models.ranks_per_group(search.topology)
    units = PackedUnits(
        demand=search.demand,
        unit_of_S=unit_of_S,
        num_ranks=search.topology.expert_parallel_degree,
        joined_units=joined,
    )
    if heat.get("temperature", 0.0) > 0.0:
        return search.placement_search.annealed(placement, units, **heat)
    return search.placement_search.refined(placement, units)


def dealt(search: Search, candidate: Candidate, load_SRL: np.ndarray) -> Iterator[Candidate]:
    """The candidate; where microbatches are waited for, also with its units dealt to them by falling cost."""
    yield candidate
    if search.planner.sync == "step":
        return
    # Any unit may be any microbatch of any group (of its modality), and sorted units have the least sum of maxima.
    width, packing = models.ranks_per_group(search.topology), candidate.packing
    cell_of_S = packing.cell_of_S
    kind_U, cost_U = np.zeros(packing.num_cells // width, dtype=np.int64), candidate.evaluation.cost_MG.ravel()
    if search.demand.modality_S is not None:
        kind_U[cell_of_S // width] = search.demand.modality_S
    place_of_U = np.empty_like(kind_U)
    place_of_U[np.lexsort((-cost_U, kind_U))] = np.argsort(kind_U, kind="stable")
    packing = Packing(
        cell_of_S=place_of_U[cell_of_S // width] * width + cell_of_S % width,
        num_microbatches=packing.num_microbatches,
        data_parallel_degree=packing.data_parallel_degree,
    )
    # A unit that changes groups takes its ranks' numbers of sequences along, which the packer may have rules about.
    if search.keeps_counts(packing.cell_of_S):
        yield search.priced(candidate.placement, packing, load_SRL, rerouter=candidate.rerouter, packer=candidate.packer)


@dataclass(kw_only=True, eq=False)
class _Alternation:
    """One search: where it stands."""

    search: Search
    placement: ExpertPlacement
    num_proposals: int
    chain: int = 0

    def __post_init__(self) -> None:
        search = self.search
        self.usual = usual_proposals(search.demand.num_sequences)
        self.hot = LARGE_HOT if search.demand.num_sequences >= LARGE_WINDOW else CHAINS[self.chain]
        self.phases = max(FEWEST_PHASES, round(self.num_proposals / self.usual))
        self.proposals = -(-self.num_proposals // self.phases)
        self.load_SRL = search.load_of(self.placement)
        problem = search.problem(self.load_SRL)
        self.typical = search.packer.typical_change(problem)
        self.packing = search.packer.pack(search.problem(self.load_SRL, num_proposals=0, temperatures=(0.0, 0.0)))

    def run(self) -> Iterator[Candidate]:
        """Cool, then finish; yields what the finish meets."""
        for phase, progress in enumerate(self._progress()):
            heat = self.hot * (COLD / self.hot) ** progress * self.typical
            self._pack(phase, heat)
            self._place(phase, heat)
        for phase in range(FINISHING):
            if phase and self.search.deadline is not None and time.monotonic() > self.search.deadline:
                break
            best = self._better(self._priced())
            yield best
            self._pack(-1 - phase, 0.0)
            best = self._better(self._priced())
            yield best
            self._place(-1 - phase, 0.0)
        yield self._better(self._priced())

    def _progress(self) -> Iterator[float]:
        """How far along, 0 to 1, before each phase: by count, or by the clock."""
        deadline = self.search.deadline
        if deadline is None:
            hot = self.phases - FINISHING
            yield from (phase / max(1, hot - 1) for phase in range(hot))
            return
        started = now = time.monotonic()
        usually, phases = 0.0, 0
        self._fit_phase(FEWEST_PHASES, 1.0)
        # The finish takes about as long as so many phases, and is cut short where it takes longer.
        while now + (1 + FINISHING) * usually <= deadline:
            yield (now - started) / max(1e-9, deadline - FINISHING * usually - started)
            taken, now, phases = time.monotonic() - now, time.monotonic(), phases + 1
            usually = (now - started) / phases
            self._fit_phase(taken, (deadline - started) / FEWEST_PHASES)

    def _fit_phase(self, taken: float, wanted: float) -> None:
        """Shorter or longer phases, up to the usual, so that there is time for enough of them."""
        least = max(1, self.usual // FEWEST_PHASES)
        self.proposals = min(self.usual, max(least, int(self.proposals * wanted / taken)))

    def _seed(self, phase: int) -> int:
        return (self.search.planner.seed * len(CHAINS) + self.chain) * 2**20 + phase % 2**20

    def _pack(self, phase: int, heat: float) -> None:
        search = self.search
        seed = self._seed(phase)
        problem = search.problem(
            self.load_SRL,
            start=self.packing.cell_of_S,
            num_proposals=self.proposals,
            temperatures=(heat, heat),
            seed=seed,
        )
        self.packing = search.packer.pack(problem)

    def _place(self, phase: int, heat: float) -> None:
        search = self.search
        seed = self._seed(phase)
        rows = heat / search.rates.expert if search.rates.expert else 0.0
        # As short as a phase packs, so long it places: a small budget is small in both.
        effort = min(1.0, self.proposals / self.usual)
        self.placement = refined(search, self.placement, self.packing, temperature=rows, seed=seed, effort=effort)
        self.load_SRL = search.load_of(self.placement)

    def _priced(self) -> Candidate:
        return self.search.priced(self.placement, self.packing, self.load_SRL)

    def _better(self, candidate: Candidate) -> Candidate:
        """The candidate as it is or dealt anew, whichever is better; the search goes on from there."""
        best = min(dealt(self.search, candidate, self.load_SRL), key=lambda one: one.evaluation.key)
        self.packing = best.packing
        return best
