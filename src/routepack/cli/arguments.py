"""What several commands take and give: their arguments, and figures as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from routepack.core.errors import ConfigError
from routepack.core.files import without_nan
from routepack.core.plans import SYNCS, Sync

Layers = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG... [key=value...]", help="YAML files, then single options; the later one wins."),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="The file that `routepack plan` wrote.")]
TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace or demand file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object instead of a table.")]


def checked_sync(sync: str) -> Sync:
    """*sync*, if it is one of the three; else ConfigError."""
    if sync not in SYNCS:
        raise ConfigError(f"--sync={sync!r} is unknown: choose {', '.join(SYNCS)}.")
    return sync


def print_json(out: Path, figures: dict[str, Any]) -> None:
    """Print *figures*, and which file the command wrote, as one JSON object."""
    typer.echo(json.dumps(without_nan({"out": str(out), **figures})))
