"""``routepack inspect``: a trace looked at, on a console, and as figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import ConfigError, TraceError
from routepack.core.files import naming
from routepack.core.plans import SYNCS, Sync
from routepack.core.rollouts import RolloutBatch, RoutingDemand
from routepack.cost.models import CostModel, WindowNormalizedCost
from routepack.report.topology_gains import Outlook, TopologyGain, natural_cap
from routepack.report.trace_statistics import RoutingInspection, inspect_routing
from routepack.report.trace_tables import gains_text, inspection_text
from routepack.traces.trace_files import load_window


def inspect_command(
    trace: Path,
    *,
    console: Console,
    ep: str,
    dp: str,
    max_tokens: int | None,
    sync: str,
    model: str | None,
    device: str,
    num_proposals: int | None,
    by: str,
    prompt_share: float | None,
) -> dict[str, Any]:
    """Show what *trace* looks like and what planning would gain; returns all figures, as JSON holds them."""
    expert_parallel, data_parallel = degrees("--ep", ep), degrees("--dp", dp)
    if sync not in SYNCS:
        raise ConfigError(f"--sync={sync!r} is unknown: choose {', '.join(SYNCS)}.")
    cost_model = WindowNormalizedCost() if model is None else CostModel.for_model(model, device=device)
    window = load_window(trace)
    with naming(trace, TraceError):
        found = inspect_routing(window, by=by, prompt_share=prompt_share)
    if not found.coverage.recorded_rows:
        raise TraceError(
            f"{trace}: none of its {found.num_sequences} sequences has a recorded row ({found.coverage.masked_rows} rows are "
            "masked): there is nothing to look at. Check that the rollout engine returns routed experts."
        )
    if expert_parallel and data_parallel and isinstance(window, RolloutBatch):
        # Whatever planning refuses is said before, not below, the tables.
        with naming(trace):
            window = RoutingDemandCollector().collect(window)
    console.print(inspection_text(found))
    outlook = Outlook(
        max_tokens=natural_cap(found.longest) if max_tokens is None else max_tokens,
        sync=cast(Sync, sync),
        cost_model=cost_model,
        num_proposals=num_proposals,
    )
    gains = _gains(window, outlook, expert_parallel, data_parallel, console)
    if gains:
        why_cap = " (the longest sequence, rounded up: set --max-tokens to yours)" if max_tokens is None else ""
        console.print(gains_text(gains, outlook, why_cap))
    return _figures(trace, found, outlook, gains)


def degrees(option: str, text: str) -> list[int]:
    """Whole numbers above 0, separated by commas.

    >>> degrees("--ep", "4, 8")
    [4, 8]
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 2**31 for part in parts):
        raise ConfigError(f"{option}={text!r} must be whole numbers above 0, separated by commas, such as 4,8,16.")
    return [int(part) for part in parts]


def _gains(
    window: RolloutBatch | RoutingDemand,
    outlook: Outlook,
    expert_parallel: list[int],
    data_parallel: list[int],
    console: Console,
) -> list[TopologyGain]:
    columns = (
        TextColumn("planning topologies"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(expert_parallel) * len(data_parallel))
        return list(outlook.gains(window, expert_parallel, data_parallel, lambda: bar.advance(task)))


def _figures(trace: Path, found: RoutingInspection, outlook: Outlook, gains: list[TopologyGain]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_tokens": outlook.max_tokens,
        "sync": outlook.sync,
        "seed": outlook.seed,
        "num_proposals": outlook.num_proposals,
    }
    options["cost_model"] = outlook.cost_model.as_dict()
    return {"trace": str(trace), "routing": found.as_dict(), "outlook": options, "gains": [gain.as_dict() for gain in gains]}
