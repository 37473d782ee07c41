"""Recorded routing of each stack to a RolloutBatch and back; none of the stacks is imported.

Every stack has a module here with two functions: ``load(source, model, **options) -> Imported`` takes records, arrays or
dicts as that stack has them, ``export(batch, ...)`` gives them back. :data:`STACKS` names them, :func:`convert` reads
files. What was not really recorded is said by ``RolloutBatch.valid_T``, never by an id.
"""

import importlib
from types import ModuleType
from typing import Any

from routepack.core.errors import ConfigError
from routepack.traces.formats.convention import Convention
from routepack.traces.formats.conversion import convert, read
from routepack.traces.formats.import_options import Imported, ImportOptions, ImportReport
from routepack.traces.formats.model_routing import ModelRouting

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

__all__ = [
    "STACKS",
    "Convention",
    "ImportOptions",
    "ImportReport",
    "Imported",
    "ModelRouting",
    "convert",
    "load",
    "read",
    "stack_module",
]


def stack_module(stack: str) -> ModuleType:
    """The module that reads and writes *stack*'s form. Raises ConfigError for an unknown one."""
    if stack not in STACKS:
        raise ConfigError(f"from={stack!r} is no stack that RoutePack reads: choose from {', '.join(STACKS)}.")
    return importlib.import_module(f"routepack.traces.formats.{STACKS[stack]}")


def load(stack: str, source: Any, model: ModelRouting, **options: Any) -> Imported:
    """*source* in *stack*'s form as a RolloutBatch with a report; *options* as the stack's module takes them.

    >>> import numpy as np
    >>> record = {"token_ids": [7, 8, 9], "routed_experts": np.array([[[0, 1]], [[2, 1]]], np.uint8)}
    >>> load("vllm", [record], ModelRouting(num_experts=4)).batch.routed_experts_TLK.tolist()
    [[[0, 1]], [[2, 1]]]
    """
    return stack_module(stack).load(source, model, **options)
