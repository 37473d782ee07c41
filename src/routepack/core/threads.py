"""Work that lets go of the interpreter's lock, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def on_all_cores(work: Callable[[int], T], num_pieces: int, num_threads: int | None = None) -> list[T]:
    """What *work* gives for each piece 0 .. *num_pieces* - 1, in that order; an error of any piece is raised.

    Args:
        num_threads: how many do the work, in any order. None: as many as there are cores.
    """
    threads = min(num_threads or num_cores(), num_pieces)
    if threads <= 1:
        return [work(piece) for piece in range(num_pieces)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(num_pieces)))
