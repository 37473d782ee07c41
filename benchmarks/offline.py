"""Launch Triton kernels without a GPU: each launch compiles for a chosen architecture and runs nothing.

The launching code is the real one, so what is compiled is what a GPU would run: the same specialisation of pointers, sizes
and strides, the same constants, warps and stages. Only the driver, which tells what GPU there is, is exchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""What the kernels are compiled for: A100, H100 and H200, B200, MI300."""


@dataclass(frozen=True)
class Launch:
    """One launch that was compiled instead of run."""

    kernel: str
    """The kernel function's name."""
    constants: dict[str, Any]
    """Its compile-time constants by name."""
    compiled: Any
    """Triton's compiled kernel: ``asm`` and ``metadata``."""


@dataclass
class OfflineDriver:
    """Tells Triton that it runs on *arch*; a device number for each, as Triton keeps its compiled kernels by device."""

    arch: str

    def get_current_device(self) -> int:
        return list(TARGETS).index(self.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.arch]

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling_for(arch: str, kernels: Collection[str] | None = None) -> Generator[list[Launch], None, None]:
    """Inside the block launches on CPU tensors compile for *arch*; the list gets one entry each. Tensors are not read.

    Launches of others than *kernels*, where they are given, do nothing.
    """
    config = triton.runtime.driver
    driver_before, run = config._active, JITFunction.run
    launches: list[Launch] = []

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if kernels is not None and self.fn.__name__ not in kernels:
            return None
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        names = [self.params[path[0]].name for path in compiled.src.constants]
        constants = dict(zip(names, compiled.src.constants.values(), strict=True))
        launches.append(Launch(kernel=self.fn.__name__, constants=constants, compiled=compiled))
        return compiled

    config.set_active(OfflineDriver(arch))
    JITFunction.run = compile_only
    try:
        yield launches
    finally:
        JITFunction.run, config._active = run, driver_before
