"""How good plans are and how long they take, beside the baselines, on the bench windows.

    python benchmarks/planner.py [--windows small standard ...] [--sync step] [--seeds 1]

The windows are synthetic, made by ``windows.py`` of the folder beside the repository (or ROUTEPACK_SHARED);
``dsv2lite`` is a recorded trace. Cost: window-normalised, shares 0.5 (expert), 0.375, 0.125. ``value/ideal``
is against attention evenly spread and whole experts on ranks (``bound.no_replication``), ``value/bound``
against the largest bound known. Planning is timed after one warm-up that compiles the kernels; every
plan is checked by ``routepack.verify``, and a rejected one ends the run.
"""

import argparse
import importlib.util
import os
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import routepack as rp
from routepack.solvers import greedy

SHARED = Path(os.environ.get("ROUTEPACK_SHARED", Path(__file__).parents[2] / "shared"))
TRACES = {"dsv2lite": (8, 8, 2048), "dsv2lite-16": (16, 8, 1536)}  # W, R, max_tokens


@dataclass(frozen=True, kw_only=True)
class TokenLPT(rp.Packer):
    """Longest first, each into the cell with the fewest tokens."""

    def assign(self, problem):
        length_S = problem.length_S
        cell_of_S = greedy.longest_first(length_S, problem.num_cells, length_S=length_S, max_tokens=problem.max_tokens)
        return problem.feasible_cell_of_S if (cell_of_S < 0).any() else cell_of_S


def window(name, seed):
    """(demand, topology, max_tokens) of a named window."""
    if name in TRACES:
        ranks, experts, max_tokens = TRACES[name]
        batch = rp.load_trace(SHARED / "data/dsv2lite/routing.safetensors")
        demand = rp.RoutingDemandCollector().collect(batch)
    else:
        spec = importlib.util.spec_from_file_location("windows", SHARED / "windows.py")
        windows = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(windows)
        tensors, meta = windows.window(name, seed)
        ranks, experts, max_tokens = int(meta["dp"]), int(meta["ep"]), int(meta["max_tokens"])
        demand = rp.RoutingDemand(**tensors, top_k=int(meta["top_k"]), name=name)
    return demand, rp.Topology(data_parallel_degree=ranks, expert_parallel_degree=experts), max_tokens


def planners(topology, max_tokens, sync):
    common = {"topology": topology, "sync": sync}
    first_fit, lpt = rp.FirstFitPacker(max_tokens=max_tokens), TokenLPT(max_tokens=max_tokens)
    return {
        "identity + first fit": rp.Planner(**common, rerouter=rp.IdentityRerouter(), packer=first_fit),
        "LPT + first fit": rp.Planner(**common, rerouter=PlainLPT(), packer=first_fit),
        "LPT + token-LPT": rp.Planner(**common, rerouter=PlainLPT(), packer=lpt),
        "RoutePack": rp.Planner(**common, packer=rp.AttentionAwarePacker(max_tokens=max_tokens)),
    }


@dataclass(frozen=True, kw_only=True)
class PlainLPT(rp.ExpertRerouter):
    """Placed once, not refined on the packed cells."""

    refines = False


def measure(name, sync, seeds):
    print(f"{name}, sync={sync}")
    figures = {}
    for seed in range(1 if name in TRACES else seeds):
        demand, topology, max_tokens = window(name, seed)
        for label, planner in planners(topology, max_tokens, sync).items():
            plan = planner.plan(demand)
            if problems := rp.verify(plan, demand):
                raise SystemExit(f"{label} on {name}: {problems}")
            ideal = plan.parts["bound.no_replication"]
            figures.setdefault(label, []).append((plan.value / ideal, plan.value / plan.bound, plan.plan_seconds, plan))
    for label, runs in figures.items():
        ideal, bound, seconds = (statistics.median(run[i] for run in runs) for i in range(3))
        plan = runs[0][3]
        rows = f"M {plan.num_microbatches}{'' if plan.certificate.certified else '?'}"
        print(f"  {label:22s} value/ideal {ideal:.4f}   value/bound {bound:.4f}   {seconds:6.2f} s   {rows}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["tiny", "small", "standard", "long", "hot", "large", *TRACES]
    parser.add_argument("--windows", nargs="+", choices=names, default=[name for name in names if name != "large"])
    parser.add_argument("--sync", choices=("step", "microbatch", "layer"), default="step")
    parser.add_argument("--seeds", type=int, default=1, help="synthetic windows to take the median over")
    args = parser.parse_args()
    if not (SHARED / "windows.py").exists():
        raise SystemExit(f"no bench windows at {SHARED}: set ROUTEPACK_SHARED to the folder that holds windows.py")
    print(f"numpy {np.__version__}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    demand, topology, max_tokens = window("tiny", 0)
    for planner in planners(topology, max_tokens, args.sync).values():
        planner.plan(demand)
    for name in args.windows:
        measure(name, args.sync, args.seeds)


if __name__ == "__main__":
    main()
