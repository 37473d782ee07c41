"""Modified first-fit decreasing: at most 71/60 of the fewest bins, and one more.

Source: D. S. Johnson, M. R. Garey, *A 71/60 theorem for bin packing*, Journal of Complexity 1 (1985).
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from routepack.solvers.greedy import first_fit


def modified_first_fit(length_S: np.ndarray, max_tokens: int) -> tuple[np.ndarray, int]:
    """Bins opened for sequences over half the cap, then filled by size class in five passes.

    >>> modified_first_fit(np.array([6, 5, 4, 4, 1]), 10)
    (array([0, 1, 0, 1, 1], dtype=int32), 2)

    Returns:
        ``cell_of_S`` int32 [S], and the number of bins used.

    """
    length_S = np.asarray(length_S, dtype=np.int64)
    longest_first = np.argsort(-length_S, kind="stable")
    # Up to a sixth of the cap, a third, half, and more. What is left of the first three: (tokens, -number), ascending.
    class_S = np.digitize(length_S, [max_tokens // parts + 1 for parts in (6, 3, 2)])
    tiny, small, medium = (
        [(int(length_S[s]), -int(s)) for s in longest_first[::-1] if class_S[s] == size] for size in range(3)
    )
    # 1: a bin for each sequence over half the cap, longest first.
    large = longest_first[class_S[longest_first] == 3]
    cell_of_S = np.full(len(length_S), -1, dtype=np.int32)
    cell_of_S[large] = np.arange(len(large))
    room = (max_tokens - length_S[large]).tolist()

    def put(left: list[tuple[int, int]], place: int, cell: int) -> None:
        length, number = left.pop(place)
        room[cell] -= length
        cell_of_S[-number] = cell

    # 2: forward, the longest medium sequence that fits each bin.
    with_medium = set()
    for cell in range(len(room)):
        if (place := _longest_fitting(medium, room[cell])) >= 0:
            put(medium, place, cell)
            with_medium.add(cell)
    # 3: backward through bins without one, the shortest small sequence and the longest that fits beside it.
    for cell in reversed(range(len(room))):
        if cell not in with_medium and len(small) >= 2 and small[0][0] + small[1][0] <= room[cell]:
            put(small, 0, cell)
            put(small, _longest_fitting(small, room[cell]), cell)
    # 4: forward, the longest sequence left of any class, as long as one fits.
    for cell in range(len(room)):
        for left in (medium, small, tiny):
            while (place := _longest_fitting(left, room[cell])) >= 0:
                put(left, place, cell)
    # 5: first-fit decreasing of what is left, into new bins.
    rest = [-number for left in (medium, small, tiny) for _, number in reversed(left)]
    cell_of_rest, used = first_fit(length_S[rest], max_tokens)
    cell_of_S[rest] = cell_of_rest + len(room)
    return cell_of_S, len(room) + used


def _longest_fitting(left: list[tuple[int, int]], room: int) -> int:
    """Where in *left* the longest sequence of at most *room* tokens is; the first given of equals; -1 where none fits."""
    return bisect_right(left, (room, 1)) - 1
