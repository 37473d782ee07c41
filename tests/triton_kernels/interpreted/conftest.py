"""Everything here runs Triton's interpreter, in a process of its own: it must be chosen before the kernels are imported.

``test_interpreted.py`` one folder up starts that process; by hand:
``TRITON_INTERPRET=1 pytest tests/triton_kernels/interpreted``.
"""

import os
import warnings

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def pytest_configure(config):
    # What rows beyond a tile hold is computed and never stored; with buffers full of NaN, numpy says so.
    config.addinivalue_line("filterwarnings", "ignore:invalid value encountered in (matmul|multiply|add):RuntimeWarning")


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Memory that torch does not initialise holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _make_bfloat16_faithful():
    """Make the interpreter multiply bfloat16 and round to it as a GPU does.

    Triton 3.6 to 3.9 multiply the 16-bit patterns as integers in ``tl.dot``, and truncate where they should round to the
    nearest even (triton issues 11584, 11604).
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    stock_cast, stock_dot = builder.cast_impl, builder.create_dot

    def widened(handle):
        bits = np.ascontiguousarray(handle.data).astype(np.uint32) << np.uint32(16)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def rounded(values):
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        with np.errstate(over="ignore"):
            return np.where(np.isnan(values), np.uint16(0x7FC0), ((bits + half) >> np.uint32(16)).astype(np.uint16))

    def cast_impl(self, source, destination):
        old, new = source.dtype.scalar, destination.scalar
        if old == new or tl.bfloat16 not in (old, new):
            return stock_cast(self, source, destination)
        if old == tl.bfloat16:
            return stock_cast(self, widened(source), destination)
        return interpreter.TensorHandle(rounded(np.asarray(source.data, dtype=np.float32)), new)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        a, b = (widened(one) if one.dtype.scalar == tl.bfloat16 else one for one in (a, b))
        return stock_dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot


if INTERPRETED:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _make_bfloat16_faithful()
