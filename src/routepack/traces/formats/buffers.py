"""Rows of unknown number in one block of memory."""

from __future__ import annotations

import math

import numpy as np

GROWTH = 1.03
RESERVED = 1 << 26
"""Bytes first asked for. The C library gives so large a block pages of its own, which it later grows by remapping, not by
copying; what no row reaches takes no memory."""


class GrowingRows:
    """A 1-D or row-major array that grows at its end.

    Large blocks grow in place (the C library remaps their pages), and pages that no row reached take no memory, so the peak
    is what the rows take, where a list of chunks to concatenate would take twice that.
    """

    def __init__(self, dtype: np.dtype, *, is_large: bool = False) -> None:
        """*is_large*: whether many rows may come."""
        self.dtype = dtype
        self.shape: tuple[int, ...] = ()
        self._expected = RESERVED // dtype.itemsize if is_large else 0
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
            self._flat = np.empty(max(self._size * width, self._expected), dtype=self.dtype)
        elif self._size * width > len(self._flat):
            # Views of earlier rows are not kept anywhere, so the block may move.
            self._flat.resize(max(self._size * width, int(len(self._flat) * GROWTH)), refcheck=False)
        return self._flat[start * width : self._size * width].reshape(num_rows, *self.shape)

    def trim(self) -> None:
        """Give back what no row reached; no row may be reserved afterwards, nor any view be held."""
        if self._flat is not None:
            self._flat.resize(self._size * self._width, refcheck=False)

    @property
    def _width(self) -> int:
        return math.prod(self.shape)
