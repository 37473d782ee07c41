"""Files that are whole or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from routepack.core.errors import ConfigError


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside *path*, renamed to it when the block ends well and removed when it does not.

    A link stays one: what it leads to is replaced. Raises ConfigError where the folder does not exist, the disk is full, or
    *path* is no ordinary file. The block is to do nothing but write.
    """
    target = _target(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        remedy = "another folder: no file can be made in this one" if is_folder(target.parent) else "a folder that exists"
        raise ConfigError(f"cannot write {path}: {error.strerror or error}: choose {remedy}.") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _flush(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}: choose another place.") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any, *, indent: int | None = None) -> None:
    """Write *value* as JSON, whole or not at all. What is not finite, which JSON has no number for, becomes null."""
    text = json.dumps(without_nan(value), indent=indent, allow_nan=False)
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def read_history(path: Path) -> list[dict[str, float]]:
    """The figures that :func:`write_json` wrote of each window; none where there is no file."""
    if not path.exists():
        return []
    history = json.loads(path.read_text())
    return [{name: math.nan if value is None else value for name, value in one.items()} for one in history]


def without_nan(value: Any) -> Any:
    """*value* with None for every number that is not finite, which JSON cannot say."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_folder(path: str | Path) -> bool:
    """Whether *path* is a folder; False for what cannot even be looked up, which opening it will explain."""
    return os.path.isdir(path)


def check_out(out: str | Path, *sources: str | Path) -> None:
    """Raise ConfigError, before all work, where *out* cannot be written, or would replace one of *sources*.

    Of a source that is a folder, it may be none of the files.
    """
    folder = _target(out).parent
    if not is_folder(folder) or not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write {out}: {folder} is no folder that can be written to: choose one that is.")
    for source in sources:
        # Of a folder, files of other kinds are not read.
        files = list(Path(source).glob(f"*{Path(out).suffix}")) if is_folder(source) else [source]
        if any(_is_same(out, file) for file in files):
            raise ConfigError(f"cannot write {out}: it would replace what it is made from: name another file.")


def _is_same(one: str | Path, other: str | Path) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _target(path: str | Path) -> Path:
    """Where *path* leads."""
    try:
        target = Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}.") from error
    if is_folder(target):
        raise ConfigError(f"cannot write {path}: it is a folder: name a file.")
    # A device would be gone, and what reads a pipe would wait for ever.
    if os.path.exists(target) and not os.path.isfile(target):
        raise ConfigError(f"cannot write {path}: it is a device or a pipe, no ordinary file: name another.")
    return target


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
