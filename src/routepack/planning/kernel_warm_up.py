"""Kernels ready before the clock of a time limit starts. Letters: :mod:`routepack.core`.

The first plan of a process compiles the search's kernels, or loads them: up to half a minute, or half a second.
A time limit is about the search, so a plan under one first plans the shortest sequences of its window once, in a few
milliseconds where the kernels are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from routepack.core.rollouts import RoutingDemand
from routepack.cost import models
from routepack.planning.search import PlannerSettings

FEWEST_SEQUENCES = 16
"""Enough not to be planned exactly, by kernels of their own."""
_READY: set[tuple[object, ...]] = set()


def ready_kernels(planner: PlannerSettings, demand: RoutingDemand, plan: Callable[[RoutingDemand], object]) -> float:
    """Compile or load what planning such windows needs, by one call of *plan* in a process; the seconds that it took."""
    tokens_SLE, several = demand.tokens_SLE, models.num_packed_groups(planner.topology) > 1
    key = (
        type(planner.packer), type(planner.rerouter), type(planner.links), planner.sync, planner.packer.rules, several,
        tokens_SLE.dtype, tokens_SLE.flags.writeable, demand.num_sequences < FEWEST_SEQUENCES,
    )  # fmt: skip
    shortest = None if key in _READY else _shortest(planner, demand)
    if shortest is None:
        return 0.0
    started = time.monotonic()
    plan(shortest)
    _READY.add(key)
    return time.monotonic() - started


def _shortest(planner: PlannerSettings, demand: RoutingDemand) -> RoutingDemand | None:
    """The shortest sequences, and the one with the largest count, which its type of number depends on.

    As many as can be planned whatever their lengths, one a cell; None where planning will fail.
    """
    ranks = planner.topology.data_parallel_degree
    wanted = ranks * planner.packer.rules.allowed(-(-FEWEST_SEQUENCES // ranks))
    if demand.length_S.max() > planner.packer.max_tokens or demand.num_sequences < ranks:
        return None
    if demand.num_sequences <= wanted:
        return demand
    largest = int(demand.tokens_SLE.reshape(demand.num_sequences, -1).max(axis=1).argmax())
    order_S = np.argsort(demand.length_S, kind="stable")
    kept_S = np.sort(np.append(order_S[order_S != largest][: wanted - 1], largest))
    kept = replace(demand, group_S=None, modality_S=None, estimated_S=None).select(kept_S)
    # Kernels are compiled once more for what they must not write to.
    kept.tokens_SLE.flags.writeable = demand.tokens_SLE.flags.writeable
    return kept
