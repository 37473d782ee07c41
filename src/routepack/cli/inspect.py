"""``routepack inspect``: a trace as tables, and what planning would gain on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from routepack.cli.arguments import TraceFile, checked_sync
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import ConfigError, TraceError
from routepack.core.files import check_out, write_json
from routepack.core.rollouts import RolloutBatch
from routepack.cost.models import CostModel, WindowNormalizedCost
from routepack.report.console_tables import gains_text, inspection_text
from routepack.report.topology_gains import Outlook, natural_cap
from routepack.report.trace_statistics import inspect_routing
from routepack.traces.trace_files import load_window, naming


def inspect(
    trace: TraceFile,
    ep: Annotated[str, typer.Option(metavar="N,N,...", help="Expert-parallel degrees to try.")] = "4,8,16",
    dp: Annotated[
        str,
        typer.Option(metavar="N,N,...", help="Data-parallel degrees to try. Empty: only look, plan nothing."),
    ] = "8,16,32",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a microbatch on one rank. Default: the longest sequence, rounded up.")
    ] = None,
    sync: Annotated[
        str, typer.Option(help="How often expert-parallel groups wait for one another: every step, microbatch or layer.")
    ] = "step",
    model: Annotated[
        str | None,
        typer.Option(help="Predict seconds of this model, such as qwen3_30b_a3b. Default: ratios to an even step."),
    ] = None,
    device: Annotated[str, typer.Option(help="The device on which --model is to run.")] = "h200",
    proposals: Annotated[
        int | None, typer.Option(min=1, help="Changes that each search tries. Default: a tenth of what `routepack plan` tries.")
    ] = None,
    by: Annotated[
        str, typer.Option(help="What to group sequences by: group (rollouts of a prompt), or a field of the trace.")
    ] = "group",
    prompt_share: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="The share of a sequence that is its prompt, whatever the trace says."),
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file, too.")] = None,
) -> None:
    """Show what recorded routing looks like (coverage, hot experts, groups, prompts), and what planning would gain."""
    if as_json is not None:
        check_out(as_json, trace)
    expert_parallel, data_parallel = degrees("--ep", ep), degrees("--dp", dp)
    joined = checked_sync(sync)
    cost_model = WindowNormalizedCost() if model is None else CostModel.for_model(model, device=device)
    window, console = load_window(trace), Console()
    with naming(trace, TraceError):
        found = inspect_routing(window, by=by, prompt_share=prompt_share)
    if not found.coverage.recorded_rows:
        raise TraceError(
            f"{trace}: none of its {found.num_sequences} sequences has a recorded row ({found.coverage.masked_rows} rows are "
            "masked): there is nothing to look at. Check that the rollout engine returns routed experts."
        )
    if expert_parallel and data_parallel and isinstance(window, RolloutBatch):
        # What planning refuses ends the command here, before any table is shown.
        with naming(trace):
            window = RoutingDemandCollector().collect(window)
    console.print(inspection_text(found))
    cap = natural_cap(found.longest) if max_tokens is None else max_tokens
    outlook = Outlook(max_tokens=cap, sync=joined, cost_model=cost_model, num_proposals=proposals)
    gains = list(
        track(
            outlook.gains(window, expert_parallel, data_parallel),
            "planning topologies",
            total=len(expert_parallel) * len(data_parallel),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
    )
    if gains:
        why_cap = " (the longest sequence, rounded up: set --max-tokens to yours)" if max_tokens is None else ""
        console.print(gains_text(gains, outlook, why_cap))
    if as_json is not None:
        figures = {"trace": str(trace), "routing": found.as_dict(), "outlook": outlook.as_dict()}
        write_json(as_json, figures | {"gains": [gain.as_dict() for gain in gains]}, indent=1)
        typer.echo(f"\nAll figures: {as_json}")


def degrees(option: str, text: str) -> list[int]:
    """Whole numbers above 0, separated by commas.

    >>> degrees("--ep", "4, 8")
    [4, 8]
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 2**31 for part in parts):
        raise ConfigError(f"{option}={text!r} must be whole numbers above 0, separated by commas, such as 4,8,16.")
    return [int(part) for part in parts]
