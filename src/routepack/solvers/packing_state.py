"""A packing under way, on whole numbers: what the annealer changes, and every figure that follows from it.

Letters: :mod:`routepack.core`; I attention stages, C = M x W cells, U = M x G units (unit m * G + g).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from routepack.core.errors import ConfigError, InfeasibleError
from routepack.solvers.anneal_joined_groups import SLOPE, anneal_joined
from routepack.solvers.anneal_separate_groups import anneal_separate
from routepack.solvers.rank_loads import summed_by_unit

CHANGED = (
    "load_SRL", "length_S", "cost_SI", "cell_of_S", "tokens_C", "count_C", "cost_CI", "load_URL", "peak_U", "attention_U",
    "expert", "max_tokens",
)  # fmt: skip
"""What both annealing kernels are given last, in this order."""
NOTHING = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Costs as whole numbers: what a sequence costs in each attention stage, and what a routed row costs."""

    cost_SI: np.ndarray
    """int64 [S, I]."""
    expert: int
    scale: float = 1.0
    """What one of the real unit has become."""

    @classmethod
    def of(cls, cost_SI: np.ndarray, expert: float, num_rows: int) -> Weights:
        """Scale real costs so that their total fills 2^56: seven digits or more of each survive."""
        total = float(cost_SI.sum()) + expert * num_rows
        if total and not 2.0**-900 <= total <= 2.0**900:
            raise ConfigError(f"cost rates price the window at {total!r}, beyond what can be searched: choose a nearer unit.")
        scale = 2.0**56 / (total or 1.0)
        return cls(cost_SI=np.rint(cost_SI * scale).astype(np.int64), expert=int(np.rint(expert * scale)), scale=scale)


class Layout:
    """A packing under way, with every figure of the objective kept beside it.

    Sequences are held longest first, so that near neighbours are of near length and lie near in memory;
    after the last comes an empty one, with which a move is a swap. With *only_swaps* nothing moves alone, so that
    every cell keeps its number of sequences.
    """

    groups_apart: ClassVar[bool] = True
    """Whether a group's cost is a sum over units of its own, which other groups do not change."""

    def __init__(
        self, *, cell_of_S, length_S, load_SRL, weights: Weights, max_tokens, num_cells, cells_per_unit, num_groups,
        only_swaps=False,
    ):  # fmt: skip
        self.only_swaps = only_swaps
        self.order_S = np.argsort(-length_S, kind="stable")
        with_nobody = np.append(self.order_S, 0)
        self.length_S, self.load_SRL, self.cost_SI = length_S[with_nobody], load_SRL[with_nobody], weights.cost_SI[with_nobody]
        # Kernels are compiled for this one layout in memory.
        self.load_SRL = np.ascontiguousarray(self.load_SRL, dtype=np.int32)
        for per_sequence in (self.length_S, self.load_SRL, self.cost_SI):
            per_sequence[-1] = 0
        self.energy_per_cost = weights.scale
        self.expert, self.max_tokens = np.int64(weights.expert), np.int64(max_tokens)
        self.num_cells, self.cells_per_unit, self.num_groups = num_cells, cells_per_unit, num_groups
        rows_S = load_SRL.sum(axis=1, dtype=np.int64).max(axis=1)
        unit_rows = min(cells_per_unit * max_tokens * float((rows_S / length_S).max()), float(rows_S.sum()))
        if unit_rows >= 2**31:
            raise InfeasibleError(
                f"packer.max_tokens={max_tokens} lets {cells_per_unit} ranks route {unit_rows:.0f} rows at once; "
                f"{2**31 - 1} can be counted: lower it."
            )
        self.restore(np.asarray(cell_of_S)[self.order_S])

    @property
    def num_units(self) -> int:
        """U, microbatches times groups."""
        return self.num_cells // self.cells_per_unit

    def restore(self, cell_of_S: np.ndarray) -> None:
        """Take the cells of the sequences (longest first) and recompute every figure from them."""
        self.cell_of_S = np.array(cell_of_S, dtype=np.int64)
        self.tokens_C = np.bincount(self.cell_of_S, self.length_S[:-1], self.num_cells).astype(np.int64)
        self.count_C = np.bincount(self.cell_of_S, minlength=self.num_cells)
        if self.only_swaps:
            # A cell's last sequence never moves, and so the kernels take every sequence for its cell's last.
            self.count_C[:] = 1
        self.cost_CI = np.zeros((self.num_cells, self.cost_SI.shape[1]), dtype=np.int64)
        np.add.at(self.cost_CI, self.cell_of_S, self.cost_SI[:-1])
        unit_of_S = self.cell_of_S // self.cells_per_unit
        self.load_URL = summed_by_unit(self.load_SRL, unit_of_S, self.num_units, np.int32)
        self.peak_U = self.load_URL.max(axis=1).sum(axis=1, dtype=np.int64)
        self.attention_U = self.cost_CI.reshape(self.num_units, self.cells_per_unit, -1).max(axis=1).sum(axis=1)

    def _figures(self) -> list[np.ndarray]:
        return [getattr(self, name) for name in CHANGED]

    def packed(self) -> np.ndarray:
        """int32 [S]: the cell of every sequence, in the order in which the sequences were given."""
        cell_of_S = np.empty(len(self.cell_of_S), dtype=np.int32)
        cell_of_S[self.order_S] = self.cell_of_S
        return cell_of_S

    def cost_U(self) -> np.ndarray:
        """int64 [U]: J of every unit."""
        return self.attention_U + self.expert * self.peak_U

    def cost_G(self) -> np.ndarray:
        """int64 [G]: U_g of every group, a new array."""
        return self.cost_U().reshape(-1, self.num_groups).sum(axis=0)

    @property
    def num_blocks(self) -> int:
        """Blocks of units that domains are dealt: here units."""
        return self.num_units

    def run(self, members, num_proposals: int, temperature: float, near: int, state, *, seen=None, changes=NOTHING) -> int:
        """Propose moves and swaps among *members*; *seen*: group costs to start from and to keep up. How many it took."""
        cost_G = self.cost_G() if seen is None else seen
        return anneal_separate(cost_G, members, num_proposals, temperature, near, state, changes, *self._figures())

    def energy(self) -> int:
        """What is annealed: G max U_g + sum of U_g."""
        cost_G = self.cost_G()
        return int(self.num_groups * cost_G.max() + cost_G.sum())

    def objective(self) -> tuple[int, int, int]:
        """(max U_g, sum of U_g, max J): what ``sync=step`` minimises, lexicographically."""
        cost_G = self.cost_G()
        return int(cost_G.max()), int(cost_G.sum()), int(self.cost_U().max())


