"""Rows of unknown number in one block of memory."""

from __future__ import annotations

import numpy as np

GROWTH = 1.03
RESERVED = 1 << 26
"""Bytes first asked for. The C library gives so large a block pages of its own, which take no memory before they are written
and are later moved, not copied: the peak is what the rows take, where chunks to concatenate would take twice that."""


class GrowingRows:
    """A row-major array that grows at its end."""

    def __init__(self, dtype: np.dtype, row_shape: tuple[int, ...] = ()) -> None:
        row_bytes = max(int(np.prod(row_shape)) * dtype.itemsize, 1)
        self._block = np.empty((RESERVED // row_bytes, *row_shape), dtype)
        self._size = 0

    @property
    def rows(self) -> np.ndarray:
        """All rows so far, a view; no row may be reserved while one is held."""
        return self._block[: self._size]

    def reserve(self, num_rows: int) -> np.ndarray:
        """The next *num_rows* rows, a view that holds until the next call; their content is not defined."""
        start = self._size
        self._size += num_rows
        if self._size > len(self._block):
            self._resize(max(self._size, int(len(self._block) * GROWTH)))
        return self._block[start : self._size]

    def trim(self) -> None:
        """Give back what no row reached; no row may be reserved afterwards, nor any view be held."""
        self._resize(self._size)

    def _resize(self, num_rows: int) -> None:
        # No view is held, so that the block may move.
        self._block.resize((num_rows, *self._block.shape[1:]), refcheck=False)
