"""How good plans are and what they take, beside the baselines, on the bench windows.

    python benchmarks/planner.py [--windows small standard ...] [--sync step] [--seeds 5] [--json out.json]

Prints the Markdown tables of benchmarks/README.md. The windows are synthetic, made by ``windows.py`` of the folder beside
the repository (or ROUTEPACK_SHARED); ``dsv2lite`` is a recorded trace. Cost: window-normalised, shares 0.5 (expert), 0.375,
0.125. ``value/bound`` is against attention evenly spread and whole experts on ranks (``bound.no_replication``), ``proven``
against the largest bound known, which also knows that sequences are whole. Figures are medians over the window seeds.
Planning is measured after a warm-up that compiles the kernels; every plan is checked by ``routepack.verify``, and a
rejected one ends the run.
"""

import argparse
import json
import statistics
from dataclasses import dataclass

from measuring import described, machine, measured
from windows import NAMES, TRACES, window

import routepack as rp

SECONDS = {"small": (2,), "standard": (3, 10), "long": (3,), "hot": (4,), "dsv2lite": (1,), "dsv2lite-16": (1,), "large": (15,)}
"""Time limits that RoutePack is measured under, beside its default number of proposals."""
FIGURES = ("value_over_bound", "value_over_proven", "wall_seconds", "cpu_seconds", "peak_gib")


@dataclass(frozen=True, kw_only=True)
class PlacedOnce(rp.ExpertRerouter):
    """RoutePack's placement before it is refined on the packed cells."""

    def search(self):
        return None


def planners(topology, max_tokens, sync, seconds=()):
    """Every planner by name, the weakest first."""
    cap, common = {"max_tokens": max_tokens}, {"topology": topology, "sync": sync}
    identity, lpt, eplb = rp.IdentityRerouter(), rp.LPTRerouter(), rp.EPLBRerouter()
    parts = {
        "identity + first fit": (identity, rp.FirstFitPacker(**cap)),
        "identity + KK, equal counts (verl)": (identity, rp.KarmarkarKarpPacker(**cap)),
        "identity + MFFD (NeMo-RL)": (identity, rp.ModifiedFirstFitPacker(**cap)),
        "LPT + first fit": (lpt, rp.FirstFitPacker(**cap)),
        "EPLB + MFFD": (eplb, rp.ModifiedFirstFitPacker(**cap)),
        "EPLB + KK, equal counts": (eplb, rp.KarmarkarKarpPacker(**cap)),
        "EPLB + KK": (eplb, rp.UnequalKarmarkarKarpPacker(**cap)),
        "LPT + token-LPT": (lpt, rp.TokenLPTPacker(**cap)),
        "placement alone (RoutePack, first fit)": (PlacedOnce(), rp.FirstFitPacker(**cap)),
        "packing alone (identity, RoutePack)": (identity, rp.AttentionAwarePacker(**cap)),
    }
    named = {name: rp.Planner(**common, rerouter=rerouter, packer=packer) for name, (rerouter, packer) in parts.items()}
    packer = rp.AttentionAwarePacker(**cap)
    named["RoutePack"] = rp.Planner(**common, packer=packer)
    for limit in seconds:
        named[f"RoutePack, {limit} s"] = rp.Planner(**common, packer=packer, time_limit_seconds=limit)
    return named


def measure(name, seed, options):
    """One record per planner on one window."""
    demand, topology, max_tokens = window(name, seed, options.cache)
    seconds = () if options.only_proposals else SECONDS.get(name, ())
    for label, planner in planners(topology, max_tokens, options.sync, seconds).items():
        if options.planners and not any(part in label for part in options.planners):
            continue
        with measured() as taken:
            plan = planner.plan(demand)
        if problems := rp.verify(plan, demand):
            raise SystemExit(f"{label} on {name}, seed {seed}: {problems}")
        yield {
            "window": name,
            "window_seed": seed,
            "sync": options.sync,
            "planner": label,
            "value_over_bound": plan.value / plan.parts["bound.no_replication"],
            "value_over_proven": plan.value / plan.bound,
            "microbatches": plan.num_microbatches,
            "certificate": str(plan.certificate),
            **vars(taken),
        }


def table(records):
    """Markdown: a line per planner, with the median over the seeds, and the worst seed beside it."""
    lines = [
        "| planner | value/bound | worst seed | value/proven | M | wall s | CPU s | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label in dict.fromkeys(record["planner"] for record in records):
        own = [record for record in records if record["planner"] == label]
        ratio, proven, wall, cpu, peak = (statistics.median(record[name] for record in own) for name in FIGURES)
        rows = sorted({record["microbatches"] for record in own})
        worst = max(record["value_over_bound"] for record in own)
        lines.append(
            f"| {label} | {ratio:.4f} | {worst:.4f} | {proven:.4f} | {', '.join(map(str, rows))} | {wall:.2f} | {cpu:.2f} | "
            f"{peak:.2f} |"
        )
    return "\n".join(lines)


def warm_up(sync):
    """Compile every kernel."""
    demand, topology, max_tokens = window("tiny", 0)
    for planner in planners(topology, max_tokens, sync, seconds=(0.1,)).values():
        planner.plan(demand)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [name for name in NAMES if name not in ("tiny", "large")]
    parser.add_argument("--windows", nargs="+", choices=NAMES, default=default)
    parser.add_argument("--planners", nargs="+", help="only those whose name contains one of these")
    parser.add_argument("--sync", choices=("step", "microbatch", "layer"), default="step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="window seeds to take the median over")
    parser.add_argument("--only-proposals", action="store_true", help="leave the time-limited runs out")
    parser.add_argument("--cache", help="folder to keep synthetic windows in")
    parser.add_argument("--json", help="file to write every single figure to")
    options = parser.parse_args()
    warm_up(options.sync)
    measured_on, records = machine(), []
    print(described(measured_on), f"sync={options.sync}, window seeds {', '.join(map(str, options.seeds))}.")
    for name in options.windows:
        own = [
            record
            for seed in (options.seeds[:1] if name in TRACES else options.seeds)
            for record in measure(name, seed, options)
        ]
        certificates = sorted({record["certificate"] for record in own if record["planner"].startswith("RoutePack")})
        print(f"\n### {name}\n\n{table(own)}\n\nRoutePack's {'; '.join(certificates)}.", flush=True)
        records += own
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"machine": measured_on, "records": records}, file, indent=1)


if __name__ == "__main__":
    main()
