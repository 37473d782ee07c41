"""Folders that are whole or absent, on a file system that all ranks share. All is collective but ``rename`` and ``discard``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from routepack.core.errors import CheckpointError
from routepack.distributed import collectives

UNFINISHED, DISCARDED = ".unfinished-", ".discarded-"
"""What a folder's name starts with while it is written, and while it is deleted."""


def fresh_folder(final: Path) -> Path:
    """An empty folder beside *final* to write it in. Raises an error on all ranks where it cannot be made."""
    unfinished = _hidden(final, UNFINISHED)

    def make() -> None:
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{unfinished} cannot be made ({error.strerror}): choose a folder to write in.") from error

    collectives.from_rank(0, make, "checkpoint's folder")
    return unfinished


def commit(unfinished: Path, final: Path) -> None:
    """Give a folder that all ranks have written its final name. Raises an error on all ranks where that fails."""

    def give_name() -> None:
        try:
            rename(unfinished, final)
        except OSError as error:
            raise CheckpointError(f"{unfinished} cannot become {final} ({error.strerror}).") from error

    collectives.from_rank(0, give_name, "checkpoint's name")


def rename(unfinished: Path, final: Path) -> None:
    """Rename on this rank, in place of what has that name; afterwards the name is on disk."""
    old = discard(final) if final.exists() else None
    unfinished.rename(final)
    _flush(final.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def discard(folder: Path) -> Path:
    """Rename a folder on this rank so that nobody takes it for whole while it is deleted; gives its new name."""
    hidden = _hidden(folder, DISCARDED)
    shutil.rmtree(hidden, ignore_errors=True)
    return folder.rename(hidden)


def remove_leftovers(parent: Path) -> None:
    """Delete what an interrupted run left half written or half deleted."""
    if collectives.this_rank() == 0:
        for prefix in (UNFINISHED, DISCARDED):
            for leftover in parent.glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)
    collectives.meet("leftovers of an interrupted run were deleted")


def _hidden(folder: Path, prefix: str) -> Path:
    # TorchTitan looks for "step-<number>" anywhere in a name.
    return folder.with_name(prefix + folder.name.replace("step-", "step"))


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
