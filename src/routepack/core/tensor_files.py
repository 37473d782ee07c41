"""safetensors files: mapped into memory when read, whole or absent when written, and never pickled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from routepack.core.errors import ConfigError, TraceError
from routepack.core.files import atomic_path, is_folder

_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "F16": np.float16, "U32": np.uint32,
    "I32": np.int32, "F32": np.float32, "U64": np.uint64, "I64": np.int64, "F64": np.float64,
}  # fmt: skip


def read_tensors(path: str | Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and memory-mapped tensors. safetensors checks the header and the file's size; we map the bytes."""
    if is_folder(path):
        raise TraceError(f"{path} is a folder: name a file.")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
        with Path(path).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (OSError, ValueError) as error:
        raise TraceError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except SafetensorError as error:
        raise TraceError(f"{path} is not a whole safetensors file ({error}): it may be truncated; write it again.") from error
    header.pop("__metadata__", None)
    return metadata, {name: _map(path, name, entry, 8 + size) for name, entry in header.items()}


def _map(path: str | Path, name: str, entry: dict[str, Any], start: int) -> np.ndarray:
    if entry["dtype"] not in _DTYPES:
        raise TraceError(f"{path}: tensor {name!r} has dtype {entry['dtype']}, which RoutePack does not read.")
    shape, dtype = tuple(entry["shape"]), np.dtype(_DTYPES[entry["dtype"]])
    if 0 in shape:
        return np.empty(shape, dtype)
    array = np.memmap(path, dtype, "r", start + entry["data_offsets"][0], shape)
    return np.asarray(array) if array.flags.aligned else np.array(array)


def write_tensors(path: str | Path, tensors: Mapping[str, np.ndarray | None], metadata: Mapping[str, str]) -> None:
    """Write the tensors that are not None. Raises ConfigError where *path* cannot be written."""
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items() if array is not None}
    with atomic_path(path) as temporary:
        try:
            save_file(arrays, temporary, metadata=dict(metadata))
        except SafetensorError as error:
            raise ConfigError(f"cannot write {path}: {error}: choose another place.") from error


def check_format(path: str | Path, metadata: Mapping[str, str], *formats: str) -> None:
    """Raise TraceError unless the file at *path* says that it is of one of *formats*."""
    if metadata.get("format") not in formats:
        wanted = " or ".join(map(repr, formats))
        raise TraceError(f"{path} has format {metadata.get('format', '(none)')!r}; {wanted} is needed.")


def check_names(path: str | Path, tensors: Mapping[str, np.ndarray], names: Iterable[str], form: str) -> None:
    """Raise TraceError unless all *names* are among *tensors*; *form* is the file's format."""
    for name in names:
        if name not in tensors:
            raise TraceError(f"{path} has no tensor {name!r}, which every {form} file has: write it again.")
