"""Packings to start a search from: dealt by tokens, shaken, best fit, paired by rank load.

Letters: :mod:`routepack.core`; cell c = m * W + w lies in unit c // (cells per unit), unit u in group u % G.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from routepack.solvers.greedy import fill_empty, first_fit, longest_first


def by_tokens(
    length_S: np.ndarray, num_cells: int, max_tokens: int, *, taken_for_S: np.ndarray | None = None
) -> np.ndarray | None:
    """Longest first, each into the cell with the fewest tokens that has room; None where one finds none.

    *taken_for_S* stands for the lengths in everything but the cap.
    """
    cost_S = length_S if taken_for_S is None else taken_for_S
    cell_of_S = longest_first(cost_S, num_cells, length_S=length_S, max_tokens=max_tokens)
    return None if (cell_of_S < 0).any() else cell_of_S


def best_fit(length_S: np.ndarray, num_cells: int, max_tokens: int, rng: np.random.Generator) -> np.ndarray | None:
    """Each into the fullest cell with room, by lengths up to a tenth off; None where that takes more cells."""
    order_S = np.argsort(-length_S * rng.uniform(0.9, 1.1, len(length_S)), kind="stable")
    cell_of_S, used = first_fit(length_S, max_tokens, order_S=order_S, tightest=True)
    return fill_empty(cell_of_S, length_S, num_cells) if used <= num_cells else None


def paired(
    length_S: np.ndarray, load_SRL: np.ndarray, num_cells: int, max_tokens: int, cells_per_unit: int, rng: np.random.Generator
) -> np.ndarray | None:
    """Longest first, each into the unit whose fullest ranks grow least, of a few with room, and there by tokens.

    What fills other ranks than those that are full goes together (expert-parallel aware pairing).
    """
    order_S = np.argsort(-length_S * rng.uniform(0.95, 1.05, len(length_S)), kind="stable")
    cell_of_S = np.full(len(length_S), -1, dtype=np.int32)
    _paired(length_S.astype(np.int64), load_SRL, order_S, num_cells, max_tokens, cells_per_unit, cell_of_S)
    return None if (cell_of_S < 0).any() or len(np.unique(cell_of_S)) < num_cells else cell_of_S


@njit(nogil=True, cache=True)
def _paired(length_S, load_SRL, order_S, num_cells, max_tokens, width, cell_of_S):
    _, ranks, layers = load_SRL.shape
    tokens_C = np.zeros(num_cells, np.int64)
    load_URL = np.zeros((num_cells // width, ranks, layers), np.int32)
    peak_UL = np.zeros((num_cells // width, layers), np.int32)
    for s in order_S:
        # Only the cells with the fewest tokens are compared, or long and short would not end even.
        fewest = tokens_C.min()
        best, least = -1, np.int64(2**62)
        for c in range(num_cells):
            if tokens_C[c] > fewest + length_S[s] // 2 or tokens_C[c] + length_S[s] > max_tokens:
                continue
            grown = np.int64(0)
            for r in range(ranks):
                for i in range(layers):
                    grown += max(0, load_URL[c // width, r, i] + load_SRL[s, r, i] - peak_UL[c // width, i])
            if grown < least or (grown == least and tokens_C[c] < tokens_C[best]):
                best, least = c, grown
        if best < 0:
            return
        cell_of_S[s] = best
        tokens_C[best] += length_S[s]
        for r in range(ranks):
            for i in range(layers):
                load_URL[best // width, r, i] += load_SRL[s, r, i]
                peak_UL[best // width, i] = max(peak_UL[best // width, i], load_URL[best // width, r, i])


def diverse(
    count: int,
    *,
    length_S: np.ndarray,
    load_SRL: np.ndarray,
    feasible_cell_of_S: np.ndarray,
    num_cells: int,
    max_tokens: int,
    cells_per_unit: int,
    seed: int,
) -> list[np.ndarray]:
    """So many packings to start from, of all kinds in turn; the feasible one where a kind finds none.

    One kind deals by lengths taken to be up to a fifth longer or shorter, in another order every time.
    """
    rng, num_sequences = np.random.default_rng(seed), len(length_S)
    kinds = (
        lambda: by_tokens(length_S, num_cells, max_tokens, taken_for_S=length_S * rng.uniform(0.8, 1.2, num_sequences)),
        lambda: best_fit(length_S, num_cells, max_tokens, rng),
        lambda: paired(length_S, load_SRL, num_cells, max_tokens, cells_per_unit, rng),
    )
    made = [by_tokens(length_S, num_cells, max_tokens), *(kinds[i % len(kinds)]() for i in range(count - 1))]
    return [feasible_cell_of_S if cell_of_S is None else cell_of_S for cell_of_S in made]
