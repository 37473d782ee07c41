"""Files that routing is kept in: JSON lines, ``.npz``, ``.safetensors``.

No pickle is ever loaded, and no size is believed unchecked.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from routepack.core.checks import MOST
from routepack.core.errors import ConfigError, TraceError
from routepack.core.files import is_folder
from routepack.core.tensor_files import read_tensors

DEFLATE_LIMIT = 1032
"""Deflate cannot make data shorter than by this factor."""
MAX_HEADER = 1 << 16
"""Bytes of an array's header; numpy writes 128 for all but the oddest."""
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""How numpy reads the header of each version of its format that it writes for arrays of numbers."""
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin")


def open_source(path: str | Path, progress: Callable[[int, int], None] | None = None) -> Any:
    """The records or arrays of a file, or the records of all ``.jsonl`` files of a folder.

    Args:
        progress: called with the bytes read so far and in all, for JSON lines.
    """
    path = Path(path)
    if is_folder(path):
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise TraceError(f"{path} holds no .jsonl files: name a file, or a folder of them.")
        return _lines(files, progress)
    if path.suffix in PICKLES:
        raise ConfigError(
            f"{path} is a pickle, which can run code when loaded, so that RoutePack reads none: save the arrays as "
            ".safetensors, .npz or JSON lines."
        )
    if path.suffix == ".npz":
        return read_npz(path)
    if path.suffix == ".safetensors":
        return read_tensors(path)[1]
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return _lines([path], progress)
    raise ConfigError(f"{path} has suffix {path.suffix!r}: .jsonl, .npz, .safetensors or a folder of .jsonl files is needed.")


def _lines(files: list[Path], progress: Callable[[int, int], None] | None) -> Iterator[dict[str, Any]]:
    try:
        total, done = sum(file.stat().st_size for file in files), 0
        for path in files:
            with path.open("rb") as file:
                for number, line in enumerate(file):
                    done += len(line)
                    if line.strip():
                        yield _record(line, path, number)
                    if progress is not None:
                        progress(done, total)
    except OSError as error:
        raise TraceError(f"{error.filename} cannot be read: {error.strerror}.") from error


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}, line {number + 1} is no JSON ({error}): was the file cut off?") from error
    if not isinstance(record, dict):
        raise TraceError(f"{path}, line {number + 1} is a {type(record).__name__}; one object a line is needed.")
    return record


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file: mapped where they are stored as they are, read where compressed.

    Raises TraceError for what is no such file, holds Python objects, or promises more than its bytes can give.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return {entry.filename.removesuffix(".npy"): _member(path, archive, entry) for entry in archive.infolist()}
    except TraceError:
        raise
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise TraceError(f"{path} is not a whole .npz file ({type(error).__name__}: {error}): write it again.") from error


def _member(path: str | Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """One array. ``np.load`` would set aside whatever memory a header asks for: here its size is checked first."""
    where = f"{path}: {entry.filename}"
    if entry.file_size > entry.compress_size * DEFLATE_LIMIT + MAX_HEADER or entry.compress_size > Path(path).stat().st_size:
        raise TraceError(f"{where} promises {entry.file_size} bytes of {entry.compress_size}: it is not what it says.")
    with archive.open(entry) as file:
        beginning = io.BytesIO(file.read(MAX_HEADER))
        shape, is_fortran, dtype = _header(beginning, where)
        size, start = math.prod(shape) * dtype.itemsize, beginning.tell()
        if size != entry.file_size - start:
            raise TraceError(f"{where} has {entry.file_size - start} bytes; shape {shape} in {dtype} takes {size}.")
        if size and entry.compress_type == zipfile.ZIP_STORED:
            return _mapped(path, entry, shape, dtype, "F" if is_fortran else "C", start)
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False, max_header_size=MAX_HEADER)


def _header(beginning: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype of an array, as numpy reads them from its header."""
    try:
        shape, is_fortran, dtype = HEADERS[np.lib.format.read_magic(beginning)](beginning, max_header_size=MAX_HEADER)
    except Exception as error:  # Whatever Python's tokenizer and parser and numpy's dtypes make of a hostile text.
        raise TraceError(f"{where} has no header that says what it holds ({type(error).__name__}: {error}).") from error
    if dtype.hasobject or dtype.kind not in "biuf" or dtype.itemsize == 0:
        raise TraceError(f"{where} has dtype {dtype}; plain numbers are read, and no Python objects (pickles).")
    if not all(0 <= side <= MOST for side in shape):
        raise TraceError(f"{where} has shape {str(shape)[:80]}.")
    return shape, is_fortran, dtype


def _mapped(
    path: str | Path, entry: zipfile.ZipInfo, shape: tuple[int, ...], dtype: np.dtype, order: Any, start: int
) -> np.ndarray:
    """A stored member's bytes, mapped. Its local header tells where they begin; zipfile has checked that it is one."""
    with Path(path).open("rb") as file:
        file.seek(entry.header_offset + 26)
        lengths = file.read(4)
    begin = entry.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little") + start
    array = np.memmap(path, dtype, "r", begin, shape, order)
    return np.asarray(array) if array.flags.aligned else np.array(array)
