"""The ``routepack`` command, put together. Exit codes: 0 done, 1 wrong input, 2 wrong usage; ``train``'s are its ranks'."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

import routepack
from routepack.cli.calibrate import calibrate
from routepack.cli.check import check
from routepack.cli.convert import convert
from routepack.cli.inspect import inspect
from routepack.cli.plan import plan
from routepack.cli.report import report
from routepack.cli.train import train
from routepack.cli.verify import verify
from routepack.core.errors import RoutePackError

EXTRA_OF = {"jinja2": "report", "torchtitan": "torchtitan", "tensorboard": "torchtitan"}
"""The extra that installs each package which only some commands need."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (train, plan, verify, inspect, report, calibrate, check, convert):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"routepack {routepack.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Expert placement and attention-aware packing for MoE reinforcement learning."""


def main(run: Callable[[], object] = app) -> None:
    """Run the command line; wrong input and missing extras end with a message and exit code 1, without a traceback."""
    try:
        run()
    except RoutePackError as error:
        sys.stderr.write(f"routepack: {error}\n")
        raise SystemExit(1) from None
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_OF:
            raise
        sys.stderr.write(f"routepack: this needs {error.name}: pip install 'routepack[{EXTRA_OF[error.name]}]'.\n")
        raise SystemExit(1) from None
