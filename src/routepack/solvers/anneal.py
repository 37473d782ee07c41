"""Annealing of sequences over cells, on whole numbers, on as many threads as there are domains.

The window's units (a microbatch of an EP group; where groups wait for one another, whole microbatches) are
dealt at random into domains; each thread anneals one domain, moving and swapping only sequences inside
it; then they are dealt again. What is found depends on the seed and the proposals alone, never on how
many threads ran or how fast they were.

Costs are fixed-point whole numbers (:mod:`routepack.solvers.packing_state`), so that the incremental figures
equal a recomputation exactly. Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from routepack.solvers.packing_state import Layout

DOMAINS = 2
"""Domains dealt in every round; fixed, so that a plan never depends on the machine's cores."""
FEWEST_BLOCKS = 12
"""Blocks that every domain must have; with fewer the search is better off whole."""
PROPOSALS_PER_ROUND = 24
"""Proposals between two dealings, per sequence."""
NEAR, NEAR_SHARE = 64, 32
"""Most swap partners lie within so many places in order of length, or within that share of a small window."""
FINISH_SHARE = 0.1
"""Share of the proposals that the zero-temperature finish on the exact objective gets."""
HOT, COLD = 0.3, 0.02
"""Temperatures at the begin and end, in typical changes of the energy, where none are given."""
MANY_GROUPS = 16
"""From so many groups on, a round at zero temperature begins with the fullest groups against the lightest: few of all
proposals touch the fullest, and no other lowers it."""
EVENINGS, EVENING_SHARE, PAIRS = 16, 0.1, 8
"""How often groups are paired so in such a round, the share of its proposals that goes there, and one in how many groups
is evened out: to lower a group that is not the fullest only costs the mean."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long to anneal, and from which temperature to which."""

    num_proposals: int
    temperatures: tuple[float, float] | None = None
    """At the begin and end, in whole-number energies; (0, 0) for a finish. None: as typical, then a finish."""
    deadline: float | None = None
    """``time.monotonic()`` at which to stop. What is found then depends on the machine."""
    threads: int = 2


def anneal(layout: Layout, schedule: Schedule, *, seed: int) -> None:
    """Anneal *layout* in place.

    Under a temperature the layout's energy falls (for ``sync=step`` max U_g + mean U_g), then, at zero, its
    objective. It is left at the best packing met at the end of a round; where temperatures above zero are
    given, as it came out.
    """
    rng = np.random.default_rng(seed)
    best, best_cell_of_S = layout.objective(), layout.cell_of_S.copy()
    own = schedule.temperatures is None
    hot, cold = schedule.temperatures or (HOT, COLD)
    if own:
        typical = typical_change(layout, rng)
        hot, cold = hot * typical, cold * typical
    finish_from, finishing = 1.0 - FINISH_SHARE if own else 1.0, False
    with ThreadPoolExecutor(schedule.threads) as pool:
        for share, num_proposals in _rounds(schedule, len(layout.cell_of_S)):
            if share >= finish_from and not finishing:
                finishing = True
                layout.restore(best_cell_of_S)
            cooled = hot * (cold / hot) ** (share / finish_from) if hot > 0 else 0.0
            _round(layout, pool, num_proposals, 0.0 if finishing else cooled, rng)
            objective = layout.objective()
            if objective < best:
                best, best_cell_of_S = objective, layout.cell_of_S.copy()
    if own or hot == 0.0:
        layout.restore(best_cell_of_S)


def _rounds(schedule: Schedule, num_sequences: int) -> Iterator[tuple[float, int]]:
    """(how far along, proposals) of every round, by count or by the clock."""
    if schedule.deadline is None or schedule.temperatures is not None:
        rounds = -(-schedule.num_proposals // (PROPOSALS_PER_ROUND * num_sequences))
        started = time.monotonic()
        for turn in range(rounds):
            if schedule.deadline is not None and turn and time.monotonic() > schedule.deadline:
                return
            yield turn / rounds, -(-schedule.num_proposals // rounds)
        return
    started = time.monotonic()
    while (now := time.monotonic()) < schedule.deadline:
        yield (now - started) / (schedule.deadline - started), PROPOSALS_PER_ROUND * num_sequences


def near_places(num_sequences: int) -> int:
    """How far apart in order of length most swap partners lie: near enough to fit and to change little."""
    return min(NEAR, max(4, num_sequences // NEAR_SHARE))


def typical_change(layout: Layout, rng: np.random.Generator) -> float:
    """The median change of the energy by a feasible proposal that changes it."""
    changes = np.zeros(2000, dtype=np.int64)
    everyone = np.arange(len(layout.cell_of_S))
    layout.run(everyone, 40_000, 0.0, near_places(len(everyone)), _random_states(rng, 1)[0], changes=changes)
    changes = np.abs(changes[changes != 0])
    return float(np.median(changes)) if len(changes) else 1.0


def _random_states(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(1, 2**63, size=(count, 1), dtype=np.uint64)


def _round(layout: Layout, pool, num_proposals: int, temperature: float, rng: np.random.Generator) -> None:
    """Deal the blocks of units into domains and anneal each for its share of the proposals."""
    if temperature == 0 and layout.groups_apart and layout.num_groups >= MANY_GROUPS:
        spent = int(num_proposals * EVENING_SHARE)
        for _ in range(EVENINGS):
            _even_groups(layout, pool, spent // EVENINGS, rng)
        num_proposals -= spent
    domains = DOMAINS if layout.num_blocks >= FEWEST_BLOCKS * DOMAINS and temperature > 0 else 1
    domain_of_B = rng.permutation(layout.num_blocks) % domains
    domain_of_S = domain_of_B[layout.cell_of_S // (layout.num_cells // layout.num_blocks)]
    members = [np.flatnonzero(domain_of_S == domain) for domain in range(domains)]
    shares = [num_proposals * len(some) // len(domain_of_S) for some in members]
    # Every domain sees the other groups' costs as they were when the round began, however the threads run.
    seen, near = [layout.cost_G() for _ in range(domains)], max(2, near_places(len(domain_of_S)) // domains)
    tasks = zip(members, shares, _random_states(rng, domains), seen, strict=True)
    jobs = [pool.submit(layout.run, some, share, temperature, near, state, seen=own) for some, share, state, own in tasks]
    for job in jobs:
        job.result()


def _even_groups(layout: Layout, pool, num_proposals: int, rng: np.random.Generator) -> None:
    """Lower the fullest groups, each paired with one of the lightest; pairs share nothing."""
    cost_G, num_groups = layout.cost_G(), layout.num_groups
    order_G = np.argsort(cost_G, kind="stable")
    group_of_S = layout.cell_of_S // layout.cells_per_unit % num_groups
    pairs = [(order_G[-1 - k], order_G[k]) for k in range(max(1, num_groups // PAIRS))]
    states = _random_states(rng, len(pairs))

    def even(fullest: int, lightest: int, state: np.ndarray) -> None:
        members = np.flatnonzero((group_of_S == fullest) | (group_of_S == lightest))
        # A kernel that sees no other group takes the costlier of the two for the fullest of all.
        seen = np.zeros_like(cost_G)
        seen[[fullest, lightest]] = cost_G[[fullest, lightest]]
        share = num_proposals * len(members) // len(group_of_S)
        layout.run(members, share, 0.0, near_places(len(members)), state, seen=seen)

    for job in [pool.submit(even, *pair, state) for pair, state in zip(pairs, states, strict=True)]:
        job.result()
