"""What planning costs the trainer's thread: planned on the spot, in the background, and streamed sequence by sequence.

    python benchmarks/background.py [--window standard] [--num-proposals N] [--threads 2] [--repeats 3] [--ready-seconds 1]

The trainer's step is stood in for by matrix products on one thread, long enough to cover a plan. ``exposed`` is the time
that the trainer's thread spent on or waited for planning; ``slower`` how much longer its own work took beside it, which
counts only where the trainer works on the planner's cores. For streaming, sequences arrive one by one, no faster than they
are counted, with routed experts that have the window's counts; ``ready`` is the time from the last of them to the plan.
Every such plan must be the synchronous one. Then the two ways to have it sooner: ``ready_seconds``, by the clock, and
QUICK_PROPOSALS proposals a sequence, the same plan every time.
"""

import argparse
import os
import statistics
import time
from dataclasses import replace

import numpy as np
from measuring import described, machine
from numba import njit
from windows import NAMES, window

import routepack as rp

QUICK_PROPOSALS = 200
PARTS = ("work", "streamed", "sooner")


class Work:
    """Matrix products that take about so many seconds alone."""

    def __init__(self, seconds):
        self.one = np.random.default_rng(0).normal(size=(384, 384)).astype(np.float32)
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < 0.5:
            self.one @ self.one
            count += 1
        self.count = int(count * seconds / 0.5)

    def __call__(self):
        started = time.perf_counter()
        for _ in range(self.count):
            self.one @ self.one
        return time.perf_counter() - started


def routes(demand, s):
    """uint8 [rows, L, K]: ids that have the counts of one sequence."""
    counts_LE = demand.tokens_SLE[s]
    ids_TLK = np.empty((int(counts_LE[0].sum()) // demand.top_k, len(counts_LE), demand.top_k), dtype=np.uint8)
    spread(counts_LE, ids_TLK)
    return ids_TLK


@njit(nogil=True, cache=True)
def spread(counts_LE, ids_TLK):
    rows = ids_TLK.shape[0]
    for layer in range(counts_LE.shape[0]):
        place = 0
        for expert in range(counts_LE.shape[1]):
            for _ in range(counts_LE[layer, expert]):
                ids_TLK[place % rows, layer, place // rows] = expert
                place += 1


def on_the_spot(planner, demand, work):
    started = time.perf_counter()
    plan = planner.plan(demand)
    exposed = time.perf_counter() - started
    return {"exposed": exposed, "plan": plan.plan_seconds, "work": work()}, plan


def in_background(planner, demand, work):
    with rp.BackgroundPlanner(planner=planner) as background:
        background.submit(demand)
        seconds = work()
        plan = background.result()
        timing = background.timing
    return {"exposed": timing.exposed_ms / 1e3, "plan": timing.plan_ms / 1e3, "work": seconds}, plan


def streamed(planner, demand, digest=None, **options):
    with rp.BackgroundPlanner(planner=planner, **options) as background:
        for s in range(demand.num_sequences):
            group = 0 if demand.group_S is None else int(demand.group_S[s])
            ids_TLK = routes(demand, s)
            while background.uncounted > 4:
                time.sleep(0.0005)
            background.add(ids_TLK, num_tokens=int(demand.length_S[s]), group=group)
        last, busy = time.perf_counter(), time.process_time()
        background.finish()
        plan = background.result()
        ready, busy = time.perf_counter() - last, time.process_time() - busy
        timing = background.timing
    assert plan.demand_digest == demand.digest, "streamed gave another window"
    assert digest in (None, plan.digest), "streamed gave another plan"
    adding, queued, planned = timing.exposed_ms / 1e3 - ready, timing.queued_ms / 1e3, timing.plan_ms / 1e3
    return {"ready": ready, "CPU": busy, "queued": queued, "plan": planned, "adding": adding}, plan


def ratio_of(plan):
    return plan.value / plan.parts["bound.no_replication"]


def show(label, runs):
    of = {name: sorted(1e3 * run[name] for run in runs) for name in runs[0]}
    figures = (f"{name} {statistics.median(values):.1f} ({values[0]:.1f})" for name, values in of.items())
    print(f"  {label:16s} " + "   ".join(figures))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", choices=NAMES, default="standard")
    parser.add_argument("--num-proposals", type=int, default=None)
    parser.add_argument("--threads", type=int, default=2, help="threads that anneal")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ready-seconds", type=float, default=1.0)
    args = parser.parse_args()
    demand, topology, max_tokens = window(args.window, 0)
    packer = rp.AttentionAwarePacker(max_tokens=max_tokens, threads=args.threads)
    collector = rp.RoutingDemandCollector(num_experts=demand.num_experts)
    planner = rp.Planner(topology=topology, packer=packer, collector=collector, num_proposals=args.num_proposals)
    planner.plan(demand)
    expected = planner.plan(demand)
    print(f"{described(machine())}, load {os.getloadavg()[0]:.1f}")
    print(f"{args.window}: value/bound {ratio_of(expected):.4f}; milliseconds, median (least):")
    if "work" in args.parts:
        beside_work(planner, demand, expected, args.repeats)
    if "streamed" in args.parts:
        show("streamed", [streamed(planner, demand, digest=expected.digest)[0] for _ in range(args.repeats)])
    if "sooner" in args.parts:
        sooner(planner, demand, args.ready_seconds, args.repeats)


def beside_work(planner, demand, expected, repeats):
    work = Work(2.0 * expected.plan_seconds)
    alone = statistics.median(work() for _ in range(repeats))
    print(f"  work alone {1e3 * alone:.0f}")
    for label, measure in (("on the spot", on_the_spot), ("in background", in_background)):
        runs = []
        for _ in range(repeats):
            run, plan = measure(planner, demand, work)
            assert plan.digest == expected.digest, f"{label} gave another plan"
            runs.append({"exposed": run["exposed"], "plan": run["plan"], "slower": run["work"] - alone})
        show(label, runs)


def sooner(planner, demand, ready_seconds, repeats):
    quick = replace(planner, num_proposals=QUICK_PROPOSALS * demand.num_sequences)
    for label, chosen, options in (
        (f"{QUICK_PROPOSALS} a sequence", quick, {}),
        (f"in {ready_seconds:g} s", planner, {"ready_seconds": ready_seconds}),
    ):
        made = [streamed(chosen, demand, **options) for _ in range(repeats)]
        show(label, [run for run, _ in made])
        print(f"  {'':16s} value/bound " + ", ".join(f"{ratio_of(plan):.4f}" for _, plan in made))


if __name__ == "__main__":
    main()
