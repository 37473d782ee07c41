"""Packings to start a search from: cells dealt by tokens, and the same with alike cells in one unit.

Letters: :mod:`routepack.types`; cell c = m * W + w lies in unit c // (cells per unit), unit u in group u % G.
"""

from __future__ import annotations

import numpy as np

from routepack.solvers.greedy import longest_first


def by_tokens(length_S: np.ndarray, num_cells: int, max_tokens: int) -> np.ndarray | None:
    """Longest first, each into the cell with the fewest tokens that has room; None where one finds none."""
    cell_of_S = longest_first(length_S, num_cells, length_S=length_S, max_tokens=max_tokens)
    return None if (cell_of_S < 0).any() else cell_of_S


def alike_cells(
    cell_of_S: np.ndarray, cost_S: np.ndarray, num_cells: int, *, cells_per_unit: int, num_groups: int
) -> np.ndarray:
    """The same cells in other places: consecutive ones in order of cost share a unit, and groups get units in turn.

    A unit waits for its costliest cell, so the sum over units is lowest where units hold cells of like cost.
    Rows of units go to the groups forth and back, so that the groups cost alike too.
    """
    cost_C = np.bincount(cell_of_S, cost_S, num_cells)
    place_of_C = np.empty(num_cells, dtype=np.int64)
    place_of_C[np.argsort(-cost_C, kind="stable")] = np.arange(num_cells)
    unit_C, place_C = np.divmod(place_of_C, cells_per_unit)
    row_C, turn_C = np.divmod(unit_C, num_groups)
    group_C = np.where(row_C % 2, num_groups - 1 - turn_C, turn_C)
    new_of_C = (row_C * num_groups + group_C) * cells_per_unit + place_C
    return new_of_C[cell_of_S].astype(np.int32)
