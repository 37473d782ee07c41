"""What planning gains on the running trainer: tokens a second of every arm, interleaved in one run.

    python benchmarks/step.py --ranks 2 --json runs/step-2.json
    python benchmarks/step.py --ranks 4 --json runs/step-4.json

Arms: `baseline` (experts where they are, first-fit packing), `reroute` (experts placed, packing as before), `pack` (placed by
the window's loads, then packed), `joint` (placement and packing searched together), and `balanced`: the same sequences with
force-balanced routing, packed: the ideal. All train the same windows with the same code: FSDP2, expert parallelism, replay.
Timed is the optimizer step: every microbatch's forward and backward pass and AdamW; planning and moves are measured apart.
Before, steps of other windows warm up and calibrate a cost model, which the plans are made with and which predicts the gains.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from step_windows import MAX_TOKENS, balanced, part, recorded, synthetic

ARMS = ("baseline", "reroute", "pack", "joint", "balanced")
EP = 2
MODEL = {"dim": 256, "moe_hidden_dim": 896, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "vocab_size": 1024}
LAYERS, EXPERTS, TOP_K = 3, 8, 2
CALIBRATING = 40
"""Steps of the calibration, of other windows and sizes; they also warm up."""


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="steps of every arm")
    parser.add_argument("--windows", type=int, default=6, help="different windows, taken in turn")
    parser.add_argument("--sequences", type=int, default=24, help="of a window, per rank")
    parser.add_argument("--calibrating", type=int, default=CALIBRATING, help="steps to calibrate with, before")
    parser.add_argument("--recorded", action="store_true", help="routes and lengths of the DeepSeek-V2-Lite trace, 64 experts")
    parser.add_argument("--gather", choices=("step", "layer"), default="step", help="trainer.gather")
    parser.add_argument("--num-proposals", type=int, default=20_000, help="of every plan")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="write every step's loads and seconds for `routepack calibrate`")
    return parser.parse_args()


def start(args):
    """Start the ranks; their exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        logs = [(Path(folder) / f"rank{rank}.log").open("w+") for rank in range(args.ranks)]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:]],
                env={**os.environ, **launched, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=None if rank == 0 else log,
                stderr=log,
            )
            for rank, log in enumerate(logs)
        ]
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.1)
        time.sleep(1.0 if any(rank.poll() for rank in ranks) else 0.0)
        for rank, log in zip(ranks, logs, strict=True):
            if rank.poll() is None:
                rank.kill()
            if rank.wait():
                log.seek(0)
                sys.stderr.write(log.read()[-4000:])
    return max(abs(rank.returncode) for rank in ranks)


@dataclass
class Placed:
    """What an arm trains in a round, and what is expected of it."""

    batch: object
    plan: object
    loads: object


