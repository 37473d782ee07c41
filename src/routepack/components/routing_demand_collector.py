"""From recorded routes to routing demand. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import numpy as np

from routepack.core.arrays import joined
from routepack.core.component import Component, CountOrZero, Limits, Share
from routepack.core.errors import ConfigError, TraceError
from routepack.core.rollouts import RolloutBatch, RoutingDemand


@dataclass(kw_only=True)
class RoutingDemandCollector(Component):
    """Count how many routed rows each sequence brings to each expert of each MoE layer.

    Either from a whole batch (:meth:`collect`), or sequence by sequence as rollouts arrive
    (:meth:`add`, then :meth:`demand`), after which their ids need not be kept. Only valid rows count.

    >>> collector = RoutingDemandCollector(num_experts=4)
    >>> collector.add(np.asarray([[[0, 2]], [[2, 3]]]), num_tokens=3)
    >>> collector.demand().tokens_SLE.tolist()
    [[[1, 0, 2, 1]]]
    """

    section: ClassVar[str] = "collector"

    min_coverage: Share = 0.5
    """A sequence with a smaller share of valid rows gets the window's mean route per token instead."""
    num_threads: Annotated[int, Limits(least=0, most=1024)] = 0
    """Threads that count; 0: one per core."""
    num_experts: CountOrZero = 0
    """E, needed by :meth:`add`; :meth:`collect` reads it from the batch."""
    _arrived: list[RoutingDemand] = field(default_factory=list, init=False, repr=False)
    _coverage: list[float] = field(default_factory=list, init=False, repr=False)

    def collect(self, batch: RolloutBatch) -> RoutingDemand:
        """The demand of a batch.

        Raises TraceError for an id in a valid row that is outside 0 .. E - 1 or stands twice in a layer, and where no
        sequence has enough valid rows to estimate the others from.
        """
        return self.estimate(*self.count(batch))

    def add(
        self,
        routed_experts_TLK: np.ndarray,
        *,
        num_tokens: int,
        valid_T: np.ndarray | None = None,
        group: int = 0,
        modality: int | None = None,
    ) -> None:
        """Count one sequence of *num_tokens* tokens as it arrives; its rows are those of a RolloutBatch."""
        if self.num_experts < 1:
            raise ConfigError("collector.num_experts is not set: add() needs it, since a sequence may not name all experts.")
        batch = RolloutBatch(
            routed_experts_TLK=routed_experts_TLK,
            cu_seqlens=np.asarray([0, len(routed_experts_TLK)]),
            num_tokens_S=np.asarray([num_tokens]),
            num_experts=self.num_experts,
            valid_T=valid_T,
            group_S=np.asarray([group]),
            modality_S=None if modality is None else np.asarray([modality]),
        )
        demand, coverage_S = self.count(batch)
        first = self._arrived[0] if self._arrived else demand
        if (demand.num_layers, demand.top_k) != (first.num_layers, first.top_k):
            raise TraceError(
                f"sequence {len(self._arrived)} records {demand.num_layers} layers of top-{demand.top_k} routes; the ones "
                f"before it recorded {first.num_layers} of top-{first.top_k}."
            )
        if (demand.modality_S is None) != (first.modality_S is None):
            raise TraceError(f"sequence {len(self._arrived)} and those before it: give a modality to all or to none.")
        self._arrived.append(demand)
        self._coverage.append(float(coverage_S[0]))

    def demand(self, order_S: Sequence[int] | None = None) -> RoutingDemand:
        """The demand of the sequences added so far; then start over.

        *order_S*: which of them, by the order in which they were added, is each sequence of the window. None: as added.
        """
        if not self._arrived:
            raise TraceError("no sequence was added: call add() for each rollout first.")
        order = _checked_order(order_S, len(self._arrived))
        arrived, coverage = [self._arrived[i] for i in order], [self._coverage[i] for i in order]
        self._arrived, self._coverage = [], []
        window = replace(
            arrived[0],
            tokens_SLE=np.concatenate([one.tokens_SLE for one in arrived]),
            length_S=np.concatenate([one.length_S for one in arrived]),
            group_S=np.concatenate([one.group_S for one in arrived if one.group_S is not None]),
            modality_S=joined([one.modality_S for one in arrived]),
            num_masked_rows=sum(one.num_masked_rows for one in arrived),
        )
        return self.estimate(window, np.asarray(coverage))

    def count(self, batch: RolloutBatch) -> tuple[RoutingDemand, np.ndarray]:
        """What was recorded, nothing estimated, and float64 [S], each sequence's share of valid rows."""
        # The compiled kernel costs half a second to load, which `import routepack` should not.
        from routepack.solvers.expert_counts import count_experts, find_repeated

        tokens_SLE, bad = count_experts(
            batch.routed_experts_TLK, batch.cu_seqlens, batch.num_experts, batch.valid_T, self.num_threads or None
        )
        if bad < 0:
            bad = find_repeated(batch.routed_experts_TLK, batch.num_experts, batch.valid_T, self.num_threads or None)
        if bad >= 0:
            raise _bad_id(batch, bad)
        rows_S = _valid_rows(batch)
        counted_SL = tokens_SLE.sum(axis=2, dtype=np.int64)
        assert (counted_SL == rows_S[:, None] * batch.top_k).all(), "a valid row was not counted top_k times"
        demand = RoutingDemand(
            tokens_SLE=tokens_SLE,
            length_S=batch.num_tokens_S,
            top_k=batch.top_k,
            group_S=batch.group_S,
            modality_S=batch.modality_S,
            layer_ids_L=batch.layer_ids_L,
            num_masked_rows=int(len(batch.routed_experts_TLK) - rows_S.sum()),
        )
        return demand, rows_S / np.maximum(batch.num_tokens_S - 1, 1)

    def estimate(self, demand: RoutingDemand, coverage_S: np.ndarray) -> RoutingDemand:
        """A whole window's counts with the mean route per token for sequences that have too few valid rows."""
        estimated_S = (coverage_S < self.min_coverage) & (demand.length_S > 1)
        if not estimated_S.any():
            return demand
        known_LE = demand.tokens_SLE[~estimated_S].sum(axis=0, dtype=np.int64)
        if not known_LE.any():
            raise TraceError(
                f"none of the {demand.num_sequences} sequences has recorded routes for {self.min_coverage:.0%} of its rows: "
                "check that the rollout engine returns routed experts, and that the mask says which rows are valid."
            )
        share_LE = known_LE / known_LE.sum(axis=1, keepdims=True)
        tokens_SLE = demand.tokens_SLE.astype(np.int32)
        for s in np.flatnonzero(estimated_S):
            tokens_SLE[s] = _apportion(share_LE, int(demand.length_S[s]) * demand.top_k)
        return replace(demand, tokens_SLE=tokens_SLE, estimated_S=estimated_S)


