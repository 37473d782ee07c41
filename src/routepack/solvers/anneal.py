"""Annealing of sequences over cells, on whole numbers, on as many threads as there are domains.

The window's units (a microbatch of an EP group) are dealt at random into domains; each thread anneals
one domain, moving and swapping only sequences inside it; then they are dealt again. What is found
depends on the seed and the proposals alone, never on how many threads ran or how fast they were.

Costs are fixed-point whole numbers (:class:`Weights`), so that the incremental figures equal a
recomputation exactly. Letters: :mod:`routepack.types`; I attention stages, C = M x W cells, U = M x G units.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from routepack.solvers import _anneal_kernels as kernels

DOMAINS = 2
"""Domains dealt in every round; fixed, so that a plan never depends on the machine's cores."""
PROPOSALS_PER_ROUND = 24
"""Proposals between two dealings, per sequence."""
NEAR = 128
"""Most swap partners lie within this many places in order of length, where both cells keep their cap."""
FINISH_SHARE = 0.1
"""Share of the proposals that the zero-temperature finish on the exact objective gets."""


HOT, COLD = 0.5, 0.01
"""Temperatures at the begin and end, in typical changes of the energy."""
NOTHING = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Costs as whole numbers: what a sequence costs in each attention stage, and what a routed row costs."""

    cost_SI: np.ndarray
    """int64 [S, I]."""
    expert: int

    @classmethod
    def of(cls, cost_SI: np.ndarray, expert: float, num_rows: int) -> Weights:
        """Scale real costs so that their total fills 2^56: seven digits or more of each survive."""
        scale = 2.0**56 / ((float(cost_SI.sum()) + expert * num_rows) or 1.0)
        return cls(cost_SI=np.rint(cost_SI * scale).astype(np.int64), expert=int(np.rint(expert * scale)))


class Layout:
    """A packing under way, with every figure of the objective kept beside it.

    Sequences are held longest first, so that near neighbours are of near length and lie near in memory;
    after the last comes an empty one, with which a move is a swap.
    """

    def __init__(self, *, cell_of_S, length_S, load_SRL, weights: Weights, max_tokens, num_cells, cells_per_unit, num_groups):
        self.order_S = np.argsort(-length_S, kind="stable")
        with_nobody = np.append(self.order_S, 0)
        self.length_S, self.load_SRL, self.cost_SI = length_S[with_nobody], load_SRL[with_nobody], weights.cost_SI[with_nobody]
        # Kernels are compiled for this one layout in memory.
        self.load_SRL = np.ascontiguousarray(self.load_SRL, dtype=np.int32)
        for per_sequence in (self.length_S, self.load_SRL, self.cost_SI):
            per_sequence[-1] = 0
        self.expert, self.max_tokens = np.int64(weights.expert), np.int64(max_tokens)
        self.num_cells, self.cells_per_unit, self.num_groups = num_cells, cells_per_unit, num_groups
        rows_per_token = float((load_SRL.sum(axis=1, dtype=np.int64).max(axis=1) / length_S).max())
        assert cells_per_unit * max_tokens * rows_per_token < 2**31, "a unit's rows do not fit int32"
        self.restore(np.asarray(cell_of_S)[self.order_S])

    @property
    def num_units(self) -> int:
        """U."""
        return self.num_cells // self.cells_per_unit

    def restore(self, cell_of_S: np.ndarray) -> None:
        """Take the cells of the sequences (longest first) and recompute every figure from them."""
        self.cell_of_S = np.array(cell_of_S, dtype=np.int64)
        self.tokens_C = np.bincount(self.cell_of_S, self.length_S[:-1], self.num_cells).astype(np.int64)
        self.count_C = np.bincount(self.cell_of_S, minlength=self.num_cells)
        self.cost_CI = np.zeros((self.num_cells, self.cost_SI.shape[1]), dtype=np.int64)
        np.add.at(self.cost_CI, self.cell_of_S, self.cost_SI[:-1])
        by_cell = np.argsort(self.cell_of_S, kind="stable")
        unit_of_S = self.cell_of_S[by_cell] // self.cells_per_unit
        starts = np.searchsorted(unit_of_S, np.arange(self.num_units))
        self.load_URL = np.add.reduceat(self.load_SRL[by_cell], starts, axis=0, dtype=np.int32)
        self.peak_U = self.load_URL.max(axis=1).sum(axis=1, dtype=np.int64)
        self.attention_U = self.cost_CI.reshape(self.num_units, self.cells_per_unit, -1).max(axis=1).sum(axis=1)

    def packed(self) -> np.ndarray:
        """int32 [S]: the cell of every sequence, in the order in which the sequences were given."""
        cell_of_S = np.empty(len(self.cell_of_S), dtype=np.int32)
        cell_of_S[self.order_S] = self.cell_of_S
        return cell_of_S

    def cost_U(self) -> np.ndarray:
        """int64 [U]: J of every unit."""
        return self.attention_U + self.expert * self.peak_U

    def cost_G(self) -> np.ndarray:
        """int64 [G]: U_g of every group, a new array."""
        return self.cost_U().reshape(-1, self.num_groups).sum(axis=0)

    def objective(self) -> tuple[int, int, int]:
        """(max U_g, sum of U_g, max J): what ``sync=step`` minimises, lexicographically."""
        cost_G = self.cost_G()
        return int(cost_G.max()), int(cost_G.sum()), int(self.cost_U().max())


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long to anneal, and which part of the way from hot to cold."""

    num_proposals: int
    begin: float = 0.0
    end: float = 1.0
    deadline: float | None = None
    """``time.monotonic()`` at which to stop. What is found then depends on the machine."""
    threads: int = 2


