"""A plan as one HTML page without scripts or requests. Text that comes from files is cleaned and escaped.

plan_page_figures.py computes what the page shows, plan_page_drawings.py lays out its drawings, and the templates beside this
file hold the words and the markup.
"""

from __future__ import annotations

import json
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
from routepack.report import plan_page_drawings as drawings
from routepack.report import plan_page_figures as figures
from routepack.report.plan_metrics import plan_metrics

MOST_JSON = 20_000
"""Characters of the folded config that are shown."""
PLAIN = "\n\u00a0\u202f"
"""White space that is no trick, though Python counts it as unprintable."""
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
    environment = template_environment()
    environment.filters["amount"] = Amount(plan).text
    names = {"plan_name": plan_name or "plan", "trace_name": trace_name, "source": source}
    return environment.get_template("plan_page.html.j2").render(**names, **_content(plan, demand))


def template_environment() -> jinja2.Environment:
    """The page's templates. Every value that they show is cleaned first, then escaped, unless it is Markup."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("routepack.report", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_cleaned,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda value, digits=1: f"{100 * value:.{digits}f} %"
    return environment


def _cleaned(value: Any) -> Any:
    return value if isinstance(value, Markup | int | float) else clean(str(value))


def clean(text: str, most: int = 300) -> str:
    """*text* without characters that cannot be shown or that hide others, cut after *most* characters.

    >>> clean("a\\x00b\\u202ec")
    'a�b�c'
    """
    shown = "".join(character if character.isprintable() or character in PLAIN else "\ufffd" for character in text[: most + 1])
    return shown if len(shown) <= most else shown[:most] + "…"


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


def _content(plan: Plan, demand: RoutingDemand | None) -> dict[str, Any]:
    packing = figures.baseline_packing(plan, demand)
    baseline = None if packing is None else figures.side_of(plan, packing, _identity(plan), demand)
    planned = figures.side_of(plan, plan.packing, plan.placement, demand)
    return {
        "plan": plan,
        "demand": demand,
        "saved": 1.0 - plan.value / plan.baseline_value if plan.baseline_value else 0.0,
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


def _identity(plan: Plan) -> ExpertPlacement:
    return ExpertPlacement.identity(plan.placement.num_layers, plan.placement.num_experts)


def _time(plan: Plan) -> dict[str, Any]:
    """Bars and table of where the step goes; parts that nobody has are left out."""
    time, write = figures.time_of(plan), Amount(plan).text
    used = [key for key in PART_NAMES if any(round(time[side][key], 12) > 0 for side in time)]
    bars = {
        side: [(key, f"{PART_NAMES[key]}: {write(parts[key])}", parts[key]) for key in used] for side, parts in time.items()
    }
    longest = max(sum(parts.values()) for parts in time.values())
    return {"time": time, "bars": bars, "longest": longest, "parts_used": used, "side_names": SIDE_NAMES}


def _heat(baseline: figures.Side | None, planned: figures.Side) -> dict[str, Any]:
    even = float(planned.busy_DM.mean()) or 1.0
    sides = {"after": planned.busy_DM / even}
    if baseline is not None:
        sides = {"before": baseline.busy_DM / even} | sides
    shown = [drawings.shown_cells(busy_DM) for busy_DM in sides.values()]
    edges = drawings.steps(min(float(cells.min()) for cells in shown), max(float(cells.max()) for cells in shown))
    heat = {
        name: {
            "map": drawings.heat_map(busy_DM, edges),
            "ranks": busy_DM.shape[0],
            "microbatches": busy_DM.shape[1],
            "merged": [-(-there // drawn) for there, drawn in zip(busy_DM.shape, cells.shape, strict=True)],
            "highest": float(busy_DM.max()),
            "lowest": float(busy_DM.min()),
            "slowest": float(busy_DM.max(axis=0).mean()),
        }
        for (name, busy_DM), cells in zip(sides.items(), shown, strict=True)
    }
    return {"heat": heat, "edges": edges.tolist()}


def _layers(plan: Plan, demand: RoutingDemand | None, before: figures.Side | None, after: figures.Side) -> dict[str, Any]:
    if demand is None or before is None or plan.topology.expert_parallel_degree == 1:
        return {"layer_chart": None}
    pairs = (before.pairs, after.pairs)
    return {
        "layer_chart": drawings.layer_chart(demand.layer_ids_L.tolist(), *pairs),
        "layers": figures.worst_layers(plan, demand, before, after),
        "imbalance": [float(np.mean([mean for mean, _ in side])) for side in pairs],
        "worst": [max(worst for _, worst in side) for side in pairs],
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
    return {name: Markup.escape(clean(text, MOST_JSON)) for name, text in texts.items()}
