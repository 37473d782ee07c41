"""``routepack report``: a plan file as an HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from routepack.cli.arguments import PlanFile
from routepack.core.files import check_out
from routepack.traces.trace_files import load_plan, load_window


def report(
    plan: PlanFile,
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="TRACE", help="What was planned. Without it the page cannot show the loads of experts."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page that explains a plan. It needs no other file: open it, send it or print it."""
    # Imported here, because it loads jinja2, numba and scipy, which other commands do without.
    from routepack.report.plan_page import write_report

    check_out(out, plan, *([] if trace is None else [trace]))
    window = None if trace is None else load_window(trace)
    write_report(load_plan(plan), out, window, plan_name=plan.name, trace_name="" if trace is None else trace.name)
    typer.echo(f"{out}: {out.stat().st_size / 1e3:.0f} KB, open it in a browser.")
