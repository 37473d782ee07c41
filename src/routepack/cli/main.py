"""``routepack train | plan | verify | convert | inspect | report | calibrate | check``. Exits: 0 done, 1 input, 2 usage."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from routepack.core.config import check_keys, load, split_layers
from routepack.core.errors import ConfigError, PlanError, RoutePackError, TraceError
from routepack.core.files import atomic_path, check_out, naming, write_json

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Expert placement and attention-aware packing for MoE reinforcement learning.",
)
Layers = Annotated[
    list[str], typer.Argument(metavar="CONFIG... [key=value...]", help="YAML files, then overrides; later wins.")
]
EXAMPLES = {"trace": "rollouts.safetensors", "out": "plan.safetensors"}
PLAN_FILE_KEYS = tuple(EXAMPLES)
PART_LABELS = {
    "attention": "attention and dense",
    "expert": "experts",
    "communication": "links",
    "waiting": "waiting for other groups",
    "largest_unit": "slowest microbatch of a group",
    "imbalance_mean": "EP-rank load, max/mean: mean",
    "imbalance_p95": "  95th percentile",
    "imbalance_max": "  worst",
    "across_share": "rows to other nodes, share",
    "inside_share": "rows inside nodes, share",
}


def _version(wanted: bool) -> None:
    if wanted:
        import routepack

        typer.echo(f"routepack {routepack.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Expert placement and attention-aware packing for MoE reinforcement learning."""


@app.command()
def train(layers: Layers) -> None:
    """Train: rollouts, plan, moved experts, FSDP2 + EP steps; starts the ranks itself when not under torchrun."""
    from routepack.torchtitan.launch.launch import train as run

    code = run(*split_layers(layers))
    if code:
        raise typer.Exit(code)


