"""The stacks whose records RoutePack reads, and the module of each."""

import importlib
from types import ModuleType
from typing import Any

from routepack.core.errors import ConfigError
from routepack.traces.formats.import_options import Imported
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
