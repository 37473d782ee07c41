"""A rank does not outlive the launcher that started it, however that ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import cast

LAUNCHER = "ROUTEPACK_LAUNCHER_PID"
"""The variable in which a launcher tells its ranks who it is."""
POLL_SECONDS = 0.5
GRACE_SECONDS = 3.0
"""A rank that is told to end gets this long to remove what it has half written before it ends at once."""


def end_with_launcher() -> None:
    """Watch the launcher that started this process, if one did, and end when it is gone."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None:
        threading.Thread(target=_watch, args=(int(launcher),), name="launcher watch", daemon=True).start()


def _watch(launcher: int) -> None:
    # A process whose parent is gone gets another one.
    while os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    sys.stderr.write(f"routepack: the launcher (process {launcher}) is gone; this rank ends.\n")
    sys.stderr.flush()
    # The main thread ends in order, unless it waits in a collective that hears of no interrupt.
    signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGINT)
    time.sleep(GRACE_SECONDS)
    os._exit(1)
