"""Starts the tests of ``interpreted/`` beside the first of all others: they take a minute of one core.

Each file runs with TRITON_INTERPRET=1 in a process of its own, one after another.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

HERE = Path(__file__).parent


class InterpretedRuns:
    """The processes, and what they say."""

    def __init__(self, files: list[str], marks: str) -> None:
        self.marks = marks
        self.done: dict[str, tuple[int, str]] = {}
        self.finished = {file: threading.Event() for file in files}
        self._process: subprocess.Popen | None = None
        self._stopped = threading.Lock()
        threading.Thread(target=self._run_all, daemon=True).start()

    def result(self, file: str) -> tuple[int, str]:
        """Exit code and output of a file's tests, when they have ended."""
        self.finished[file].wait()
        return self.done[file]

    def stop(self) -> None:
        """Start no further file, and end the one that runs."""
        self._stopped.acquire()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _run_all(self) -> None:
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        for file, finished in self.finished.items():
            path = HERE / "interpreted" / file
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", self.marks, str(path)]
            if not self._stopped.acquire(blocking=False):
                return
            self._process = process = subprocess.Popen(
                command, env=environment, cwd=HERE.parents[1], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            self._stopped.release()
            output, _ = process.communicate()
            self.done[file] = process.returncode, output
            finished.set()


RUNS = pytest.StashKey[InterpretedRuns]()


def pytest_collection_finish(session: pytest.Session) -> None:
    files = [item.callspec.params["file"] for item in session.items if item.path == HERE / "test_interpreted.py"]
    if files and not session.config.option.collectonly:
        session.config.stash[RUNS] = InterpretedRuns(files, session.config.getoption("markexpr"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if runs := session.config.stash.get(RUNS, None):
        runs.stop()


@pytest.fixture(scope="session")
def interpreted_runs(request: pytest.FixtureRequest) -> InterpretedRuns:
    """What the tests of ``interpreted/`` gave."""
    return request.config.stash[RUNS]
