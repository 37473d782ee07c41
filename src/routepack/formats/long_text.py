"""Long base64 text to ids on all cores, without a copy of the text and without all of its bytes at once."""

from __future__ import annotations

import binascii
import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

LONG_TEXT = 1 << 16
"""Characters from which on this is worth it."""
BLOCK = 1 << 19
"""Characters decoded at once: whole ids of every width, since 32 characters are 24 bytes."""


def long_base64(text: str, dtype: np.dtype) -> np.ndarray | None:
    """The ids of *dtype* in *text*, flat; as int16 where all fit. None for what is no base64 or no whole number of ids.

    Four-byte ids that become one-byte ones are never all in memory, so that an import peaks at about its result.
    """
    characters = _characters(text)
    if characters is None or len(characters) % 4:
        return None
    try:
        tail = binascii.a2b_base64(characters[-4:].tobytes(), strict_mode=True)
    except binascii.Error:
        return None
    size = len(characters) // 4 * 3 - 3 + len(tail)
    if size % dtype.itemsize:
        return None
    narrow = np.dtype(np.int16) if dtype.itemsize > 2 else dtype
    ids = _decoded(characters, tail, size, dtype, narrow)
    # Wider ids than int16 holds: a model of more than 32,768 experts, or ids that are none.
    return _decoded(characters, tail, size, dtype, dtype) if ids is not None and not len(ids) and size else ids


def _decoded(characters: np.ndarray, tail: bytes, size: int, dtype: np.dtype, target: np.dtype) -> np.ndarray | None:
    """Block by block; None for other characters than base64's, an empty array where *target* is too narrow."""
    # The compiled kernel costs half a second to load, which `import routepack` should not.
    from routepack.formats._kernels import decode_groups

    ids = np.empty(size // dtype.itemsize, dtype=target)

    def block(start: int) -> str:
        text = characters[start : start + BLOCK]
        is_last = start + BLOCK >= len(characters)
        text = text[:-4] if is_last else text
        data = np.empty(len(text) // 4 * 3 + (len(tail) if is_last else 0), dtype=np.uint8)
        if not decode_groups(text, data):
            return "other text"
        if is_last:
            data[len(data) - len(tail) :] = np.frombuffer(tail, dtype=np.uint8)
        some, first = data.view(dtype), start // 4 * 3 // dtype.itemsize
        if target != dtype and len(some) and not _fits(some, target):
            return "too narrow"
        ids[first : first + len(some)] = some
        return ""

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        problems = set(pool.map(block, range(0, len(characters), BLOCK)))
    if "other text" in problems:
        return None
    return ids[:0] if "too narrow" in problems else ids


def _fits(ids: np.ndarray, target: np.dtype) -> bool:
    return int(ids.min()) >= np.iinfo(target).min and int(ids.max()) <= np.iinfo(target).max


def _characters(text: str) -> np.ndarray | None:
    """The characters of an ASCII text, uint8, where Python keeps them; valid as long as *text* is. None for other text."""
    if not text.isascii():
        return None
    size = ctypes.c_ssize_t()
    address = _AS_UTF8(text, ctypes.byref(size))
    return np.ctypeslib.as_array((ctypes.c_uint8 * size.value).from_address(address)) if size.value else None


_AS_UTF8 = ctypes.pythonapi.PyUnicode_AsUTF8AndSize
_AS_UTF8.restype = ctypes.c_void_p
_AS_UTF8.argtypes = (ctypes.py_object, ctypes.POINTER(ctypes.c_ssize_t))
