"""Which layers' experts move from where they are to where a plan wants them, and what that costs.

Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from routepack.components.move_policy import MoveChoice, moved_between
from routepack.core.errors import PlanError
from routepack.core.plans import ExpertPlacement
from routepack.cost.links import nodes_per_group
from routepack.planning import alternation
from routepack.planning.search import Candidate, Search


def moved_on(
    search: Search, best: Candidate, baseline: Candidate, previous: ExpertPlacement
) -> tuple[Candidate, dict[str, float]]:
    """The candidate that the planner's move policy makes of *best*, and the moves' figures for a plan's ``parts``.

    Ranks are numbered near the previous ones first. A policy that compares chooses layers twice: between staying and the
    few swaps that serve this packing best, then between that and the plan's placement. Sequences are packed again for what
    results, and for no layer moving at all; the policy's ``worth`` chooses.

    Raises PlanError where *previous* is of another model.
    """
    if previous.physical_to_logical_LP.shape != best.placement.physical_to_logical_LP.shape:
        raise PlanError(
            f"previous places {previous.num_layers} layers of {previous.num_experts} experts; the window has "
            f"{best.placement.num_layers} of {best.placement.num_experts}."
        )
    # A plan held to equal numbers of sequences may be worth more than its baseline, which is not.
    limit = max(baseline.evaluation.value, best.evaluation.value)
    near = _near(search, best, limit, previous)
    policy = search.planner.move_policy
    if not policy.compares:
        return near, _figures(search, near, previous)
    kept = search.changed(near, previous, near.packing)
    partly = _chosen_layers(search, kept, _refined(search, near, previous), previous, limit=float("inf"))
    mostly = _chosen_layers(search, partly, near, previous, limit=limit)
    placements = [previous, partly.placement, mostly.placement]
    candidates = [near, *(candidate for placed in placements for candidate in _packings(search, placed, near))]
    allowed = [one for one in candidates if one.evaluation.value <= limit and search.allowed(one)]
    chosen = min(allowed, key=lambda one: _worth(search, one, previous))
    values = {"value_if_moved": near.evaluation.value, "value_if_kept": kept.evaluation.value}
    return chosen, _figures(search, chosen, previous) | values


def _chosen_layers(search: Search, kept: Candidate, moved: Candidate, previous: ExpertPlacement, *, limit: float) -> Candidate:
    """The first of two candidates with the layers of the second that the policy takes; the packing of both is the same."""
    policy, topology = search.planner.move_policy, search.topology
    seconds_L = [policy.seconds_L(previous, one.placement, topology) for one in (kept, moved)]
    choice = MoveChoice(
        moved=moved.evaluation,
        kept=kept.evaluation,
        rates=search.rates,
        num_layers=previous.num_layers,
        move_seconds_L=seconds_L[1] - seconds_L[0],
        limit=limit,
    )
    placement = _mixed(moved.placement, kept.placement, policy.moves(choice))
    return search.changed(kept, placement, kept.packing)


def _refined(search: Search, near: Candidate, previous: ExpertPlacement) -> Candidate:
    """The previous placement after the rerouter's swaps for this packing: most of the gain for few of the moves."""
    from routepack.solvers.placement import keep_in_place

    moved = alternation.refined(search, previous, near.packing)
    ranks = search.topology.expert_parallel_degree
    # Every rank a node of its own: none is renumbered, and who stays keeps his slot.
    slots_LP = keep_in_place(moved.physical_to_logical_LP, previous.physical_to_logical_LP, ranks, num_nodes=ranks)
    placement = ExpertPlacement(physical_to_logical_LP=slots_LP)
    return search.changed(near, placement, near.packing)


def _near(search: Search, best: Candidate, limit: float, previous: ExpertPlacement) -> Candidate:
    """The candidate with ranks renumbered and slots kept; priced again where it matters which rank is whose neighbour."""
    from routepack.solvers.placement import keep_in_place

    ranks = search.topology.expert_parallel_degree
    nodes = max(1, nodes_per_group(search.topology)) if search.rates.links_cost else 1
    slots_LP = keep_in_place(best.placement.physical_to_logical_LP, previous.physical_to_logical_LP, ranks, num_nodes=nodes)
    placement = ExpertPlacement(physical_to_logical_LP=slots_LP)
    if not search.rates.links_cost:
        return replace(best, placement=placement)
    near = search.changed(best, placement, best.packing)
    return near if near.evaluation.value <= limit else best


def _mixed(moved: ExpertPlacement, kept: ExpertPlacement, moved_L: np.ndarray) -> ExpertPlacement:
    slots_LP = np.where(moved_L[:, None], moved.physical_to_logical_LP, kept.physical_to_logical_LP)
    return ExpertPlacement(physical_to_logical_LP=slots_LP)


def _packings(search: Search, placement: ExpertPlacement, near: Candidate) -> list[Candidate]:
    """A placement with the packing that there is, and with the one found from it where the packer improves on packings."""
    load_SRL = search.load_of(placement)
    candidates = [search.changed(near, placement, near.packing)]
    if placement is not near.placement and search.packer.improves:
        start = near.packing.cell_of_S
        if near.packing.num_microbatches == search.certificate.num_microbatches:
            quarter = -(-search.num_proposals // 4)
            problem = search.problem(load_SRL, start=start, num_proposals=quarter, temperatures=(0.0, 0.0))
            candidates.append(search.priced(placement, search.packer.pack(problem), load_SRL, rerouter=near.rerouter))
    return candidates


def _worth(search: Search, candidate: Candidate, previous: ExpertPlacement) -> tuple[float, ...]:
    policy = search.planner.move_policy
    seconds = float(policy.seconds_L(previous, candidate.placement, search.topology).sum())
    return policy.worth(candidate.evaluation.value, seconds), *candidate.evaluation.key


def _figures(search: Search, candidate: Candidate, previous: ExpertPlacement) -> dict[str, float]:
    policy, topology = search.planner.move_policy, search.topology
    moved_L = moved_between(previous, candidate.placement, topology.expert_parallel_degree).sum(axis=(1, 2))
    experts = int(moved_L.sum())
    return {
        "experts_moved": experts,
        "layers_kept": int((moved_L == 0).sum()),
        "bytes_moved": experts * policy.expert_bytes(topology) * topology.num_groups,
        "move_seconds": float(policy.seconds_L(previous, candidate.placement, topology).sum()),
    }
