"""Files that are whole or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from routepack.errors import ConfigError


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside *path*, renamed to it when the block ends well and removed when it does not.

    Raises ConfigError where the folder does not exist or cannot be written.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}: choose a folder that exists.") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _flush(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except IsADirectoryError as error:
        raise ConfigError(f"cannot write {path}: it is a folder: name a file.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
