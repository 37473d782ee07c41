"""The tests of ``interpreted/``, which ``conftest.py`` runs with TRITON_INTERPRET=1 in a process of its own."""

import pytest

pytest.importorskip("triton", reason="the kernels need triton")


@pytest.mark.timeout(900)
def test_the_kernels_are_right_in_the_interpreter(interpreted):
    output, _ = interpreted.communicate()
    assert interpreted.returncode == 0, output[-10000:]
