"""One sequence as a stack delivers it, before it becomes part of a batch. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Recorded rows of consecutive tokens of one sequence."""

    ids_TLK: np.ndarray
    """Any integer dtype [rows, layers, K]."""
    start: int = 0
    """The absolute position of the first row's token."""
    valid_T: np.ndarray | None = None
    """bool [rows]: False where the stack's own mask says that nothing was recorded."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedSequence:
    """One sequence as a stack delivers it."""

    num_tokens: int
    segments: Sequence[Segment] = ()
    """Turns or deltas, oldest first; none where nothing was recorded."""
    doubtful: Sequence[int] = ()
    """Rows that the stack may have made up: there, zeros, a copy of the row before and 0 .. top_k - 1 are no routes."""
    token_fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    sequence_fields: Mapping[str, Any] = field(default_factory=dict)
    group: int | None = None
