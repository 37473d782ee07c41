"""From a stack's file to a ``routepack.trace/1`` file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from routepack.core.files import check_out
from routepack.traces.formats.import_options import Imported
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.sources import open_source
from routepack.traces.formats.stack_modules import stack_module
from routepack.traces.trace_files import save_trace


def read(
    stack: str,
    source: str | Path,
    model: ModelRouting,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Imported:
    """Read *source*, a file or folder in *stack*'s form; *options* go to the stack's ``load``."""
    return stack_module(stack).load(open_source(source, progress), model, **options)


def convert(
    stack: str,
    source: str | Path,
    destination: str | Path,
    model: ModelRouting,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Imported:
    """Write *source* to *destination* as ``routepack.trace/1``; a file there is replaced only once all is well."""
    check_out(destination, source)
    imported = read(stack, source, model, progress=progress, **options)
    extra = {} if model.num_layers is None else {"num_layers": str(model.num_layers)}
    save_trace(imported.batch, destination, **extra)
    return imported
