"""How many microbatches a window needs at least: a bound, a packing that reaches it, and where they differ a search.

Letters: :mod:`routepack.core`. Derivations: docs/design/planning.md.
"""

from __future__ import annotations

import numpy as np

from routepack.core.plans import Certificate, PackingRules
from routepack.solvers.bin_completion import STEPS, UNDECIDED, bin_completion
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


def certify_rows(
    length_S: np.ndarray,
    max_tokens: int,
    num_ranks: int,
    *,
    seed: int = 0,
    rules: PackingRules | None = None,
    steps: int = STEPS,
) -> tuple[Certificate, np.ndarray]:
    """The fewest microbatches found, what proves that fewer will not do, and a legal packing with that many.

    First the L2 bound and quick packings; where they differ, bin completion for *steps* steps a question. All of it repeats
    bit for bit.

    Returns:
        the certificate, and ``cell_of_S`` int32 [S]: no cell above the cap, none empty where S allows it. Equal
        numbers of sequences (``rules.equal_sequences``) are not seen to here.

    """
    rules, length_S = rules or PackingRules(), np.asarray(length_S, dtype=np.int64)
    lower, method = rules.allowed(-(-l2_bound(length_S, max_tokens) // num_ranks)), "L2"
    cell_of_S, rows = _quick(length_S, max_tokens, num_ranks, rules, lower, seed)
    while lower < rows:
        answer, found = bin_completion(length_S, max_tokens, lower * num_ranks, steps=steps)
        if answer == UNDECIDED:
            break
        if found is not None:
            cell_of_S, rows = found, lower
        else:
            lower, method = rules.allowed(lower + 1), "bin completion"
    certificate = Certificate(num_microbatches=rows, lower_bound=lower, method=method)
    return certificate, fill_empty(cell_of_S, length_S, rows * num_ranks)


def _quick(length_S, max_tokens, num_ranks, rules, lower, seed) -> tuple[np.ndarray, int]:
    """First fit and best fit by falling length, plain and shaken, until one reaches the bound."""
    best: tuple[np.ndarray, int] | None = None
    for order_S in _orders(length_S, seed):
        for tightest in (False, True):
            cell_of_S, used = first_fit(length_S, max_tokens, order_S=order_S, tightest=tightest)
            rows = rules.allowed(-(-used // num_ranks))
            if best is None or rows < best[1]:
                best = cell_of_S, rows
            if best[1] == lower:
                return best
    assert best is not None, "there is at least one order to try"
    return best


def _orders(length_S: np.ndarray, seed: int, attempts: int = 16):
    """Longest first, then the same with the lengths slightly shaken."""
    yield np.argsort(-length_S, kind="stable")
    rng = np.random.default_rng(seed)
    for _ in range(attempts):
        yield np.argsort(-length_S * rng.uniform(0.9, 1.1, len(length_S)), kind="stable")
