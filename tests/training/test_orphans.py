"""A rank ends when its launcher is gone, even where nothing can interrupt it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
RANK = """
import signal, time
from routepack.training import orphans
# Jobs in the background inherit an interrupt that is ignored.
signal.signal(signal.SIGINT, {handler})
try:
    orphans.end_with_launcher()
    print("watching", flush=True)
    time.sleep(60)
finally:
    print("in order", flush=True)
"""
LAUNCHER = """
import os, subprocess, sys
environment = {**os.environ, "ROUTEPACK_LAUNCHER_PID": str(os.getpid() + int(sys.argv[2]))}
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment, start_new_session=True)
print(rank.pid, flush=True)
rank.wait()
"""
HEARS, DEAF = "signal.default_int_handler", "signal.SIG_IGN"


def launched(handler, *, other_by=0):
    command = [sys.executable, "-c", LAUNCHER, RANK.format(handler=handler), str(other_by)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("handler", "in_order"), [(HEARS, True), (DEAF, False)])
def test_a_rank_ends_when_its_launcher_is_killed(handler, in_order):
    launcher = launched(handler)
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    assert launcher.stdout.readline() == "watching\n"
    time.sleep(1.0)
    assert Path(f"/proc/{rank}").exists()
    launcher.kill()
    # The rank holds the other end: this reads on until it is gone.
    out, err = launcher.communicate(timeout=20)
    assert ("in order" in out) == in_order
    assert f"the launcher (process {launcher.pid}) is gone" in err


def test_a_rank_whose_launcher_was_gone_before_it_looked_ends_too():
    out, err = launched(HEARS, other_by=10**7).communicate(timeout=60)
    assert "in order" in out
    assert "is gone; this rank ends" in err
