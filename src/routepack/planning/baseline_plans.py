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
from routepack.cost import bounds, models


def rerouters_beside(rerouter: Rerouter) -> tuple[Rerouter, ...]:
    """The baselines that place; the planner's own alone where it is one that does not search."""
    return baselines.REROUTERS if rerouter.refines else (rerouter,)


def packings_beside(packer: Packer, problem: PackingProblem) -> Iterator[Packing]:
    """Every baseline's packing of the problem, under the packer's own rules; none where it does not search itself.

    Baselines pack by lengths and work alone: one placement's packings are every placement's.
    """
    if packer.improves:
        options: dict[str, Any] = asdict(packer.rules) | {"max_tokens": packer.max_tokens}
        for kind in baselines.PACKERS:
            yield kind(**options).pack(problem)


def least_attention(packing: Packing, length_S: np.ndarray, topology: Topology, rates: models.CostRates) -> float:
    """The attention term of a packing's mean group, which joining groups and dealing units anew can only exceed or equal."""
    nothing_SRL = np.zeros((len(length_S), topology.expert_parallel_degree, 1), dtype=np.int32)
    priced = {"length_S": length_S, "packing": packing, "topology": topology, "rates": rates}
    return models.evaluate(load_SRL=nothing_SRL, sync="step", **priced).terms[0]


def least_expert(placement: ExpertPlacement, demand: RoutingDemand, topology: Topology, rates: models.CostRates) -> float:
    """What the expert term of a placement is at least, under any packing: the window's fullest rank of each layer."""
    load_LP = np.take_along_axis(demand.tokens_LE, placement.physical_to_logical_LP.astype(np.int64), axis=1)
    load_LR = load_LP.reshape(demand.num_layers, topology.expert_parallel_degree, -1).sum(axis=2)
    return rates.expert * float(bounds.packing_bound(load_LR).sum()) / models.num_packed_groups(topology)
