"""A rank is killed in the middle of something: the others say so and end, and the same command goes on as if nothing was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SMALL = [
    "topology.data_parallel_degree=2",
    "model.dim=32",
    "model.moe_hidden_dim=32",
    "model.num_layers=2",
    "model.num_experts=8",
    "task.max_answer_symbols=4",
    "task.alphabet_sizes=[4]",
    "warmup.num_steps=24",
    "warmup.batch_size=32",
    "rl.num_steps=4",
    "rollout.prompts_per_step=4",
    "rollout.rollouts_per_prompt=4",
    "rollout.max_new_tokens=8",
    "packer.max_tokens=64",
    "num_proposals=500",
    "trainer.checkpoint_interval=12",
    "trainer.staging_bytes=65536",
    "trainer.timeout_seconds=20",
]
SAME = ("loss", "reward", "grad_norm", "experts_moved", "tokens")
"""Figures that must not depend on an interruption."""


def train(out, *arguments, fault=None):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(HERE)])
    if fault is not None:
        environment["ROUTEPACK_FAULT"] = fault
        arguments = (*arguments, "task._target_=faults.FaultyTask")
    command = [sys.executable, "-c", "from routepack.cli.main import main; main()", "train", str(ROOT / "configs/tiny_rl.yaml")]
    command += [*SMALL, f"out={out}", *arguments]
    started = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    return done, time.monotonic() - started


def figures(out):
    return [{name: step[name] for name in SAME} for step in json.loads((out / "summary.json").read_text())["steps"]]


def checkpoints(out):
    """The steps of the checkpoints that have a name; each must be readable."""
    folders = list((out / "checkpoint").glob("step-*"))
    for folder in folders:
        saved = FileSystemReader(folder).read_metadata()
        assert {info.relative_path for info in saved.storage_data.values()} <= {path.name for path in folder.iterdir()}
    return sorted(int(folder.name.removeprefix("step-")) for folder in folders)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "results"
    done, _ = train(out)
    assert (done.returncode, done.stderr) == (0, "")
    assert sum(step["reward"] > 0 and step["experts_moved"] for step in figures(out)) >= 2
    return figures(out)


IN_BACKGROUND = "trainer.async_checkpoints=true"
FAULTS = {
    "a move": ("move:1:2:SIGKILL", "while the experts of MoE layer", "Their weights are torn"),
    "planning": ("plan:0:2:SIGKILL", "while rank 0 made the plan", ""),
    "a save": ("save:1:530:SIGKILL", "was saved", ""),
    "a save in the background": ("save:1:530:SIGKILL", "", ""),
    "the end of a save": ("rename:0:2:SIGKILL", "rank 0 made the checkpoint's name", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", FAULTS)
def test_a_rank_killed_in_the_middle_is_told_and_the_run_goes_on_from_its_last_checkpoint(uninterrupted, tmp_path, moment):
    fault, *said = FAULTS[moment]
    rank, out = fault.split(":")[1], tmp_path / "results"
    options = [IN_BACKGROUND] if "background" in moment else []
    done, _ = train(out, *options, fault=fault)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert f"rank {rank} was ended by SIGKILL" in done.stderr
    assert "lost another rank while" in done.stderr
    assert all(words in done.stderr for words in said), done.stderr
    kept = checkpoints(out)[-1]
    assert kept == (12 if "save" in moment else 24)
    done, _ = train(out, *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Resumed from a checkpoint: {kept} of 24 + 4 steps are done." in done.stdout
    assert figures(out) == uninterrupted
    assert checkpoints(out)[-1] == 28


@pytest.mark.slow
def test_a_rank_that_no_longer_answers_ends_the_run_after_the_timeout(tmp_path):
    out = tmp_path / "results"
    done, seconds = train(out, fault="move:1:2:SIGSTOP")
    assert done.returncode == 1
    assert "while the experts of MoE layer" in done.stderr
    assert "imed out" in done.stderr
    assert seconds < 100
