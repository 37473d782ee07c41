"""Initial parameters of a sharded model: each drawn whole, as on one device, and kept in part.

TorchTitan draws sharded parameters by DTensor's random operators, which on a CPU give every rank the same shard, so that
experts are duplicates of each other, and elsewhere make the values depend on the parallel degrees. Here one parameter
at a time is drawn in full, in the order and from the random state of an unsharded model, and this rank's part is copied out:
the values are those of :func:`~routepack.torchtitan.model.models.build_local_model` at the memory of the largest
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from routepack.torchtitan.model import cpu_device
from routepack.torchtitan.moves import expert_moves


def draw_whole(spec: ModelSpec, *, seed: int) -> None:
    """Make the model that *spec* parallelizes draw every parameter whole, from *seed*; torch's random state stays as it was."""
    parallelize = spec.parallelize_fn

    def parallelize_and_draw_whole(model: nn.Module, **kwargs: Any) -> nn.Module:
        parallel = cast(Any, parallelize(model, **kwargs))
        stock = parallel.init_weights

        def init_weights(**options: Any) -> None:
            with torch.random.fork_rng(devices=cpu_device.random_devices()), drawn_whole(parallel):
                torch.manual_seed(seed)
                stock(**options)

        parallel.init_weights = init_weights
        return parallel

    spec.parallelize_fn = parallelize_and_draw_whole


@contextmanager
def drawn_whole(model: nn.Module) -> Iterator[None]:
    """Inside the block, initialising a module of *model* draws its parameters in full and keeps this rank's parts."""
    modules = [module for module in model.modules() if isinstance(module, Module)]
    for module in modules:
        module._init_self_parameters = _initializer(module)  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        for module in modules:
            del module._init_self_parameters


def _initializer(module: Module) -> Callable[[], None]:
    if module._param_init is None:
        return lambda: _reset(module)

    def initialize() -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if (module._param_init or {}).get(name) is not skip_param_init:
                _draw(module, name, parameter)

    return initialize


def _draw(module: Module, name: str, parameter: Tensor) -> None:
    full = _empty_like(parameter)
    module._init_param(name, cast(nn.Parameter, full))
    expert_moves.take_shard(parameter, full)


def _reset(module: Module) -> None:
    """A module that initialises itself all at once, such as a norm of torch's own, on full tensors in its parameters' place."""
    sharded = dict(module.named_parameters(recurse=False))
    for name, parameter in sharded.items():
        module._parameters[name] = nn.Parameter(_empty_like(parameter))
    try:
        type(module)._init_self_parameters(module)
        for name, parameter in sharded.items():
            expert_moves.take_shard(parameter, cast(Tensor, module._parameters[name]).detach())
    finally:
        module._parameters.update(sharded)


def _empty_like(parameter: Tensor) -> Tensor:
    # float32 also where parameters are kept in less: the values are then the rounded ones of an unsharded model.
    return torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
