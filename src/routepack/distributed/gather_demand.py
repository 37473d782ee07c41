"""One window's demand from ranks that hold its sequences: each counts its own, and only counts travel.

Every rank must call it; without an initialised process group it acts as on a single rank. Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from routepack.components.routing_demand_collector import RoutingDemandCollector, end_to_end
from routepack.core.errors import RoutePackError, TraceError
from routepack.core.rollouts import RolloutBatch, RoutingDemand
from routepack.distributed.collectives import from_all


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """What one rank says of the sequences that it holds."""

    demand: RoutingDemand | None
    """Counts of recorded routes, nothing estimated. None where the rank has no sequence, or could not count."""
    coverage_S: np.ndarray
    """float64 [S of the rank]: each sequence's share of valid rows."""
    positions_S: np.ndarray | None
    """int64 [S of the rank]: where each sequence stands in the window."""
    failed: bool
    """Whether the rank could not count its sequences."""

    @property
    def kind(self) -> tuple:
        """Layers, experts and top-k, then what else must be the same on all ranks that have sequences."""
        demand = self.demand
        assert demand is not None
        given = (demand.modality_S is None, self.positions_S is None)
        return demand.num_layers, demand.num_experts, demand.top_k, demand.layer_ids_L.tolist(), given


def collect_demand(
    collector: RoutingDemandCollector,
    batch: RolloutBatch | None,
    *,
    positions_S: np.ndarray | None = None,
    called: str = "positions_S",
) -> RoutingDemand:
    """The demand of all ranks' sequences, the same on every rank.

    What travels is [L, E] counts a sequence, 2 bytes each (4 where a sequence has more than 65,535 ids in a layer), and
    five numbers; never an id. Sequences without routes are estimated from the whole window, as on a single rank.

    Args:
        batch: this rank's sequences; None where it has none.
        positions_S: int64 [S of this rank], where each sequence stands in the window; together a permutation. None: the
            ranks' sequences one after another.
        called: what errors call *positions_S*.

    Raises:
        TraceError: on every rank, where one of them cannot count or the ranks disagree on layers, experts or top-k.
    """
    demand, coverage_S, error = None, np.empty(0), None
    try:
        if batch is not None:
            demand, coverage_S = collector.count(batch)
        positions_S = _positions(positions_S, len(coverage_S), called)
    except RoutePackError as problem:
        error = problem
    share = Share(demand=demand, coverage_S=coverage_S, positions_S=positions_S, failed=error is not None)
    shares = from_all(share, "demand")
    # The same error on every rank, so that none waits for a later collective alone.
    if error is not None:
        raise error
    _check(shares)
    return _window(collector, shares, called)


def _check(shares: list[Share]) -> None:
    for rank, share in enumerate(shares):
        if share.failed:
            raise TraceError(f"rank {rank} could not count its sequences: see its error. No demand was made.")
    holding = [(rank, share) for rank, share in enumerate(shares) if share.demand is not None]
    if not holding:
        raise TraceError(f"none of the {len(shares)} ranks has a sequence.")
    for rank, share in holding:
        if share.kind != holding[0][1].kind:
            raise TraceError(
                f"rank {rank} recorded {share.kind[:3]} [layers, experts, top_k], another rank {holding[0][1].kind[:3]}, or "
                "other layers, or positions or modalities are given on some ranks only: all must record one model."
            )


def _window(collector: RoutingDemandCollector, shares: list[Share], called: str) -> RoutingDemand:
    demand = end_to_end([share.demand for share in shares if share.demand is not None])
    coverage_S = np.concatenate([share.coverage_S for share in shares])
    positions = [share.positions_S for share in shares if share.demand is not None and share.positions_S is not None]
    if not positions:
        return collector.estimate(demand, coverage_S)
    position_S = np.concatenate(positions)
    _check_permutation(position_S, np.repeat(np.arange(len(shares)), [len(share.coverage_S) for share in shares]), called)
    order_S = np.argsort(position_S)
    return collector.estimate(demand.select(order_S), coverage_S[order_S])


def _check_permutation(position_S: np.ndarray, rank_S: np.ndarray, called: str) -> None:
    """Raise TraceError, naming number and ranks, unless *position_S* holds 0, 1, ... each once; *rank_S* gave them."""
    count, wrong = len(position_S), ""
    beyond = np.flatnonzero((position_S < 0) | (position_S >= count))
    if len(beyond):
        wrong = f"rank {rank_S[beyond[0]]} has {position_S[beyond[0]]}"
    else:
        times_S = np.bincount(position_S, minlength=count)
        if (times_S > 1).any():
            number = int(times_S.argmax())
            ranks = sorted(set(rank_S[position_S == number].tolist()))
            holders = f"ranks {' and '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]} twice"
            wrong = f"{number} is held by {holders}, and {int(times_S.argmin())} by none"
    if wrong:
        raise TraceError(
            f"{called} of all ranks must be 0 .. {count - 1}, each once: {wrong}. Number the sequences of all ranks together."
        )


def _positions(positions_S: np.ndarray | None, sequences: int, called: str) -> np.ndarray | None:
    if positions_S is None:
        return None
    positions_S = np.asarray(positions_S)
    if positions_S.shape != (sequences,) or (positions_S.size and positions_S.dtype.kind not in "iu"):
        raise TraceError(f"{called} has shape {positions_S.shape}; {sequences} whole numbers are needed.")
    return positions_S.astype(np.int64)
