"""Starts the tests of ``interpreted/`` beside the first of all others: they take more than a minute of one core."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INTERPRETED = pytest.StashKey[subprocess.Popen]()


def pytest_collection_finish(session: pytest.Session) -> None:
    chosen = any(item.path == HERE / "test_interpreted.py" for item in session.items)
    if chosen and not session.config.option.collectonly:
        marks = session.config.getoption("markexpr")
        session.config.stash[INTERPRETED] = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, str(HERE / "interpreted")],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=HERE.parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if process := session.config.stash.get(INTERPRETED, None):
        with process:
            process.kill()


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> subprocess.Popen:
    """The process that runs the tests of ``interpreted/``."""
    return request.config.stash[INTERPRETED]