def anneal(layout: Layout, schedule: Schedule, *, seed: int) -> None:
    """Anneal *layout* in place and leave it at the best packing met at the end of a round.

    Minimises max U_g + mean U_g with a geometric temperature, then (max U_g, sum U_g, max J) at zero.
    """
    rng = np.random.default_rng(seed)
    best, best_cell_of_S = layout.objective(), layout.cell_of_S.copy()
    hot, cold = _temperatures(layout, rng)
    finish_from = 1.0 - FINISH_SHARE if schedule.end >= 1.0 else 2.0
    finishing = False
    with ThreadPoolExecutor(schedule.threads) as pool:
        for share, num_proposals in _rounds(schedule, len(layout.cell_of_S)):
            if share >= finish_from and not finishing:
                finishing = True
                layout.restore(best_cell_of_S)
            progress = schedule.begin + (schedule.end - schedule.begin) * min(1.0, share / finish_from)
            temperature = 0.0 if finishing else hot * (cold / hot) ** progress
            _round(layout, pool, num_proposals, temperature, rng)
            objective = layout.objective()
            if objective < best:
                best, best_cell_of_S = objective, layout.cell_of_S.copy()
    layout.restore(best_cell_of_S)


def _rounds(schedule: Schedule, num_sequences: int) -> Iterator[tuple[float, int]]:
    """(how far along, proposals) of every round, by count or by the clock."""
    if schedule.deadline is None:
        rounds = max(1, round(schedule.num_proposals / (PROPOSALS_PER_ROUND * num_sequences)))
        yield from ((turn / rounds, -(-schedule.num_proposals // rounds)) for turn in range(rounds))
        return
    started = time.monotonic()
    while (now := time.monotonic()) < schedule.deadline:
        yield (now - started) / (schedule.deadline - started), PROPOSALS_PER_ROUND * num_sequences


def _temperatures(layout: Layout, rng: np.random.Generator) -> tuple[float, float]:
    """Hot and cold, from the typical change of the energy by a feasible proposal."""
    changes = np.zeros(2000, dtype=np.int64)
    everyone = np.arange(len(layout.cell_of_S))
    _run(layout, layout.cost_G(), everyone, 40_000, 0.0, NEAR, _random_states(rng, 1)[0], changes)
    changes = np.abs(changes[changes != 0])
    typical = float(np.median(changes)) if len(changes) else 1.0
    return HOT * typical, COLD * typical


def _run(layout: Layout, cost_G, members, num_proposals, temperature, near, state, changes=NOTHING) -> None:
    kernels.anneal_domain(
        layout.load_SRL, layout.length_S, layout.cost_SI, layout.cell_of_S, layout.tokens_C, layout.count_C,
        layout.cost_CI, layout.load_URL, layout.peak_U, layout.attention_U, cost_G, layout.expert,
        layout.max_tokens, members, num_proposals, temperature, near, state, changes,
    )  # fmt: skip


def _random_states(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(1, 2**63, size=(count, 1), dtype=np.uint64)


def _round(layout: Layout, pool, num_proposals: int, temperature: float, rng: np.random.Generator) -> None:
    """Deal the units into domains and anneal each for its share of the proposals."""
    domains = DOMAINS if layout.num_units >= 2 * DOMAINS and temperature > 0 else 1
    domain_of_U = rng.permutation(layout.num_units) % domains
    domain_of_S = domain_of_U[layout.cell_of_S // layout.cells_per_unit]
    members = [np.flatnonzero(domain_of_S == domain) for domain in range(domains)]
    shares = [num_proposals * len(some) // len(domain_of_S) for some in members]
    near = max(2, NEAR // domains)
    # Every domain sees the other groups' costs as they were when the round began, however the threads run.
    costs = [layout.cost_G() for _ in range(domains)]
    tasks = zip(costs, members, shares, _random_states(rng, domains), strict=True)
    jobs = [pool.submit(_run, layout, *task[:3], temperature, near, task[3]) for task in tasks]
    for job in jobs:
        job.result()