def _checked_order(order_S: Sequence[int] | None, count: int) -> list[int]:
    order = list(range(count)) if order_S is None else list(order_S)
    if sorted(order) != list(range(count)):
        raise TraceError(f"order_S must name each of the {count} sequences added once; it is {order[:20]}.")
    return order


def _apportion(share_LE: np.ndarray, total: int) -> np.ndarray:
    """Whole counts in proportion to *share_LE* that add up to *total* in every layer (largest remainder)."""
    exact_LE = share_LE * total
    counts_LE = np.floor(exact_LE).astype(np.int64)
    left_L = total - counts_LE.sum(axis=1)
    by_remainder_LE = np.argsort(counts_LE - exact_LE, axis=1, kind="stable")
    rank_LE = np.argsort(by_remainder_LE, axis=1, kind="stable")
    return counts_LE + (rank_LE < left_L[:, None])


def _valid_rows(batch: RolloutBatch) -> np.ndarray:
    if batch.valid_T is None:
        return np.diff(batch.cu_seqlens)
    return np.diff(np.concatenate([[0], np.cumsum(batch.valid_T, dtype=np.int64)])[batch.cu_seqlens])


def _bad_id(batch: RolloutBatch, flat_index: int) -> TraceError:
    t, layer, k = np.unravel_index(flat_index, batch.routed_experts_TLK.shape)
    s = int(np.searchsorted(batch.cu_seqlens, t, side="right")) - 1
    value = int(batch.routed_experts_TLK[t, layer, k])
    where = f"sequence {s}, row {int(t) - int(batch.cu_seqlens[s])}, layer {int(batch.layer_ids_L[layer])}: expert id {value}"
    if value < 0:
        return TraceError(f"{where} is negative: mark rows that were not recorded in the validity mask (valid_T).")
    if value < batch.num_experts:
        return TraceError(
            f"{where} stands twice in the row: a token goes to top_k={batch.top_k} different experts. Mark rows that were not "
            "recorded, filler among them, in the validity mask (valid_T); `routepack convert` does so for what stacks write."
        )
    return TraceError(
        f"{where} is not below num_experts={batch.num_experts}: are these physical ids, or does it mark a shared expert?"
    )
