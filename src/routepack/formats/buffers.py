"""Rows of unknown number in one block of memory."""

from __future__ import annotations

import math

import numpy as np

GROWTH = 1.03


class GrowingRows:
    """A 1-D or row-major array that grows at its end.

    Large blocks grow in place (the C library remaps their pages), and pages that no row reached take no memory, so the peak
    is what the rows take, where a list of chunks to concatenate would take twice that.
    """

    def __init__(self, dtype: np.dtype, num_rows: int = 0) -> None:
        self.dtype = dtype
        self.shape: tuple[int, ...] = ()
        self._expected = num_rows
        self._size = 0
        self._flat: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        """All rows so far, a view; no row may be reserved while one is held."""
        width = self._width
        flat = np.empty(0, dtype=self.dtype) if self._flat is None else self._flat
        return flat[: self._size * width].reshape(self._size, *self.shape)

    def reserve(self, num_rows: int) -> np.ndarray:
        """The next *num_rows* rows, a view that holds until the next call; their content is not defined."""
        width, start = self._width, self._size
        self._size += num_rows
        if self._flat is None:
            self._flat = np.empty(max(self._size, self._expected) * width, dtype=self.dtype)
        elif self._size * width > len(self._flat):
            # Views of earlier rows are not kept anywhere, so the block may move.
            self._flat.resize(max(self._size * width, int(len(self._flat) * GROWTH)), refcheck=False)
        return self._flat[start * width : self._size * width].reshape(num_rows, *self.shape)

    @property
    def _width(self) -> int:
        return math.prod(self.shape)
