"""``routepack convert``: what a stack recorded in, a trace file out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from routepack.cli.arguments import AsJson, print_json
from routepack.core.errors import ConfigError
from routepack.traces.formats import STACKS, ImportOptions, ModelRouting
from routepack.traces.formats import convert as convert_file


def convert(
    stack: Annotated[str, typer.Option("--from", metavar="STACK", help=f"What recorded it: {', '.join(STACKS)}.")],
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A .jsonl, .npz or .safetensors file, or a folder of .jsonl files.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The routepack.trace/1 file to write.")],
    model_config: Annotated[
        Path | None, typer.Option(help="The model's config.json, for its numbers of experts, choices a token and layers.")
    ] = None,
    num_experts: Annotated[
        int | None, typer.Option(help="Routed experts of a layer, instead of what the model's config says.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Experts that a token is routed to. Needed where routes are stored without shape.")
    ] = None,
    num_layers: Annotated[int | None, typer.Option(help="Decoder layers, without draft (MTP) layers.")] = None,
    moe_layers: Annotated[
        str | None, typer.Option(metavar="1-26,28", help="The layers that have a router. Default: those that recorded routes.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="strict: wrong routing is an error. lenient: it is masked, counted and reported.")
    ] = "strict",
    merge: Annotated[
        str | None, typer.Option(help="Which to keep where turns recorded a row differently: keep_first or keep_last.")
    ] = None,
    require: Annotated[bool, typer.Option("--require", help="Refuse sequences without routes.")] = False,
    max_missing_share: Annotated[float, typer.Option(help="The largest share of rows that may be masked.")] = 0.5,
    veomni: Annotated[
        bool, typer.Option("--veomni", help="For verl on VeOmni: a row that repeats an expert was not recorded.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert what a stack recorded to a trace, mask rows that hold no route, and report coverage and suspicious signs."""
    options: dict[str, Any] = {
        "options": ImportOptions(policy=policy, merge=merge, require=require, max_missing_share=max_missing_share)
    }
    if veomni:
        if stack != "verl":
            raise ConfigError(f"--veomni is for --from verl, not {stack}.")
        options["veomni"] = True
    model = ModelRouting.from_config(
        {} if model_config is None else _read_json(model_config),
        num_experts=num_experts,
        top_k=top_k,
        num_layers=num_layers,
        moe_layers=None if moe_layers is None else _layer_numbers(moe_layers),
    )
    with _progress(source) as progress:
        report = convert_file(stack, source, destination, model, progress=progress, **options).report
    if as_json:
        print_json(destination, report.figures())
        return
    console = Console()
    lines = report.lines()
    width = max(24, *(len(label) + 2 for label, _ in lines))
    for label, value in lines:
        console.print(f"{label:<{width}}{value}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"Trace: {destination}. Next: routepack plan configs/plan.yaml trace={destination}", soft_wrap=True)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from error


def _layer_numbers(text: str) -> list[int]:
    """``1-3,5`` as 1, 2, 3, 5."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdecimal() or not (last or first).strip().isdecimal() or len(part) > 15:
            raise ConfigError(f"--moe-layers={text!r} is not understood: the option names layers as in 1-26,28.")
        numbers += range(int(first), min(int(last or first), 2**16) + 1)
    return numbers


@contextmanager
def _progress(source: Path) -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal, and what to call with the bytes read so far and in all."""
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"Reading {source.name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
