"""How many microbatches a window needs at least: a bin-packing bound, and a packing that shows it can be reached."""

from __future__ import annotations

import numpy as np

from routepack.planned import Certificate
from routepack.solvers.greedy import fill_empty, first_fit


def l2_bound(length_S: np.ndarray, max_tokens: int) -> int:
    """Bins of *max_tokens* that no packing of the lengths can go below.

    The L2 bound of Martello and Toth (1990): for a threshold a, items above C - a fill a bin alone, items
    above C / 2 need one each, and items from a to C / 2 that do not fit beside those need more.

    >>> l2_bound(np.array([7] * 8), 8), l2_bound(np.array([6, 6, 3, 3, 3]), 8)
    (8, 4)
    """
    length = np.sort(np.asarray(length_S, dtype=np.int64))
    total = np.concatenate([[0], np.cumsum(length)])
    a = np.unique(np.concatenate([[0], length[length <= max_tokens // 2]]))
    above_half = np.searchsorted(length, max_tokens // 2, side="right")
    alone = np.searchsorted(length, max_tokens - a, side="right")
    small = np.searchsorted(length, a, side="left")
    room = (alone - above_half) * max_tokens - (total[alone] - total[above_half])
    beside = np.maximum(0, -(-(total[above_half] - total[small] - room) // max_tokens))
    return int((len(length) - above_half + beside).max())


def certify_rows(length_S: np.ndarray, max_tokens: int, num_ranks: int, *, seed: int = 0) -> tuple[Certificate, np.ndarray]:
    """The smallest number of microbatches found, what proves it, and a legal packing with that many.

    Returns:
        the certificate, and ``cell_of_S`` int32 [S]: no cell above the cap, none empty where S allows it.

    """
    bins = l2_bound(length_S, max_tokens)
    lower = -(-bins // num_ranks)
    best = None
    for order_S in _orders(length_S, seed):
        for tightest in (False, True):
            cell_of_S, used = first_fit(length_S, max_tokens, order_S=order_S, tightest=tightest)
            rows = -(-used // num_ranks)
            if best is None or rows < best[0]:
                best = (rows, cell_of_S)
            if rows == lower:
                break
        if best is not None and best[0] == lower:
            break
    assert best is not None, "there is at least one order to try"
    rows, cell_of_S = best
    certificate = Certificate(num_microbatches=rows, lower_bound=lower, method="L2")
    return certificate, fill_empty(cell_of_S, length_S, rows * num_ranks)


def _orders(length_S: np.ndarray, seed: int, attempts: int = 16):
    """Longest first, then the same with the lengths slightly shaken."""
    yield np.argsort(-length_S, kind="stable")
    rng = np.random.default_rng(seed)
    for _ in range(attempts):
        yield np.argsort(-length_S * rng.uniform(0.9, 1.1, len(length_S)), kind="stable")
