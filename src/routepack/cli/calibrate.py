"""``routepack calibrate``: logs of steps in, a config file with a fitted cost model out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from routepack.cli.arguments import AsJson, checked_sync, print_json
from routepack.core.errors import ConfigError
from routepack.core.files import atomic_path, check_out
from routepack.cost.calibration import TERMS, Fit, best_sync
from routepack.cost.calibration import calibrate as fits_of
from routepack.cost.step_log import load_steps
from routepack.report.console_tables import calibration_table


def calibrate(
    logs: Annotated[list[Path], typer.Argument(metavar="STEPS...", help="Logs of steps, as trainer.step_log writes them.")],
    out: Annotated[Path, typer.Option(help="The config file to write.")] = Path("cost_model.yaml"),
    sync: Annotated[
        str, typer.Option(help="The sync that plans were made for. Another is chosen only if it predicts better.")
    ] = "step",
    as_json: AsJson = False,
) -> None:
    """Fit a cost model in seconds to logged steps, and find the sync that predicts them best."""
    configured = checked_sync(sync)
    check_out(out, *logs)
    records = load_steps(logs)
    if not records:
        raise ConfigError(f"{', '.join(map(str, logs))}: no step is logged: train with trainer.step_log set.")
    fits = fits_of(records)
    chosen = best_sync({name: fit.error for name, fit in fits.items()}, configured=configured)
    with atomic_path(out) as path:
        path.write_text(_config_layer(fits[chosen], logs))
    if as_json:
        print_json(out, {"sync": chosen, "fits": {name: asdict(fit) for name, fit in fits.items()}})
        return
    console = Console()
    console.print(calibration_table(fits))
    same = " One EP group: the three are the same." if records[0].loads.num_groups == 1 else ""
    why = "predicts best" if chosen != configured else "is kept: nothing predicts better"
    console.print(f"\nsync={chosen} {why}.{same} Use it: routepack plan configs/plan.yaml {out}", soft_wrap=True)


def _config_layer(fit: Fit, logs: Sequence[Path]) -> str:
    """The YAML of ``sync`` and the fitted cost model, with what they rest on as a comment."""
    names = ", ".join(log.name for log in logs)
    lines = [
        f"# routepack calibrate: {fit.num_steps} steps of {names}; sync={fit.sync} predicts held-out steps",
        f"# within {fit.error:.1%} (median; 90 % within {fit.error_p90:.1%}). Holds for the log's model, device and topology.",
        f"sync: {fit.sync}",
        "cost_model:",
        "  _target_: routepack.MeasuredCost",
        *(f"  {name}: {getattr(fit.cost_model, name):.6e}" for name in TERMS),
    ]
    return "\n".join(lines) + "\n"
