"""What the all-to-all costs: routed rows that go from rank to rank inside a node, and from node to node.

Rank w * m + i is the i-th of the m model-parallel ranks of DP rank w; node n holds ranks n * ranks_per_node and on; an EP
group is R consecutive ranks. A DP rank's tokens lie evenly on its m ranks. Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from routepack.core.component import Component, Limits, NotNegative, Positive, Speed
from routepack.core.errors import ConfigError
from routepack.core.plans import Plan, Topology
from routepack.core.rollouts import RolloutBatch, RoutingDemand


def node_of_ranks(topology: Topology) -> np.ndarray:
    """int64 [G, R]: the node of every EP rank of every group.

    >>> node_of_ranks(Topology(data_parallel_degree=8, expert_parallel_degree=4, ranks_per_node=2)).tolist()
    [[0, 0, 1, 1], [2, 2, 3, 3]]
    """
    ranks = topology.expert_parallel_degree
    return np.arange(topology.num_groups * ranks).reshape(-1, ranks) // topology.ranks_per_node


def nodes_per_group(topology: Topology) -> int:
    """Into how many equal parts nodes cut every EP group; 0 where they cut groups unevenly, or cut a DP rank.

    >>> topologies = [Topology(data_parallel_degree=n, expert_parallel_degree=n, ranks_per_node=4) for n in (4, 8, 9)]
    >>> tuple(map(nodes_per_group, topologies))
    (1, 2, 0)
    """
    ranks, per_node = topology.expert_parallel_degree, topology.ranks_per_node
    if per_node % ranks == 0:
        return 1
    return ranks // per_node if ranks % per_node == 0 and per_node % topology.model_parallel_degree == 0 else 0


@dataclass(frozen=True, kw_only=True)
class Links(Component):
    """Prices what goes over links: a keyword-only dataclass whose fields are its config."""

    section: ClassVar[str] = "links"
    unit: ClassVar[str | None] = None
    """The cost model's unit that its prices are in; None: any."""

    @abstractmethod
    def prices(self, demand: RoutingDemand, topology: Topology) -> tuple[float, float]:
        """(inside, across): per routed row that a rank sends or receives in one layer, inside its node or across nodes."""

    @property
    def bytes_per_row(self) -> float:
        """Bytes of one routed row, all its ways in a step together; 0 where unknown."""
        return 0.0

    def checked_prices(self, demand: RoutingDemand, topology: Topology, unit: str) -> tuple[float, float]:
        """The prices. Raises ConfigError where they are in another unit than the cost model's."""
        if self.unit not in (None, unit):
            raise ConfigError(
                f"links are priced in {self.unit} and the cost model in {unit}: use LinkSpeeds beside a cost model in seconds "
                "(FlopsCost), WindowNormalizedLinks beside WindowNormalizedCost."
            )
        return self.prices(demand, topology)

    def as_dict(self) -> dict[str, Any]:
        """The class and its options, as a plan keeps them."""
        return {"model": type(self).__name__, "options": asdict(self)}


@dataclass(frozen=True, kw_only=True)
class FreeLinks(Links):
    """Links cost nothing: the default. Nothing about them is counted or reported."""

    def prices(self, demand: RoutingDemand, topology: Topology) -> tuple[float, float]:
        """Zero."""
        return 0.0, 0.0


@dataclass(frozen=True, kw_only=True)
class LinkSpeeds(Links):
    """Seconds, from the bytes of a routed row and what one rank's links carry; beside a cost model in seconds.

    Rows, not tokens, are counted: a dispatcher that sends a token to a node once, however many of its experts are there, moves
    fewer bytes across. Counts bound them from above; :func:`copies_across` counts them, from ids.
    """

    unit: ClassVar[str | None] = "seconds"

    dim: Annotated[int, Limits(least=1)]
    """D, the elements of a row."""
    inside_bytes_per_second: Speed
    """One rank, one way, to the other ranks of its node; ``inf``: free, but counted."""
    across_bytes_per_second: Speed
    """One rank, one way, to other nodes; ``inf``: free, but counted."""
    bytes_per_element: Positive = 2.0
    traversals: Annotated[int, Limits(least=1)] = 4
    """Times that a row travels in a step: dispatched and combined, forward and backward. 6 where the layer is recomputed."""

    @property
    def bytes_per_row(self) -> float:
        """D elements, every traversal."""
        return self.dim * self.bytes_per_element * self.traversals

    def prices(self, demand: RoutingDemand, topology: Topology) -> tuple[float, float]:
        """Seconds per row."""
        return self.bytes_per_row / self.inside_bytes_per_second, self.bytes_per_row / self.across_bytes_per_second


