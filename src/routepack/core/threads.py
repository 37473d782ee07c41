"""Work that lets go of the interpreter's lock, on all cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def on_all_cores(work: Callable[[int], object], num_pieces: int) -> None:
    """Do *work* for each piece 0 .. *num_pieces* - 1, in any order, and return when all are done; errors are raised.

    The calling thread takes pieces too, so that a busy machine, which starts the others late, holds nothing up.
    """
    pieces, lock = iter(range(num_pieces)), threading.Lock()

    def some() -> None:
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            work(piece)

    helpers = min(num_cores(), num_pieces) - 1
    if helpers <= 0:
        some()
        return
    with ThreadPoolExecutor(helpers) as pool:
        others = [pool.submit(some) for _ in range(helpers)]
        some()
        for other in others:
            other.result()
