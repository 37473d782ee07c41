"""Initial parameters of a sharded model: each drawn whole, as on one device, and kept in part.

TorchTitan draws sharded parameters by DTensor's random operators, which on a CPU give every rank the same shard, so that
experts are duplicates of each other, and elsewhere make the values depend on the parallel degrees. Here one parameter
at a time is drawn in full, in the order and from the random state of an unsharded model, and this rank's part is copied out:
the values are those of :func:`~routepack.torchtitan.model.models.build_local_model` at the memory of the largest
parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from routepack.core.errors import ConfigError
from routepack.torchtitan.model import cpu_device
from routepack.torchtitan.model.models import after_parallelizing
from routepack.training.expert_moves import take_shard


def draw_whole(spec: ModelSpec, *, seed: int) -> None:
    """Make the model that *spec* builds draw every parameter whole, from *seed*; torch's random state stays as it was.

    Drawing raises ConfigError where a module initialises its parameters by itself, not by its config's ``param_init``.
    """
    drawn = set[int]()
    for _, config, _, _ in spec.traverse(Module.Config, recurse=True):
        module = cast(Module.Config, config)
        if module.param_init is not None:
            module.param_init = {name: _drawing_whole(draw, drawn) for name, draw in module.param_init.items()}

    def draw_from_seed(parallel: nn.Module) -> None:
        model = cast(Decoder, parallel)
        stock = model.init_weights

        def init_weights(**options: torch.device | None) -> None:
            with torch.random.fork_rng(devices=cpu_device.random_devices()):
                torch.manual_seed(seed)
                stock(**options)
            left = [name for name, parameter in model.named_parameters() if id(parameter) not in drawn]
            if left:
                raise ConfigError(f"model {spec.name} {spec.flavor} has no param_init for {left[0]}: it cannot be drawn whole.")

        model.init_weights = init_weights

    after_parallelizing(spec, draw_from_seed)


def _drawing_whole(draw: Callable[[Tensor], Any], drawn: set[int]) -> Callable[[Tensor], Any]:
    # A config that stands in two places is met twice.
    is_done = draw is skip_param_init or (isinstance(draw, partial) and draw.func is _draw)
    return draw if is_done else partial(_draw, draw, drawn)


def _draw(draw: Callable[[Tensor], Any], drawn: set[int], parameter: Tensor) -> None:
    full = _empty_like(parameter)
    draw(full)
    take_shard(parameter, full)
    drawn.add(id(parameter))


def _empty_like(parameter: Tensor) -> Tensor:
    # float32 also where parameters are kept in less: the values are then the rounded ones of an unsharded model.
    return torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
