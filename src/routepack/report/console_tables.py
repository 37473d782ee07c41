"""Plans, calibrations and inspections as tables for a terminal. Nothing here prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from routepack.core.plans import Plan, Sync
from routepack.cost.calibration import TERMS, Fit
from routepack.report.topology_gains import Outlook, TopologyGain
from routepack.report.trace_statistics import HOT_SHARE, SPLITS, GroupPopularity, LayerLoads, PromptResponse, RoutingInspection

WORST_LAYERS = 8
"""Layers that are listed; all are in the JSON."""
FIRST_GROUPS = 6
"""Groups that are listed and compared; up to 64 are in the JSON."""
MOST_PAIRS = 3
"""Groups up to which each one's distance to each other is listed."""
MOST_ROOMY = 8
"""Columns of a table up to which they stand two spaces apart."""
BARS = "▁▂▃▄▅▆▇█"
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
"""The entries of ``Plan.parts`` that a plan's table shows, in its order."""


def plan_table(plan: Plan) -> Table:
    """Baseline, plan and lower bound of the step and of each of its parts, side by side."""
    table = _table("", "baseline", "planned", "lower bound", right=range(1, 4))
    unit = "s" if plan.unit == "seconds" else "relative"
    table.add_row(f"step, sync={plan.sync} ({unit})", *(f"{v:.4f}" for v in (plan.baseline_value, plan.value, plan.bound)))
    for key, label in PART_LABELS.items():
        parts = [plan.parts.get(f"{side}.{key}") for side in ("baseline", "planned", "bound")]
        if any(parts):
            table.add_row(f"  {label}", *("" if part is None else f"{part:.4f}" for part in parts))
    table.add_row("microbatches", *map(str, (plan.baseline_microbatches, plan.num_microbatches, plan.certificate.lower_bound)))
    return table


def calibration_table(fits: Mapping[Sync, Fit]) -> Table:
    """The fit for every ``sync``: its errors, its rates, and the share of a step that each rate accounts for."""
    table = _table("", *(f"sync={sync}" for sync in fits), right=range(1, 1 + len(fits)))
    table.add_row("held-out error, median", *(f"{fit.error:.2%}" for fit in fits.values()))
    table.add_row("  90th percentile", *(f"{fit.error_p90:.2%}" for fit in fits.values()))
    for term in TERMS:
        label = f"seconds per {term.removesuffix('_seconds')}"
        table.add_row(label, *(f"{getattr(fit.cost_model, term):.3e}" for fit in fits.values()))
        table.add_row("  share of a step", *(f"{fit.shares[term]:.1%} ± {fit.uncertainty[term]:.1%}" for fit in fits.values()))
    return table


def inspection_text(found: RoutingInspection) -> Group:
    """An inspection: coverage, hottest experts, groups, and prompts beside responses."""
    parts = [_window(found), *_layers(found.layers)]
    parts += _groups(found.groups) if found.groups is not None else []
    parts += _prompt_response(found.prompt_response) if found.prompt_response is not None else []
    return Group(*parts)


def gains_text(gains: Sequence[TopologyGain], outlook: Outlook, why_cap: str) -> Group:
    """What planning would gain, topology by topology; below, why some cannot be planned."""
    table = _table(
        "EP", "DP", "microbatches", "baseline", "planned", "lower bound", "gain", "EP-rank load, max/mean", right=range(8)
    )
    reasons: list[str] = []
    for gain in gains:
        degrees = (str(gain.expert_parallel_degree), str(gain.data_parallel_degree))
        if gain.reason:
            if gain.reason not in reasons:
                reasons.append(gain.reason)
            table.add_row(*degrees, "", "", "", "", f"no [{reasons.index(gain.reason) + 1}]", "", style="dim")
            continue
        rows = _arrow(gain.baseline_microbatches, gain.num_microbatches)
        worth = [_figure(value) for value in (gain.baseline, gain.planned, gain.bound)]
        table.add_row(*degrees, rows, *worth, f"{gain.gain:+.1%}", f"{gain.imbalance_before:.2f} → {gain.imbalance_after:.2f}")
    units = {gain.unit for gain in gains if gain.unit}
    unit = "seconds" if units == {"seconds"} else "1 = a perfectly even step"
    head = _head(f"What planning would gain: predicted step, sync={outlook.sync} ({unit})")
    notes = [
        f"Cap {outlook.max_tokens:,} tokens a microbatch{why_cap}.",
        "Baseline: experts where they are, sequences packed first-fit.",
        "Gain: how much longer the baseline takes. A quick search; `routepack plan` searches further.",
        *(f"[{number}] {reason}" for number, reason in enumerate(reasons, start=1)),
    ]
    return Group(head, table, *(Text(note, style="dim") for note in notes))


def _window(found: RoutingInspection) -> Group:
    coverage = found.coverage
    lines = [
        f"{found.num_sequences:,} sequences, {found.num_tokens:,} tokens (longest {found.longest:,}), {found.num_layers} MoE "
        f"layers, top-{found.top_k} of {found.num_experts} experts",
        f"routes recorded for {coverage.share:.1%} of the fed tokens: {coverage.complete_sequences:,} sequences whole, "
        f"{coverage.partial_sequences:,} in part, {coverage.missing_sequences:,} not at all; "
        f"{coverage.masked_rows:,} rows masked",
    ]
    # Text, not markup: a trace's own words must not style the terminal.
    return Group(Text(_printable(found.source) or "(no source named)", style="bold"), *map(Text, lines))


