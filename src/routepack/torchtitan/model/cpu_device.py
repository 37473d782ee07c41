"""Runs TorchTitan 0.3.0 where there is no accelerator: device ``cpu``, collectives by gloo.

TorchTitan picks its device when ``torchtitan.tools.utils`` is imported and falls back to CUDA; four of its
modules then copy the choice by name, so it can only be changed before they load. It offers no setting for
this. Everything else that CPU and gloo need is in one place each: attention and experts in
:mod:`~routepack.torchtitan.model.overrides`, FSDP's reduction in :func:`reduce_with_plain_sums`, and
initialisation (where TorchTitan on CPU silently gives every rank the same shard) in the trainer.
"""

from __future__ import annotations

import os
import sys
import types
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from routepack.core.errors import ConfigError

_LOADABLE_BEFORE = ("torchtitan.tools.utils", "torchtitan.tools.logging", "torchtitan.observability")
"""TorchTitan modules that do not copy the device, and so may be loaded already."""


class CpuDevice(types.ModuleType):
    """What TorchTitan asks of ``torch.cuda``, answered for the CPU; the rest is ``torch.cpu``."""

    def __init__(self) -> None:
        super().__init__("routepack_cpu_device")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: Any) -> None:
        """Nothing: there is one CPU."""

    def current_device(self) -> int:
        """0, also what ``barrier(device_ids=...)`` is given."""
        return 0

    def device_count(self) -> int:
        """1, so that every local rank uses device index 0."""
        return 1

    def synchronize(self, device: Any = None) -> None:
        """Nothing: the CPU has no queue."""

    def get_device_name(self, device: Any = None) -> str:
        """``cpu``."""
        return "cpu"

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        """``total_memory`` in bytes: the machine's memory."""
        return types.SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Empty: torch does not count CPU allocations."""
        return {}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Nothing to reset."""

    def empty_cache(self) -> None:
        """Nothing to free."""


KNOWN = ("cpu", "cuda", "xpu", "npu", "hpu", "mps")
"""What torch calls the devices that a rank may be asked to have."""


def device_type() -> str:
    """What TorchTitan runs on: ``cpu``, or the accelerator that torch finds."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def on_cpu() -> bool:
    """True where torch finds no accelerator, so that TorchTitan is run on the CPU."""
    return device_type() == "cpu"


def random_devices() -> list[int]:
    """The accelerator whose random state a fork has to keep: this process's own, none on a CPU."""
    return [] if on_cpu() else [torch.accelerator.current_device_index()]


def install() -> None:
    """Make TorchTitan use the CPU where there is no accelerator; leave it alone where there is one.

    Raises ConfigError where TorchTitan modules that copied the device are loaded already.
    """
    _add_set_timeout()
    if not on_cpu():
        return
    import torchtitan.tools.utils as utils

    if isinstance(utils.device_module, CpuDevice):
        return
    late = sorted(name for name in sys.modules if name.startswith("torchtitan.") and not _harmless(name))
    if late:
        raise ConfigError(
            f"TorchTitan has no accelerator here and chose its device when {late[0]} was imported ({len(late)} such "
            "modules): import routepack.torchtitan before anything of torchtitan."
        )
    utils.device_type, utils.device_module = "cpu", CpuDevice()
    utils.get_peak_flops = _unknown_peak_flops
    # TorchTitan's router asks for float32 autocast, which on the CPU is a no-op that warns. And it initialises sharded
    # parameters by DTensor's random operators, which on the CPU give every rank the same shard: the trainer does not use them.
    warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype is not supported", UserWarning)
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support", UserWarning)


def _unknown_peak_flops(device_name: str) -> float:
    # TorchTitan's own would run lspci, warn where there is none, and assume an A100.
    return float("nan")


def _harmless(name: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") or prefix.startswith(f"{name}.") for prefix in _LOADABLE_BEFORE)


def _add_set_timeout() -> None:
    # TorchTitan 0.3.0 was written for the torch after 2.13 and calls this once the first step is done.
    if not hasattr(dist, "set_timeout"):
        setattr(dist, "set_timeout", _set_timeout)  # noqa: B010 - no type checker knows the name


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def reduce_with_plain_sums(model: nn.Module) -> nn.Module:
    """Let FSDP reduce gradients by plain sums: gloo lacks the pre-multiplied sum that TorchTitan's factor of 1 asks for."""
    if on_cpu():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model
