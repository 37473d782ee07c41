"""Where each expert's rows lie under FSDP2 and expert parallelism, and how a new placement moves them.

TorchTitan shards expert weights [P, ...] over EP ranks first (whole experts, in blocks) and over the FSDP ranks of the
expert mesh second: by experts where there are enough, else inside each expert (``Shard(1)``). A replicate axis copies all of
it. The optimizer's moments have the layout of their weight.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from routepack.core.arrays import digest_of
from routepack.core.errors import PlanError, RankLostError, RoutePackError
from routepack.core.plans import ExpertPlacement
from routepack.distributed import collectives
from routepack.distributed.exchange_rows import RowExchange, RowMoves

_OUTER_TO_INNER = ("ep", "efsdp", "fsdp", "dp_shard")
"""The mesh axes that split expert slots, in the order in which they split: every EP block is cut again by FSDP."""


STAGING_BYTES = 256 * 2**20
"""The most memory that a rank uses by default to receive rows."""
CPU_STAGING_BYTES = 64 * 2**20
"""On a CPU more than this is no faster."""


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
        return self.columns(full[torch.from_numpy(self.rows_of_rank[collectives.this_rank()]).to(full.device)])

    def columns(self, rows: Tensor) -> Tensor:
        """Of some whole rows [rows, ...], the part of each that this rank holds."""
        for dim, chunks, chunk in self.column_slices:
            kept = _chunk_of(np.arange(rows.shape[dim]), [(chunks, chunk)])
            rows = rows.index_select(dim, torch.from_numpy(kept).to(rows.device))
        return rows

    def moves(self, source_P: np.ndarray) -> RowMoves:
        """The moves after which slot p holds what slot ``source_P[p]`` held."""
        rank_of_P, row_of_P = np.empty_like(source_P), np.empty_like(source_P)
        for rank, rows in self.rows_of_rank.items():
            rank_of_P[rows], row_of_P[rows] = rank, np.arange(len(rows))
        return RowMoves(rank_of_P=rank_of_P, row_of_P=row_of_P, source_P=source_P)


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


@torch.no_grad()
def take_shard(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's part of a full tensor into a parameter, sharded or not."""
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(ShardLayout.of(parameter).local(full))
    else:
        parameter.copy_(full)


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


@dataclass(frozen=True, kw_only=True)
class MoveFigures:
    """What one move took."""

    num_experts: int = 0
    """Experts, over all layers, that changed their EP rank."""
    bytes_sent: int = 0
    """Bytes that this rank sent to others."""
    staged_bytes: int = 0
    """Staging memory that was used, in bytes."""
    seconds: float = 0.0
    """From the agreement to the last row, on this rank."""


