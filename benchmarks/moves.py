"""What moving all experts of a layer takes, beside a plain all-to-all of the same bytes in the same run.

    python benchmarks/moves.py [--ranks 2 4] [--staging-mib 256 4] [--repeats 9] [--json FILE]

Starts gloo ranks on this machine, each with one layer of experts, AdamW's moments and FSDP2 + EP as in training. Every expert
moves to another rank and back; in between, the same bytes go to the same ranks by one ``all_to_all_single`` from and into
memory that is ready. A move includes the agreement, copying rows out of and into the shards, and the exchange. Bandwidth is
the bytes that a rank sends over the seconds of the slowest rank.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import described, machine

MIB = 2**20


def rank_main(args):
    import numpy as np
    import torch
    import torch.distributed as dist

    from routepack.core.plans import ExpertPlacement
    from routepack.distributed import collectives
    from routepack.torchtitan.model import overrides
    from routepack.torchtitan.model.models import TinyQwen3MoE
    from routepack.torchtitan.trainer.settings import TrainerSettings
    from routepack.torchtitan.trainer.trainer import RoutePackTrainer
    from routepack.training.expert_moves import MoveFigures, StagingMemory, move_experts

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{args.join}", rank=rank, world_size=size)
    model = TinyQwen3MoE(dim=args.dim, moe_hidden_dim=args.hidden, num_experts=args.experts, num_layers=1)
    settings = TrainerSettings(expert_parallel_degree=size, dump_folder=tempfile.gettempdir())
    trainer = RoutePackTrainer.from_settings(model=model, settings=settings)
    trainer.optimizers.state_dict()  # makes AdamW's moments
    per_rank = args.experts // size
    # Expert i of every rank goes to the rank i % (size - 1) + 1 further on: all leave, each rank gets as many as it gives.
    ranks, rows = np.divmod(np.arange(args.experts), per_rank)
    targets = (ranks + rows % (size - 1) + 1) % size
    away = ExpertPlacement(physical_to_logical_LP=np.argsort(targets, kind="stable")[None])
    home = ExpertPlacement.identity(1, args.experts)
    assert (away.rank_of_LE(size) != home.rank_of_LE(size)).all()

    memories = {mib: StagingMemory(limit_bytes=mib * MIB) for mib in args.staging_mib}

    def moved(old, new, mib) -> MoveFigures:
        layers = overrides.expert_modules(trainer.model)
        return move_experts(layers, trainer.optimizers, old, new, num_ranks=size, staging=memories[mib])

    def timed(work):
        dist.barrier()
        started = time.perf_counter()
        result = work()
        seconds = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds), result

    row_bytes = moved(home, away, args.staging_mib[0]).bytes_sent // per_rank
    moved(away, home, args.staging_mib[0])
    counts = [int((targets[ranks == rank] == other).sum()) for other in range(size)]
    leaving = torch.ones(per_rank, row_bytes, dtype=torch.uint8)
    arriving = torch.empty_like(leaving)
    figures = {"plain": [], **{str(mib): [] for mib in args.staging_mib}}
    received = [int((targets[ranks == other] == rank).sum()) for other in range(size)]
    for repeat in range(args.repeats + 1):
        taken = {"plain": timed(lambda: dist.all_to_all_single(arriving, leaving, received, counts))[0]}
        for mib in args.staging_mib:
            there = timed(lambda mib=mib: moved(home, away, mib))[0]
            back = timed(lambda mib=mib: moved(away, home, mib))[0]
            taken[str(mib)] = (there + back) / 2
        if repeat:  # the first warms up
            for name, seconds in taken.items():
                figures[name].append(seconds)
    if rank == 0:
        print(json.dumps({"bytes": per_rank * row_bytes, "seconds": figures}))
    collectives.leave()


def run(ranks, args):
    """The figures of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--join", f"{folder}/join", *sys.argv[1:]]
        processes = []
        for rank in range(ranks):
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **environment}, stdout=output))
        said = processes[0].communicate(timeout=args.timeout)[0]
        assert [process.wait(timeout=30) for process in processes] == [0] * ranks
    return json.loads(said.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--experts", type=int, default=12)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--staging-mib", type=int, nargs="+", default=[256, 4])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=170.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--join", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.join:
        rank_main(args)
        return
    from importlib import metadata

    here, results = machine(), {}
    print(f"{described(here)[:-1]}, torch {metadata.version('torch')}.")
    print("| ranks | sent by a rank | | seconds, median | least | most | GB/s | of the plain one, by medians | by least |")
    print("|---|---|---|---|---|---|---|---|---|")
    for ranks in args.ranks:
        results[ranks] = found = run(ranks, args)
        plain = found["seconds"]["plain"]
        for name, seconds in found["seconds"].items():
            median, label = statistics.median(seconds), "plain all-to-all" if name == "plain" else f"move, {name} MiB allowed"
            shares = f"{statistics.median(plain) / median:.0%} | {min(plain) / min(seconds):.0%}"
            print(
                f"| {ranks} | {found['bytes'] / 1e6:.0f} MB | {label} | {median:.4f} | {min(seconds):.4f} | {max(seconds):.4f} "
                f"| {found['bytes'] / median / 1e9:.2f} | {shares} |"
            )
    if args.json:
        args.json.write_text(json.dumps({"machine": here, "ranks": results}, indent=1))


if __name__ == "__main__":
    main()