class JoinedLayout(Layout):
    """A packing whose groups wait for one another in every microbatch: in each layer and attention stage, or once."""

    groups_apart: ClassVar[bool] = False

    def __init__(self, *, by_layer: bool, **figures):
        self.by_layer = by_layer
        super().__init__(**figures)
        # One of the value: under "layer" as a placement sees it; else as the sum over units, which it lowers, does.
        self.energy_per_cost *= SLOPE * self.num_groups if by_layer else SLOPE

    def restore(self, cell_of_S: np.ndarray) -> None:
        """Take the cells of the sequences (longest first) and recompute every figure from them."""
        super().restore(cell_of_S)
        self.peak_UL = self.load_URL.max(axis=1)
        self.value_M = self._values()

    def _values(self) -> np.ndarray:
        """int64 [M]: what each microbatch waits for."""
        microbatches = self.num_units // self.num_groups
        if not self.by_layer:
            return self.cost_U().reshape(microbatches, -1).max(axis=1)
        attention_M = self.cost_CI.reshape(microbatches, -1, self.cost_CI.shape[1]).max(axis=1).sum(axis=1)
        peak_ML = self.peak_UL.reshape(microbatches, self.num_groups, -1).max(axis=1)
        return attention_M + self.expert * peak_ML.sum(axis=1, dtype=np.int64)

    @property
    def num_blocks(self) -> int:
        """M: blocks are whole microbatches."""
        return self.num_units // self.num_groups

    def run(self, members, num_proposals: int, temperature: float, near: int, state, *, seen=None, changes=NOTHING) -> int:
        """Propose moves and swaps among *members*; how many it took."""
        own = self.peak_UL, self.value_M, self.by_layer
        return anneal_joined(*own, members, num_proposals, temperature, near, state, changes, *self._figures())

    def energy(self) -> int:
        """What is annealed: mostly what all microbatches wait for, and the sum of U_g for slope."""
        return int(SLOPE * self.num_groups * self.value_M.sum() + self.cost_U().sum())

    def objective(self) -> tuple[int, int, int]:
        """(what all microbatches wait for, sum of U_g, max J)."""
        cost_U = self.cost_U()
        return int(self.value_M.sum()), int(cost_U.sum()), int(cost_U.max())
