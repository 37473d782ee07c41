"""How fast recorded ids are counted, beside numpy.bincount and the bandwidth of a plain copy; "collect" also checks them.

    python benchmarks/collector.py [--ids 100_000_000]

Every figure is the best of five in this process; ratios are against the baselines of the same run.
"""

import argparse
import os
import time

import numpy as np

from routepack import RolloutBatch, RoutingDemandCollector
from routepack.solvers.expert_counts import count_experts

SHAPES = [  # dtype, experts, layers, top-k
    (np.uint8, 128, 48, 8),
    (np.uint8, 256, 58, 8),
    (np.int16, 512, 48, 8),
    (np.int32, 128, 48, 8),
]


def best_seconds(run, repeats=5):
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def recorded(dtype, experts, layers, top_k, ids):
    rng = np.random.default_rng(0)
    popularity = rng.lognormal(0, 0.85, experts)
    rows = ids // (layers * top_k)
    # Different experts in a row, the popular ones more often (Gumbel top-k); some thousand rows, repeated at random.
    keys = np.log(popularity) + rng.gumbel(size=(4096, layers, experts))
    drawn = np.argpartition(-keys, top_k, axis=2)[:, :, :top_k].astype(dtype)[rng.integers(0, 4096, rows)]
    cuts = np.unique(np.concatenate([[0, rows], rng.integers(0, rows, max(rows // 2000, 1))]))
    return RolloutBatch(routed_experts_TLK=drawn, cu_seqlens=cuts, num_tokens_S=np.diff(cuts) + 1, num_experts=experts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=lambda text: int(text.replace("_", "")), default=100_000_000)
    ids = parser.parse_args().ids
    print(
        f"{ids:,} ids, {len(os.sched_getaffinity(0))} cores, numpy {np.__version__}; ids/s, and the share of a copy's bandwidth"
    )
    row = "{:>6} {:>4} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10} {:>8}".format
    print(row("dtype", "E", "1 thread", "all cores", "collect", "bincount", "x bincount", "copy GB/s", "of copy"))
    for dtype, experts, layers, top_k in SHAPES:
        batch = recorded(dtype, experts, layers, top_k, ids)
        flat = batch.routed_experts_TLK.reshape(-1)

        def count(threads, batch=batch, experts=experts):
            return lambda: count_experts(batch.routed_experts_TLK, batch.cu_seqlens, experts, None, threads)

        tokens_SLE, bad = count(None)()
        assert bad < 0
        assert (tokens_SLE.sum((0, 1), dtype=np.int64) == np.bincount(flat, minlength=experts)).all()
        one, every = best_seconds(count(1)), best_seconds(count(None))
        whole = best_seconds(lambda batch=batch: RoutingDemandCollector().collect(batch))
        baseline = best_seconds(lambda flat=flat, experts=experts: np.bincount(flat, minlength=experts), 2)
        target = np.empty_like(flat)
        copy = best_seconds(lambda flat=flat, target=target: np.copyto(target, flat))
        rates = [f"{flat.size / seconds:.2e}" for seconds in (one, every, whole, baseline)]
        bandwidth = f"{flat.nbytes / copy / 1e9:.1f}"
        print(row(np.dtype(dtype).name, experts, *rates, f"{baseline / every:.1f}", bandwidth, f"{copy / every:.0%}"))


if __name__ == "__main__":
    main()
