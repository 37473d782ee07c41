"""Checkpoints hold experts in logical order: planners that write each slot's row where its expert belongs, and read it back.

Nothing is moved or copied for it. To a distributed checkpoint a tensor is a set of chunks at offsets; a chunk of an expert
tensor is one slot's row here, at the offset of the expert in it. Whoever loads, at any number of ranks and with any placement,
asks for the rows of its own slots by the same offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from routepack.core.errors import PlanError
from routepack.distributed import collectives
from routepack.training.expert_moves import ShardLayout

Name = str
"""A tensor's name in the flattened state: a parameter's, or ``optimizer.state.<parameter>.<state>``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LogicalRows:
    """Which expert each slot holds, for every expert parameter by name."""

    logical_of_parameter: Mapping[str, np.ndarray]
    """int64 [P] for each name."""

    def of(self, name: Name, value: Any) -> np.ndarray | None:
        """int64 [P]: the expert of each slot of a tensor, or None where it has no slots.

        Raises PlanError for a tensor that belongs to experts but has no sharded row for each.
        """
        if not isinstance(value, Tensor) or value.numel() <= 1:
            return None
        parameter = name.removeprefix("optimizer.state.")
        while parameter and parameter not in self.logical_of_parameter:
            parameter = parameter.rpartition(".")[0]
        logical_P = self.logical_of_parameter.get(parameter)
        if logical_P is not None and not (isinstance(value, DTensor) and len(value) == len(logical_P)):
            raise PlanError(
                f"{name} of shape {tuple(value.shape)} belongs to {len(logical_P)} experts but has no sharded row for each, so "
                "it cannot be saved or loaded in logical order: use an optimizer whose state is sharded like its parameter."
            )
        return logical_P


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertChunks:
    """This rank's rows of one expert tensor, each a chunk of its own."""

    tensor: DTensor
    row_of_offset: Mapping[int, int]
    """Logical expert -> the row of this rank's shard that holds it."""
    inner_offsets: tuple[int, ...]
    """Where this shard begins in the dimensions within an expert."""

    @classmethod
    def of(cls, tensor: DTensor, logical_P: np.ndarray) -> ExpertChunks:
        """The chunks of a sharded tensor [P, ...]."""
        layout = ShardLayout.of(tensor)
        slots = layout.rows_of_rank[collectives.this_rank()]
        begin = [0] * (tensor.ndim - 1)
        for dim, num_chunks, chunk in layout.column_slices:
            begin[dim - 1] = min(chunk * -(-tensor.shape[dim] // num_chunks), tensor.shape[dim])
        rows = {int(logical_P[slot]): row for row, slot in enumerate(slots)}
        return cls(tensor=tensor, row_of_offset=rows, inner_offsets=tuple(begin))

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """Offset and size of every row in the logical tensor."""
        sizes = torch.Size([1, *self.tensor.to_local().shape[1:]])
        offsets = [torch.Size([expert, *self.inner_offsets]) for expert in self.row_of_offset]
        return [ChunkStorageMetadata(offsets=offset, sizes=sizes) for offset in offsets]

    def row(self, index: MetadataIndex) -> Tensor:
        """The row [1, ...] that a chunk's index names, in the shard's own storage."""
        assert index.offset is not None, "a chunk has an offset"
        row = self.row_of_offset[index.offset[0]]
        return self.tensor.to_local().detach()[row : row + 1]

    def write_items(self, name: Name) -> list[WriteItem]:
        """One for each row."""
        properties = TensorProperties.create_from_tensor(self.tensor.to_local())
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.tensor.size()),
            )
            for chunk in self.chunks
        ]


def _expert_chunks(state_dict: Mapping[str, Any], rows: LogicalRows) -> dict[Name, ExpertChunks]:
    found = {name: rows.of(name, value) for name, value in state_dict.items()}
    return {
        name: ExpertChunks.of(cast(DTensor, state_dict[name]), logical_P)
        for name, logical_P in found.items()
        if logical_P is not None
    }


class LogicalSavePlanner(DefaultSavePlanner):
    """Writes expert tensors in logical order, everything else as torch does."""

    def __init__(self, rows: LogicalRows) -> None:
        super().__init__()
        self.rows = rows
        self.experts: dict[Name, ExpertChunks] = {}

    def create_local_plan(self) -> SavePlan:
        """What this rank writes: one item for each row of an expert tensor, and what torch plans for the rest."""
        self.experts = _expert_chunks(self.state_dict, self.rows)
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.index.fqn not in self.experts]
        items += [item for name, chunks in self.experts.items() for item in chunks.write_items(name)]
        self.plan = replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What to write at *index*: the row of an expert tensor, or what torch finds."""
        if index.fqn in self.experts:
            return self.experts[index.fqn].row(index)
        return super().lookup_object(index)


class LogicalLoadPlanner(DefaultLoadPlanner):
    """Reads expert tensors from logical order into the slots of a placement, in place."""

    def __init__(self, rows: LogicalRows) -> None:
        super().__init__()
        self.rows = rows
        self.experts: dict[Name, ExpertChunks] = {}

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads: the rows of expert tensors one by one, and what torch plans for the rest."""
        self.experts = _expert_chunks(self.state_dict, self.rows)
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.dest_index.fqn not in self.experts]
        assert self.metadata is not None, "torch has read the metadata"
        for name, chunks in self.experts.items():
            saved = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[name])
            items += create_read_items_for_chunk_list(name, saved, chunks.chunks)
        return replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where to put what is read for *index*: the row of an expert tensor, or what torch finds."""
        if index.fqn in self.experts:
            return self.experts[index.fqn].row(index)
        return super().lookup_tensor(index)
