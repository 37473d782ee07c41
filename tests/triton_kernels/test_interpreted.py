"""The tests of ``interpreted/``: ``conftest.py`` runs them, each file in a process of its own."""

from pathlib import Path

import pytest

FILES = sorted(path.name for path in (Path(__file__).parent / "interpreted").glob("test_*.py"))

pytest.importorskip("triton", reason="the kernels need triton")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", FILES)
def test_the_kernels_are_right_in_the_interpreter(interpreted_runs, file):
    code, output = interpreted_runs.result(file)
    assert code == 0, output[-10000:]
