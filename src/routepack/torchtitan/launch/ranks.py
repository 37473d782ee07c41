"""The ranks of ``routepack train`` on one machine: torch's elastic multiprocessing starts, ends and reads them."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from routepack.core.errors import ConfigError
from routepack.torchtitan.launch.error_files import is_second_hand, message_of
from routepack.training import orphans

GRACE_SECONDS = 10
"""Ranks that are told to end get this long before they are killed."""
POLL_SECONDS = 0.05
SETTLE_SECONDS = 5.0
"""After one rank failed, the others get this long to fail too, so that all that they know is shown."""


class RankFiles(LogsSpecs):
    """rankN.log and rankN.error.json of every rank N, in one folder. Rank 0's standard output stays on the terminal."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    @property
    def root_log_dir(self) -> str:
        """The folder."""
        return str(self.folder)

    def log(self, rank: int) -> Path:
        """Where a rank's standard error goes; :func:`join_log` sends the output of all but rank 0 there too."""
        return self.folder / f"rank{rank}.log"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files, by rank; deletes the errors of an earlier run and tells every rank in *envs* where its own would go."""
        errors = {rank: self.folder / f"rank{rank}.error.json" for rank in envs}
        for rank, path in errors.items():
            path.unlink(missing_ok=True)
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = str(path)
        return LogsDest(
            stdouts={rank: os.devnull if rank else "" for rank in envs},
            stderrs={rank: str(self.log(rank)) for rank in envs},
            error_files={rank: str(path) for rank, path in errors.items()},
        )


def join_log() -> None:
    """Send what this process prints to its log, if :func:`run_ranks` started it as another rank than 0."""
    if orphans.LAUNCHER in os.environ and os.environ["RANK"] != "0":
        os.dup2(2, 1)


def rendezvous_port(port: int) -> int:
    """*port* if nobody listens there, or a free one for 0. Raises ConfigError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"launch.port={port} cannot be used ({error.strerror}): choose another, or 0 for a free one."
            ) from error
        return probe.getsockname()[1]


def rank_environment(rank: int, num_ranks: int, *, port: int, threads: int) -> dict[str, str]:
    """What torchrun would set for this rank, on one node."""
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        orphans.LAUNCHER: str(os.getpid()),
    }


def run_ranks(arguments: Sequence[str], environments: Sequence[dict[str, str]], folder: Path) -> int:
    """Run Python with *arguments* once for each rank's environment, files in *folder*, and wait for all; the exit code.

    A rank that fails ends the others, and so does ctrl-C. 0 if all ended well, 1 if a rank has a RoutePackError, 130 if
    interrupted, else as the shell counts: the rank's own code, or 128 + the signal that ended it.
    """
    files, ranks = RankFiles(folder), None
    try:
        ranks = start(arguments, environments, files)
        failures = wait_for(ranks)
        return report(failures, files) if failures else 0
    except SignalException:
        sys.stderr.write("routepack: interrupted; ending all ranks.\n")
        return 130
    finally:
        if ranks is not None:
            ranks.close(timeout=GRACE_SECONDS)


def start(arguments: Sequence[str], environments: Sequence[dict[str, str]], files: RankFiles) -> PContext:
    """Start every rank, each in a session of its own: ctrl-C reaches this process only, which then ends them in order."""
    # It would tell in its own words, too, what is reported here.
    logging.getLogger(PContext.__module__).setLevel(logging.CRITICAL)
    each = {rank: tuple(arguments) for rank in range(len(environments))}
    return start_processes("routepack", sys.executable, each, dict(enumerate(environments)), files)


def wait_for(ranks: PContext) -> dict[int, ProcessFailure]:
    """Wait until all ranks have ended, or SETTLE_SECONDS longer than the first that failed; those that failed by then.

    Ranks that still run are then ended: asked first, and after GRACE_SECONDS by force.
    """
    deadline = math.inf
    while True:
        # Looked at without being reaped: torch's own wait would end the others as soon as one has failed.
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ended = {rank: info for rank, pid in ranks.pids().items() if (info := os.waitid(os.P_PID, pid, look)) is not None}
        failed = [rank for rank, info in ended.items() if info.si_status]
        if failed:
            deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
        if len(ended) == ranks.nprocs or time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    ranks.close(timeout=GRACE_SECONDS)
    result = ranks.wait(timeout=0)
    assert result is not None
    return {rank: result.failures[rank] for rank in failed}


def report(failures: Mapping[int, ProcessFailure], files: RankFiles) -> int:
    """Show why ranks failed, in the words of one that knows the cause; the exit code."""
    # A rank that lost its peer fails too, in a collective; one with an error of RoutePack's own knows the cause, unless all
    # that it knows is that another rank has one, or is gone.
    told = sorted((rank for rank in failures if message_of(failures[rank])), key=lambda rank: is_second_hand(failures[rank]))
    # NCCL aborts a rank that lost its peer: one that was killed otherwise comes first.
    killed = sorted(
        (rank for rank in failures if failures[rank].exitcode < 0), key=lambda rank: failures[rank].exitcode == -signal.SIGABRT
    )
    if told:
        sys.stderr.write(f"routepack: {message_of(failures[told[0]])}\n")
        if not killed or not is_second_hand(failures[told[0]]):
            return 1
    # Killed from outside, or by the kernel for memory, comes before consequences too; what the others were at is told above.
    rank = (killed or list(failures))[0]
    code = failures[rank].exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    tail = "".join(f"{line}\n" for line in files.log(rank).read_text(errors="replace").splitlines()[-30:])
    sys.stderr.write(f"{tail}routepack: rank {rank} {how}; its log is {files.log(rank)}.\n")
    return 128 - code if code < 0 else code