@app.command()
def plan(
    layers: Layers,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Plan one optimizer step from a recorded trace: baseline, plan and lower bound side by side."""
    from routepack.planning.plan_files import save_plan
    from routepack.report.plan_metrics import plan_metrics
    from routepack.traces.trace_files import load_window

    config = load(*split_layers(layers))
    planner = _planner(config)
    trace, out = _path(config, "trace"), _path(config, "out")
    check_out(out, trace)
    window = load_window(trace)
    with naming(trace, TraceError):
        made = planner.plan(window)
    save_plan(made, out)
    if as_json:
        figures = plan_metrics(made, prefix="")
        typer.echo(json.dumps({"out": str(out), "certificate": str(made.certificate), "certified": made.certificate.certified,
                               "unit": made.unit, "sync": made.sync, "digest": made.digest, **figures}))  # fmt: skip
        return
    console = Console()
    console.print(plan_table(made))
    console.print(f"{made.certificate}; planned in {made.plan_seconds:.2f} s ({_budget(made.budget)}), seed {made.seed}.")
    console.print(f"Plan: {out}. Check it: routepack verify {out} {trace}", soft_wrap=True)


@app.command()
def verify(
    plan: Annotated[Path, typer.Argument(metavar="PLAN")],
    trace: Annotated[Path, typer.Argument(metavar="TRACE")],
) -> None:
    """Recheck a plan against the trace it was made for, with code that shares nothing with the planner."""
    from routepack.components.routing_demand_collector import RoutingDemandCollector
    from routepack.core.rollouts import RoutingDemand
    from routepack.planning.plan_files import load_plan
    from routepack.planning.verification import verify as problems_of
    from routepack.traces.trace_files import load_window

    made, window = load_plan(plan), load_window(trace)
    demand = window if isinstance(window, RoutingDemand) else RoutingDemandCollector().collect(window)
    problems = problems_of(made, demand)
    if problems:
        raise PlanError(f"{plan} is rejected for {trace}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    typer.echo(
        f"{plan}: accepted. {demand.num_sequences} sequences in {made.num_microbatches} x "
        f"{made.topology.data_parallel_degree} cells, value {made.value:.4f}, bound {made.bound:.4f}."
    )


@app.command("inspect")
def inspect_trace(
    trace: Annotated[Path, typer.Argument(metavar="TRACE")],
    ep: Annotated[str, typer.Option(metavar="N,N,...", help="Expert-parallel degrees to look at.")] = "4,8,16",
    dp: Annotated[
        str, typer.Option(metavar="N,N,...", help="Data-parallel degrees to look at; empty: no table of gains.")
    ] = "8,16,32",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a microbatch on one rank. Default: the longest sequence, rounded up.")
    ] = None,
    sync: Annotated[str, typer.Option(help="What joins the ranks: step, microbatch or layer.")] = "step",
    model: Annotated[str | None, typer.Option(help="Price in seconds of this model, such as qwen3_30b_a3b.")] = None,
    device: Annotated[str, typer.Option(help="The device that goes with --model.")] = "h200",
    proposals: Annotated[int | None, typer.Option(min=1, help="How far to search on each topology.")] = None,
    by: Annotated[str, typer.Option(help="What groups sequences: group, or a per-sequence field of the trace.")] = "group",
    prompt_share: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Cut sequences here, whatever the trace says of prompts.")
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every figure to this file.")] = None,
) -> None:
    """Look at recorded routing: hot experts, groups, prompts, coverage; and what planning would gain."""
    from routepack.cli.inspect import inspect_command

    if as_json is not None:
        check_out(as_json, trace)
    figures = inspect_command(
        trace, console=Console(), ep=ep, dp=dp, max_tokens=max_tokens, sync=sync, model=model, device=device,
        num_proposals=proposals, by=by, prompt_share=prompt_share,
    )  # fmt: skip
    if as_json is not None:
        write_json(as_json, figures, indent=1)
        typer.echo(f"\nAll figures: {as_json}")


@app.command()
def report(
    plan: Annotated[Path, typer.Argument(metavar="PLAN")],
    trace: Annotated[
        Path | None, typer.Argument(metavar="TRACE", help="What it was planned for; shows what experts do.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("report.html"),
) -> None:
    """Show a plan as one HTML page that needs nothing else: for a browser, a mail or paper."""
    from routepack.planning.plan_files import load_plan
    from routepack.report import write_report
    from routepack.traces.trace_files import load_window

    check_out(out, plan, *([] if trace is None else [trace]))
    window = None if trace is None else load_window(trace)
    write_report(load_plan(plan), out, window, plan_name=plan.name, trace_name="" if trace is None else trace.name)
    typer.echo(f"{out}: {out.stat().st_size / 1e3:.0f} KB, open it in a browser.")


@app.command()
def calibrate(
    logs: Annotated[list[Path], typer.Argument(metavar="STEPS...", help="What trainer.step_log wrote: routepack.steps/1.")],
    out: Annotated[Path, typer.Option("--out", help="The config layer to write.")] = Path("cost_model.yaml"),
    sync: Annotated[
        str, typer.Option("--sync", help="What the plans were made for; kept where nothing predicts better.")
    ] = "step",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Fit a cost model in seconds to logged steps, and find which ``sync`` predicts them best."""
    from dataclasses import asdict

    from routepack.core.plans import SYNCS
    from routepack.cost.calibration import best_sync
    from routepack.cost.calibration import calibrate as fits_of
    from routepack.cost.step_log import load_steps

    if sync not in SYNCS:
        raise ConfigError(f"--sync {sync!r} is unknown: choose {', '.join(SYNCS)}.")
    check_out(out, *logs)
    records = load_steps(logs)
    if not records:
        raise ConfigError(f"{', '.join(map(str, logs))}: no step is logged: train with trainer.step_log set.")
    fits = fits_of(records)
    chosen = best_sync({name: one.error for name, one in fits.items()}, configured=sync)
    with atomic_path(out) as path:
        path.write_text(calibrated_layer(fits[chosen], logs))
    if as_json:
        typer.echo(json.dumps({"out": str(out), "sync": chosen, "fits": {name: asdict(one) for name, one in fits.items()}}))
        return
    console = Console()
    console.print(calibration_table(fits))
    same = " One EP group: the three are the same." if records[0].loads.num_groups == 1 else ""
    why = "predicts best" if chosen != sync else "is kept: nothing predicts better"
    console.print(f"\nsync={chosen} {why}.{same} Use it: routepack plan configs/plan.yaml {out}", soft_wrap=True)


def calibrated_layer(fit: Any, logs: list[Path]) -> str:
    """The YAML of a config layer: ``sync`` and the fitted cost model."""
    from routepack.cost.calibration import TERMS

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


def calibration_table(fits: Any) -> Table:
    """Rates, their shares of a step, and errors, for every ``sync``."""
    from routepack.cost.calibration import TERMS

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in fits:
        table.add_column(f"sync={name}", justify="right")
    table.add_row("held-out error, median", *(f"{one.error:.2%}" for one in fits.values()))
    table.add_row("  90th percentile", *(f"{one.error_p90:.2%}" for one in fits.values()))
    for term in TERMS:
        label = term.removesuffix("_seconds")
        table.add_row(f"seconds per {label}", *(f"{getattr(one.cost_model, term):.3e}" for one in fits.values()))
        shares = (f"{one.shares[term]:.1%} ± {one.uncertainty[term]:.1%}" for one in fits.values())
        table.add_row("  share of a step", *shares)
    return table


@app.command()
def check(layers: Layers) -> None:
    """Resolve a config and build every component, without running anything; for training also what memory a rank takes."""
    from omegaconf import OmegaConf

    config = load(*split_layers(layers))
    # A value that is still ??? does not count as present, but its key does.
    if "trace" in config.keys():  # noqa: SIM118
        _planner(config)
        said = ""
    else:
        from routepack.torchtitan.launch.launch import check as check_training

        said = f"{check_training(config)}\n"
    typer.echo(OmegaConf.to_yaml(config).rstrip())
    typer.echo(f"{said}ok", err=True)


@app.command()
def convert(
    stack: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="STACK",
            help="vllm, sglang, verl, slime, miles, nemo-rl, prime-rl, verifiers, areal, skyrl, megatron or arrays.",
        ),
    ],
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A .jsonl, .npz or .safetensors file, or a folder of .jsonl files.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The routepack.trace/1 file to write.")],
    model_config: Annotated[Path | None, typer.Option(help="The model's config.json: experts, top-k, layers.")] = None,
    num_experts: Annotated[int | None, typer.Option(help="Logical routed experts; wins over the config.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts a token; flat payloads need it.")] = None,
    num_layers: Annotated[int | None, typer.Option(help="Decoder layers, draft layers left out.")] = None,
    moe_layers: Annotated[
        str | None, typer.Option(metavar="1-26,28", help="Layers with a router; else those that route.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="strict: bad routing is an error; lenient: mask, count and report it.")
    ] = "strict",
    merge: Annotated[str | None, typer.Option(help="Rows that turns recorded differently: keep_first or keep_last.")] = None,
    require: Annotated[bool, typer.Option("--require", help="Every sequence must have routes.")] = False,
    max_missing_share: Annotated[float, typer.Option(help="Largest share of rows that may be masked.")] = 0.5,
    veomni: Annotated[bool, typer.Option("--veomni", help="verl: a repeated id means that a row was not recorded.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Read what a stack recorded, mask what is no route, and write a trace: sequences, coverage, reasons, suspicious signs."""
    from routepack.traces.formats import ImportOptions
    from routepack.traces.formats import convert as convert_file

    options: dict[str, Any] = {
        "options": ImportOptions(policy=policy, merge=merge, require=require, max_missing_share=max_missing_share)
    }
    if veomni:
        if stack != "verl":
            raise ConfigError(f"--veomni is for --from verl, not {stack}.")
        options["veomni"] = True
    model = _model_routing(model_config, num_experts=num_experts, top_k=top_k, num_layers=num_layers, moe_layers=moe_layers)
    with _progress(source) as progress:
        report = convert_file(stack, source, destination, model, progress=progress, **options).report
    if as_json:
        typer.echo(json.dumps({"out": str(destination)} | report.figures()))
        return
    console = Console()
    lines = report.lines()
    width = max(24, *(len(label) + 2 for label, _ in lines))
    for label, value in lines:
        console.print(f"{label:<{width}}{value}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"Trace: {destination}. Next: routepack plan configs/plan.yaml trace={destination}", soft_wrap=True)


def _model_routing(config: Path | None, *, moe_layers: str | None, **sizes: int | None) -> Any:
    from routepack.traces.formats import ModelRouting

    loaded: Any = {}
    if config is not None:
        try:
            loaded = json.loads(config.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{config} cannot be read as JSON: {error}.") from error
    layers = None if moe_layers is None else _layer_numbers(moe_layers)
    return ModelRouting.from_config(loaded, moe_layers=layers, **sizes)


def _layer_numbers(text: str) -> list[int]:
    """``1-3,5`` as 1, 2, 3, 5."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdecimal() or not (last or first).strip().isdecimal() or len(part) > 15:
            raise ConfigError(f"--moe-layers {text!r} names layers as in 1-26,28.")
        numbers += range(int(first), min(int(last or first), 2**16) + 1)
    return numbers


@contextmanager
def _progress(source: Path) -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal, for files that take more than a moment to read."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"Reading {source.name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def plan_table(plan: Any) -> Table:
    """Baseline, plan and bound of each term, side by side."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in ("baseline", "planned", "lower bound"):
        table.add_column(name, justify="right")
    unit = "s" if plan.unit == "seconds" else "relative"
    table.add_row(f"step, sync={plan.sync} ({unit})", *(f"{v:.4f}" for v in (plan.baseline_value, plan.value, plan.bound)))
    for key, label in PART_LABELS.items():
        parts = [plan.parts.get(f"{column}.{key}") for column in ("baseline", "planned", "bound")]
        if any(parts):
            table.add_row(f"  {label}", *("" if part is None else f"{part:.4f}" for part in parts))
    counts = (plan.baseline_microbatches, plan.num_microbatches, plan.certificate.lower_bound)
    table.add_row("microbatches", *map(str, counts))
    return table


def _planner(config: Any) -> Any:
    from routepack.planning.from_config import PLANNER_KEYS, TRAINING_ONLY, build_planner

    if other := [key for key in TRAINING_ONLY if key in config.keys()]:  # noqa: SIM118
        raise ConfigError(
            f"{', '.join(other)}: this is a config of 'routepack train': give it to that, or name one of 'routepack plan', "
            f"which has {', '.join(PLAN_FILE_KEYS)} and the planner's options."
        )
    check_keys(config, (*PLANNER_KEYS, *PLAN_FILE_KEYS), what="a plan's config")
    return build_planner(config)


def _path(config: Any, key: str) -> Path:
    if key not in config or config[key] in (None, ""):
        raise ConfigError(f"{key} is not set: name a file, as in {key}={EXAMPLES[key]}.")
    if not isinstance(config[key], str | int | float):
        raise ConfigError(f"{key}={config[key]} is no path: name a file, as in {key}={EXAMPLES[key]}.")
    return Path(str(config[key]))


def _budget(budget: Any) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in budget.items() if value is not None)


def main(run: Callable[[], Any] = app) -> None:
    """The ``routepack`` command: messages instead of tracebacks for wrong input."""
    try:
        run()
    except RoutePackError as error:
        sys.stderr.write(f"routepack: {error}\n")
        raise SystemExit(1) from None