def _layers(loads: LayerLoads) -> list[RenderableType]:
    table = _table(
        "layer", "hottest expert", "its rows", "x mean", f"hottest {HOT_SHARE:.0%}", "spread", "unused", right=range(7)
    )
    for layer in np.argsort(-loads.hottest_over_mean_L, kind="stable")[:WORST_LAYERS]:
        table.add_row(
            str(loads.layer_ids_L[layer]),
            str(loads.hottest_L[layer]),
            f"{loads.hottest_rows_L[layer]:,}",
            f"{loads.hottest_over_mean_L[layer]:.2f}",
            f"{loads.hot_share_L[layer]:.1%} of rows",
            f"{loads.variation_L[layer]:.2f}",
            str(loads.unused_L[layer]),
        )
    hottest_L = loads.hottest_over_mean_L
    profile = f"layers {loads.layer_ids_L[0]} to {loads.layer_ids_L[-1]}: {_bars(hottest_L)}  "
    profile += f"{hottest_L.min():.2f} to {hottest_L.max():.2f}, mean {hottest_L.mean():.2f}"
    head = _head("Hottest experts: rows over the layer's mean expert (1 = even)")
    more = len(hottest_L) - min(len(hottest_L), WORST_LAYERS)
    return [head, Text(profile), table, *([Text(f"... and {more} less uneven layers", style="dim")] if more else [])]


def _groups(groups: GroupPopularity) -> list[RenderableType]:
    shown = len(groups.group_g[:FIRST_GROUPS])
    listed = "" if shown == groups.num_groups else f", the {shown} with most rows listed"
    head = _head(f"Popularity by {_printable(groups.field)}: {groups.num_groups:,} groups{listed}")
    # Of many groups the distances between an arbitrary few tell little: their mean to all others stands for them.
    each = groups.group_g.tolist() if groups.num_groups <= MOST_PAIRS else []
    distances = [f"to {group}" for group in each] or ["others"]
    names = ("group", "sequences", "rows", "own halves", *distances)
    table = _table(*names, "its own expert", "share", "elsewhere", right=range(10 + len(each)))
    for g in range(shown):
        layer, expert, share, others = groups.distinctive_g[g]
        apart = [groups.distance_gg[g, o] if o != g else np.nan for o in range(len(each))]
        apart = apart or [np.delete(groups.distance_gg[g], g).mean()]
        figures = ["" if np.isnan(value) else f"{value:.3f}" for value in (groups.within_g[g], *apart)]
        own = (f"{expert} of layer {layer}", f"{share:.1%}", f"{others:.1%}")
        table.add_row(str(groups.group_g[g]), str(groups.sequences_g[g]), f"{groups.rows_g[g]:,}", *figures, *own)
    between, within = (f"{value:.3f}" if np.isfinite(value) else "-" for value in (groups.between, groups.within))
    note = (
        "Distances: share of a group's rows that would have to go to other experts to match (0 alike, 1 disjoint). Mean "
        f"between groups {between}; between random halves of one group {within} ({SPLITS} splits): chance alone."
    )
    return [head, table, Text(note, style="dim")]


def _prompt_response(found: PromptResponse) -> list[RenderableType]:
    table = _table("correlation over experts, mean over layers", "mean", "10th pct", "median", "90th pct", right=range(1, 5))
    for label, values in (
        ("prompt and its own response", found.correlation_S),
        ("prompt and another's response", found.other_S),
    ):
        if len(values):
            table.add_row(label, *(f"{value:.2f}" for value in (values.mean(), *np.percentile(values, [10, 50, 90]))))
    recorded = "recorded" if found.boundary in ("loss_mask", "num_prompt_tokens") else "nothing recorded says where prompts end"
    note = f"{len(found.correlation_S):,} requests; prompt and response told apart by: {found.boundary} ({recorded})."
    return [_head("Do prompts tell what responses will activate?"), table, Text(note, style="dim")]


def _head(title: str) -> Text:
    return Text(f"\n{title}", style="bold")


def _table(*names: str, right: range) -> Table:
    # One space between columns where there are so many that 80 characters would not hold them.
    padding = (0, 1, 0, 0) if len(names) > MOST_ROOMY else (0, 1)
    table = Table(box=None, pad_edge=False, padding=padding, header_style="bold")
    for column, name in enumerate(names):
        # Where a terminal is narrow, headings wrap between words; no word is cut.
        widest = max(map(len, name.split()), default=0)
        table.add_column(name, justify="right" if column in right else "left", min_width=widest)
    return table


def _bars(values: np.ndarray) -> str:
    """One block a value, from 1 (even) to the largest."""
    top = max(float(values.max()), 1.0 + 1e-9)
    return "".join(BARS[min(7, int(8 * max(0.0, value - 1.0) / (top - 1.0)))] for value in values.tolist())


def _arrow(before: int | None, after: int | None) -> str:
    return str(after) if before == after else f"{before} → {after}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value >= 0.1 else f"{value:.3g}"


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)[:200]
