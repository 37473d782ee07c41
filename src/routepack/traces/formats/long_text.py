"""Long base64 text to ids on all cores, without a copy of the text and without all of its bytes at once."""

from __future__ import annotations

import binascii
import ctypes

import numpy as np

from routepack.core.threads import on_all_cores

LONG_TEXT = 1 << 16
"""Characters from which on this is worth it."""
BLOCK = 1 << 18
"""Characters decoded at once, which fit a core's cache: whole ids of every width, since 32 characters are 24 bytes."""
STEP = 16
"""Characters that the kernel decodes together."""


def long_base64(text: str, dtype: np.dtype) -> np.ndarray | None:
    """The ids of *dtype* in *text*, flat; as int16 where all fit. None for what is no base64 or no whole number of ids.

    Four-byte ids that become one-byte ones are never all in memory, so that an import peaks at about its result.
    """
    characters = _characters(text)
    if characters is None or len(characters) % 4 or len(characters) <= STEP:
        return None
    # The end, which may be padded, is Python's to judge.
    body = (len(characters) - 1) // STEP * STEP
    try:
        tail = binascii.a2b_base64(characters[body:].tobytes(), strict_mode=True)
    except binascii.Error:
        return None
    if (body // 4 * 3 + len(tail)) % dtype.itemsize:
        return None
    narrow = np.dtype(np.int16) if dtype.itemsize > 2 else dtype
    ids = _decoded(characters[:body], tail, dtype, narrow)
    # Wider ids than int16 holds: a model of more than 32,768 experts, or ids that are none.
    return _decoded(characters[:body], tail, dtype, dtype) if ids is not None and not len(ids) else ids


def _decoded(characters: np.ndarray, tail: bytes, dtype: np.dtype, target: np.dtype) -> np.ndarray | None:
    """Block by block; None for other characters than base64's, an empty array where *target* is too narrow."""
    # The compiled kernel costs half a second to load, which `import routepack` should not.
    from routepack.traces.formats._kernels import decode_groups

    ids = np.empty((len(characters) // 4 * 3 + len(tail)) // dtype.itemsize, dtype=target)
    problems = set()
    starts = range(0, len(characters), BLOCK)

    def block(number: int) -> None:
        text = characters[starts[number] : starts[number] + BLOCK]
        data = np.empty(len(text) // 4 * 3, dtype=np.uint8)
        if not decode_groups(text, data):
            problems.add("other text")
        if number == len(starts) - 1:
            data = np.concatenate([data, np.frombuffer(tail, dtype=np.uint8)])
        some, first = data.view(dtype), starts[number] // 4 * 3 // dtype.itemsize
        if target != dtype and not _fits(some, target):
            problems.add("too narrow")
        ids[first : first + len(some)] = some

    on_all_cores(block, len(starts))
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
