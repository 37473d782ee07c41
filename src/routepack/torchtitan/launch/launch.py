"""``routepack train``: checks a config, then starts the ranks, or is one of them where a launcher started it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from routepack.core.config import load
from routepack.core.errors import ConfigError, RoutePackError
from routepack.core.files import atomic_path
from routepack.distributed import collectives
from routepack.torchtitan.experiments.experiment import Experiment
from routepack.torchtitan.launch.error_files import ErrorFiles
from routepack.torchtitan.launch.ranks import join_log, rank_environment, rendezvous_port, run_ranks
from routepack.torchtitan.model import cpu_device
from routepack.torchtitan.recorded.recorded_experiment import RecordedExperiment, build_recorded_experiment
from routepack.torchtitan.recorded.recorded_run import RecordedRun
from routepack.torchtitan.rl.rl_experiment import RLExperiment, build_experiment
from routepack.torchtitan.rl.rl_run import RLRun
from routepack.training import orphans
from routepack.training.progress import Progress, WindowProgress


def experiment_of(config: DictConfig) -> Experiment:
    """The experiment that *config* describes: over recorded windows where it has ``windows``, else one that samples its own."""
    # A value that is still ??? does not count as present, but its key does.
    if "trace" in config.keys():  # noqa: SIM118
        raise ConfigError(
            "trace: this is a config of 'routepack plan', which plans one recorded window: give it to that. 'routepack train' "
            "trains on recorded windows where a config has windows and model, see configs/README.md."
        )
    return build_recorded_experiment(config) if "windows" in config.keys() else build_experiment(config)  # noqa: SIM118


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
    if isinstance(experiment, RecordedExperiment):
        said.append(experiment.check_windows())
    return "\n".join(said)


def train(paths: Sequence[str], overrides: Sequence[str]) -> int:
    """Train as *paths* and *overrides* say; the exit code of the ranks, 0 if all ended well.

    Where a launcher started this process (``RANK`` is set) it is one rank: it trains and ends. Otherwise the ranks are started
    here, once the whole config is known to be good. Raises ConfigError.
    """
    if "RANK" in os.environ:
        be_rank(paths, overrides)
    experiment = experiment_of(load(paths, overrides))
    check_devices(experiment, experiment.num_ranks)
    experiment.check_ready()
    port, num_ranks = rendezvous_port(experiment.launch.port), experiment.num_ranks
    prepare_folder(experiment)
    environments = [
        rank_environment(rank, num_ranks, port=port, threads=experiment.launch.threads_per_rank) for rank in range(num_ranks)
    ]
    return run_ranks(["-m", "routepack.torchtitan.launch", *paths, *overrides], environments, experiment.out / "logs")


def be_rank(paths: Sequence[str], overrides: Sequence[str]) -> NoReturn:
    """Train as one rank, and end this process: with code 1 for a RoutePackError, 70 for any other.

    The error goes to the file where the launcher looks for it, and to standard error.
    """
    join_log()
    orphans.end_with_launcher()
    code = 0
    try:
        record(lambda: run_rank(experiment_of(load(paths, overrides))), ErrorFiles())()
    except RoutePackError as error:
        sys.stderr.write(f"routepack: {error}\n")
        code = 1
    except BaseException:
        traceback.print_exc()
        code = 70
    collectives.leave(code)


def run_rank(experiment: Experiment) -> None:
    """Train as one rank of those that a launcher started."""
    check_world_size(experiment)
    check_devices(experiment, int(os.environ.get("LOCAL_WORLD_SIZE", experiment.num_ranks)))
    experiment.check_ready()
    shows = os.environ.get("RANK", "0") == "0"
    if shows:
        prepare_folder(experiment)
    log_folder = experiment.out / "tensorboard"
    run: RLRun | RecordedRun
    if isinstance(experiment, RecordedExperiment):
        run = RecordedRun(experiment=experiment, progress=WindowProgress(enabled=shows, log_folder=log_folder))
    else:
        progress = Progress(enabled=shows, log_folder=log_folder)
        run = RLRun(experiment=cast(RLExperiment, experiment), progress=progress)
    try:
        with collectives.together("ranks trained"):  # whatever has no better name for what was going on
            run.run()
            run.trainer.close()
    finally:
        run.progress.close()


def prepare_folder(experiment: Experiment) -> None:
    """Make the result folder and write the resolved config into it. Raises ConfigError where it cannot be written."""
    try:
        (experiment.out / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={experiment.out} cannot be written: {error.strerror}: choose another folder.") from error
    with atomic_path(experiment.out / "config.yaml") as path:
        path.write_text(OmegaConf.to_yaml(experiment.config, resolve=True))


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
