"""Recorded ids as they travel: arrays, bytes, base64, nested lists. No size is believed before it is checked."""

from __future__ import annotations

import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from routepack.core.arrays import to_numpy
from routepack.core.checks import whole
from routepack.core.errors import TraceError
from routepack.traces.formats.import_options import ImportReport
from routepack.traces.formats.model_routing import ModelRouting

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
ENVELOPE = "nrlre1"
"""What NeMo-RL's strings begin with: ``nrlre1:<dtype>:<S>x<L>x<K>:<base64>``."""
BLOCK = 1 << 18
"""Characters of base64 text decoded at once: whole ids of every width, since 32 characters are 24 bytes."""
LISTS = "Routes came as nested lists, which take seconds to convert: arrays or bytes are preferred."


def decoded(
    value: Any, where: str, model: ModelRouting, report: ImportReport, *, dtype: str = "int32", num_rows: int | None = None
) -> np.ndarray | None:
    """Ids [rows, layers, K] in whatever integer dtype they came; None for None.

    Args:
        value: an array or tensor of three axes, or of two [rows, L * K]; nested lists; base64 text or bytes; a mapping with
            ``data``, ``shape`` and ``dtype``; or an envelope of NeMo-RL.
        dtype: of flat bytes that do not say theirs.
        num_rows: of flat bytes, where the caller knows.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return _from_mapping(value, where)
    if isinstance(value, str) and value.startswith(f"{ENVELOPE}:"):
        return _from_envelope(value, where)
    if isinstance(value, str | bytes | bytearray | memoryview):
        ids = _ids(value, dtype, where)
        return _shaped(ids, _flat_shape(len(ids), where, model, num_rows), where)
    if isinstance(value, list | tuple):
        report.note(LISTS)
    return checked_ids(to_numpy(value, f"{where}: routed_experts"), where, model)


def checked_ids(ids: np.ndarray, where: str, model: ModelRouting) -> np.ndarray:
    """*ids* with three axes. Raises TraceError for anything but whole numbers."""
    if ids.size == 0 and ids.dtype.kind == "f" and ids.ndim <= 3:
        # An empty list has no dtype to speak of.
        ids = ids.astype(np.int32)
    if ids.dtype.kind not in "iu":
        raise TraceError(f"{where}: routed_experts has dtype {ids.dtype} and shape {ids.shape}; whole numbers are needed.")
    if ids.ndim == 2 and model.top_k and ids.shape[1] and ids.shape[1] % model.top_k == 0:
        ids = ids.reshape(len(ids), ids.shape[1] // model.top_k, model.top_k)
    if ids.size == 0 and ids.ndim != 3:
        return np.empty((0, model.num_layers or len(model.moe_layers or (0,)), model.top_k or 1), dtype=ids.dtype)
    if ids.ndim != 3:
        raise TraceError(
            f"{where}: routed_experts has shape {ids.shape}; [rows, layers, top_k] is needed, or [rows, layers * top_k] with "
            f"model.top_k (which is {model.top_k})."
        )
    return ids


def encoded(ids_TLK: np.ndarray) -> str:
    """Base64 text of the array's bytes."""
    return binascii.b2a_base64(np.ascontiguousarray(ids_TLK).reshape(-1).view(np.uint8).data, newline=False).decode("ascii")


def envelope(ids_TLK: np.ndarray) -> str:
    """The string that NeMo-RL sends over HTTP."""
    return f"{ENVELOPE}:{ids_TLK.dtype.name}:{'x'.join(map(str, ids_TLK.shape))}:{encoded(ids_TLK)}"


def _from_mapping(payload: Mapping, where: str) -> np.ndarray:
    data = payload.get("data")
    if isinstance(data, memoryview) and payload.get("encoding", "base64") == "base64":
        # verifiers keeps the base64 text of a response as a view of its bytes.
        data = _base64(data, where)
    if not isinstance(data, str | bytes | bytearray | memoryview):
        raise TraceError(f"{where}: routed_experts has no data, as bytes or base64 text.")
    shape = _shape(payload.get("shape"), where)
    return _shaped(_ids(data, payload.get("dtype", "uint8"), where), shape, where)


