"""``routepack train``: checks a config, starts the ranks unless a launcher did, and reports how they ended.

``python -m routepack.torchtitan.launch`` is one rank.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from omegaconf import DictConfig, OmegaConf

from routepack.core.config import load, split_layers
from routepack.core.errors import ConfigError, RoutePackError
from routepack.core.files import atomic_path
from routepack.distributed import collectives
from routepack.torchtitan.model import cpu_device
from routepack.torchtitan.recorded.read_windows import check_windows
from routepack.torchtitan.recorded.recorded_config import TraceExperiment, build_trace_experiment
from routepack.torchtitan.rl.rl_config import Experiment, RLExperiment, build_experiment
from routepack.training import orphans

if TYPE_CHECKING:
    from routepack.torchtitan.recorded.recorded_run import TraceRun
    from routepack.torchtitan.rl.rl_run import RLRun

GRACE_SECONDS = 10.0
"""Ranks that are told to end get this long before they are killed."""
POLL_SECONDS = 0.05
SETTLE_SECONDS = 5.0
"""After one rank failed, the others get this long to fail too, so that all that they know is shown."""


def experiment_of(config: DictConfig) -> Experiment:
    """The experiment that *config* describes: over recorded windows where it has ``windows``, else one that samples its own."""
    # A value that is still ??? does not count as present, but its key does.
    if "trace" in config.keys():  # noqa: SIM118
        raise ConfigError(
            "trace: this is a config of 'routepack plan', which plans one recorded window: give it to that. 'routepack train' "
            "trains on recorded windows where a config has windows and model, see configs/README.md."
        )
    return build_trace_experiment(config) if "windows" in config.keys() else build_experiment(config)  # noqa: SIM118


def check(config: DictConfig) -> str:
    """Build every component of a training config, and look at all that training needs; says what memory a rank takes.

    Where ``windows`` is still ``???``, neither windows nor weights nor results have a place yet, and none is looked at.
    Raises a RoutePackError as training would, and starts nothing.
    """
    experiment = experiment_of(config)
    if OmegaConf.is_missing(config, "windows"):
        return str(experiment.memory())
    experiment.check_ready()
    said = [str(experiment.memory())]
    if isinstance(experiment, TraceExperiment):
        said.append(check_windows(experiment))
    return "\n".join(said)


def train(paths: Sequence[str], overrides: Sequence[str]) -> int:
    """Train as *paths* and *overrides* say; the exit code of the ranks, 0 if all ended well.

    Under torchrun (``RANK`` is set) this process is one rank: it trains and exits. Otherwise the ranks are started here, once
    the whole config is known to be good. Raises ConfigError.
    """
    experiment = experiment_of(load(paths, overrides))
    if "RANK" in os.environ:
        collectives.leave(run_rank(experiment))
    check_devices(experiment, experiment.num_ranks)
    experiment.check_ready()
    port = rendezvous_port(experiment.launch.port)
    prepare_folder(experiment)
    return run_ranks([*paths, *overrides], experiment, port)


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


def prepare_folder(experiment: Experiment) -> None:
    """Make the result folder and write the resolved config into it. Raises ConfigError where it cannot be written."""
    try:
        (experiment.out / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={experiment.out} cannot be written: {error.strerror}: choose another folder.") from error
    with atomic_path(experiment.out / "config.yaml") as path:
        path.write_text(OmegaConf.to_yaml(experiment.config, resolve=True))


def run_ranks(layers: Sequence[str], experiment: Experiment, port: int) -> int:
    """Start every rank and wait for all; the exit code. A rank that fails, or ctrl-C, ends the others."""
    logs = [experiment.out / "logs" / f"rank{rank}.log" for rank in range(experiment.num_ranks)]
    previous = signal.signal(signal.SIGTERM, _interrupt)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            ranks.append(start_rank(rank, layers, rank_environment(rank, experiment, port), log))
        code = wait_for(ranks, logs)
    except KeyboardInterrupt:
        sys.stderr.write("routepack: interrupted; ending all ranks.\n")
        code = 130
    finally:
        end(ranks)
        signal.signal(signal.SIGTERM, previous)
    return code


def rank_environment(rank: int, experiment: Experiment, port: int) -> dict[str, str]:
    """What torchrun would set for this rank, on one node."""
    size = str(experiment.num_ranks)
    return {
        "OMP_NUM_THREADS": str(experiment.launch.threads_per_rank),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        orphans.LAUNCHER: str(os.getpid()),
    }


def start_rank(rank: int, layers: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start one rank. Rank 0 shows its progress here; what else ranks say goes to their logs."""
    with log.open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "routepack.torchtitan.launch", *layers],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else errors,
            stderr=errors,
            # A session of its own: ctrl-C reaches this process only, which then ends the ranks in order.
            start_new_session=True,
        )


