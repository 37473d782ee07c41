"""Equally many sequences on every DP rank: a packing changed until that holds. Letters: :mod:`routepack.core`."""

from __future__ import annotations

import numpy as np

from routepack.solvers.greedy import fill_empty, first_fit


def equalized(cell_of_S: np.ndarray, length_S: np.ndarray, *, max_tokens: int, num_ranks: int, skew: int) -> np.ndarray | None:
    """int32 [S]: the packing with ranks' numbers of sequences at most *skew* apart, or None where none was found.

    The fullest rank gives to the emptiest: a sequence that has room there, or a cell for one of fewer sequences.
    A legal packing stays legal. Where that ends too early, sequences are dealt anew, longest first, to the ranks by
    tokens and with equal numbers, and each rank's packed first-fit decreasing.
    """
    cell_of_S = np.array(cell_of_S, dtype=np.int32)
    rows = (int(cell_of_S.max()) + num_ranks) // num_ranks
    count_W = np.bincount(cell_of_S % num_ranks, minlength=num_ranks)
    while count_W.max() - count_W.min() > skew:
        giver, taker = int(count_W.argmax()), int(count_W.argmin())
        given = _move(cell_of_S, length_S, giver, taker, num_ranks, rows, max_tokens)
        given = given or _swap_cells(cell_of_S, giver, taker, num_ranks, rows, int(count_W[giver] - count_W[taker]))
        if not given:
            return dealt_equally(length_S, max_tokens=max_tokens, num_ranks=num_ranks, rows=rows, skew=skew)
        count_W[giver] -= given
        count_W[taker] += given
    return cell_of_S


def _swap_cells(cell_of_S, giver: int, taker: int, num_ranks: int, rows: int, apart: int) -> int:
    """Swap the two whole cells that bring two ranks nearest to each other; the sequences given, or 0."""
    count_C = np.bincount(cell_of_S, minlength=rows * num_ranks)
    more_MM = count_C[giver::num_ranks, None] - count_C[None, taker::num_ranks]
    wanted = apart // 2
    more_MM = np.where((more_MM > 0) & (more_MM <= wanted), more_MM, 0)
    if not more_MM.any():
        return 0
    row, other = np.unravel_index(int(more_MM.argmax()), more_MM.shape)
    a, b = int(row) * num_ranks + giver, int(other) * num_ranks + taker
    of_a, of_b = cell_of_S == a, cell_of_S == b
    cell_of_S[of_a], cell_of_S[of_b] = b, a
    return int(more_MM.max())


def _move(cell_of_S, length_S, giver: int, taker: int, num_ranks: int, rows: int, max_tokens: int) -> int:
    """Move the shortest sequence that its cell can spare into the emptiest cell of the taker; 1, or 0 without room."""
    tokens_C = np.bincount(cell_of_S, length_S, rows * num_ranks)
    count_C = np.bincount(cell_of_S, minlength=rows * num_ranks)
    spared = np.flatnonzero((cell_of_S % num_ranks == giver) & (count_C[cell_of_S] > 1))
    cell = taker + num_ranks * int(tokens_C[taker::num_ranks].argmin())
    if not len(spared):
        return 0
    s = spared[np.argmin(length_S[spared])]
    if tokens_C[cell] + length_S[s] > max_tokens:
        return 0
    cell_of_S[s] = cell
    return 1


def dealt_equally(length_S: np.ndarray, *, max_tokens: int, num_ranks: int, rows: int, skew: int) -> np.ndarray | None:
    """int32 [S]: ranks dealt by tokens, longest first, with equal numbers; each rank's packed first-fit decreasing."""
    even, more = divmod(len(length_S), num_ranks)
    if even < rows or (more and not skew):
        return None
    tokens_W, quota_W = np.zeros(num_ranks, dtype=np.int64), np.full(num_ranks, even)
    spare, rank_of_S = more, np.empty(len(length_S), dtype=np.int64)
    for s in np.argsort(-length_S, kind="stable"):
        open_W = (quota_W > 0) if spare == 0 else (quota_W >= 0)
        rank = int(np.where(open_W, tokens_W, np.iinfo(np.int64).max).argmin())
        quota_W[rank] -= 1
        spare -= quota_W[rank] < 0
        tokens_W[rank] += length_S[s]
        rank_of_S[s] = rank
    cell_of_S = np.empty(len(length_S), dtype=np.int32)
    for rank in range(num_ranks):
        held = np.flatnonzero(rank_of_S == rank)
        order = np.argsort(-length_S[held], kind="stable")
        row_of, used = first_fit(length_S[held], max_tokens, order_S=order)
        if used > rows:
            return None
        cell_of_S[held] = fill_empty(row_of, length_S[held], rows) * num_ranks + rank
    return cell_of_S
