"""The last step of a search where links cost something: ranks that exchange many rows are put on one node.

Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

from routepack.components.hierarchical_rerouter import group_of
from routepack.core.plans import ExpertPlacement, Packing
from routepack.cost.links import nodes_per_group
from routepack.planning.search import Candidate, Search

ROUNDS = 3
"""Times that sequences are seated and experts placed anew."""


def brought_near(search: Search, best: Candidate) -> Candidate:
    """The better of a candidate and what follows from it when cells, sequences and experts come near one another.

    Cells of a unit exchange their ranks, sequences of a unit their cells, experts their ranks (by the rerouter's
    ``bring_near``), in turn; every result is priced with all terms and the best is kept, so the value never rises.
    """
    if not search.rates.links_cost:
        return best
    near = _alternated(search, best, best.placement)
    if search.placement_search is None:
        return near
    gathered = search.placement_search.gathered(search.demand, search.topology)
    return near if gathered is None else _better(search, near, _alternated(search, best, gathered))


def _alternated(search: Search, best: Candidate, placement: ExpertPlacement) -> Candidate:
    """The best of a candidate and of what comes of its packing on a placement."""
    packing = best.packing
    for turn in range(ROUNDS):
        before = best
        packing = _seated(search, placement, packing)
        best = _better(search, best, search.changed(best, placement, packing))
        if search.placement_search is not None:
            placement = search.placement_search.brought_near(
                placement, search.demand, packing, search.topology, search.rates, search.planner.sync
            )
        best = _better(search, best, search.changed(best, placement, packing))
        if best is before and turn:
            break
    return best


def _better(search: Search, best: Candidate, other: Candidate) -> Candidate:
    # Cells that change ranks change how many sequences a rank has, which the packer may have rules about.
    return min(best, other, key=lambda candidate: candidate.evaluation.key) if search.allowed(other) else best


def _seated(search: Search, placement: ExpertPlacement, packing: Packing) -> Packing:
    """The packing with cells, then sequences, nearer to their experts; as it was unless nodes cut groups evenly."""
    from routepack.solvers import node_locality

    if nodes_per_group(search.topology) < 2:
        return packing
    group, demand = group_of(search.topology), search.demand
    rows_Sn = node_locality.node_rows(search.load_of(placement), group.num_nodes)
    cell_of_S = node_locality.seat_cells(rows_Sn, packing.cell_of_S, packing.num_cells, group)
    if not search.keeps_counts(cell_of_S):
        cell_of_S = packing.cell_of_S
    cell_of_S = node_locality.swap_sequences(
        rows_Sn,
        cell_of_S,
        demand.length_S,
        search.rates.cost_SI(demand.length_S),
        num_cells=packing.num_cells,
        max_tokens=search.packer.max_tokens,
        group=group,
    )
    return Packing(
        cell_of_S=cell_of_S,
        num_microbatches=packing.num_microbatches,
        data_parallel_degree=packing.data_parallel_degree,
    )
