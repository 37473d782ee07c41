"""Launches of several gloo ranks, shared by the tests of this folder: each runs many checks, see checks.py."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

collect_ignore = ["checks.py", "windows.py", "worker.py"]

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"
Results = list[dict[str, Any]]
"""For each rank, what each check gave, by key."""

Check = tuple[str, str, dict[str, Any]]
"""A key for the result, the check's name in checks.py, and its arguments."""


def launch(checks: list[Check], num_ranks: int, folder: Path, *, timeout: float = 280.0) -> list[dict[str, Any]]:
    """Run *checks*, one after another, on *num_ranks* gloo ranks; gives each rank's results by key.

    Raises RuntimeError with the ranks' output where one failed, and kills all where one hangs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checks.pickle").write_bytes(pickle.dumps(checks))
    ranks = [_start(folder, rank, num_ranks) for rank in range(num_ranks)]
    try:
        _wait(ranks, time.monotonic() + timeout)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    results = [_result(folder, rank) for rank in range(num_ranks)]
    codes = [process.returncode for process in ranks]
    if any(codes) or any("error" in result for result in results):
        raise RuntimeError(
            f"exit codes {codes} of {num_ranks} ranks\n" + "\n".join(_output(folder, r) for r in range(num_ranks))
        )
    return results


def _start(folder: Path, rank: int, num_ranks: int) -> subprocess.Popen:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    environment.update(
        {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SOURCE}{os.pathsep}{HERE}", "WORLD_SIZE": str(num_ranks), "RANK": str(rank)}
    )
    # For experts that ask for Triton on a CPU; nothing else here does.
    environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(HERE / "worker.py"), str(folder), str(rank), str(num_ranks)]
    with (folder / f"rank{rank}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _wait(ranks: list[subprocess.Popen], deadline: float) -> None:
    while any(process.poll() is None for process in ranks):
        # One failed rank leaves the others waiting for it; there is nothing to wait for then.
        if time.monotonic() > deadline or any(process.poll() not in (None, 0) for process in ranks):
            return
        time.sleep(0.05)


def _result(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"rank{rank}.pickle"
    return pickle.loads(path.read_bytes()) if path.exists() else {"error": "no result"}


def _output(folder: Path, rank: int) -> str:
    return f"--- rank {rank}\n{(folder / f'rank{rank}.log').read_text()[-3000:]}"


def trains(ep: int, plans: str, **changes: Any) -> Check:
    return f"trains ep={ep} {plans}", "trains", {"ep": ep, "plans": plans, **changes}


TRITON = "routepack.integrations.torchtitan.experts.TritonExperts"
RECOMPUTING = "routepack.integrations.torchtitan.experts.RecomputingTritonExperts"


def trains_with(experts: str, ep: int, plans: str, **changes: Any) -> Check:
    key = f"trains {experts.rpartition('.')[2]} ep={ep} {plans}"
    return key, "trains", {"ep": ep, "plans": plans, "tiny": {"experts": experts}, **changes}


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """One rank."""
    checks = [
        trains(1, "first_fit"),
        trains(1, "planner"),
        trains(1, "shuffled"),
        ("moves", "moves_experts", {"ep": 1}),
        ("replays", "replays", {"ep": 1}),
        ("replays selective", "replays", {"ep": 1, "activation_checkpoint": "selective"}),
        ("replays full", "replays", {"ep": 1, "activation_checkpoint": "full"}),
        ("log_probabilities", "gives_log_probabilities", {"ep": 1}),
        ("stock experts", "trains_stock_experts_in_float32", {"ep": 1, "plans": "first_fit"}),
        trains_with(TRITON, 1, "first_fit"),
        trains_with(RECOMPUTING, 1, "first_fit"),
        trains_with("checks.ScorelessExperts", 1, "first_fit"),
        trains_with("checks.InterpretedExperts", 1, "first_fit", num_steps=2),
    ]
    return launch(checks, 1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two ranks."""
    folder = tmp_path_factory.mktemp("pair")
    checks = [
        trains(1, "first_fit"),
        trains(1, "planner"),
        trains(2, "first_fit"),
        trains(2, "planner"),
        trains(2, "shuffled"),
        ("moments left behind", "trains_with_moments_left_behind", {"ep": 2}),
        ("mapping not applied", "trains_without_the_mapping", {"ep": 2}),
        ("normalized locally", "trains_with_local_normalization", {"ep": 2}),
        ("starts", "starts_from", {"ep": 2, "stock": False}),
        ("stock starts", "starts_from", {"ep": 2, "stock": True}),
        ("moves", "moves_experts", {"ep": 2}),
        ("replays", "replays", {"ep": 2}),
        ("log_probabilities", "gives_log_probabilities", {"ep": 2}),
        ("refuses", "refuses", {"ep": 2}),
        ("resumes", "resumes", {"ep": 2, "folder": str(folder / "checkpoints")}),
        trains_with(TRITON, 2, "planner"),
        trains_with(TRITON, 2, "shuffled"),
        trains_with("checks.InterpretedExperts", 2, "planner", num_steps=2),
        ("keeps stock", "keeps", {"ep": 2, "experts": ""}),
        ("keeps Triton", "keeps", {"ep": 2, "experts": TRITON}),
    ]
    return launch(checks, 2, folder)