class Bench:
    def __init__(self, args):
        import torch.distributed as dist

        import routepack as rp
        from routepack.components.rerouter import Rerouter
        from routepack.torchtitan.model.models import TinyQwen3MoE
        from routepack.torchtitan.trainer.settings import TrainerSettings
        from routepack.torchtitan.trainer.trainer import RoutePackTrainer
        from routepack.training.losses import CrossEntropyTokenLoss

        class Kept(Rerouter):
            """A placement that is given."""

            def assign(self, tokens_LE, num_ranks):
                return kept[-1]

        kept = []
        self.rp, self.dist, self.args, self.kept, self.Kept = rp, dist, args, kept, Kept
        experts, top_k, hidden = (64, 6, 208) if args.recorded else (EXPERTS, TOP_K, MODEL["moe_hidden_dim"])
        self.max_tokens = MAX_TOKENS
        shape = {"num_layers": LAYERS, "num_experts": experts, "top_k": top_k, "max_seq_len": self.max_tokens}
        self.model = TinyQwen3MoE(**{**MODEL, "moe_hidden_dim": hidden}, **shape)
        settings = TrainerSettings(
            expert_parallel_degree=EP, learning_rate=1e-5, gather=args.gather, dump_folder=tempfile.gettempdir()
        )
        self.trainer = RoutePackTrainer.from_settings(model=self.model, settings=settings)
        self.rank, self.loss = dist.get_rank(), CrossEntropyTokenLoss()
        self.topology = rp.Topology(data_parallel_degree=args.ranks, expert_parallel_degree=EP)
        self.cost_model, self.sync = rp.WindowNormalizedCost(), "step" if args.gather == "step" else "layer"

    def window(self, seed, num_sequences):
        num_sequences -= num_sequences % 8
        if self.args.recorded:
            return recorded(seed, num_sequences, layers=LAYERS, vocab=MODEL["vocab_size"])
        shape = {"layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K}
        return synthetic(seed, num_sequences, vocab=MODEL["vocab_size"], **shape)

    def planner(self, rerouter, packer, **rules):
        return self.rp.Planner(
            topology=self.topology,
            rerouter=rerouter,
            packer=packer(max_tokens=self.max_tokens, **rules),
            cost_model=self.cost_model,
            sync=self.sync,
            num_proposals=self.args.num_proposals,
        )

    def placed(self, batch, rerouter, packer, **rules):
        """The batch with rank 0's plan."""
        from routepack.cost.step_log import StepLoads
        from routepack.distributed import collectives

        demand = self.rp.RoutingDemandCollector().collect(batch)
        plan = collectives.from_rank(0, lambda: self.planner(rerouter, packer, **rules).plan(demand), "plan")
        return Placed(batch, plan, StepLoads.planned(plan, demand))

    def arms(self, batch):
        """What every arm trains of a window."""
        rp = self.rp
        demand = rp.RoutingDemandCollector().collect(batch)
        self.kept.append(rp.ExpertRerouter().place(demand.tokens_LE, self.topology).physical_to_logical_LP)
        return {
            "baseline": self.placed(batch, rp.IdentityRerouter(), rp.FirstFitPacker),
            "reroute": self.placed(batch, rp.ExpertRerouter(), rp.FirstFitPacker),
            "pack": self.placed(batch, self.Kept(), rp.AttentionAwarePacker),
            "joint": self.placed(batch, rp.ExpertRerouter(), rp.AttentionAwarePacker),
            "balanced": self.placed(balanced(batch), rp.IdentityRerouter(), rp.AttentionAwarePacker),
        }

    def step(self, placed):
        """Seconds of one step, of the slowest rank; and the CPU seconds of every rank's own thread."""
        import torch

        self.trainer.move_experts(placed.plan.placement)
        self.dist.barrier()
        started, busy = time.perf_counter(), time.thread_time()
        self.trainer.update(placed.batch, placed.plan, self.loss)
        taken = torch.tensor([time.perf_counter() - started, time.thread_time() - busy], dtype=torch.float64)
        by_rank = [torch.empty_like(taken) for _ in range(self.args.ranks)]
        self.dist.all_gather(by_rank, taken)
        return max(float(one[0]) for one in by_rank), [float(one[1]) for one in by_rank]

    def calibrate(self):
        """Warm up on windows of other sizes and plans of every kind; take the rates and the sync that predict them best."""
        from routepack.core.errors import TraceError
        from routepack.cost.calibration import best_sync, calibrate
        from routepack.cost.step_log import StepRecord

        records, rng = [], np.random.default_rng(0)
        for number in range(2 * self.args.calibrating):
            placed = self.calibrating(number, rng)
            seconds, _ = self.step(placed)
            # The first ones load kernels and allocate.
            if number >= 4:
                records.append(StepRecord(loads=placed.loads, seconds=seconds, step=number))
            if number + 1 < self.args.calibrating:
                continue
            try:
                fits = calibrate(records)
                break
            except TraceError:
                # A disturbed machine needs more steps. At the end the rates are taken as they are; their errors are shown.
                if number + 1 == 2 * self.args.calibrating:
                    fits = calibrate(records, uncertain=float("inf"))
        self.sync = best_sync({sync: one.error for sync, one in fits.items()}, configured=self.sync)
        self.cost_model = fits[self.sync].cost_model
        return records, fits

    def calibrating(self, number, rng):
        """A window of another size or make, under a plan of another kind, for every step."""
        rp = self.rp
        size = self.args.ranks * self.args.sequences * rng.choice([2, 3, 4, 5]) // 4
        # Every part of a window under every kind of plan: what always went together could not be told apart.
        kinds = list(product(("all", "short", "long"), ("identity", "placed", "random"), ("first fit", "balanced")))
        if number % len(kinds) == 0:
            self.order = rng.permutation(len(kinds))
        which, placement, packing = kinds[self.order[number % len(kinds)]]
        batch = part(self.window(1000 + number, max(size, 8 * self.args.ranks)), which)
        self.kept.append(np.argsort(rng.random((LAYERS, batch.num_experts)), axis=1))
        rerouters = {"identity": rp.IdentityRerouter(), "placed": rp.ExpertRerouter(), "random": self.Kept()}
        packer = {"first fit": rp.FirstFitPacker, "balanced": rp.AttentionAwarePacker}[packing]
        # Some steps have more microbatches than they need: that is what tells a microbatch's overhead.
        fewest = min(1 + int(rng.integers(4)), batch.num_sequences // self.args.ranks)
        return self.placed(batch, rerouters[placement], packer, min_microbatches=fewest)

    def measure(self):
        """Every arm, round by round."""
        windows = [self.arms(self.window(seed, self.args.ranks * self.args.sequences)) for seed in range(self.args.windows)]
        steps = {arm: [] for arm in ARMS}
        for number in range(-1, self.args.rounds):
            for arm, placed in windows[number % len(windows)].items():
                seconds, busy = self.step(placed)
                tokens = int(placed.batch.num_tokens_S.sum())
                predicted = self.cost_model.predicted_seconds(placed.loads, self.sync)
                if number >= 0:
                    steps[arm].append({"seconds": seconds, "busy": busy, "tokens": tokens, "predicted": predicted})
        return windows, steps

    def hidden(self, windows):
        """Seconds of planning that the trainer saw, and of its steps, with every plan made while the step before runs."""
        exposed, steps, alone, planning = [], [], [], []
        rp = self.rp
        demands = [rp.RoutingDemandCollector().collect(window["joint"].batch) for window in windows]
        with rp.BackgroundPlanner(planner=self.planner(rp.ExpertRerouter(), rp.AttentionAwarePacker)) as background:
            for number in range(len(windows)):
                window, coming = windows[number % len(windows)], demands[(number + 1) % len(windows)]
                alone.append(self.step(window["joint"])[0])
                if self.rank == 0:
                    background.submit(coming)
                steps.append(self.step(window["joint"])[0])
                if self.rank == 0:
                    background.result()
                    exposed.append(background.timing.exposed_ms / 1e3)
                    planning.append(background.timing.plan_ms / 1e3)
        return {"exposed": exposed, "steps": steps, "alone": alone, "planning": planning}


def summarize(args, records, fits, bench, windows, steps, hidden):
    from measuring import machine

    def spread(values):
        return {
            "median": float(np.median(values)),
            "p10": float(np.percentile(values, 10)),
            "p90": float(np.percentile(values, 90)),
        }

    speed = {arm: np.array([one["tokens"] / one["seconds"] for one in steps[arm]]) for arm in ARMS}
    predicted = {arm: np.array([one["tokens"] / one["predicted"] for one in steps[arm]]) for arm in ARMS}
    arms = {
        arm: {
            "tokens_per_second": spread(speed[arm]),
            "seconds": spread([one["seconds"] for one in steps[arm]]),
            "measured_gain": float(np.median(speed[arm]) / np.median(speed["baseline"]) - 1),
            "paired_gain": float(np.median(speed[arm] / speed["baseline"]) - 1),
            "predicted_gain": float(np.median(predicted[arm]) / np.median(predicted["baseline"]) - 1),
            "of_balanced": float(np.median(speed[arm]) / np.median(speed["balanced"])),
            "busy_seconds_by_rank": np.mean([one["busy"] for one in steps[arm]], axis=0).tolist(),
            "num_microbatches": [window[arm].plan.num_microbatches for window in windows],
            "imbalance": float(np.mean([window[arm].plan.parts["planned.imbalance_mean"] for window in windows])),
            "plan_seconds": float(np.median([window[arm].plan.plan_seconds for window in windows])),
        }
        for arm in ARMS
    }
    share = float(np.median(hidden["exposed"]) / np.median(hidden["steps"]))
    return {
        "machine": machine(),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "model": MODEL | {"num_layers": LAYERS, "num_experts": bench.model.num_experts, "top_k": bench.model.top_k},
        "sync": bench.sync,
        "fits": {
            sync: {"error": one.error, "error_p90": one.error_p90, "shares": one.shares, "rates": one.cost_model.as_dict()}
            for sync, one in fits.items()
        },
        "arms": arms,
        "predicted_gain": arms["joint"]["predicted_gain"],
        "measured_gain": arms["joint"]["measured_gain"],
        "exposed_planning_share": share,
        "planning": {
            "exposed_ms": 1e3 * float(np.median(hidden["exposed"])),
            "plan_ms": 1e3 * float(np.median(hidden["planning"])),
            "step_with_planning_seconds": float(np.median(hidden["steps"])),
            "step_alone_seconds": float(np.median(hidden["alone"])),
        },
        "steps": steps,
    }


def show(result):
    for sync, one in result["fits"].items():
        shares = ", ".join(f"{name.removesuffix('_seconds')} {share:.0%}" for name, share in one["shares"].items())
        print(f"sync={sync}: predicts held-out steps within {one['error']:.1%} (p90 {one['error_p90']:.1%}); {shares}")
    print(f"chosen: sync={result['sync']}\n")
    print("| arm | tokens/s | p10 | p90 | measured | predicted | of balanced | EP max/mean | busy s by rank |")
    print("|---|---|---|---|---|---|---|---|---|")
    for arm, one in result["arms"].items():
        speed, busy = one["tokens_per_second"], " / ".join(f"{value:.2f}" for value in one["busy_seconds_by_rank"])
        print(
            f"| {arm} | {speed['median']:.0f} | {speed['p10']:.0f} | {speed['p90']:.0f} | {one['measured_gain']:+.1%} | "
            f"{one['predicted_gain']:+.1%} | {one['of_balanced']:.1%} | {one['imbalance']:.3f} | {busy} |"
        )
    planning = result["planning"]
    print(
        f"\nplanning: {planning['plan_ms']:.0f} ms in the background, {planning['exposed_ms']:.2f} ms exposed "
        f"({result['exposed_planning_share']:.2%} of a step); steps take {planning['step_with_planning_seconds']:.3f} s beside "
        f"it, {planning['step_alone_seconds']:.3f} s alone",
        flush=True,
    )


def rank(args):
    from routepack.distributed import collectives

    bench = Bench(args)
    records, fits = bench.calibrate()
    if args.log and bench.rank == 0:
        args.log.write_text("".join(record.to_json() + "\n" for record in records))
    windows, steps = bench.measure()
    hidden = bench.hidden(windows)
    if bench.rank == 0:
        result = summarize(args, records, fits, bench, windows, steps, hidden)
        show(result)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=1))
    collectives.leave(0)


if __name__ == "__main__":
    arguments = parse()
    if "RANK" in os.environ:
        rank(arguments)
    else:
        raise SystemExit(start(arguments))
