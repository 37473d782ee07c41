"""Starts the ranks of a multi-process test and collects what each of them found."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"

Check = tuple[str, str, dict[str, Any]]
"""A key for the result, the check's name in checks.py, and its arguments."""


def launch(checks: list[Check], num_ranks: int, folder: Path, *, timeout: float = 200.0) -> list[dict[str, Any]]:
    """Run *checks*, one after another, on *num_ranks* gloo ranks; gives each rank's results by key.

    Raises RuntimeError with the ranks' output where one failed, and kills all where one hangs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checks.pickle").write_bytes(pickle.dumps(checks))
    ranks = [_start(folder, rank, num_ranks) for rank in range(num_ranks)]
    try:
        _wait(ranks, time.monotonic() + timeout)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    results = [_result(folder, rank) for rank in range(num_ranks)]
    codes = [process.returncode for process in ranks]
    if any(codes) or any("error" in result for result in results):
        raise RuntimeError(f"exit codes {codes} of {num_ranks} ranks\n" + "\n".join(_output(folder, r) for r in range(num_ranks)))
    return results


def _start(folder: Path, rank: int, num_ranks: int) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment.update({"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SOURCE}{os.pathsep}{HERE}", "WORLD_SIZE": str(num_ranks), "RANK": str(rank)})
    command = [sys.executable, str(HERE / "worker.py"), str(folder), str(rank), str(num_ranks)]
    with (folder / f"rank{rank}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _wait(ranks: list[subprocess.Popen], deadline: float) -> None:
    while any(process.poll() is None for process in ranks):
        # One failed rank leaves the others waiting for it; there is nothing to wait for then.
        if time.monotonic() > deadline or any(process.poll() not in (None, 0) for process in ranks):
            return
        time.sleep(0.05)


def _result(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"rank{rank}.pickle"
    return pickle.loads(path.read_bytes()) if path.exists() else {"error": "no result"}


def _output(folder: Path, rank: int) -> str:
    return f"--- rank {rank}\n{(folder / f'rank{rank}.log').read_text()[-3000:]}"
