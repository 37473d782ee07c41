"""How planning time grows with the window: 512 to 65,536 sequences, RoutePack and the baselines that pack by search.

    python benchmarks/scaling.py [--most 65536] [--repeats 3] [--figure docs/design/scaling.svg]

Windows are made up here (lognormal lengths, skewed experts, 16 layers x 64 experts, EP 8) and grow in every way at once:
64 sequences a DP rank, so more ranks and more groups. RoutePack tries 400 proposals a sequence, so that the search grows with
the window, whatever its default is. Time is CPU seconds of all threads, and wall seconds beside.
"""

import argparse
import json
import statistics

import numpy as np
from measuring import described, machine, measured

import routepack as rp

LAYERS, EXPERTS, TOP_K, EP, MAX_TOKENS, PER_RANK, PROPOSALS = 16, 64, 4, 8, 16_384, 64, 400


def window(sequences, seed=0):
    """A demand; drawn in blocks, so that it takes little memory beside itself."""
    rng = np.random.default_rng(seed)
    length_S = rng.lognormal(np.log(1150), 0.9, sequences).clip(64, MAX_TOKENS).astype(np.int64)
    popularity_LE = rng.lognormal(0, 0.8, (LAYERS, EXPERTS))
    tokens_SLE = np.empty((sequences, LAYERS, EXPERTS), dtype=np.uint16)
    for first in range(0, sequences, 1024):
        block = slice(first, min(sequences, first + 1024))
        own = popularity_LE * rng.lognormal(0, 0.4, (block.stop - first, LAYERS, EXPERTS))
        own /= own.sum(axis=2, keepdims=True)
        tokens_SLE[block] = rng.multinomial(length_S[block, None] * TOP_K, own)
    return rp.RoutingDemand(tokens_SLE=tokens_SLE, length_S=length_S, top_k=TOP_K)


def planners(ranks):
    topology, cap = rp.Topology(data_parallel_degree=ranks, expert_parallel_degree=EP), {"max_tokens": MAX_TOKENS}
    return {
        "RoutePack": rp.Planner(
            topology=topology, packer=rp.AttentionAwarePacker(**cap), num_proposals=PROPOSALS * PER_RANK * ranks
        ),
        "EPLB + KK": rp.Planner(topology=topology, rerouter=rp.EPLBRerouter(), packer=rp.KarmarkarKarpPacker(**cap)),
        "EPLB + MFFD": rp.Planner(topology=topology, rerouter=rp.EPLBRerouter(), packer=rp.ModifiedFirstFitPacker(**cap)),
    }


def measure(sequences, repeats):
    demand, figures = window(sequences), []
    _ = demand.digest  # The window's own, not the plan's.
    for label, planner in planners(sequences // PER_RANK).items():
        runs = []
        for _ in range(repeats):
            with measured() as taken:
                plan = planner.plan(demand)
            runs.append(taken)
        wall, cpu, peak = (
            statistics.median(getattr(run, name) for run in runs) for name in ("wall_seconds", "cpu_seconds", "peak_gib")
        )
        ratio = plan.value / plan.parts["bound.no_replication"]
        figures.append({"sequences": sequences, "planner": label, "wall": wall, "cpu": cpu, "peak": peak, "ratio": ratio})
        print(
            f"| {sequences:,} | {label} | {ratio:.4f} | {wall:.2f} | {cpu:.2f} | {1e6 * cpu / sequences:.0f} | {peak:.2f} |",
            flush=True,
        )
    return figures


def draw(figures, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "routepack"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.8), layout="constrained")
    for label in dict.fromkeys(row["planner"] for row in figures):
        own = [row for row in figures if row["planner"] == label]
        axes.loglog([row["sequences"] for row in own], [row["cpu"] for row in own], marker="o", label=label, base=2)
    first = next(row for row in figures if row["planner"] == "RoutePack")
    ends = np.array([first["sequences"], figures[-1]["sequences"]])
    axes.loglog(ends, first["cpu"] * ends / ends[0], linestyle=":", color="grey", label="linear", base=2)
    axes.set(xlabel="sequences", ylabel="CPU seconds a plan")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=65_536, help="sequences of the largest window")
    parser.add_argument("--repeats", type=int, default=3, help="plans to take the median over")
    parser.add_argument("--figure", help="SVG file to draw")
    parser.add_argument("--json", help="file to write the figures to")
    options = parser.parse_args()
    for planner in planners(8).values():
        planner.plan(window(512))
    measured_on, figures = machine(), []
    print(described(measured_on))
    print(
        "\n| sequences | planner | value/bound | wall s | CPU s | CPU µs a sequence | peak GiB |\n|---|---|---|---|---|---|---|"
    )
    sequences = 512
    while sequences <= options.most:
        figures += measure(sequences, options.repeats)
        sequences *= 2
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": measured_on, "figures": figures}, file, indent=1)
    if options.figure:
        draw(figures, options.figure)


if __name__ == "__main__":
    main()