def wait_for(ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> int:
    """0 once all ranks have ended well; else, as soon as one has failed, its code, after showing what it said."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes):
            return report_failure(settled(ranks), logs)
        if None not in codes:
            return 0
        time.sleep(POLL_SECONDS)


def settled(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """The ranks' codes once all have ended, or SETTLE_SECONDS later."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return codes


def report_failure(codes: Sequence[int | None], logs: Sequence[Path]) -> int:
    """Show why ranks failed and give the exit code: 1 for wrong input, else as the shell counts, 128 + the signal."""
    failed = [rank for rank, code in enumerate(codes) if code]
    # A rank that lost its peer fails too, in a collective; one with a message of RoutePack's own knows the cause,
    # unless all that it knows is that another rank has one, or is gone.
    said = {rank: logs[rank].read_text(errors="replace") for rank in failed}
    messages = {rank: [line for line in text.splitlines() if line.startswith("routepack: ")] for rank, text in said.items()}
    told = [rank for rank in failed if messages[rank]]
    heard = [rank for rank in told if "another rank" in messages[rank][-1]]
    # NCCL aborts a rank that lost its peer: one that was killed otherwise comes first.
    killed = sorted((rank for rank in failed if (codes[rank] or 0) < 0), key=lambda rank: codes[rank] == -signal.SIGABRT)
    if told and (len(heard) < len(told) or not killed):
        rank = next((rank for rank in told if rank not in heard), told[0])
        sys.stderr.write(messages[rank][-1] + "\n")
        return 1
    # Killed from outside, or by the kernel for memory, comes before consequences too; what the others were at is told.
    for rank in heard[:1]:
        sys.stderr.write(messages[rank][-1] + "\n")
    rank = (killed or failed)[0]
    code = codes[rank] or 1
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    tail = "".join(f"{line}\n" for line in said[rank].splitlines()[-30:])
    sys.stderr.write(f"{tail}routepack: rank {rank} {how}; its log is {logs[rank]}.\n")
    return 128 - code if code < 0 else code


def end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run, first asking, then by force."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in ranks:
        try:
            rank.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def run_rank(experiment: Experiment) -> int:
    """Train as one rank; its exit code. Errors go to stderr."""
    from routepack.training.progress import Progress, WindowProgress

    shows = WindowProgress if isinstance(experiment, TraceExperiment) else Progress
    progress = shows(enabled=os.environ["RANK"] == "0", log_folder=experiment.out / "tensorboard")
    try:
        check_world_size(experiment)
        check_devices(experiment, int(os.environ.get("LOCAL_WORLD_SIZE", experiment.num_ranks)))
        experiment.check_ready()
        if progress.enabled:
            prepare_folder(experiment)
        run = _run_of(experiment, progress)
        with collectives.together("ranks trained"):  # whatever has no better name for what was going on
            run.run()
            run.trainer.close()
    except RoutePackError as error:
        sys.stderr.write(f"routepack: {error}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        progress.close()
    return 0


def _run_of(experiment: Experiment, progress: Any) -> RLRun | TraceRun:
    if isinstance(experiment, TraceExperiment):
        from routepack.torchtitan.recorded.recorded_run import TraceRun

        return TraceRun(experiment=experiment, progress=progress)
    from routepack.torchtitan.rl.rl_run import RLRun

    return RLRun(experiment=cast(RLExperiment, experiment), progress=progress)


def check_world_size(experiment: Experiment) -> None:
    """Raise ConfigError unless as many ranks were started as the topology has."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != experiment.num_ranks:
        raise ConfigError(
            f"topology.data_parallel_degree={experiment.num_ranks} needs as many ranks; the launcher started {started}: "
            f"use {torchrun(experiment)}, or no launcher at all."
        )


def check_devices(experiment: Experiment, num_local_ranks: int) -> None:
    """Raise ConfigError unless this machine has the devices that its ranks need."""
    wanted, found = experiment.launch.device, cpu_device.device_type()
    if wanted and found != wanted:
        raise ConfigError(
            f"launch.device={wanted}: every rank needs one, and torch finds none on this machine, only a {found}: "
            f"start it where they are, by {torchrun(experiment)}. 'routepack check' needs none."
        )
    devices = num_local_ranks if found == "cpu" else torch.accelerator.device_count()
    if devices < num_local_ranks:
        raise ConfigError(
            f"{num_local_ranks} ranks on this machine need as many {found} devices, and it has {devices}: use "
            f"{torchrun(experiment)}, or lower topology.data_parallel_degree={experiment.num_ranks}."
        )


def torchrun(experiment: Experiment) -> str:
    """The launcher's options for this topology, on as few nodes as it takes."""
    per_node = min(experiment.num_ranks, experiment.planner.topology.ranks_per_node)
    nodes = -(-experiment.num_ranks // per_node)
    return f"torchrun --nproc-per-node={per_node}" + (f" --nnodes={nodes}" if nodes > 1 else "")


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> None:
    """One rank, with the layers that ``routepack train`` was given."""
    orphans.end_with_launcher()
    try:
        train(*split_layers(list(arguments)))
    except RoutePackError as error:
        sys.stderr.write(f"routepack: {error}\n")
        collectives.leave(1)
