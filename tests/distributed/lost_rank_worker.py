"""One of two gloo ranks of test_lost_rank.py: rank 1 ends or falls silent, rank 0 writes what each collective then raises."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from routepack.distributed import collectives


def collectives_under_test():
    messages = [(1, torch.zeros(1))]
    return {
        "meet": lambda: collectives.meet("ranks started"),
        "agree": lambda: collectives.agree("ab" * 32, "plan"),
        "from_rank": lambda: collectives.from_rank(1, lambda: 1, "plan"),
        "from_all": lambda: collectives.from_all(1, "the layout"),
        "sum_over_ranks": lambda: collectives.sum_over_ranks(torch.zeros(1)),
        "max_over_ranks": lambda: collectives.max_over_ranks(torch.zeros(1)),
        "exchange": lambda: collectives.exchange([0, 1], "sequences"),
        "messages to a rank": lambda: collectives.begin_messages(messages, [])(),
        "messages from a rank": lambda: collectives.begin_messages([], messages)(),
    }


def main():
    folder, rank, first = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    # Both have imported all they need before the first of them waits for the other with so little patience.
    (folder / f"ready{rank}").touch()
    while len(list(folder.glob("ready*"))) < 2:
        time.sleep(0.05)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=5))
    dist.barrier()
    if rank == 1 and first == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(600)  # until the test ends it
    said = {}
    calls = collectives_under_test()
    # The first one waits for the rank that is lost; the others meet a connection that is gone.
    for name, call in {"first": calls.get(first, calls["meet"]), **calls}.items():
        try:
            call()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    (folder / "said.json").write_text(json.dumps(said))
    os._exit(0)


if __name__ == "__main__":
    main()
