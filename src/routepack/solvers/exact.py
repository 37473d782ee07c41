"""The best plan of a tiny window: every packing with every placement. Letters: :mod:`routepack.core`.

N packings, P placements of a layer, U units, X sets of sequences: a set is a whole number, with one bit for each sequence.
What a set makes the fullest rank of a layer wait for is tabled for every placement, so that pricing a packing is looking up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from routepack.solvers.packing_state import Weights

MAX_SEQUENCES = 10
MAX_CELLS = 4
MAX_PLACEMENTS = 105
"""Of one layer, counting those once that only number the ranks differently: 8 experts on 4 ranks have so many."""
MAX_TABLE = 2**26
"""Entries of the table of peaks."""
MAX_CHOICES, FEW_CHOICES = 2**15, 64
"""Placements of the first layers that are carried on to the next at most; and to find a good plan, before all are tried."""


def placements(num_experts: int, num_ranks: int) -> np.ndarray:
    """int [P, E]: the rank of every expert, for every placement with equal counts; ranks are numbered by their first expert.

    >>> placements(4, 2).tolist()
    [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]]
    """
    slots = num_experts // num_ranks
    return _assignments(
        num_experts, num_ranks, lambda rank_NE: _in_order(rank_NE) & ((rank_NE == rank_NE[:, -1:]).sum(axis=1) <= slots)
    )


def num_placements(num_experts: int, num_ranks: int) -> int:
    """P of :func:`placements`, without listing them.

    >>> num_placements(8, 4)
    105
    """
    slots = num_experts // num_ranks
    return math.factorial(num_experts) // (math.factorial(slots) ** num_ranks * math.factorial(num_ranks))


def _assignments(num_items: int, num_bins: int, allowed: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """int [N, items]: bins of the items, item by item; *allowed* judges the last item of the rows so far."""
    bin_NI = np.zeros((1, 0), dtype=np.int64)
    for _ in range(num_items):
        bin_NI = np.column_stack([np.repeat(bin_NI, num_bins, axis=0), np.tile(np.arange(num_bins), len(bin_NI))])
        bin_NI = bin_NI[allowed(bin_NI)]
    return bin_NI


def _in_order(label_NI: np.ndarray) -> np.ndarray:
    """bool [N]: whether the last label is at most one above all before it, as labels are that count first appearances."""
    return label_NI[:, -1] <= label_NI[:, :-1].max(axis=1, initial=-1) + 1


@dataclass(frozen=True, kw_only=True, eq=False)
class TinyWindow:
    """All that decides the value of a plan."""

    length_S: np.ndarray
    tokens_SLE: np.ndarray
    weights: Weights
    max_tokens: int
    num_microbatches: int
    num_groups: int
    cells_per_unit: int
    num_ranks: int
    """EP ranks of a group."""
    sync: str
    modality_S: np.ndarray | None = None
    """Sequences of different modality never share a microbatch."""
    skew: int = -1
    """By how much the numbers of sequences of DP ranks may differ; -1: by any number."""

    @property
    def is_tiny(self) -> bool:
        """Whether trying everything is a matter of a second or so."""
        sequences, layers, experts = self.tokens_SLE.shape
        if sequences > MAX_SEQUENCES or self.num_microbatches * self.num_groups * self.cells_per_unit > MAX_CELLS:
            return False
        options = num_placements(experts, self.num_ranks)
        return options <= MAX_PLACEMENTS and layers * options * 2**sequences <= MAX_TABLE

    @cached_property
    def rank_of_PE(self) -> np.ndarray:
        """int [P, E]: the placements to choose from in every layer."""
        return placements(self.tokens_SLE.shape[2], self.num_ranks)

    def _peaks(self) -> np.ndarray:
        """int32 [L, X, P]: rows of the fullest rank, for every set of sequences and every placement."""
        held_PRE = self.rank_of_PE[:, None, :] == np.arange(self.num_ranks)[:, None]
        load_SLPR = np.einsum("sle,pre->slpr", self.tokens_SLE.astype(np.int64), held_PRE.astype(np.int64))
        peaks = []
        for load_SPR in load_SLPR.swapaxes(0, 1):
            load_XPR = np.zeros((1, *load_SPR.shape[1:]), dtype=np.int64)
            for load_PR in load_SPR:
                load_XPR = np.concatenate([load_XPR, load_XPR + load_PR])
            peaks.append(load_XPR.max(axis=2).astype(np.int32))
        return np.stack(peaks)

    def _packings(self) -> np.ndarray:
        """int [N, S]: all legal packings, but for the numbers of microbatches, of groups, and of the ranks of a group."""
        width, ranks = self.cells_per_unit, self.num_groups * self.cells_per_unit
        num_cells = self.num_microbatches * ranks
        modality_S = np.zeros(len(self.length_S)) if self.modality_S is None else self.modality_S

        def allowed(cell_NS: np.ndarray) -> np.ndarray:
            placed = cell_NS.shape[1]
            row_NS, (group_NS, seat_NS) = cell_NS // ranks, np.divmod(cell_NS % ranks, width)
            beside_NS = np.where(group_NS == group_NS[:, -1:], seat_NS, -1)
            fits_N = (cell_NS == cell_NS[:, -1:]) @ self.length_S[:placed] <= self.max_tokens
            mixed_N = (row_NS == row_NS[:, -1:]) @ (modality_S[:placed] != modality_S[placed - 1]).astype(np.int64) > 0
            return _in_order(row_NS) & _in_order(group_NS) & _in_order(beside_NS) & fits_N & ~mixed_N

        cell_NS = _assignments(len(self.length_S), num_cells, allowed)
        count_NC = np.stack([(cell_NS == c).sum(axis=1) for c in range(num_cells)], axis=1)
        legal_N = (count_NC > 0).all(axis=1)
        if self.skew >= 0:
            legal_N &= np.ptp(count_NC.reshape(-1, self.num_microbatches, ranks).sum(axis=1), axis=1) <= self.skew
        return cell_NS[legal_N]

    def _value(self, cost_NU: np.ndarray) -> np.ndarray:
        """int64 [N]: the largest sum of a group, or the sum over microbatches of the costliest unit."""
        cost_NMG = cost_NU.reshape(len(cost_NU), self.num_microbatches, self.num_groups)
        return cost_NMG.sum(axis=1).max(axis=1) if self.sync == "step" else cost_NMG.max(axis=2).sum(axis=1)

    def solve(self) -> tuple[np.ndarray, np.ndarray, bool] | None:
        """(``cell_of_S``, ``rank_of_LE``) of the least value, and whether that is proven.

        It is not where placements were too many to try (MAX_CHOICES). None where no packing fits so many microbatches.
        """
        cell_NS, expert = self._packings(), self.weights.expert
        if not len(cell_NS):
            return None
        num_units, bit_S = self.num_microbatches * self.num_groups, 1 << np.arange(len(self.length_S))
        set_NU = np.stack([(cell_NS // self.cells_per_unit == u) @ bit_S for u in range(num_units)], axis=1)
        # Units that wait for one another in every stage and layer are one block; then, and with one group, layers are free.
        joined = self.num_groups if self.sync == "layer" else 1
        cost_CNI = np.stack([(cell_NS == c) @ self.weights.cost_SI for c in range(num_units * self.cells_per_unit)])
        cost_BNI = cost_CNI.reshape(num_units // joined, -1, *cost_CNI.shape[1:]).max(axis=1)
        attention_NB, peak_LXP = cost_BNI.sum(axis=2).T, self._peaks()
        # Many packings share their units' sets, and differ in the cells alone.
        name_N = set_NU @ (1 << len(bit_S) * np.arange(num_units))
        _, first_K, k_of_N = np.unique(name_N, return_index=True, return_inverse=True)
        set_KBJ = set_NU[first_K].reshape(len(first_K), -1, joined)
        sum_K, choice_LK = np.zeros(len(first_K), dtype=np.int64), []
        for peak_XP in peak_LXP:
            waits_KP = peak_XP[set_KBJ].max(axis=2).sum(axis=1, dtype=np.int64)
            sum_K += waits_KP.min(axis=1)
            choice_LK.append(waits_KP.argmin(axis=1))
        sum_N = attention_NB.sum(axis=1) + expert * sum_K[k_of_N]
        if joined == self.num_groups:
            n, proven = int(sum_N.argmin()), True
            choice_L = np.array(choice_LK)[:, k_of_N[n]]
        else:
            n, choice_L, proven = self._coupled(attention_NB, set_NU, peak_LXP, sum_N)
        return cell_NS[n].astype(np.int32), self.rank_of_PE[choice_L].astype(np.int32), proven

    def _coupled(self, attention_NU, set_NU, peak_LXP, sum_N) -> tuple[int, np.ndarray, bool]:
        """(packing, placements, proven) of the least value where what one layer's placement is worth hangs on the others'.

        Packings are taken by the least that they can be worth: all units together, or each with the placements that suit it.
        """
        alone_X = peak_LXP.min(axis=2).sum(axis=0, dtype=np.int64)
        least_N = np.maximum(self._value(attention_NU + self.weights.expert * alone_X[set_NU]), -(-sum_N // self.num_groups))
        order_N = np.argsort(least_N, kind="stable")
        best, best_n, best_L, proven = np.iinfo(np.int64).max, -1, np.zeros(0, dtype=np.int64), True
        for most, some in ((FEW_CHOICES, order_N[:FEW_CHOICES]), (MAX_CHOICES, order_N)):
            proven = True
            for n in some:
                if least_N[n] >= best:
                    break
                value, choice_L, all_tried = self._placed(attention_NU[n], peak_LXP[:, set_NU[n]], best, most)
                proven &= all_tried
                if value < best:
                    best, best_n, best_L = value, int(n), choice_L
        return best_n, best_L, proven

    def _placed(self, attention_U, peak_LUP, best: int, most: int) -> tuple[int, np.ndarray, bool]:
        """(value, placements, whether all were tried) of one packing, layer by layer; *best* where none is below that.

        Placements of the first layers are given up once they cannot get below *best*, and beyond *most* the likeliest are kept.
        """
        peak_LPU = self.weights.expert * peak_LUP.swapaxes(1, 2).astype(np.int64)
        rest_LU = peak_LPU.min(axis=1)[::-1].cumsum(axis=0)[::-1] - peak_LPU.min(axis=1)
        together_L = peak_LPU.sum(axis=2).min(axis=1)
        cost_FU, choice_FL, all_tried = attention_U[None], np.zeros((1, 0), dtype=np.int64), True
        for layer, peak_PU in enumerate(peak_LPU):
            cost_FU = (cost_FU[:, None] + peak_PU).reshape(-1, len(attention_U))
            sum_F = cost_FU.sum(axis=1) + together_L[layer + 1 :].sum()
            least_F = np.maximum(self._value(cost_FU + rest_LU[layer]), -(-sum_F // self.num_groups))
            kept = np.flatnonzero(least_F < best)
            if len(kept) > most:
                kept, all_tried = kept[np.argsort(least_F[kept], kind="stable")[:most]], False
            cost_FU = cost_FU[kept]
            choice_FL = np.column_stack([choice_FL[kept // len(peak_PU)], kept % len(peak_PU)])
        if not len(cost_FU):
            return best, choice_FL, all_tried
        value_F = self._value(cost_FU)
        return int(value_F.min()), choice_FL[value_F.argmin()], all_tried
