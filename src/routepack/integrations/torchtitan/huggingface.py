"""Weights in Hugging Face's format, whatever the layout and the placement: one parameter after another, gathered and written.

TorchTitan's own export names a slot's weight by the slot, and knows no replicated experts. Here every rank gathers a
parameter, puts its experts in logical order, and rank 0 lets the model's adapter name and split it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from routepack import distributed
from routepack.errors import ConfigError

MOST_BYTES = 5 * 10**9
"""Of one file, unless one parameter has more."""


def write(folder: Path, state: Mapping[str, Any], adapter: Any, logical_of_parameter: Mapping[str, np.ndarray]) -> None:
    """Write a model's state into *folder* as safetensors files with an index. Collective; rank 0 writes.

    Args:
        state: TorchTitan's names and tensors, sharded or not.
        adapter: the model's ``state_dict_adapter``.
        logical_of_parameter: int64 [P] for each expert parameter: the expert in each slot.

    Raises:
        ConfigError: the model has no adapter.
    """
    if adapter is None:
        raise ConfigError("this model has no state_dict_adapter, so its weights have no names in Hugging Face's format.")
    writer = _Writer(folder)
    for name, full in _full_tensors(state, logical_of_parameter):
        if distributed.this_rank() == 0:
            writer.add(adapter.to_hf({name: full.cpu()}))
    if distributed.this_rank() == 0:
        writer.finish()
    distributed.meet("weights were written in Hugging Face's format")


@torch.no_grad()
def _full_tensors(state: Mapping[str, Any], logical_of_parameter: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Tensor]]:
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