def move_experts(
    layers: Sequence[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    old: ExpertPlacement,
    new: ExpertPlacement,
    *,
    num_ranks: int,
    staging: StagingMemory,
    error: RoutePackError | None = None,
) -> MoveFigures:
    """Move all layers' expert weights with their optimizer state, layer by layer; collective, between optimizer steps.

    Everything that can fail on one rank alone is done before the ranks agree to start, staging memory included.

    Args:
        layers: for each MoE layer the module whose own parameters, DTensors [P, ...], are its experts' weights.
        num_ranks: EP ranks, for the count of experts.
        staging: what a rank receives into.
        error: one that this rank has already; then no rank moves anything.

    Raises:
        PlanError: a rank cannot move, or ranks would move differently; every rank keeps the old placement.
        RankLostError: a rank was lost during the move; the experts are torn, and the run must end.
    """
    started = time.perf_counter()
    device = next(parameter.device for layer in layers for parameter in layer.parameters())
    exchanges: list[tuple[int, RowExchange]] = []
    memory = torch.empty(0, dtype=torch.uint8, device=device)
    if error is None:
        try:
            exchanges = _exchanges(layers, list(optimizers), slot_sources(old, new), staging.limit_on(device))
            memory = staging.take(max((exchange.staged_bytes for _, exchange in exchanges), default=0), device)
        except RoutePackError as caught:
            error = caught
    signatures = [exchange.signature for _, exchange in exchanges]
    digest = digest_of(old.physical_to_logical_LP, new.physical_to_logical_LP, *signatures)
    collectives.agree(digest, "placement", error=error, device=device)
    sent = 0
    for layer, exchange in exchanges:
        sent += _moved(layer, len(layers), exchange, memory)
    if device.type != "cpu":
        # The last row has arrived, or the error is here, before anybody relies on the new placement.
        torch.accelerator.synchronize()
    return MoveFigures(
        num_experts=num_experts_moved(old, new, num_ranks),
        bytes_sent=sent,
        staged_bytes=len(memory),
        seconds=time.perf_counter() - started,
    )


@dataclass(kw_only=True)
class StagingMemory:
    """What a rank receives into, and keeps rows in that change their place on it."""

    limit_bytes: int = STAGING_BYTES
    """It is never more than this."""
    _kept: Tensor | None = None

    def limit_on(self, device: torch.device) -> int:
        """The most bytes that it may have on *device*."""
        return min(self.limit_bytes, CPU_STAGING_BYTES) if device.type == "cpu" else self.limit_bytes

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """uint8 [num_bytes]. Raises PlanError where there is not so much."""
        if device.type != "cpu":
            return _allocated(num_bytes, device)  # torch keeps an accelerator's memory itself
        # Fresh memory of a CPU is mapped page by page at the first touch, which takes longer than the copy.
        if self._kept is None or len(self._kept) < num_bytes:
            self._kept = None
            self._kept = _allocated(num_bytes, device)
        return self._kept[:num_bytes]


def _allocated(num_bytes: int, device: torch.device) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch raises no narrower one on a CPU
        raise PlanError(f"{num_bytes} bytes of staging memory cannot be had: lower trainer.staging_bytes.") from error


def _moved(layer: int, num_layers: int, exchange: RowExchange, staging: Tensor) -> int:
    try:
        return exchange.run(staging)
    except RankLostError as error:
        raise RankLostError(
            f"while the experts of MoE layer {layer} (of {num_layers}) moved, {error} Their weights are torn and cannot be "
            "used or saved."
        ) from error


def _exchanges(
    layers: Sequence[nn.Module], optimizers: list[torch.optim.Optimizer], source_LP: np.ndarray, staging_bytes: int
) -> list[tuple[int, RowExchange]]:
    """The exchanges of every layer in which a slot gets another expert, each with the layer's number."""
    moving = [number for number, source_P in enumerate(source_LP) if (source_P != np.arange(len(source_P))).any()]
    return [
        (number, one)
        for number in moving
        for one in layer_exchanges(layers[number], optimizers, source_LP[number], staging_bytes)
    ]


def layer_exchanges(
    experts: nn.Module, optimizers: Iterable[torch.optim.Optimizer], source_P: np.ndarray, staging_bytes: int
) -> list[RowExchange]:
    """One layer's exchanges, ready to run: one for all tensors of the weights' layout, and one for each other layout.

    Raises PlanError where an optimizer keeps something for the experts that cannot follow them.
    """
    by_layout: dict[tuple, tuple[ShardLayout, list[Tensor]]] = {}
    for tensor, layout in expert_tensors(experts, optimizers):
        key = tuple((rank, *rows.tolist()) for rank, rows in layout.rows_of_rank.items())
        by_layout.setdefault(key, (layout, []))[1].append(tensor)
    return [
        RowExchange.of(shards, layout.moves(source_P), staging_bytes=staging_bytes) for layout, shards in by_layout.values()
    ]


def expert_tensors(experts: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[Tensor, ShardLayout]]:
    """This rank's shard of each expert weight and of all optimizer state that it has, in one order on every rank."""
    optimizers = list(optimizers)
    for _, parameter in sorted(experts.named_parameters(recurse=False)):
        weight = cast(DTensor, parameter)
        layout = ShardLayout.of(weight)
        yield weight.to_local(), layout
        for optimizer in optimizers:
            for name, state in state_tensors(optimizer.state.get(parameter, {})):
                if state.numel() > 1:  # a step count is the same for every expert
                    yield _state_shard(name, state, weight, layout)


def state_tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of one parameter's optimizer state by dotted name, those of nested mappings included."""
    for name, value in sorted(state.items()):
        if isinstance(value, Mapping):
            yield from state_tensors(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{name}", value


def _state_shard(name: str, state: Tensor, weight: DTensor, layout: ShardLayout) -> tuple[Tensor, ShardLayout]:
    if isinstance(state, DTensor) and len(state) == len(weight):
        same = state.device_mesh == weight.device_mesh and state.placements == weight.placements
        return state.to_local(), layout if same else ShardLayout.of(state)
    if not isinstance(state, DTensor) and state.ndim and len(state) == len(weight.to_local()):
        return state, layout
    raise PlanError(
        f"the optimizer keeps {name} of shape {tuple(state.shape)} for experts of shape {tuple(weight.shape)}: it has no row "
        "for each expert and cannot follow them when they move. Use an optimizer with state for each element or expert, or "
        "an IdentityRerouter."
    )
