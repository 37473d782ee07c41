"""What the baselines would plan, so that a search never falls behind one of them. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from routepack.components import baselines
from routepack.components.packer import Packer, PackingProblem
from routepack.components.rerouter import Rerouter
from routepack.core.plans import ExpertPlacement, Packing, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost import bounds, evaluation, models
from routepack.planning import alternation
from routepack.planning.search import Candidate, Search

ROUNDING = 1e-9
"""By so much a bound may exceed a value that it equals."""


def candidates(search: Search, known: float) -> Iterator[Candidate]:
    """What the baselines would plan where it can be worth less than *known*, the best value so far.

    A search that falls behind one of them takes its plan. Most cannot, by their attention term and the least that
    their placement's experts cost, and are not priced.
    """
    packings = None
    for rerouter in rerouters_beside(search.rerouter):
        placement, load_SRL = rerouter.place(search.demand.tokens_LE, search.topology), None
        expert = least_expert(placement, search.demand, search.topology, search.rates)
        packings = peer_packings(search) if packings is None else packings
        for packer, packing, attention in packings:
            if attention + expert < known * (1 + ROUNDING):
                load_SRL = search.load_of(placement) if load_SRL is None else load_SRL
                yield from alternation.dealt(
                    search, search.priced(placement, packing, load_SRL, rerouter=rerouter, packer=packer), load_SRL
                )


def peer_packings(search: Search) -> list[tuple[Packer, Packing, float]]:
    """The baselines that pack, the packing of each, and its attention term."""
    problem = search.problem(np.zeros((search.demand.num_sequences, 1, 1), dtype=np.int32))
    return [
        (packer, packing, least_attention(packing, search.demand.length_S, search.topology, search.rates))
        for packer, packing in packings_beside(search.packer, problem)
    ]


def rerouters_beside(rerouter: Rerouter) -> tuple[Rerouter, ...]:
    """The baselines that place; the planner's own alone where it is one that does not search."""
    return baselines.REROUTERS if rerouter.search() else (rerouter,)


def packings_beside(packer: Packer, problem: PackingProblem) -> Iterator[tuple[Packer, Packing]]:
    """Every baseline's packing of the problem, under the packer's own rules; none where it does not search itself.

    Baselines pack by lengths and work alone: one placement's packings are every placement's.
    """
    if packer.improves:
        options: dict[str, Any] = asdict(packer.rules) | {"max_tokens": packer.max_tokens}
        for kind in baselines.PACKERS:
            yield (beside := kind(**options)), beside.pack(problem)


def least_attention(packing: Packing, length_S: np.ndarray, topology: Topology, rates: models.CostRates) -> float:
    """The attention term of a packing's mean group, which joining groups and dealing units anew can only exceed or equal."""
    nothing_SRL = np.zeros((len(length_S), topology.expert_parallel_degree, 1), dtype=np.int32)
    priced = {"length_S": length_S, "packing": packing, "topology": topology, "rates": rates}
    return evaluation.evaluate(load_SRL=nothing_SRL, sync="step", **priced).terms[0]


def least_expert(placement: ExpertPlacement, demand: RoutingDemand, topology: Topology, rates: models.CostRates) -> float:
    """What the expert term of a placement is at least, under any packing: the window's fullest rank of each layer."""
    load_LP = np.take_along_axis(demand.tokens_LE, placement.physical_to_logical_LP.astype(np.int64), axis=1)
    load_LR = load_LP.reshape(demand.num_layers, topology.expert_parallel_degree, -1).sum(axis=2)
    return rates.expert * float(bounds.packing_bound(load_LR).sum()) / models.num_packed_groups(topology)
