"""Launches of several gloo ranks, shared by the tests of this folder: each runs many checks, see checks.py."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

collect_ignore = [
    "checks.py",
    "checks_guard.py",
    "checks_nodes.py",
    "checks_step.py",
    "faults.py",
    "sharded.py",
    "traces.py",
    "windows.py",
    "worker.py",
]

HERE = Path(__file__).parent
# For the helpers beside the tests, which the ranks import too.
sys.path.insert(0, str(HERE))
SOURCE = HERE.parents[1] / "src"
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


@pytest.fixture(scope="session")
def launch_ranks() -> Any:
    """:func:`launch`, for tests that make their checks themselves."""
    return launch


def trains(ep: int, plans: str, **changes: Any) -> Check:
    return f"trains ep={ep} {plans}", "trains", {"ep": ep, "plans": plans, **changes}


TRITON = "routepack.torchtitan.model.experts.TritonExperts"
RECOMPUTING = "routepack.torchtitan.model.experts.RecomputingTritonExperts"


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
        ("moves every step", "moves_every_step", {"ep": 1, **INVARIANT}),
        ("stock experts", "trains_stock_experts_in_float32", {"ep": 1, "plans": "first_fit"}),
        trains_with(TRITON, 1, "first_fit"),
        trains_with(RECOMPUTING, 1, "first_fit"),
        trains_with("checks.ScorelessExperts", 1, "first_fit"),
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
        ("moves every step", "moves_every_step", {"ep": 2}),
        ("moves further state", "moves_further_state", {"ep": 2}),
        ("clips", "clips", {"ep": 2}),
        ("stages little", "stages_little", {"ep": 2, "staging_bytes": 2**16}),
        ("draws", "draws_one_at_a_time", {"ep": 2}),
        *saved_and_loaded(folder / "checkpoints", {"ep": 2}, again={"ep": 2}, alone={"ep": 1}),
        ("tears", "tears", {"ep": 2, "folder": str(folder / "tears")}),
        ("resists", "resists", {"ep": 2, "folder": str(folder / "resists")}),
        ("exports", "exports", {"ep": 2, "folder": str(folder / "exported"), "seed": None}),
        ("exports moved", "exports", {"ep": 2, "folder": str(folder / "exported_moved"), "seed": 3}),
        trains_with(TRITON, 2, "planner"),
        trains_with(TRITON, 2, "shuffled"),
        trains_with("checks.InterpretedExperts", 2, "planner", num_steps=2),
        ("keeps stock", "keeps", {"ep": 2, "experts": ""}),
        ("keeps Triton", "keeps", {"ep": 2, "experts": TRITON}),
    ]
    return [result | {"folder": folder} for result in launch(checks, 2, folder)]


def saved_and_loaded(folder: Path, saving: dict[str, Any], **loading: dict[str, Any]) -> list[Check]:
    """One save, and a load of it into each layout of *loading*."""
    saves = ("saves", "saves", {"folder": str(folder), **saving})
    return [saves, *((f"loads {name}", "loads", {"folder": str(folder), **layout}) for name, layout in loading.items())]


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
def slow_alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """One rank whose kernels are interpreted."""
    checks = [trains_with(experts, 1, "first_fit", num_steps=2) for experts in (TRITON, "checks.InterpretedExperts")]
    return launch(checks, 1, tmp_path_factory.mktemp("slow_alone"))


@pytest.fixture(scope="session")
def slow_pair(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two ranks: precisions, moves without EP, faults of a move, saves in the background."""
    folder = tmp_path_factory.mktemp("slow_pair")
    asynchronous = {"ep": 2, "async_checkpoints": True}
    checks = [
        ("moves every step ep=1", "moves_every_step", {"ep": 1}),
        ("moves every step in bfloat16", "moves_every_step", {"ep": 2, "storage_dtype": "bfloat16"}),
        ("moves every step, computes in bfloat16", "moves_every_step", {"ep": 2, "param_dtype": "bfloat16"}),
        ("moments left behind", "moves_every_step", {"ep": 2, "num_steps": 6, "fault": "moments left behind"}),
        ("mapping not applied", "moves_every_step", {"ep": 2, "num_steps": 6, "fault": "mapping not applied"}),
        ("four experts a token", "moves_every_step", {"ep": 2, "top_k": 4}),
        ("resists asynchronously", "resists", {"folder": str(folder / "resists"), **asynchronous}),
        ("saves asynchronously", "saves", {"folder": str(folder / "asynchronous"), **asynchronous}),
        ("loads asynchronously", "loads", {"folder": str(folder / "asynchronous"), **asynchronous}),
        *saved_and_loaded(folder / "ours", {"ep": 2}, torchtitan={"ep": 2, "stock": True}),
        ("saves as torchtitan", "saves_as_torchtitan", {"ep": 2, "folder": str(folder / "stock")}),
        ("loads theirs", "loads", {"ep": 2, "folder": str(folder / "stock")}),
        ("starts recomputing", "starts_from", {"ep": 2, "stock": False, "activation_checkpoint": "full"}),
    ]
    return launch(checks, 2, folder)


