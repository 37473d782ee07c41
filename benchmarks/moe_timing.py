"""How long the layer takes and how much memory: medians on a GPU; one run each on a CPU, where only the path is tried."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import triton
from moe_cases import Inputs, Shape, floor_seconds, flops
from moe_peers import Layer
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

MODES = ("forward", "backward", "both")
WARMUP_MS, REPEAT_MS = 25, 100
"""Of triton.testing.do_bench, which clears the L2 cache before every run."""
KERNEL_PRODUCTS = {
    "gate_up_forward": 2,
    "down_forward": 1,
    "down_backward": 1,
    "input_gradient": 2,
    "weight_gradient": 1,
}
"""2 R D F operations that a launch of each kernel computes."""


def median_ms(run: Callable[[], Any], on_gpu: bool) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile in milliseconds."""
    if on_gpu:
        low, middle, high = triton.testing.do_bench(run, warmup=WARMUP_MS, rep=REPEAT_MS, quantiles=[0.2, 0.5, 0.8])
        return middle, low, high
    start = time.perf_counter()
    run()
    elapsed = (time.perf_counter() - start) * 1e3
    return elapsed, elapsed, elapsed


def ceilings(on_gpu: bool) -> dict[str, float]:
    """What this machine reaches in a dense bfloat16 product (FLOP/s) and in a copy (bytes/s, read and written)."""
    device, size = ("cuda", 8_192) if on_gpu else ("cpu", 128)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_ms = median_ms(lambda: a @ b, on_gpu)[0]
    source = torch.empty(2**30 if on_gpu else 2**20, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), on_gpu)[0]
    return {"flops_per_second": 2 * size**3 / product_ms * 1e3, "bytes_per_second": 2 * source.numel() / copy_ms * 1e3}


def timed(layer: Layer, given: Inputs, mode: str, ceiling: dict[str, float], on_gpu: bool) -> dict[str, Any]:
    """Time, arithmetic a second, and the share of the floor that the machine's ceilings allow."""
    out = layer.forward()
    run = {
        "forward": layer.forward,
        "backward": lambda: layer.backward(out, given.dout_TD),
        "both": lambda: layer.both(given.dout_TD),
    }[mode]
    middle, low, high = median_ms(run, on_gpu)
    floor = floor_seconds(given.shape, **ceiling)[mode]
    operations = flops(given.shape)[mode]
    return {
        "ms": middle,
        "ms_20": low,
        "ms_80": high,
        "tflops_per_second": operations / middle * 1e-9,
        "share_of_floor": floor * 1e3 / middle,
    }


def memory(layer: Layer, given: Inputs, on_gpu: bool) -> dict[str, float | None]:
    """Bytes a token that a forward keeps for its backward, and the peak of both beyond the inputs (on a GPU)."""
    saved: dict[int, int] = {}
    leaves = {leaf.untyped_storage().data_ptr() for leaf in (*given.separate, *given.joined) if leaf is not given.x_TD}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in leaves:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = layer.forward()
    kept = sum(saved.values()) / given.shape.num_tokens
    del out
    if not on_gpu:
        return {"saved_bytes_per_token": kept, "peak_mib": None}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer.both(given.dout_TD)
    torch.cuda.synchronize()
    return {"saved_bytes_per_token": kept, "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}


def kernel_ms(run: Callable[[], Any], on_gpu: bool, repeats: int = 10) -> dict[str, float]:
    """The median milliseconds of each kernel of ours in *run*, one launch of it; between events on a GPU."""
    launches: dict[str, list[Any]] = defaultdict(list)
    kind = JITFunction if on_gpu else InterpretedFunction
    original = kind.run

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        start, end = _mark(on_gpu), None
        result = original(self, *args, **options)
        end = _mark(on_gpu)
        launches[self.fn.__name__].append((start, end))
        return result

    run()
    kind.run = noted
    try:
        for _ in range(repeats if on_gpu else 1):
            run()
    finally:
        kind.run = original
    if on_gpu:
        torch.cuda.synchronize()
        return {name: statistics.median(start.elapsed_time(end) for start, end in marks) for name, marks in launches.items()}
    return {name: statistics.median((end - start) * 1e3 for start, end in marks) for name, marks in launches.items()}


def _mark(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def kernel_rows(layer: Layer, given: Inputs, on_gpu: bool) -> list[dict[str, Any]]:
    """One row for each kernel of a forward and backward: time of a launch and, where it multiplies, arithmetic a second."""
    shape: Shape = given.shape
    product = 2 * shape.num_rows * shape.dim * shape.hidden_dim
    rows = []
    for kernel, ms in kernel_ms(lambda: layer.both(given.dout_TD), on_gpu).items():
        products = KERNEL_PRODUCTS.get(kernel)
        rows.append({"kernel": kernel, "ms": ms, "tflops_per_second": products * product / ms * 1e-9 if products else None})
    return rows
