"""Weights in Hugging Face's format, whatever the layout and the placement, written and read one parameter after another.

TorchTitan's own export and import name a slot's weight by the slot, and know no replicated experts. To write, every rank
gathers a parameter, puts its experts in logical order, and rank 0 lets the model's adapter name and split it. To read, every
rank takes from the files the experts that its slots hold, and its part of everything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.trainer import Trainer

from routepack.core.errors import CheckpointError, ConfigError, RoutePackError
from routepack.distributed import collectives
from routepack.training import folders
from routepack.training.expert_moves import ShardLayout, take_shard

MOST_BYTES = 5 * 10**9
"""Of one file, unless one parameter has more."""


def export(
    folder: Path,
    model_parts: list[nn.Module],
    config: Trainer.Config,
    logical_of_parameter: Mapping[str, np.ndarray],
    *,
    dtype: torch.dtype,
) -> None:
    """Write a trainer's weights into a new *folder*, which is whole or absent. Collective.

    Raises ConfigError where the model's weights have no names in Hugging Face's format.
    """
    adapter, state = _adapter(config), ModelWrapper(model_parts).state_dict()
    floats = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    unfinished = folders.fresh_folder(folder)
    write(unfinished, floats, adapter, logical_of_parameter)
    folders.commit(unfinished, folder)


def load(
    folder: Path, model_parts: list[nn.Module], config: Trainer.Config, logical_of_parameter: Mapping[str, np.ndarray]
) -> None:
    """Give a trainer the weights in *folder*. Collective: where one rank cannot read them, every rank raises."""
    wrapper = ModelWrapper(model_parts)
    state, error = wrapper.state_dict(), None
    try:
        read(folder, state, _adapter(config), logical_of_parameter)
    except RoutePackError as caught:
        error = caught
    collectives.agree("", "weights", error=error)
    # Parameters were filled in place; those that the model keeps fused under other names are put together here.
    wrapper.load_state_dict(state)


def _adapter(config: Trainer.Config) -> BaseStateDictAdapter:
    spec = config.model_spec
    assert spec is not None
    if spec.state_dict_adapter is None:
        raise ConfigError("this model has no state_dict_adapter, so its weights have no names in Hugging Face's format.")
    return spec.state_dict_adapter(spec.model, None)


def write(
    folder: Path,
    state: Mapping[str, Tensor],
    adapter: BaseStateDictAdapter,
    logical_of_parameter: Mapping[str, np.ndarray],
) -> None:
    """Write a model's state into *folder* as safetensors files with an index. Collective; rank 0 writes.

    Args:
        state: TorchTitan's names and tensors, sharded or not.
        adapter: the model's ``state_dict_adapter``.
        logical_of_parameter: int64 [P] for each expert parameter: the expert in each slot.
    """
    writer = _Writer(folder)
    for name, full in _full_tensors(state, logical_of_parameter):
        if collectives.this_rank() == 0:
            writer.add(adapter.to_hf({name: full.cpu()}))
    if collectives.this_rank() == 0:
        writer.finish()
    collectives.meet("weights were written in Hugging Face's format")


@torch.no_grad()
def _full_tensors(state: Mapping[str, Tensor], logical_of_parameter: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if name in logical_of_parameter:
            full = full[torch.from_numpy(np.argsort(logical_of_parameter[name])).to(full.device)]
        yield name, full


class _Writer:
    """Collects tensors and writes them, a file at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pending: dict[str, Tensor] = {}
        self.files: list[list[str]] = []
        self.total_bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors; writes a file where they would make it too large."""
        added = sum(tensor.nbytes for tensor in tensors.values())
        if self.pending and added + sum(tensor.nbytes for tensor in self.pending.values()) > MOST_BYTES:
            self._write()
        self.pending.update({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()})
        self.total_bytes += added

    def _write(self) -> None:
        self.files.append(sorted(self.pending))
        save_file(self.pending, self.folder / f"part-{len(self.files)}", metadata={"format": "pt"})
        self.pending = {}

    def finish(self) -> None:
        """Write what is left, name the files by their number, and write the index."""
        self._write()
        weight_map = {}
        for number, names in enumerate(self.files, start=1):
            file = f"model-{number:05d}-of-{len(self.files):05d}.safetensors"
            (self.folder / f"part-{number}").rename(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


@torch.no_grad()
def read(
    folder: Path,
    state: Mapping[str, Tensor],
    adapter: BaseStateDictAdapter,
    logical_of_parameter: Mapping[str, np.ndarray],
) -> None:
    """Fill a model's state in place from the safetensors files in *folder*. Every rank reads, and no rank waits for another.

    A rank reads the rows of the experts that it holds; of any other parameter it has the whole in memory for a moment.

    Args:
        state: TorchTitan's names and tensors, sharded or not.
        adapter: the model's ``state_dict_adapter``.
        logical_of_parameter: int64 [P] for each expert parameter: the expert in each slot.

    Raises:
        CheckpointError: files that cannot be read, names or shapes that are not this model's. Nothing was changed then, unless
            a file broke off in the middle.
    """
    with _Files(folder) as files:
        names = {name: _names(adapter, name, value) for name, value in state.items()}
        files.check({one: shape for parts in names.values() for one, shape in parts.items()})
        for name, value in state.items():
            parts = list(names[name])
            if name in logical_of_parameter:
                _take_experts(value, [parts[expert] for expert in logical_of_parameter[name]], files)
            else:
                take_shard(value, files.tensor(parts[0]).to(value.device))


def _names(adapter: BaseStateDictAdapter, name: str, value: Tensor) -> dict[str, torch.Size]:
    """What a parameter is called in Hugging Face's format, with shapes: one name, or one for each expert in order."""
    return {one: part.shape for one, part in adapter.to_hf({name: torch.empty(value.shape, device="meta")}).items()}