@pytest.fixture(scope="session")
def slow_pair_faulty(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two ranks that save slots as if they were experts."""
    folder = tmp_path_factory.mktemp("faulty")
    return launch(saved_and_loaded(folder / "slots", {"ep": 2, "fault": "slots"}, again={"ep": 2}), 2, folder)


INVARIANT = {"placement_invariant": True, "top_k": 4, "max_norm": 0.05}
"""Sums in an order of their own, where every one of them would otherwise go by slots: gradients are clipped at every step."""


def moves_every_step(layouts: dict[str, dict[str, Any]]) -> list[Check]:
    return [(f"moves every step {name}", "moves_every_step", layout) for name, layout in layouts.items()]


@pytest.fixture(scope="session")
def slow_pair_invariant(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two ranks that sum in recorded order."""
    layouts = {
        "ep=1": {"ep": 1, **INVARIANT},
        "ep=2": {"ep": 2, **INVARIANT},
        "in bfloat16": {"ep": 2, **INVARIANT, "storage_dtype": "bfloat16"},
        "computes in bfloat16": {"ep": 2, **INVARIANT, "param_dtype": "bfloat16"},
        "recomputes": {"ep": 2, **INVARIANT, "activation_checkpoint": "full"},
        "gathers once": {"ep": 2, **INVARIANT, "gather": "step"},
    }
    return launch(moves_every_step(layouts), 2, tmp_path_factory.mktemp("slow_pair_invariant"))


@pytest.fixture(scope="session")
def slow_quad_invariant(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Four ranks that sum in recorded order, FSDP alone and with EP."""
    layouts = {f"ep={ep}": {"ep": ep, **INVARIANT} for ep in (1, 2, 4)}
    return launch(moves_every_step(layouts), 4, tmp_path_factory.mktemp("slow_quad_invariant"))


@pytest.fixture(scope="session")
def slow_replicas_invariant(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two times two ranks that sum in recorded order."""
    layouts = {f"ep={ep}": {"ep": ep, **INVARIANT, "data_parallel_replicate_degree": 2} for ep in (1, 2)}
    return launch(moves_every_step(layouts), 4, tmp_path_factory.mktemp("slow_replicas_invariant"))


@pytest.fixture(scope="session")
def slow_cut_invariant(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Four ranks that sum in recorded order, and experts cut inside or dealt unevenly."""
    layouts = {
        "inside experts": {"ep": 2, **INVARIANT, "num_experts": 2, "top_k": 1},
        "inside experts ep=1": {"ep": 1, **INVARIANT, "num_experts": 3, "top_k": 3},
        "uneven shards": {"ep": 1, **INVARIANT, "num_experts": 6},
    }
    return launch(moves_every_step(layouts), 4, tmp_path_factory.mktemp("slow_cut_invariant"))


@pytest.fixture(scope="session")
def slow_quad_moving(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Four ranks that sum as TorchTitan and gloo do."""
    layouts = {
        "ep=1": {"ep": 1},
        "ep=2": {"ep": 2},
        "ep=4": {"ep": 4},
        "replicated": {"ep": 2, "data_parallel_replicate_degree": 2},
    }
    hsdp = {"data_parallel_replicate_degree": 2}
    clipping = [
        ("clips", "clips", {"ep": 2}),
        ("clips ep=1", "clips", {"ep": 1}),
        ("clips replicated", "clips", {"ep": 2, **hsdp}),
    ]
    return launch(moves_every_step(layouts) + clipping, 4, tmp_path_factory.mktemp("slow_quad_moving"))


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Rank 0's view of one checkpoint of four ranks, EP 2, and of its loads elsewhere."""
    folder = tmp_path_factory.mktemp("layouts")
    saved = folder / "saved"
    replicated = {"ep": 2, "data_parallel_replicate_degree": 2}
    quad = saved_and_loaded(saved, {"ep": 2}, quad={"ep": 2}, quad_ep4={"ep": 4}, quad_replicated=replicated)
    results = launch(quad, 4, folder / "quad")[0]
    results |= launch(saved_and_loaded(saved, {}, pair={"ep": 2}, pair_ep1={"ep": 1})[1:], 2, folder / "pair")[0]
    return results | launch(saved_and_loaded(saved, {}, alone={"ep": 1})[1:], 1, folder / "alone")[0]


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


@pytest.fixture(scope="session")
def step_pair(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two ranks: what steps had to do."""
    folder = tmp_path_factory.mktemp("step_pair")
    checks = [
        ("trains", "trains", {"ep": 2, "plans": "shuffled"}),
        ("gathers once", "trains", {"ep": 2, "plans": "shuffled", "gather": "step"}),
        ("observes", "observes", {"ep": 2, "folder": str(folder)}),
        ("observes recomputing", "observes", {"ep": 2, "folder": str(folder), "activation_checkpoint": "full"}),
        ("mini-batches", "trains_in_mini_batches", {"ep": 2}),
        ("mini-batches, gathers once", "trains_in_mini_batches", {"ep": 2, "gather": "step"}),
        ("remembers", "remembers", {"ep": 2}),
        ("remembers, gathers once", "remembers", {"ep": 2, "gather": "step"}),
        ("reference stays", "remembers", {"ep": 2, "fault": "reference stays"}),
        ("log_probabilities", "gives_log_probabilities", {"ep": 2, "gather": "step"}),
        ("sends", "sends_sequences", {"ep": 2}),
        ("trains what it holds", "trains_what_it_holds", {"ep": 2}),
    ]
    return launch(checks, 2, folder)


@pytest.fixture(scope="session")
def step_quad(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Four ranks, two EP groups: what steps had to do."""
    folder = tmp_path_factory.mktemp("step_quad")
    checks = [
        ("trains", "trains", {"ep": 2, "plans": "shuffled"}),
        ("gathers once", "trains", {"ep": 2, "plans": "shuffled", "gather": "step"}),
        ("observes", "observes", {"ep": 2, "folder": str(folder)}),
        ("remembers", "remembers", {"ep": 2}),
        ("sends", "sends_sequences", {"ep": 2}),
        ("trains what it holds", "trains_what_it_holds", {"ep": 2}),
    ]
    return launch(checks, 4, folder)


@pytest.fixture(scope="session")
def trace_pair(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two ranks, EP 2: runs over recorded windows, weights of Hugging Face's format, memory."""
    import traces
    import windows

    from routepack.traces.trace_files import save_trace

    folder = tmp_path_factory.mktemp("traces")
    (folder / "empty").mkdir()
    traces.written_windows(folder, 6)
    config = traces.written_config(folder)
    parts, exported, broken = str(folder / "parts"), str(folder / "exported"), traces.broken_folders(folder)
    first = f"[{folder}/window0.safetensors,{folder}/window1.safetensors,{folder}/window2.safetensors]"
    unlabelled = folder / "unlabelled.safetensors"
    batch = windows.window(0)
    save_trace(replace(batch, token_fields={k: v for k, v in batch.token_fields.items() if k != "loss_mask"}), unlabelled)
    grpo = {"loss._target_": "routepack.training.losses.GRPOTokenLoss"}
    one_window = {"config": config, "windows": str(folder / "window0.safetensors")}
    several = {"update.updates_per_window": 2, "update.minibatches_per_window": 2}
    checks = [
        ("whole", "trains_on_traces", {"config": config}),
        ("first part", "trains_on_traces", {"config": config, "out": parts, "windows": first}),
        ("second part", "trains_on_traces", {"config": config, "out": parts}),
        ("nothing left", "trains_on_traces", {"config": config, "out": parts}),
        ("recomputed", "trains_on_traces", {**one_window, "out": str(folder / "a"), "update.recompute_logprobs": True, **grpo}),
        ("recorded", "trains_on_traces", {**one_window, "out": str(folder / "b"), **grpo}),
        ("several", "trains_on_traces", {**one_window, "out": str(folder / "c"), **several}),
        ("unlabelled", "fails_on_traces", {"config": config, "out": str(folder / "none"), "windows": str(unlabelled)}),
        ("exports", "exports", {"ep": 2, "folder": exported, "seed": 3}),
        ("loads", "loads_huggingface", {"folder": exported, "ep": 2, "seed": 5}),
        ("loads ep=1", "loads_huggingface", {"folder": exported, "ep": 1, "seed": 5}),
        ("starts", "starts_from_huggingface", {"folder": exported, "ep": 2}),
        ("breaks", "breaks_export", {"source": exported, **broken}),
        ("refuses", "refuses_huggingface", {"ep": 2, **broken, "empty": str(folder / "empty")}),
        ("memory ep=2", "takes_memory", {"ep": 2}),
        ("memory ep=1", "takes_memory", {"ep": 1, "tiny": {"num_experts": 5, "vocab_size": 67}}),
        ("memory in bfloat16", "takes_memory", {"ep": 2, "storage_dtype": "bfloat16"}),
        ("peaks", "peaks", {"vocab_size": 8192, "num_tokens": 512}),
    ]
    return [result | {"folder": folder} for result in launch(checks, 2, folder / "launch")]


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two ranks, EP 2: what they refuse, what changes no weight, and which checkpoints they keep."""
    folder = tmp_path_factory.mktemp("guarded")
    invariant = {"placement_invariant": True, "gather": "step"}
    checks = [
        ("refuses", "refuses_tokens", {"ep": 2}),
        ("guards", "guards", {"ep": 2, "folder": str(folder / "a")}),
        ("guards invariant", "guards", {"ep": 2, "folder": str(folder / "b"), **invariant}),
        ("keeps", "keeps_checkpoints", {"ep": 2, "folder": str(folder / "c")}),
        ("keeps asynchronously", "keeps_checkpoints", {"ep": 2, "folder": str(folder / "d"), "async_checkpoints": True}),
    ]
    return launch(checks, 2, folder)


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
