"""Runs the tests of ``interpreted/`` with TRITON_INTERPRET=1, two files at a time, each in a process of its own."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))

pytest.importorskip("triton", reason="the kernels need triton")


def run(file, marks):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, str(FOLDER / file)]
    return subprocess.run(command, env=environment, cwd=FOLDER.parents[2], capture_output=True, text=True)


@pytest.fixture(scope="module")
def runs(request):
    marks = request.config.getoption("markexpr")
    with ThreadPoolExecutor(2) as pool:
        yield {file: pool.submit(run, file, marks) for file in FILES}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", FILES)
def test_the_kernels_are_right_in_the_interpreter(runs, file):
    done = runs[file].result()
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
