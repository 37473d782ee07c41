"""What no plan of a window can go below. Derivations: docs/design/planning.md. Letters: :mod:`routepack.core`."""

from __future__ import annotations

import numpy as np

from routepack.core.plans import Sync, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.models import CostRates, num_packed_groups, ranks_per_group


def placement_bound(tokens_LE: np.ndarray, num_ranks: int) -> np.ndarray:
    """int64 [L]: the fullest rank of each layer, under any placement of E / R whole experts a rank.

    The largest of: the mean rank; the hottest expert with the k - 1 coldest beside it; and, two of the
    R + 1 hottest sharing a rank, the R-th and (R + 1)-th hottest with the k - 2 coldest.

    >>> placement_bound(np.array([[9, 1, 1, 1]]), 2)
    array([10])
    """
    tokens_LE = np.sort(np.asarray(tokens_LE, dtype=np.int64), axis=1)[:, ::-1]
    experts = tokens_LE.shape[1]
    slots = experts // num_ranks
    bound_L = -(-tokens_LE.sum(axis=1) // num_ranks)
    bound_L = np.maximum(bound_L, tokens_LE[:, 0] + tokens_LE[:, experts - (slots - 1) :].sum(axis=1))
    if slots < 2:
        return bound_L
    pair_L = tokens_LE[:, num_ranks - 1] + tokens_LE[:, num_ranks]
    return np.maximum(bound_L, pair_L + tokens_LE[:, experts - (slots - 2) :].sum(axis=1))


def packing_bound(load_LR: np.ndarray) -> np.ndarray:
    """int64 [L]: sum over units of the fullest rank, under any packing, with the placement as it is.

    *load_LR* is the window's load of each rank, so the largest of them; it is never below the mean.
    """
    return np.asarray(load_LR, dtype=np.int64).max(axis=1)


def attention_bound(cost_S: np.ndarray, length_S: np.ndarray, *, cells_per_unit: int, max_tokens: int) -> float:
    """Sum over units of the costliest cell, in one attention stage, under any packing into units of so many cells.

    Without a long sequence: all the cost spread evenly over the cells of every unit. The unit that holds
    the costliest sequence waits for it, and its other cells cannot hold more than the cap allows: what
    they cannot hold must be spread over the other units.

    Valid where cost per token does not fall with length, as attention's does not.
    """
    total, longest = float(cost_S.sum()), int(np.argmax(cost_S))
    beside = _most_cost(np.delete(cost_S, longest), np.delete(length_S, longest), (cells_per_unit - 1) * max_tokens)
    held = min(cells_per_unit * float(cost_S[longest]), float(cost_S[longest]) + beside)
    return max(total / cells_per_unit, float(cost_S[longest]) + (total - held) / cells_per_unit)


def _most_cost(cost_S: np.ndarray, length_S: np.ndarray, room: int) -> float:
    """The most cost that *room* tokens can hold: longest sequences first, the last one cut to fit."""
    order = np.argsort(-length_S, kind="stable")
    length_S, cost_S = length_S[order], cost_S[order]
    filled = np.minimum(length_S, np.maximum(0, room - (np.cumsum(length_S) - length_S)))
    return float((cost_S * filled / length_S).sum())


def plan_bounds(
    demand: RoutingDemand, topology: Topology, rates: CostRates, *, max_tokens: int, sync: Sync = "step"
) -> dict[str, float]:
    """Bounds of a whole window, in the unit of the rates.

    Returns:
        ``attention`` and ``expert``, which add up to the largest valid bound; and the ideals kept apart:
        ``force_balanced``: every rank does the mean. ``no_replication``: attention even, but whole experts on
        ranks (what value / bound is quoted against on the bench). ``whole_sequences``: experts even, but whole
        sequences in cells. Each holds for every ``sync``, since joining more ranks only raises a value; under
        ``layer`` the attention bound may be higher than under the others.

    """
    groups, ranks = num_packed_groups(topology), topology.expert_parallel_degree
    cost_SI = rates.cost_SI(demand.length_S)
    even_attention = float(cost_SI.sum()) / topology.data_parallel_degree
    even_expert = rates.expert * float(demand.tokens_LE.sum()) / (groups * ranks)
    expert = rates.expert * float(placement_bound(demand.tokens_LE, ranks).sum()) / groups
    attention = _whole_sequences(cost_SI, demand.length_S, ranks_per_group(topology), max_tokens) / groups
    if sync == "layer":
        attention = max(attention, _whole_sequences(cost_SI, demand.length_S, topology.data_parallel_degree, max_tokens))
    return {
        "attention": attention,
        "expert": expert,
        "force_balanced": even_attention + even_expert,
        "no_replication": even_attention + expert,
        "whole_sequences": attention + even_expert,
    }


def _whole_sequences(cost_SI: np.ndarray, length_S: np.ndarray, cells_per_unit: int, max_tokens: int) -> float:
    limits = {"cells_per_unit": cells_per_unit, "max_tokens": max_tokens}
    return sum(attention_bound(cost_S, length_S, **limits) for cost_S in cost_SI.T)
