"""Experts to nodes, then to the ranks of a node; balance against traffic. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack.components.expert_rerouter import ExpertRerouter, SwapSearch
from routepack.components.placement_search import PlacementSearch
from routepack.core.component import NotNegative
from routepack.core.plans import ExpertPlacement, Packing, Sync, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.links import nodes_per_group
from routepack.cost.models import CostRates, num_packed_groups, ranks_per_group

if TYPE_CHECKING:
    from routepack.solvers.node_locality import Group

LEAN = 4.0
"""How much dearer the first pass of swaps takes links to be."""


@dataclass(frozen=True, kw_only=True)
class HierarchicalRerouter(ExpertRerouter):
    """Evens out nodes, then the ranks of each node; on packed cells, gives balance up where it saves more traffic.

    Where nodes cut EP groups unevenly (``nodes_per_group`` 0) or hold whole groups (1) it places as
    :class:`ExpertRerouter` does; a plan's ``parts["planned.nodes_per_group"]`` says which.
    """

    traffic_weight: NotNegative = 1.0
    """What a row across nodes counts for, in its price: 0 looks at balance alone, above 1 leans to locality."""

    def assign_on(self, tokens_LE: np.ndarray, topology: Topology) -> np.ndarray:
        """LPT with equal counts and best-pair swaps, over nodes and then inside each."""
        from routepack.solvers import node_locality, placement

        num_nodes, ranks = nodes_per_group(topology), topology.expert_parallel_degree
        if num_nodes < 2:
            return self.assign(tokens_LE, ranks)
        return placement.slots_of_ranks(node_locality.hierarchical_ranks(tokens_LE, num_nodes, ranks))

    def search(self) -> PlacementSearch:
        """Swaps of two experts of a layer, on packed cells by balance and traffic together."""
        return NodeSearch(sweeps=self.sweeps, swaps_per_layer=self.swaps_per_layer, traffic_weight=self.traffic_weight)


@dataclass(frozen=True, kw_only=True)
class NodeSearch(SwapSearch):
    """Swaps experts for balance and traffic together. Options as :class:`HierarchicalRerouter` has them."""

    traffic_weight: NotNegative

    def gather(self, demand: RoutingDemand, topology: Topology) -> np.ndarray | None:
        """Experts that the same sequences use onto one node, then evened out over its ranks; None without nodes."""
        from routepack.solvers import node_clusters, node_locality, placement

        num_nodes = nodes_per_group(topology)
        if num_nodes < 2 or self.traffic_weight == 0:
            return None
        node_of_LE = node_clusters.gathered_nodes(demand.tokens_SLE, num_nodes)
        ranks_LE = node_locality.ranks_in_nodes(demand.tokens_LE, node_of_LE, num_nodes, topology.expert_parallel_degree)
        return placement.slots_of_ranks(ranks_LE)

    def bring_near(
        self, slots_LP: np.ndarray, demand: RoutingDemand, packing: Packing, topology: Topology, rates: CostRates, sync: Sync
    ) -> np.ndarray:
        """Swaps that lower experts' and links' cost together; as it was where nodes cut groups unevenly."""
        from routepack.solvers import node_locality, placement, rank_loads

        if nodes_per_group(topology) == 0:
            return slots_LP
        load_LEC = rank_loads.unit_load(demand.tokens_SLE, packing.cell_of_S, packing.num_cells)
        ranks_LE = ExpertPlacement(physical_to_logical_LP=slots_LP).rank_of_LE(topology.expert_parallel_degree)
        joined = num_packed_groups(topology) if sync == "layer" else 1
        # Swaps go one at a time; leaning to locality at first reaches what no single swap pays for.
        for lean in (LEAN, 1.0):
            across = rates.across * self.traffic_weight * lean
            prices = node_locality.Prices(expert=rates.expert, inside=rates.inside, across=across)
            ranks_LE = node_locality.refine_near(load_LEC, ranks_LE, prices, group_of(topology), joined_units=joined)
        return placement.slots_of_ranks(ranks_LE)


def group_of(topology: Topology) -> Group:
    """The shape of the EP groups, for the solvers."""
    from routepack.solvers.node_locality import Group

    ranks = topology.expert_parallel_degree
    return Group(num_ranks=ranks, num_nodes=nodes_per_group(topology), num_cells=ranks_per_group(topology))
