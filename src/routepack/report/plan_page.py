"""The page itself: no script, nothing fetched, readable on paper. Text that comes from files is cleaned and escaped."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from routepack.core.errors import PlanError
from routepack.core.files import atomic_path
from routepack.core.plans import ExpertPlacement, Plan
from routepack.core.rollouts import RolloutBatch, RoutingDemand
from routepack.planning.verification import verify
from routepack.report import figures, svg
from routepack.report.plan_metrics import plan_metrics

MOST_JSON = 20_000
"""Characters of the folded config that are shown."""
PART_NAMES = {
    "attention": "attention",
    "dense": "dense layers",
    "experts": "experts",
    "links": "links between ranks",
    "waiting_attention": "waiting for the rank with most attention and dense work",
    "waiting_experts": "waiting for the fullest expert rank",
    "waiting_groups": "waiting for other expert groups",
}
SIDE_NAMES = {"baseline": "Baseline", "planned": "Planned", "bound": "Lower bound"}
SYNC_TEXT = {
    "step": "EP groups meet once a step",
    "microbatch": "EP groups meet once a microbatch",
    "layer": "all ranks meet in every layer",
}


def write_report(
    plan: Plan,
    path: str | Path,
    window: RolloutBatch | RoutingDemand | None = None,
    *,
    plan_name: str = "",
    trace_name: str = "",
) -> None:
    """Write :func:`render_report`'s page to *path*, whole or not at all."""
    page = render_report(plan, window, plan_name=plan_name, trace_name=trace_name)
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def render_report(
    plan: Plan, window: RolloutBatch | RoutingDemand | None = None, *, plan_name: str = "", trace_name: str = ""
) -> str:
    """The page of a plan, as HTML.

    Args:
        plan: what was planned.
        window: the trace or demand that it was planned for. Without it the page cannot say what experts do: no load
            per layer, and a heat map of attention and dense work alone.
        plan_name: how the page calls the plan.
        trace_name: and the trace.

    Raises:
        PlanError: the plan was changed, or does not fit the window: a report of it would mislead.

    """
    demand, source = _demand_of(window)
    problems = _own_problems(plan) or ([] if demand is None else verify(plan, demand))
    if problems:
        raise PlanError("the plan is rejected, and a report would mislead:\n" + "\n".join(f"  - {text}" for text in problems))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_cleaned, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"amount": Amount(plan).text, "percent": lambda value, digits=1: f"{100 * value:.{digits}f} %"}
    template = environment.from_string(_text("page.html.j2"))
    style = Markup(_text("page.css"))
    names = {"plan_name": plan_name or "plan", "trace_name": trace_name, "source": source}
    return template.render(style=style, **names, **_content(plan, demand))


def _text(name: str) -> str:
    return resources.files("routepack.report").joinpath(name).read_text(encoding="utf-8")


class Amount:
    """How this plan's unit is written: seconds with a prefix, or a plain ratio."""

    def __init__(self, plan: Plan) -> None:
        largest = max(plan.value, plan.baseline_value)
        self.scale, self.unit = 1.0, ""
        if plan.unit == "seconds":
            self.scale, self.unit = next(
                (s, u) for s, u in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if largest * s >= 1 or u == "µs"
            )

    def text(self, value: float, digits: int = 3) -> str:
        """*value* with its unit."""
        return f"{value * self.scale:.{digits}f}" + (f"\u202f{self.unit}" if self.unit else "")


def _demand_of(window: RolloutBatch | RoutingDemand | None) -> tuple[RoutingDemand | None, str]:
    if not isinstance(window, RolloutBatch):
        return window, "" if window is None else window.name
    from routepack.components.routing_demand_collector import RoutingDemandCollector

    version = f", weights version {window.weights_version}" if window.weights_version else ""
    return RoutingDemandCollector().collect(window), (window.source + version).removeprefix(", ")


def _own_problems(plan: Plan) -> list[str]:
    """What is wrong with a plan that can be told without its window."""
    found = []
    if plan.content_digest() != plan.digest:
        found.append("it was changed after it was made: its cells, order, slots, lengths or figures do not give its digest.")
    found += [f"it keeps no rate {name!r}." for name in ("expert", "linear", "quadratic") if name not in plan.cost]
    needed = [f"{side}.{term}" for side in SIDE_NAMES for term in ("attention", "expert")]
    found += [f"it keeps no figure {name!r}." for name in (*needed, "bound.force_balanced") if name not in plan.parts]
    if not min(plan.value, plan.bound, plan.baseline_value) > 0:
        found.append("its value, bound and baseline are not all above 0.")
    tokens_C = np.bincount(plan.packing.cell_of_S, plan.length_S)
    if tokens_C.max() > plan.max_tokens:
        found.append(f"a cell holds {tokens_C.max():.0f} tokens, above its cap of {plan.max_tokens}.")
    return found


def _cleaned(value: Any) -> Any:
    """Whatever a file says, as text fit to be shown; the template escapes it."""
    return value if isinstance(value, Markup | int | float) else svg.clean(str(value))