@dataclass(frozen=True, kw_only=True)
class WindowNormalizedLinks(Links):
    """Each kind of link scaled so that a window routed evenly over all ranks spends its share there.

    Shares come beside the cost model's own, which add up to 1.
    """

    unit: ClassVar[str | None] = "relative"

    inside_share: NotNegative = 0.0
    """What an even window spends inside nodes, as a fraction of its work."""
    across_share: NotNegative = 0.1
    """What an even window spends across nodes, as a fraction of its work."""

    def prices(self, demand: RoutingDemand, topology: Topology) -> tuple[float, float]:
        """Shares over the rows that an even rank sends."""
        node_GR = node_of_ranks(topology)
        rank_rows = float(demand.tokens_LE.sum()) / node_GR.size
        across = float((node_GR[:, :, None] != node_GR[:, None, :]).mean())
        inside = 1.0 - across - 1.0 / topology.expert_parallel_degree
        # A rounding error is no link.
        even_I = [rank_rows * part if part > 1e-12 else 0.0 for part in (inside, across)]
        shares = (self.inside_share, self.across_share)
        inside, across = (share / even if even else 0.0 for share, even in zip(shares, even_I, strict=True))
        return inside, across


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """Rows on the links of every unit (microbatch of an EP group). Shapes: U units, L layers."""

    inside_UL: np.ndarray
    """float64: rows that the busiest rank sends, or receives if more, inside its node."""
    across_UL: np.ndarray
    """float64: the same across nodes."""
    rows_inside: float
    """Rows sent to another rank of the same node, all units and layers together."""
    rows_across: float
    """Rows sent to another node."""
    rows: float
    """All rows, those that stay on their rank too."""

    def parts(self, name: str, bytes_per_row: float) -> dict[str, float]:
        """Named figures for a plan's ``parts``."""
        figures = {
            f"{name}.inside_share": self.rows_inside / self.rows if self.rows else 0.0,
            f"{name}.across_share": self.rows_across / self.rows if self.rows else 0.0,
        }
        if bytes_per_row:
            figures[f"{name}.bytes_inside"] = self.rows_inside * bytes_per_row
            figures[f"{name}.bytes_across"] = self.rows_across * bytes_per_row
        return figures


def traffic_of(load_CRL: np.ndarray, topology: Topology) -> Traffic:
    """What goes over which links.

    Args:
        load_CRL: [C, R, L] routed rows of every cell (microbatch c // W of DP rank c % W) to every EP rank of its group.
        topology: which rank is on which node.

    """
    ranks, m = topology.expert_parallel_degree, topology.model_parallel_degree
    cells, _, layers = load_CRL.shape
    if ranks == 1:
        nothing_UL = np.zeros((cells, layers))
        return Traffic(inside_UL=nothing_UL, across_UL=nothing_UL, rows_inside=0.0, rows_across=0.0, rows=float(load_CRL.sum()))
    groups, width = topology.num_groups, ranks // m
    # [M, G, j, L, r]: what EP rank j of the unit sends to r.
    load = np.repeat(load_CRL.reshape(-1, groups, width, ranks, layers), m, axis=2).swapaxes(-1, -2) / m
    node_GR = node_of_ranks(topology)
    apart_GRR = node_GR[:, :, None] != node_GR[:, None, :]
    beside_GRR = ~apart_GRR & ~np.eye(ranks, dtype=bool)
    (inside_UL, rows_inside), (across_UL, rows_across) = (_busiest(load, over) for over in (beside_GRR, apart_GRR))
    return Traffic(
        inside_UL=inside_UL,
        across_UL=across_UL,
        rows_inside=rows_inside,
        rows_across=rows_across,
        rows=float(load_CRL.sum(dtype=np.float64)),
    )


def _busiest(load: np.ndarray, over_GRR: np.ndarray) -> tuple[np.ndarray, float]:
    """Rows of the busiest rank of every unit and layer [U, L], and all rows, where *over_GRR* says that j to r is counted."""
    layers = load.shape[3]
    if not over_GRR.any():
        return np.zeros((load.shape[0] * load.shape[1], layers)), 0.0
    sent = np.einsum("mgjlr,gjr->mgjl", load, over_GRR)
    received = np.einsum("mgjlr,gjr->mgrl", load, over_GRR)
    peaks = np.maximum(sent.max(axis=2), received.max(axis=2))
    return peaks.reshape(-1, layers), float(sent.sum())


def copies_across(batch: RolloutBatch, plan: Plan) -> float:
    """Tokens sent to other nodes under a plan where a node gets a token once, however many of its experts are there.

    Summed over layers, one way: times :attr:`Links.bytes_per_row` it is the bytes that such a dispatcher moves across nodes
    (arXiv 2604.23150: tokens x layers x distinct remote nodes x row). Never more than the routed rows that go across.
    """
    from routepack.solvers.rank_loads import node_copies

    topology, m = plan.topology, plan.topology.model_parallel_degree
    node_GR, copies = node_of_ranks(topology), 0.0
    rank_LE = plan.placement.rank_of_LE(topology.expert_parallel_degree)
    rank_of_S = plan.packing.cell_of_S % topology.data_parallel_degree
    first_node_G = node_GR[:, 0]
    for group in range(topology.num_groups if topology.expert_parallel_degree > 1 else 0):
        copies_SLn = node_copies(batch.routed_experts_TLK, batch.cu_seqlens, node_GR[group][rank_LE] - first_node_G[group],
                                 batch.valid_T)  # fmt: skip
        copies_Sn = copies_SLn.sum(axis=1, dtype=np.int64)
        for w in np.flatnonzero(topology.group_of_W == group):
            home_m = (np.arange(w * m, (w + 1) * m) // topology.ranks_per_node) - first_node_G[group]
            here_n = np.bincount(home_m, minlength=copies_Sn.shape[1])[: copies_Sn.shape[1]] / m
            copies += float((copies_Sn[rank_of_S == w] * (1.0 - here_n)).sum())
    return copies
