"""Runs TorchTitan 0.3.0 where there is no accelerator: device ``cpu``, collectives by gloo.

TorchTitan looks for its device when it is imported, finds CUDA where there is none, and offers no setting for it. It uses what
it found while a Trainer is built, so :func:`torchtitan_on_cpu` replaces it for so long and puts it back. Everything else that
CPU and gloo need is in one place each: attention and experts in :mod:`~routepack.torchtitan.model.overrides`, FSDP's reduction
in :func:`reduce_with_plain_sums`, and initialisation (where TorchTitan on a CPU silently gives every rank the same shard) in
the trainer.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torchtitan.tools.utils as torchtitan_utils
from torch import nn
from torch.distributed.fsdp import FSDPModule

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


CPU_MODULE = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    device_count=lambda: 1,
    get_device_name=lambda device=None: "cpu",
    get_device_properties=lambda device=None: SimpleNamespace(
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ),
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=lambda device=None: None,
    empty_cache=lambda: None,
)
"""What TorchTitan asks of ``torch.cuda``, answered for the CPU; torch counts no memory there."""


@contextmanager
def torchtitan_on_cpu() -> Generator[None]:
    """Inside the block TorchTitan uses the CPU where there is no accelerator; where there is one, nothing changes.

    Several of TorchTitan's modules hold copies of its device: each of them gets the CPU, and its own back.
    """
    if not on_cpu():
        yield
        return
    cpu = {
        "device_type": "cpu",
        "device_module": CPU_MODULE,
        # TorchTitan's own would run lspci, warn where there is none, and assume an A100.
        "get_peak_flops": lambda device_name: float("nan"),
    }
    found = {name: vars(torchtitan_utils)[name] for name in cpu}
    replaced: list[tuple[dict[str, object], str]] = []
    for holder in [vars(module) for name, module in sys.modules.items() if name.startswith("torchtitan.")]:
        for name in cpu:
            if holder.get(name) is found[name]:
                holder[name] = cpu[name]
                replaced.append((holder, name))
    try:
        with quiet():
            yield
    finally:
        for holder, name in replaced:
            holder[name] = found[name]


@contextmanager
def quiet() -> Generator[None]:
    """Inside the block TorchTitan does not warn of what it does on a CPU.

    Its router asks for float32 autocast, which is no operation there. And it draws sharded parameters by DTensor's random
    operators, which RoutePack's trainer does not use.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype is not supported", UserWarning)
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support", UserWarning)
        yield


def reduce_with_plain_sums(model: nn.Module) -> None:
    """Let FSDP reduce gradients by plain sums: gloo lacks the pre-multiplied sum that TorchTitan's factor of 1 asks for."""
    if on_cpu():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
