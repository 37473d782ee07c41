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
    return _Filling(np.asarray(length_S, dtype=np.int64), max_tokens).run()


class _Filling:
    """Bins under way. Sequences left over are kept by size class, ``(tokens, -number)`` ascending."""

    def __init__(self, length_S: np.ndarray, max_tokens: int):
        self.length_S, self.max_tokens = length_S, max_tokens
        self.cell_of_S = np.full(len(length_S), -1, dtype=np.int32)
        self.room: list[int] = []
        self.medium: list[tuple[int, int]] = []
        self.small: list[tuple[int, int]] = []
        self.tiny: list[tuple[int, int]] = []

    def run(self) -> tuple[np.ndarray, int]:
        """The five passes."""
        self._open_large()
        with_medium = self._add_medium()
        self._add_small_pairs(with_medium)
        self._fill()
        self._first_fit_the_rest()
        return self.cell_of_S, len(self.room)

    def _open_large(self) -> None:
        """1: a bin for each sequence over half the cap, longest first."""
        longest_first = np.argsort(-self.length_S, kind="stable")
        class_S = np.digitize(self.length_S, [self.max_tokens // size + 1 for size in (6, 3, 2)])
        large = longest_first[class_S[longest_first] == 3]
        self.cell_of_S[large] = np.arange(len(large))
        self.room = (self.max_tokens - self.length_S[large]).tolist()
        shortest_first = longest_first[::-1]
        for size, some in enumerate((self.tiny, self.small, self.medium)):
            members = shortest_first[class_S[shortest_first] == size]
            some.extend(zip(self.length_S[members].tolist(), (-members).tolist(), strict=True))

    def _add_medium(self) -> set[int]:
        """2: forward, the longest medium sequence that fits each bin."""
        taken = set()
        for cell, room in enumerate(self.room):
            if self.medium and self.medium[0][0] <= room:
                self._put(self.medium, _longest_fitting(self.medium, room), cell)
                taken.add(cell)
        return taken

    def _add_small_pairs(self, with_medium: set[int]) -> None:
        """3: backward through bins without one, the shortest small sequence and the longest that fits beside it."""
        for cell in reversed(range(len(self.room))):
            if cell in with_medium or len(self.small) < 2 or self.small[0][0] + self.small[1][0] > self.room[cell]:
                continue
            self._put(self.small, 0, cell)
            self._put(self.small, _longest_fitting(self.small, self.room[cell]), cell)

    def _fill(self) -> None:
        """4: forward, the longest sequence left of any class, as long as one fits."""
        for cell in range(len(self.room)):
            while True:
                fitting = [(some, _longest_fitting(some, self.room[cell])) for some in (self.medium, self.small, self.tiny)]
                some, place = next(((some, place) for some, place in fitting if place >= 0), (None, -1))
                if some is None:
                    break
                self._put(some, place, cell)

    def _first_fit_the_rest(self) -> None:
        """5: first-fit decreasing of what is left, into new bins."""
        left = [-number for some in (self.medium, self.small, self.tiny) for _, number in reversed(some)]
        if left:
            cell_of_left, used = first_fit(self.length_S[left], self.max_tokens)
            self.cell_of_S[left] = cell_of_left + len(self.room)
            self.room.extend([0] * used)

    def _put(self, some: list[tuple[int, int]], place: int, cell: int) -> None:
        length, number = some.pop(place)
        self.room[cell] -= length
        self.cell_of_S[-number] = cell


def _longest_fitting(some: list[tuple[int, int]], room: int) -> int:
    """Where in *some* the longest sequence of at most *room* tokens is; the first given of equals; -1 where none fits."""
    return bisect_right(some, (room, 1)) - 1
