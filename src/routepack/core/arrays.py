"""Arrays as the nouns hold them: converted once, checked on construction, digested for plans."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from routepack.core.errors import TraceError


def digest_of(*arrays: np.ndarray) -> str:
    """SHA-256 over dtype, shape and bytes of each array, in order."""
    digest = hashlib.sha256()
    for array in arrays:
        array = np.ascontiguousarray(array)
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def to_numpy(value: Any, name: str) -> np.ndarray:
    """*value* as a numpy array; a CPU torch tensor shares its memory. Raises TraceError naming *name*."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{name} is not an array: {error}") from error


def checked_array(noun: Any, name: str, dtype: Any = None, *, ndim: int) -> np.ndarray:
    """Replace field *name* of a frozen noun by a numpy array of *ndim* axes and *dtype*; a lossy cast raises TraceError."""
    value = to_numpy(getattr(noun, name), name)
    if value.ndim != ndim:
        raise TraceError(f"{name} has shape {value.shape}; {ndim} axes are needed.")
    if dtype is not None and value.dtype != dtype:
        if np.issubdtype(dtype, np.integer) and value.dtype.kind not in "iub":
            raise TraceError(f"{name} has dtype {value.dtype}; whole numbers ({np.dtype(dtype)}) are needed.")
        cast = value.astype(dtype)
        if value.size and not np.array_equal(cast, value):
            raise TraceError(f"{name} has dtype {value.dtype} with values that {np.dtype(dtype)} cannot hold.")
        value = cast
    object.__setattr__(noun, name, value)
    return value


def joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The arrays end to end; None where any is missing."""
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if len(there) == len(parts) else None


def as_plain(value: Any, *, finite: bool = False) -> Any:
    """*value* with arrays and tuples as lists, numpy numbers as Python's, and mappings as dicts.

    With *finite*, floats that are not become None: JSON has no number for them.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): as_plain(item, finite=finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item, finite=finite) for item in value]
    return None if finite and isinstance(value, float) and not math.isfinite(value) else value
