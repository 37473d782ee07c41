"""Elements beyond 2^31 in every tensor and along every axis that a kernel walks, in memory that exists only where touched.

The operating system gives a page when it is first written. So a tensor with strides of millions costs a page per row, and
the kernels meet the addresses of a tensor of 5 GB within a second. Then each cast to int64 is dropped in turn, and these
cases must see it.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import re
import signal
import sys
import traceback
from pathlib import Path

import pytest
import torch

import routepack.triton_kernels as package
from routepack.triton_kernels.routing import Needs, Routing, offsets_of_counts, route
from routepack.triton_kernels.testing import random_problem, relative_errors

BEYOND = 2**31
# Two blocks of D, three of F, three experts: an index of at least 2 meets a stride that itself fits 32 bits.
D, F, K, E, T = 72, 130, 2, 3, 24
WEIGHTS = ("w1", "w3", "w2")
LAUNCH_FILES = ("launch_forward", "launch_backward")
CASES = {
    "rows of x and of the gradient": {"x": 0, "dout": 0},
    "columns of x and of the gradient": {"x": 1, "dout": 1},
    "experts": dict.fromkeys(WEIGHTS, 0),
    "first axis of an expert": dict.fromkeys(WEIGHTS, 1),
    "second axis of an expert": dict.fromkeys(WEIGHTS, 2),
    "the kernels' own rows": {"own": 0},
}


@pytest.fixture(autouse=True)
def _untouched_memory():
    """Poison would touch all of it."""
    torch.use_deterministic_algorithms(False)


def far_apart(shape, axis, dtype):
    """Zeros, *axis* strided so that its index 63 (a block's last) and its own last index lie beyond 2^31 elements."""
    step = (BEYOND // min(max(shape[axis] - 1, 1), 63) // 64 + 1) * 64
    strides, inner = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        if i != axis:
            strides[i], inner = inner, inner * shape[i]
    strides[axis] = step
    assert step > inner
    storage = torch.empty((shape[axis] - 1) * step + inner, dtype=dtype)
    return storage.as_strided(shape, strides).zero_()


def spread(tensor, axis):
    return far_apart(tensor.shape, axis, tensor.dtype).copy_(tensor)


@contextlib.contextmanager
def own_tensors_far_apart(launch_forward, launch_backward):
    """Every buffer that the launch code makes gets rows that far apart."""
    kept = launch_forward.new_rows, launch_forward.new_output, launch_backward.new_parts

    def new_rows(num_rows, width, like, parts=1):
        step = (BEYOND // (num_rows - 1) // 64 + 1) * 64
        storage = torch.empty((num_rows - 1) * step + parts * width, dtype=like.dtype)
        return storage.as_strided((parts, num_rows, width), (width, step, 1))

    launch_forward.new_rows = launch_backward.new_rows = new_rows
    launch_forward.new_output = lambda shape, like: far_apart(shape, 0, like.dtype)
    launch_backward.new_parts = lambda parts, slots, like: far_apart((parts, slots), 0, torch.float32)
    yield
    launch_forward.new_rows, launch_forward.new_output, launch_backward.new_parts = kept
    launch_backward.new_rows = kept[0]


def local_errors(axes, tma=False):
    """Errors of the output and of all gradients, on the level of launches, so that the sums can be spread as well."""
    launch_forward, launch_backward = (importlib.import_module(f"{package.__name__}.{name}") for name in LAUNCH_FILES)
    problem = random_problem(T=T, D=D, F=F, K=K, E=E, dtype=torch.float16)
    names = ("x", *WEIGHTS, "dout")
    x, w1, w3, w2, dout = (
        spread(getattr(problem, name), axes[name]) if name in axes else getattr(problem, name) for name in names
    )
    sums = [
        far_apart(w.shape, axes[name], w.dtype) if name in axes else torch.zeros_like(w)
        for name, w in zip(WEIGHTS, (w1, w3, w2), strict=True)
    ]
    order, inverse, offsets = route(problem.ids, E)
    plan, scores = Routing(offsets_E1=offsets, order_R=order, inverse_N=inverse, top_k=K), problem.scores.reshape(-1)
    needs = Needs(x=True, scores=True, w1=True, w3=True, w2=True)
    with own_tensors_far_apart(launch_forward, launch_backward) if "own" in axes else contextlib.nullcontext():
        out, h = launch_forward.forward(x, scores, w1, w3, w2, plan, save_h=True, tma=tma)
        dx, dscores, *_ = launch_backward.backward(dout, x, scores, w1, w3, w2, h, plan, needs, sums=sums, tma=tma)
    return relative_errors([out, dx, dscores.view(-1, K), *sums], problem.reference())


def tail_errors():
    """The same for the zeros beyond the last row of a dispatch."""
    launch_forward = importlib.import_module(f"{package.__name__}.launch_forward")
    out = far_apart((40, 8), 0, torch.float16).fill_(1.0)
    launch_forward.zero_tail(out, Routing(offsets_E1=offsets_of_counts(torch.tensor([10, 3]), 40)))
    wanted = torch.ones(40, 8)
    wanted[13:] = 0
    return relative_errors([out], [wanted])


@pytest.mark.parametrize("axes", CASES.values(), ids=CASES)
def test_offsets_beyond_32_bits(axes):
    errors = local_errors(axes)
    assert max(errors) < 1e-2, errors


def test_offsets_beyond_32_bits_by_tma():
    errors = local_errors(CASES["experts"], tma=True)
    assert max(errors) < 1e-2, errors


def test_offsets_beyond_32_bits_in_the_tail():
    assert tail_errors() == [0.0]


KERNEL_FILES = ("grouped_gemm_kernels", "permute_kernels")
CAST = re.compile(r"\.to\(tl\.int64\)|tl\.cast\((\w+), tl\.int64\)")


def casts():
    """Every cast of the kernels: its line to name it by, the file, and where in the file it stands."""
    for name in KERNEL_FILES:
        source = (Path(package.__file__).parent / f"{name}.py").read_text()
        for number, cast in enumerate(CAST.finditer(source)):
            line = source[: cast.end()].count("\n")
            yield pytest.param((name, cast.span()), id=f"{name}-{number}: {source.splitlines()[line].strip()[:60]}")


def load_without_cast(name, span, folder):
    """Import the kernels anew, from a copy of file *name* in which the cast at *span* is gone."""
    for module in (*KERNEL_FILES, *LAUNCH_FILES):
        sys.modules.pop(f"{package.__name__}.{module}", None)
        vars(package).pop(module, None)
    source = (Path(package.__file__).parent / f"{name}.py").read_text()
    operand = re.sub(r"^tl\.cast\((\w+), .*|^\..*", r"\1", source[slice(*span)])
    mutant = folder / f"{name}.py"
    mutant.write_text(source[: span[0]] + operand + source[span[1] :])
    full_name = f"{package.__name__}.{name}"
    specification = importlib.util.spec_from_file_location(full_name, mutant)
    sys.modules[full_name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(sys.modules[full_name])
    setattr(package, name, sys.modules[full_name])


def cases_that_fail():
    """Whether any case above is wrong; a crash is seen from outside."""
    yield max(tail_errors()) > 0
    for axes in reversed(CASES.values()):
        yield max(local_errors(axes)) > 1e-2


def outcome_without_cast(name, span, folder):
    """Exit status of a process of its own, which may well crash: 0 where everything is right."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    status = 1
    try:
        faulthandler.disable()
        signal.setitimer(signal.ITIMER_VIRTUAL, 100)
        load_without_cast(name, span, folder)
        status = int(any(cases_that_fail()))
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


@pytest.mark.slow
@pytest.mark.parametrize("cast", list(casts()))
def test_every_cast_to_64_bits_is_needed_and_seen(cast, tmp_path):
    assert outcome_without_cast(*cast, tmp_path) != 0


def test_without_a_change_the_process_finds_nothing(tmp_path):
    assert outcome_without_cast("grouped_gemm_kernels", (0, 0), tmp_path) == 0
