"""``routepack plan``: recorded routing in, a plan file and its table out."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from routepack.cli.arguments import AsJson, Layers, print_json
from routepack.core.config import check_keys, load, split_layers
from routepack.core.errors import ConfigError, TraceError
from routepack.core.files import check_out
from routepack.planning.from_config import PLANNER_KEYS, TRAINING_ONLY, build_planner
from routepack.planning.planner import Planner
from routepack.report.console_tables import plan_table
from routepack.report.plan_metrics import plan_metrics
from routepack.traces.trace_files import load_window, naming, save_plan

FILES = {"trace": "rollouts.safetensors", "out": "plan.safetensors"}
"""The options that name a file, and an example of each for error messages."""


def plan(layers: Layers, as_json: AsJson = False) -> None:
    """Plan one optimizer step from recorded routing, and show baseline, plan and lower bound side by side."""
    config = load(*split_layers(layers))
    planner = planner_of(config)
    trace, out = _file(config, "trace"), _file(config, "out")
    check_out(out, trace)
    window = load_window(trace)
    with naming(trace, TraceError):
        made = planner.plan(window)
    save_plan(made, out)
    if as_json:
        certificate = {"certificate": str(made.certificate), "certified": made.certificate.certified}
        plan_of = {"unit": made.unit, "sync": made.sync, "digest": made.digest}
        print_json(out, certificate | plan_of | plan_metrics(made, prefix=""))
        return
    console = Console()
    console.print(plan_table(made))
    budget = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in made.budget.items() if value is not None)
    console.print(f"{made.certificate}; planned in {made.plan_seconds:.2f} s ({budget}), seed {made.seed}.")
    console.print(f"Plan: {out}. Check it: routepack verify {out} {trace}", soft_wrap=True)


def planner_of(config: DictConfig) -> Planner:
    """The planner of a config of ``routepack plan``; raises ConfigError for options that such a config does not have."""
    if other := [key for key in TRAINING_ONLY if key in config.keys()]:  # noqa: SIM118 - a value that is still ??? counts too
        raise ConfigError(
            f"{', '.join(other)}: this is a config of 'routepack train': give it to that, or name one of 'routepack plan', "
            f"which has {', '.join(FILES)} and the planner's options."
        )
    check_keys(config, (*PLANNER_KEYS, *FILES), what="a plan's config")
    return build_planner(config)


def _file(config: DictConfig, key: str) -> Path:
    value = config.get(key)
    if value is None or value == "":
        raise ConfigError(f"{key} is not set: name a file, as in {key}={FILES[key]}.")
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{key}={value} is no path: name a file, as in {key}={FILES[key]}.")
    return Path(str(value))