def _from_envelope(text: str, where: str) -> np.ndarray:
    parts = text.split(":", 3)
    if len(parts) != 4:
        raise TraceError(f"{where}: an envelope reads {ENVELOPE}:<dtype>:<S>x<L>x<K>:<base64>; parts are missing.")
    sizes = parts[2].split("x")
    if not all(size.isascii() and size.isdecimal() and len(size) < 16 for size in sizes):
        raise TraceError(f"{where}: an envelope's shape reads <S>x<L>x<K>, not {parts[2][:40]!r}.")
    shape = _shape([int(size) for size in sizes], where)
    return _shaped(_ids(parts[3], parts[1], where), shape, where)


def _ids(data: str | bytes | bytearray | memoryview, dtype_name: Any, where: str) -> np.ndarray:
    """The ids of *dtype_name* that base64 text or bytes hold, flat; long text of wide ids gives int16 where all fit."""
    dtype = _dtype(dtype_name, where)
    if isinstance(data, str):
        ids = _narrowed(data, dtype) if len(data) > BLOCK and dtype.itemsize > 2 else None
        if ids is not None:
            return ids
        data = _base64(data, where)
    size = memoryview(data).nbytes
    if size % dtype.itemsize:
        raise TraceError(f"{where}: routed_experts has {size} bytes, no multiple of {dtype}'s. Was it cut off?")
    return np.frombuffer(data, dtype=dtype) if size else np.empty(0, dtype=dtype)


def _narrowed(text: str, dtype: np.dtype) -> np.ndarray | None:
    """The ids of base64 text as int16, decoded block by block, so that the wide ones of a sequence are never all in memory.

    None where an id does not fit, or the text is not whole: decoding it at once tells which. Padding inside the text ends a
    block short of a whole number of ids, which four or eight bytes wide show.
    """
    ids = np.empty(len(text) // 4 * 3 // dtype.itemsize, np.int16)
    size = 0
    for first in range(0, len(text), BLOCK):
        try:
            block = np.frombuffer(binascii.a2b_base64(text[first : first + BLOCK], strict_mode=True), dtype)
        except ValueError:
            return None
        if block.min() < np.iinfo(np.int16).min or block.max() > np.iinfo(np.int16).max:
            return None
        ids[size : size + len(block)] = block
        size += len(block)
    return ids[:size]


def _base64(text: str | memoryview, where: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise TraceError(f"{where}: routed_experts is no base64 text ({error}): was it cut off?") from error


def _shape(shape: Any, where: str) -> tuple[int, int, int]:
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) != 3:
        raise TraceError(f"{where}: routed_experts has shape {str(shape)[:60]}; three sizes [rows, layers, top_k] are needed.")
    rows, layers, top_k = (whole(f"{where}: shape", size, least=0, error=TraceError) for size in shape)
    return rows, layers, top_k


def _dtype(name: Any, where: str) -> np.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise TraceError(f"{where}: routed_experts has dtype {str(name)[:40]!r}; one of {', '.join(DTYPES)} is needed.")
    return np.dtype(name)


def _flat_shape(num_ids: int, where: str, model: ModelRouting, num_rows: int | None) -> tuple[int, int, int]:
    """The shape of ids that do not say theirs. It is not guessed from *num_rows*, of which there may be one more."""
    layers, top_k = model.num_layers, model.top_k
    if not layers or not top_k:
        raise TraceError(f"{where}: flat routes need num_layers and top_k of the model (they are {layers} and {top_k}).")
    if num_rows and num_rows > 0 and num_ids > num_rows * layers * top_k and num_ids % (num_rows * top_k) == 0:
        found = num_ids // (num_rows * top_k)
        if num_ids != (num_rows + 1) * layers * top_k and found <= 2 * layers:
            raise TraceError(
                f"{where}: {num_ids} ids for {num_rows} rows of top-{top_k} make {found} layers; the model has "
                f"num_layers={layers}: leave draft (MTP) layers out, or correct num_layers."
            )
    return num_ids // (layers * top_k), layers, top_k


def _shaped(ids: np.ndarray, shape: tuple[int, int, int], where: str) -> np.ndarray:
    """Flat *ids* in that shape. Raises TraceError where it has another number of them."""
    if math.prod(shape) != len(ids):
        raise TraceError(
            f"{where}: routed_experts has {len(ids)} ids; shape {list(shape)} has {math.prod(shape)}. Was it cut off?"
        )
    return ids.reshape(shape)