@pytest.fixture(scope="session")
def rl_pair(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two ranks that reinforce."""
    ahead = {"rl.async_level": 1}
    checks: list[Check] = [
        ("level 0", "reinforces", {}),
        ("on the spot", "reinforces_on_the_spot", {}),
        ("level 1", "reinforces", ahead),
        ("level 1 again", "reinforces", ahead),
        ("level 1, other seed", "reinforces", ahead | {"seed": 1, "rl.num_steps": 1}),
        ("in time", "reinforces", {"rl.plan_ready_seconds": 0.5, "rl.num_steps": 1}),
        ("fails", "fails_to_plan", {}),
        ("fails ahead", "fails_to_plan", ahead),
    ]
    return launch(checks, 2, tmp_path_factory.mktemp("rl_pair"))


@pytest.fixture(scope="session")
def quad(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Four ranks, in two EP groups or one."""
    both = [trains(ep, plans) for ep in (2, 4) for plans in ("first_fit", "planner")]
    checks = [*both, ("moves", "moves_experts", {"ep": 2})]
    return launch(checks, 4, tmp_path_factory.mktemp("quad"))


@pytest.fixture(scope="session")
def slow_quad(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Four ranks in every layout that the default tests leave out."""
    hsdp = {"ep": 2, "data_parallel_replicate_degree": 2}
    checks = [
        trains(2, "shuffled"),
        ("trains padded", "trains", {"ep": 2, "plans": "shuffled", "pad_to_multiple_of": 16}),
        ("trains recomputing", "trains", {"ep": 2, "plans": "shuffled", "activation_checkpoint": "full"}),
        ("trains replicated", "trains", {**hsdp, "plans": "shuffled"}),
        ("moves ep=4", "moves_experts", {"ep": 4}),
        ("moves ep=1", "moves_experts", {"ep": 1}),
        ("moves replicated", "moves_experts", hsdp),
        ("moves inside experts", "moves_experts", {"ep": 2, "num_experts": 2}),
        ("moves inside experts ep=1", "moves_experts", {"ep": 1, "num_experts": 3}),
        ("moves uneven shards", "moves_experts", {"ep": 1, "num_experts": 6}),
        ("replays", "replays", {"ep": 2}),
        ("replays selective", "replays", {"ep": 2, "activation_checkpoint": "selective"}),
        ("log_probabilities", "gives_log_probabilities", {"ep": 2}),
    ]
    return launch(checks, 4, tmp_path_factory.mktemp("slow_quad"), timeout=280)


DEBUG_MODEL = {"name": "deepseek_v3", "flavor": "debugmodel"}


@pytest.fixture(scope="session")
def debug_alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """TorchTitan's debug model on one rank."""
    checks = [
        ("stock", "trains_stock_debug_model_in_float32", {"ep": 1, **DEBUG_MODEL}),
        ("Triton", "trains_debug_model", {"ep": 1, "experts": TRITON, **DEBUG_MODEL}),
    ]
    return launch(checks, 1, tmp_path_factory.mktemp("debug_alone"))


@pytest.fixture(scope="session")
def debug_pair(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """TorchTitan's debug model over an EP group of two."""
    checks = [
        ("stock", "trains_stock_debug_model_in_float32", {"ep": 2, **DEBUG_MODEL}),
        ("Triton", "trains_debug_model", {"ep": 2, "experts": TRITON, **DEBUG_MODEL}),
        ("interpreted", "trains_debug_model", {"ep": 2, "experts": "checks.InterpretedExperts", "num_steps": 1, **DEBUG_MODEL}),
    ]
    return launch(checks, 2, tmp_path_factory.mktemp("debug_pair"))
