"""From the form of a stack, chosen by its name, to a batch or to a ``routepack.trace/1`` file."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from routepack.core.errors import ConfigError
from routepack.core.files import check_out
from routepack.traces.formats.import_options import Imported
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.sources import open_source
from routepack.traces.trace_files import save_trace

STACKS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "verl": "verl",
    "slime": "slime",
    "miles": "miles",
    "nemo-rl": "nemo_rl",
    "prime-rl": "prime_rl",
    "verifiers": "prime_rl",
    "areal": "areal",
    "skyrl": "skyrl",
    "megatron": "megatron",
    "arrays": "plain",
}
"""The module of each stack, as ``routepack convert --from`` names them."""


def stack_module(stack: str) -> ModuleType:
    """The module that reads and writes *stack*'s form. Raises ConfigError for an unknown one."""
    if stack not in STACKS:
        raise ConfigError(f"from={stack!r} is no stack that RoutePack reads: choose from {', '.join(STACKS)}.")
    return importlib.import_module(f"routepack.traces.formats.stacks.{STACKS[stack]}")


def load(stack: str, source: Any, model: ModelRouting, **options: Any) -> Imported:
    """*source* in *stack*'s form as a RolloutBatch with a report; *options* as the stack's module takes them.

    >>> import numpy as np
    >>> record = {"token_ids": [7, 8, 9], "routed_experts": np.array([[[0, 1]], [[2, 1]]], np.uint8)}
    >>> load("vllm", [record], ModelRouting(num_experts=4)).batch.routed_experts_TLK.tolist()
    [[[0, 1]], [[2, 1]]]
    """
    return stack_module(stack).load(source, model, **options)


def read(
    stack: str, source: str | Path, model: ModelRouting, *, progress: Callable[[int, int], None] | None = None, **options: Any
) -> Imported:
    """Read *source*, a file or folder in *stack*'s form; *options* go to the stack's ``load``."""
    return load(stack, open_source(source, progress), model, **options)


def convert(
    stack: str,
    source: str | Path,
    destination: str | Path,
    model: ModelRouting,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Imported:
    """Write *source* to *destination* as ``routepack.trace/1``; a file there is replaced only once all is well."""
    check_out(destination, source)
    imported = read(stack, source, model, progress=progress, **options)
    extra = {} if model.num_layers is None else {"num_layers": str(model.num_layers)}
    save_trace(imported.batch, destination, **extra)
    return imported
