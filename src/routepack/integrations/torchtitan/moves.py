"""Where each expert's rows lie under FSDP2 and expert parallelism, and how a new placement moves them.

TorchTitan shards expert weights [P, ...] over EP ranks first (whole experts, in blocks) and over the FSDP ranks of the
expert mesh second: by experts where there are enough, else inside each expert (``Shard(1)``). A replicate axis copies all of
it. The optimizer's moments have the layout of their weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from routepack import distributed
from routepack.integrations.torchtitan.overrides import PlacedRoutedExperts
from routepack.planned import ExpertPlacement

_OUTER_TO_INNER = ("ep", "efsdp", "fsdp")
"""The mesh axes that split expert slots, in the order in which they split: every EP block is cut again by FSDP."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardLayout:
    """Which rows (dimension 0) of a sharded parameter each rank holds."""

    rows_of_rank: Mapping[int, np.ndarray]
    """World rank -> int64 rows in the order of its shard, for this rank and those that hold its other rows."""
    column_slices: tuple[tuple[int, int, int], ...]
    """(dimension, chunks, this rank's chunk) for every axis that splits another dimension."""

    @classmethod
    def of(cls, parameter: DTensor) -> ShardLayout:
        """The layout of a parameter as TorchTitan and FSDP2 shard it."""
        mesh = parameter.device_mesh
        axes, mine = mesh.mesh_dim_names, mesh.get_coordinate()
        assert axes is not None, "TorchTitan names its axes"
        assert mine is not None, "this rank holds a part of its model's parameters"
        row_axes = sorted((axis for axis in range(mesh.ndim) if _splits(parameter, axis, 0)), key=lambda a: _depth(axes[a]))
        others = [axis for axis in range(mesh.ndim) if axis not in row_axes]
        rows_of_rank = {}
        for coordinate in product(*(range(size) for size in mesh.shape)):
            if all(coordinate[axis] == mine[axis] for axis in others):
                cuts = [(mesh.size(axis), coordinate[axis]) for axis in row_axes]
                rows_of_rank[int(mesh.mesh[coordinate])] = _chunk_of(np.arange(parameter.shape[0]), cuts)
        slices = [(axis, dim) for axis in others for dim in range(1, parameter.ndim) if _splits(parameter, axis, dim)]
        column_slices = tuple((dim, mesh.size(axis), mine[axis]) for axis, dim in slices)
        return cls(rows_of_rank=rows_of_rank, column_slices=column_slices)

    def local(self, full: Tensor) -> Tensor:
        """This rank's shard of a full tensor."""
        shard = full[torch.from_numpy(self.rows_of_rank[distributed.this_rank()]).to(full.device)]
        for dim, chunks, chunk in self.column_slices:
            kept = _chunk_of(np.arange(shard.shape[dim]), [(chunks, chunk)])
            shard = shard.index_select(dim, torch.from_numpy(kept).to(full.device))
        return shard

    def moves(self, source_P: np.ndarray) -> distributed.RowMoves:
        """The moves after which slot p holds what slot ``source_P[p]`` held."""
        rank_of_P, row_of_P = np.empty_like(source_P), np.empty_like(source_P)
        for rank, rows in self.rows_of_rank.items():
            rank_of_P[rows], row_of_P[rows] = rank, np.arange(len(rows))
        return distributed.RowMoves(rank_of_P=rank_of_P, row_of_P=row_of_P, source_P=source_P)


def _splits(parameter: DTensor, axis: int, dim: int) -> bool:
    # A strided shard (FSDP inside an EP block) answers False to is_shard() but has a dim.
    return getattr(parameter.placements[axis], "dim", None) == dim


def _depth(axis_name: str) -> int:
    return _OUTER_TO_INNER.index(axis_name)


def _chunk_of(rows: np.ndarray, cuts: Sequence[tuple[int, int]]) -> np.ndarray:
    for num_chunks, chunk in cuts:
        size = -(-len(rows) // num_chunks)
        rows = rows[chunk * size : (chunk + 1) * size]
    return rows


def slot_sources(old: ExpertPlacement, new: ExpertPlacement) -> np.ndarray:
    """int64 [L, P]: the slot in which, under *old*, sits the expert that *new* wants in each slot.

    >>> old, new = ([ExpertPlacement(physical_to_logical_LP=[row]) for row in ([0, 2, 1], [2, 0, 1])])
    >>> slot_sources(old, new).tolist()
    [[1, 0, 2]]
    """
    return np.take_along_axis(old.logical_to_physical_LE, new.physical_to_logical_LP, axis=1).astype(np.int64)


def num_experts_moved(old: ExpertPlacement, new: ExpertPlacement, num_ranks: int) -> int:
    """How many experts, over all layers, *new* puts on another of *num_ranks* EP ranks than *old*."""
    return int((old.rank_of_LE(num_ranks) != new.rank_of_LE(num_ranks)).sum())


def move_layer(layer: PlacedRoutedExperts, optimizers: Iterable[torch.optim.Optimizer], source_P: np.ndarray) -> None:
    """Move one layer's expert weights with their optimizer state; collective, between optimizer steps."""
    shards = [tensor.to_local() for tensor in expert_tensors(layer.inner_experts, optimizers)]
    layout = ShardLayout.of(next(layer.inner_experts.parameters(recurse=False)))
    distributed.exchange_rows(shards, layout.moves(source_P))


def expert_tensors(experts: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[DTensor]:
    """Each expert weight, followed by its optimizer state of the same shape (both moments), in one order on every rank."""
    optimizers = list(optimizers)
    for _, parameter in sorted(experts.named_parameters(recurse=False)):
        yield cast(DTensor, parameter)
        for optimizer in optimizers:
            yield from _moments(parameter, optimizer.state.get(parameter, {}))


def _moments(parameter: Tensor, state: Mapping[str, Any]) -> Iterator[DTensor]:
    for _, value in sorted(state.items()):
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            yield cast(DTensor, value)
