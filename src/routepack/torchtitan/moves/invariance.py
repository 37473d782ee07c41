"""Sums in an order that does not depend on where the experts are, so that moving them changes no bit of a run.

What a move carries keeps its bits by itself. Three sums of a step would still go by slots: a token's experts, where there are
more than two; an expert's gradients over more than two FSDP shards, which transports add in an order that depends on the place
in the buffer; and the gradient norm that clips (docs/design/moves.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.protocols.model_spec import ModelSpec

from routepack.distributed import collectives
from routepack.torchtitan.model.models import after_parallelizing
from routepack.torchtitan.model.overrides import PlacedRoutedExperts, placed_layers
from routepack.torchtitan.model.private import reduce_scatter_by
from routepack.training.expert_moves import ShardLayout


def make_invariant(spec: ModelSpec, *, max_norm: float) -> None:
    """Make the model that *spec* builds sum alike wherever its experts are, and clip its gradients to *max_norm*.

    TorchTitan's own clipping must be left without effect: ``training.max_norm`` infinite.
    """
    after_parallelizing(spec, _order_sums)
    spec.post_optimizer_build_fn = partial(_clip_before_steps, max_norm)


def _order_sums(model: nn.Module) -> None:
    experts: list[Tensor] = []
    for layer in placed_layers(model):
        layer.add_in_recorded_order()
        experts += layer.inner_experts.parameters()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            reduce_scatter_by(module, RankOrderReduceScatter(), experts)


class RankOrderReduceScatter:
    """A reduce-scatter that adds ranks in their order wherever an element lies; it sends as much as any other.

    Rings and trees begin at a rank that depends on the place. Two ranks give the same sum either way and go by the usual one.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of its own for every call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fill *output_tensor* with this rank's part of the sum."""
        assert op == dist.ReduceOp.SUM, "FSDP was told to use plain sums"
        assert not async_op, "FSDP waits for it on its own stream"
        if group.size() <= 2:
            dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)
            return
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        first, *others = parts.view(group.size(), -1)
        output_tensor.copy_(first)
        for part in others:
            output_tensor.add_(part)


def _clip_before_steps(max_norm: float, optimizers: Any, model_parts: Sequence[nn.Module], parallel_dims: Any) -> None:
    def hook(*_: Any) -> None:
        clip(model_parts[0], max_norm)

    optimizers.register_step_pre_hook(hook)


@torch.no_grad()
def clip(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients down to *max_norm*; gives their norm before. Collective.

    Every expert's sum of squares has a place of its own, by its logical number, and is on one rank alone, so that
    adding ranks up rounds nothing; then all are added in that order.
    """
    experts = list(_experts_with_gradients(model))
    ours = {id(parameter) for _, parameter in experts}
    others = [parameter for parameter in model.parameters() if parameter.grad is not None and id(parameter) not in ours]
    dense = torch.nn.utils.get_total_norm([cast(Tensor, parameter.grad) for parameter in others])
    dense = dense.full_tensor() if isinstance(dense, DTensor) else dense
    squares = collectives.sum_over_ranks(torch.cat([_squares(layer, parameter) for layer, parameter in experts]))
    norm = (squares.sum() + dense.double().square()).sqrt().float()
    for parameters in ([parameter for _, parameter in experts], others):  # on meshes of their own
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm


def _experts_with_gradients(model: nn.Module) -> Iterator[tuple[PlacedRoutedExperts, Tensor]]:
    for layer in placed_layers(model):
        for _, parameter in sorted(layer.inner_experts.named_parameters(recurse=False)):
            if parameter.grad is not None:
                yield layer, parameter


def _squares(layer: PlacedRoutedExperts, parameter: Tensor) -> Tensor:
    """float64 [E * pieces]: each expert's sum of squared gradients, cut as its shards are; zeros where another rank has it."""
    grad, logical_P = cast(Tensor, parameter.grad), layer.physical_to_logical_P
    if not isinstance(grad, DTensor):
        own_E = _by_row(grad)
        return own_E if logical_P is None else torch.zeros_like(own_E).index_copy_(0, logical_P, own_E)
    layout, mesh = ShardLayout.of(grad), grad.device_mesh
    pieces, piece = 1, 0
    for _, chunks, chunk in layout.column_slices:
        pieces, piece = pieces * chunks, piece * chunks + chunk
    squares_EC = torch.zeros(len(grad), pieces, dtype=torch.float64, device=grad.device)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank holds a part of its model's parameters"
    if any(isinstance(axis, Replicate) and place for axis, place in zip(grad.placements, coordinate, strict=True)):
        return squares_EC.flatten()
    slots = torch.from_numpy(layout.rows_of_rank[collectives.this_rank()].astype(np.int64)).to(grad.device)
    squares_EC[slots if logical_P is None else logical_P[slots], piece] = _by_row(grad.to_local())
    return squares_EC.flatten()


def _by_row(grad: Tensor) -> Tensor:
    """float64 [rows]: sums of squares."""
    return torch.linalg.vector_norm(grad.flatten(1), dim=1, dtype=torch.float32).double().square()
