"""The private names of torch and TorchTitan that RoutePack cannot do without: all of them are here, each behind a function.

A private name may go with any release. One that is missing is refused by name, together with the versions that were tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.models import qwen3
from torchtitan.models.common.decoder import TransformerBlock

from routepack.core.errors import ConfigError

TESTED = "torch 2.13 and torchtitan 0.3.0"


def _private(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        where = getattr(owner, "__qualname__", getattr(owner, "__name__", type(owner).__name__))
        raise ConfigError(
            f"{where} has no {name} in torch {torch.__version__} and the torchtitan that is installed; RoutePack was tested "
            f"with {TESTED}: install those."
        ) from error


def qwen3_moe_layers(**options: Any) -> list[TransformerBlock.Config]:
    """The layers of a Qwen3 mixture of experts of any size: TorchTitan's public registry has a few fixed sizes only.

    Args:
        options: ``n_layers``, ``dim``, ``n_heads``, ``n_kv_heads``, ``head_dim``, ``moe_hidden_dim``, ``num_experts``,
            ``top_k`` and ``rope``.
    """
    build: Callable[..., list[TransformerBlock.Config]] = _private(qwen3, "_build_qwen3_moe_layers")
    return build(**options, attn_backend="varlen", moe_comm_backend="standard")


def reduce_scatter_by(module: FSDPModule, reduce_scatter: Callable[..., None], parameters: Iterable[Tensor]) -> None:
    """Let a module's gradients be reduced by *reduce_scatter*, in plain sums, in the groups that hold any of *parameters*.

    FSDP's public ``set_custom_reduce_scatter`` refuses modules whose experts have a mesh of their own.
    """
    wanted = {id(parameter) for parameter in parameters}
    for group in _private(_private(module, "_get_fsdp_state")(), "_fsdp_param_groups"):
        if any(id(one.sharded_param) in wanted for one in _private(group, "fsdp_params")):
            _private(group, "_reduce_scatter_comm")
            group.force_sum_reduction_for_comms = True
            group._reduce_scatter_comm = reduce_scatter


CHECKPOINT_HOOKS = (
    "_save",
    "_should_save",
    "_load",
    "_find_load_step",
    "_purge_stale_checkpoints",
    "_wait_for_saving",
    "_close",
)
"""Methods of TorchTitan's checkpoint manager that RoutePack's overrides. Public ones must not be: they guard a manager that is
disabled."""


def check_checkpoint_hooks() -> None:
    """Raise ConfigError where TorchTitan no longer has a hook that RoutePack overrides, and so would no longer call it."""
    for name in CHECKPOINT_HOOKS:
        _private(CheckpointManager, name)
