"""The best plan of a tiny window, by trying them all. Letters: :mod:`routepack.core`.

Packings are tried one by one, depth first, without those that only renumber equal cells; placements
by what a set of sequences makes the fullest rank of a layer wait for, which is tabled for every set.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from routepack.solvers import _exact_kernels as kernels
from routepack.solvers.packing_state import Weights

MAX_SEQUENCES = 10
MAX_CELLS = 4
MAX_PLACEMENTS = 105
"""Of one layer, up to the numbers of the ranks: 8 experts on 4 ranks."""
MAX_TABLE = 2**26
"""Entries of the table of peaks."""
MAX_NODES = 20_000_000
"""Prefixes of placements that are tried at most; about 2 s. What is found then may fall short of the optimum."""


def placements(num_experts: int, num_ranks: int) -> np.ndarray:
    """int [P, E]: the rank of every expert, for every placement with equal counts but for the numbers of the ranks.

    >>> placements(4, 2).tolist()
    [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]]
    """
    slots = num_experts // num_ranks

    def fill(rest: tuple[int, ...], rank: int):
        if not rest:
            yield {}
            return
        for others in itertools.combinations(rest[1:], slots - 1):
            held = (rest[0], *others)
            left = tuple(e for e in rest if e not in held)
            for more in fill(left, rank + 1):
                yield dict.fromkeys(held, rank) | more

    return np.array([[rank_of[e] for e in range(num_experts)] for rank_of in fill(tuple(range(num_experts)), 0)])


def num_placements(num_experts: int, num_ranks: int) -> int:
    """P of :func:`placements`, without listing them.

    >>> num_placements(8, 4)
    105
    """
    slots, count = num_experts // num_ranks, 1
    for rank in range(num_ranks):
        left = num_experts - rank * slots - 1
        for k in range(slots - 1):
            count = count * (left - k) // (k + 1)
    return count


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
    sync: str
    modality_S: np.ndarray | None = None
    """Sequences of different modality never share a microbatch."""
    skew: int = -1
    """By how much ranks' numbers of sequences may differ; -1: by any number."""

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
        """int32 [L, 2^S, P]: rows of the fullest rank, for every set of sequences and every placement."""
        held_PRE = self.rank_of_PE[:, None, :] == np.arange(self.num_ranks)[:, None]
        sequences, layers, _ = self.tokens_SLE.shape
        load_SLPR = np.einsum("sle,pre->slpr", self.tokens_SLE.astype(np.int64), held_PRE.astype(np.int64))
        peak_LXP = np.empty((layers, 2**sequences, len(held_PRE)), dtype=np.int32)
        for layer in range(layers):
            load_XPR = np.zeros((1, *load_SLPR.shape[2:]), dtype=np.int64)
            for s in range(sequences):
                load_XPR = np.concatenate([load_XPR, load_XPR + load_SLPR[s, layer]])
            peak_LXP[layer] = load_XPR.max(axis=2)
        return peak_LXP

    def solve(self) -> tuple[np.ndarray, np.ndarray, bool] | None:
        """(``cell_of_S``, ``rank_of_LE``) of the least value, and whether that is proven.

        It is not where placements were too many to try (MAX_NODES). None where no packing fits so many microbatches.
        """
        best_S = np.full(len(self.length_S), -1)
        best_L = np.zeros(self.tokens_SLE.shape[1], dtype=np.int64)
        sync, nodes = ("step", "microbatch", "layer").index(self.sync), np.array([MAX_NODES])
        modality_S = np.zeros(len(self.length_S)) if self.modality_S is None else self.modality_S
        kernels.best_plan(
            np.ascontiguousarray(self.length_S, dtype=np.int64), self.weights.cost_SI, self._peaks(),
            np.int64(self.weights.expert), self.max_tokens, self.num_microbatches, self.num_groups,
            self.cells_per_unit, sync, modality_S.astype(np.int64), self.skew, nodes, best_S, best_L,
        )  # fmt: skip
        if best_S[0] < 0:
            return None
        return best_S.astype(np.int32), self.rank_of_PE[best_L].astype(np.int32), bool(nodes[0] > 0)
