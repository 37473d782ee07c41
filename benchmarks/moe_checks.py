"""Whether the layer is right, before anything is timed: each check says what it found, and none of them stops the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from moe_cases import EDGE_SHAPES, SHAPES, Inputs, Shape, inputs, reference, relative_error, routed, shrunk
from moe_peers import IMPLEMENTATIONS, Layer
from torch import Tensor

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""Of the norms, against float64."""


@dataclass(frozen=True)
class Outcome:
    """What a check found."""

    check: str
    implementation: str
    passed: bool | None
    """None: the clock did not allow it."""
    detail: str


@dataclass(frozen=True)
class Bench:
    """Where the checks run, and how large: the same checks on a GPU, and small on a CPU."""

    device: str
    dtype: torch.dtype
    num_runs: int
    """How often the same input must give the same bits."""
    limits: dict[str, int]
    """No dimension of a checked shape is above these."""
    edge_limits: dict[str, int]

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


GPU = Bench(
    device="cuda",
    dtype=torch.bfloat16,
    num_runs=20,
    limits={"num_tokens": 1_024, "dim": 7_168, "hidden_dim": 2_048, "num_experts": 64, "top_k": 8},
    edge_limits={"num_tokens": 10_000, "dim": 10_000, "hidden_dim": 10_000, "num_experts": 10_000, "top_k": 100},
)
DRY = Bench(
    device="cpu",
    dtype=torch.float32,
    num_runs=2,
    limits={"num_tokens": 24, "dim": 64, "hidden_dim": 64, "num_experts": 4, "top_k": 2},
    edge_limits={"num_tokens": 24, "dim": 72, "hidden_dim": 40, "num_experts": 8, "top_k": 3},
)


def check_all(names: list[str], bench: Bench, deadline: float) -> list[dict[str, Any]]:
    """Every check on every implementation, the most telling first; what the clock did not allow is None."""
    small = shrunk(SHAPES[0], **bench.limits)
    references = [
        (f"float64 reference: {shape.name}, {routing}", partial(_matches, shape=shape, routing=routing, bench=bench))
        for shape, routing in _cases(bench)
    ]
    properties = [
        (f"{bench.num_runs} runs bit-equal", partial(_bit_equal, shape=small, bench=bench)),
        ("no host synchronisation", partial(_no_sync, shape=small, bench=bench)),
        ("CUDA graph, changed routing", partial(_replays, shape=small, bench=bench)),
    ]
    checks: list[tuple[str, Callable[[str], tuple[bool | None, str]]]] = [references[0], *properties, *references[1:]]
    outcomes = []
    for check, run in checks:
        for name in names:
            passed, detail = run(name) if time.monotonic() < deadline else (None, "not reached before the deadline")
            outcomes.append(asdict(Outcome(check, name, passed, detail)))
    return outcomes


def _cases(bench: Bench) -> list[tuple[Shape, str]]:
    benched = [(shrunk(shape, **bench.limits), routing) for shape in SHAPES for routing in ("balanced", "zipf")]
    routings = ("zipf", "hot", "empty")
    edges = [(shrunk(shape, **bench.edge_limits), routing) for shape in EDGE_SHAPES for routing in routings]
    if bench.on_gpu:
        return benched + edges
    # The benched layers are alike once they are shrunk; each edge gets one routing in turn.
    return [benched[0], *(edges[len(routings) * number + number % len(routings)] for number in range(len(EDGE_SHAPES)))]


def _matches(name: str, shape: Shape, routing: str, bench: Bench) -> tuple[bool, str]:
    given = inputs(shape, routing, device=bench.device, dtype=bench.dtype)
    out, gradients = reference(given)
    layer = IMPLEMENTATIONS[name](given)
    with poisoned_memory(bench):
        got_out = layer.forward()
        got = layer.backward(got_out, given.dout_TD)
    errors = [relative_error(got_out, out), *(relative_error(a, b) for a, b in zip(got, gradients, strict=True))]
    return max(errors) <= TOLERANCE[bench.dtype], "out, dx, dscores, dw1, dw3, dw2: " + " ".join(f"{e:.1e}" for e in errors)


@contextmanager
def poisoned_memory(bench: Bench) -> Generator[None, None, None]:
    """Memory that nobody wrote holds NaN inside the block, so a value that is read before it is written shows."""
    if bench.on_gpu:
        blocks = [torch.full((2**size,), torch.nan, device=bench.device) for size in range(8, 28)]
        del blocks
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _everything(layer: Layer, given: Inputs) -> list[Tensor]:
    out = layer.forward()
    return [out.detach(), *layer.backward(out, given.dout_TD)]


def _bit_equal(name: str, shape: Shape, bench: Bench) -> tuple[bool, str]:
    given = inputs(shape, "zipf", device=bench.device, dtype=bench.dtype)
    layer = IMPLEMENTATIONS[name](given)
    first = _everything(layer, given)
    different, held = 0, []
    for run in range(1, bench.num_runs):
        held.append(torch.empty(2**16 * run, device=bench.device))  # other addresses for what follows
        again = _everything(layer, given)
        different += not all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return different == 0, f"{different} of {bench.num_runs - 1} differ from the first"


READS = ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__")
"""What makes the host wait for a tensor's values."""


@contextmanager
def refused_reads() -> Generator[None, None, None]:
    """Reading a tensor's values raises RuntimeError, as torch.cuda's sync debug mode makes it; that mode needs a GPU."""
    originals = {name: getattr(torch.Tensor, name) for name in READS}

    def refuse(name: str) -> Callable[..., None]:
        def read(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"Tensor.{name} synchronises with the host")

        return read

    for name in READS:
        setattr(torch.Tensor, name, refuse(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


@contextmanager
def no_sync(bench: Bench) -> Generator[None, None, None]:
    """A host synchronisation inside the block raises RuntimeError."""
    if not bench.on_gpu:
        with refused_reads():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _no_sync(name: str, shape: Shape, bench: Bench) -> tuple[bool, str]:
    given = inputs(shape, "zipf", device=bench.device, dtype=bench.dtype)
    layer = IMPLEMENTATIONS[name](given)
    _everything(layer, given)  # compiles, which may synchronise
    try:
        with no_sync(bench):
            _everything(layer, given)
    except RuntimeError as error:
        return False, str(error).splitlines()[0]
    return True, "forward and backward"


def _replays(name: str, shape: Shape, bench: Bench) -> tuple[bool, str]:
    given = inputs(shape, "balanced", device=bench.device, dtype=bench.dtype)
    layer = IMPLEMENTATIONS[name](given)
    replay, results = _captured(lambda: _everything(layer, given), bench)
    errors = []
    for seed, routing in enumerate(("zipf", "hot", "empty")):
        given.ids_TK.copy_(routed(shape, routing, torch.Generator(bench.device).manual_seed(seed)))
        replay()
        replayed = [result.clone() for result in results]
        errors += [relative_error(a, b) for a, b in zip(replayed, _everything(layer, given), strict=True)]
    # The same kernels in the same order: the bits are equal, not only close.
    return max(errors) == 0.0, f"largest difference {max(errors):.1e}"


def _captured(run: Callable[[], list[Tensor]], bench: Bench) -> tuple[Callable[[], None], list[Tensor]]:
    """A function that runs *run* again, and the tensors that it leaves its results in. Without a GPU nothing is captured."""
    results = run()
    if not bench.on_gpu:

        def run_again() -> None:
            for result, value in zip(results, run(), strict=True):
                result.copy_(value)

        return run_again, results
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph.replay, results