def _take_experts(weight: Tensor, names_P: Sequence[str], files: _Files) -> None:
    """Fill this rank's rows of a weight [P, ...], reading the tensors that belong there; *names_P*: of each slot's."""
    if not isinstance(weight, DTensor):
        for row, name in zip(weight, names_P, strict=True):
            row.copy_(files.tensor(name))
        return
    layout = ShardLayout.of(weight)
    rows = layout.rows_of_rank[collectives.this_rank()]
    for row, slot in zip(weight.to_local(), rows, strict=True):
        row.copy_(layout.columns(files.tensor(names_P[slot])[None])[0])


@dataclass
class _Files:
    """The safetensors files of a folder, opened one by one as their tensors are asked for."""

    folder: Path

    def __enter__(self) -> _Files:
        self.opened: dict[Path, safe_open] = {}
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.folder} holds no safetensors files: name a folder of Hugging Face's format.")
        self.file_of = {name: path for path in paths for name in self._open(path).keys()}  # noqa: SIM118 - no mapping
        return self

    def __exit__(self, *_: Any) -> None:
        self.opened.clear()

    def _open(self, path: Path) -> safe_open:
        if path not in self.opened:
            try:
                self.opened[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read ({error}): it may be truncated; fetch it again.") from error
        return self.opened[path]

    def tensor(self, name: str) -> Tensor:
        """A tensor of the files, in their dtype."""
        return self._open(self.file_of[name]).get_tensor(name)

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise CheckpointError unless the files hold exactly these names, with these shapes."""
        if missing := sorted(shapes.keys() - self.file_of.keys()):
            raise CheckpointError(f"{self.folder} lacks {len(missing)} of the model's weights, such as {missing[0]}.")
        derived = {name for name in self.file_of if name.endswith("rotary_emb.inv_freq")}
        if unknown := sorted(self.file_of.keys() - shapes.keys() - derived):
            raise CheckpointError(
                f"{self.folder} has {len(unknown)} weights that are no parameter of this model, such as {unknown[0]}: it is of "
                "another model."
            )
        for name, shape in shapes.items():
            found = tuple(self._open(self.file_of[name]).get_slice(name).get_shape())
            if found != tuple(shape):
                raise CheckpointError(f"{name} has shape {found} in {self.folder} and {tuple(shape)} in the model.")