def _content(plan: Plan, demand: RoutingDemand | None) -> dict[str, Any]:
    packing = figures.baseline_packing(plan, demand)
    baseline = None if packing is None else figures.side_of(plan, packing, _identity(plan), demand)
    planned = figures.side_of(plan, plan.packing, plan.placement, demand)
    return {
        "plan": plan,
        "demand": demand,
        "saved": 1.0 - plan.value / plan.baseline_value if plan.baseline_value else 0.0,
        "sync_text": SYNC_TEXT[plan.sync],
        "waits": _waits(plan),
        "relative": plan.unit != "seconds",
        "num_tokens": int(plan.length_S.sum()),
        "moved": int((plan.placement.physical_to_logical_LP != _identity(plan).physical_to_logical_LP).any(axis=1).sum()),
        **_time(plan),
        **_heat(baseline, planned),
        **_layers(plan, demand, baseline, planned),
        "sequences": figures.worst_sequences(plan, demand),
        "folded": _folded(plan),
        "part_names": PART_NAMES,
    }


def _waits(plan: Plan) -> str:
    """Who waits for whom, beside the heat maps."""
    ranks = plan.topology.expert_parallel_degree
    if plan.sync == "step" and ranks == 1:
        return "Ranks meet at the end of the step: what counts is the sum of each row."
    if plan.sync == "step":
        return (
            f"In every microbatch the {ranks} ranks of an EP group wait for the busiest of them, and groups for one another "
            "at the end of the step."
        )
    return (
        f"In every {plan.sync}{' of every microbatch' if plan.sync == 'layer' else ''} all ranks wait for the busiest of them."
    )


def _identity(plan: Plan) -> ExpertPlacement:
    return ExpertPlacement.identity(plan.placement.num_layers, plan.placement.num_experts)


def _time(plan: Plan) -> dict[str, Any]:
    """Bars and table of where the step goes; parts that nobody has are left out."""
    time, write = figures.time_of(plan), Amount(plan).text
    used = [key for key in PART_NAMES if any(round(time[side][key], 12) > 0 for side in time)]
    total = max(sum(parts.values()) for parts in time.values())
    bars = {
        side: svg.bar(
            [(key, f"{PART_NAMES[key]}: {write(parts[key])}", parts[key]) for key in used],
            total,
            f"{SIDE_NAMES[side]}: " + ", ".join(f"{PART_NAMES[key]} {write(parts[key])}" for key in used),
        )
        for side, parts in time.items()
    }
    return {"time": time, "bars": bars, "parts_used": used, "side_names": SIDE_NAMES}


def _heat(baseline: figures.Side | None, planned: figures.Side) -> dict[str, Any]:
    even = float(planned.busy_DM.mean()) or 1.0
    sides = {"after": planned.busy_DM / even}
    if baseline is not None:
        sides = {"before": baseline.busy_DM / even} | sides
    shown = [svg.shown_cells(busy_DM) for busy_DM in sides.values()]
    edges = svg.steps(min(float(cells.min()) for cells in shown), max(float(cells.max()) for cells in shown))
    drawn = {}
    for name, busy_DM in sides.items():
        ranks, microbatches = busy_DM.shape
        label = (
            f"{'Baseline' if name == 'before' else 'Planned'}: predicted work of {ranks} ranks in {microbatches} microbatches, "
            f"from {busy_DM.min():.2f} to {busy_DM.max():.2f} times an even share"
        )
        rows, columns = svg.shown_cells(busy_DM).shape
        drawn[name] = {
            "svg": svg.heat_map(busy_DM, edges, label),
            "ranks": ranks,
            "microbatches": microbatches,
            "merged": (-(-ranks // rows), -(-microbatches // columns)),
            "highest": float(busy_DM.max()),
            "lowest": float(busy_DM.min()),
            "slowest_M": float(busy_DM.max(axis=0).mean()),
        }
    return {"heat": drawn, "edges": edges.tolist()}


def _layers(plan: Plan, demand: RoutingDemand | None, before: figures.Side | None, after: figures.Side) -> dict[str, Any]:
    if demand is None or before is None or plan.topology.expert_parallel_degree == 1:
        return {"layer_svg": None, "layers": [], "imbalance": None}
    pairs0, pairs1 = before.pairs, after.pairs
    mean0, mean1 = (float(np.mean([mean for mean, _ in pairs])) for pairs in (pairs0, pairs1))
    label = (
        f"Load of the fullest expert-parallel rank over the mean one in {demand.num_layers} layers: mean {mean0:.3f} before, "
        f"{mean1:.3f} after planning; worst microbatch {max(w for _, w in pairs0):.3f} before, "
        f"{max(w for _, w in pairs1):.3f} after"
    )
    return {
        "layer_svg": svg.layer_chart(demand.layer_ids_L.tolist(), pairs0, pairs1, label),
        "layers": figures.worst_layers(plan, demand, before, after),
        "imbalance": (mean0, mean1),
    }


def _folded(plan: Plan) -> dict[str, str]:
    """What is folded away: as text, cut where a file has far more to say than anyone reads."""
    header = plan.header()
    config = {name: header[name] for name in ("topology", "rules", "max_tokens", "sync", "seed", "budget", "unit", "cost")}
    texts = {
        "Resolved config": json.dumps(config, indent=2),
        "Versions": json.dumps(header["versions"], indent=2),
        "All figures": json.dumps(plan_metrics(plan, prefix=""), indent=2),
    }
    return {name: Markup.escape(svg.clean(text, MOST_JSON)) for name, text in texts.items()}
