"""The layer under FSDP2 and under expert parallelism, over gloo, against one process alone."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import routepack
from routepack.triton_kernels import moe_experts
from routepack.triton_kernels.testing import random_problem, relative_errors

WORKER = Path(__file__).with_name("worker.py")
_specification = importlib.util.spec_from_file_location("triton_kernels_worker", WORKER)
worker = importlib.util.module_from_spec(_specification)
_specification.loader.exec_module(worker)


def run(case, world_size, folder):
    environment = os.environ | {"PYTHONPATH": str(Path(routepack.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), case]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world_size), str(folder / "store"), str(folder / "out")], env=environment)
        for rank in range(world_size)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(folder / f"out.{rank}") for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_fsdp_trains_as_one_process(world_size, tmp_path):
    alone = worker.train(0, 0)
    assert alone[-1] < 0.9 * alone[0]
    for losses in run("fsdp", world_size, tmp_path):
        assert losses == pytest.approx(alone, rel=1e-4)


def test_two_expert_parallel_ranks_give_what_one_process_gives(tmp_path):
    T, D, F, K, E = worker.T, worker.D, worker.F, worker.K, worker.E
    problem = random_problem(T=T, D=D, F=F, K=K, E=E).requiring_grad()
    out = moe_experts(problem.x, problem.ids, problem.scores, problem.w1, problem.w3, problem.w2)
    wanted = [out.detach(), *torch.autograd.grad(out, problem.inputs, problem.dout)]
    actual = [torch.cat(parts) for parts in zip(*run("ep", 2, tmp_path), strict=True)]
    assert max(relative_errors(actual, wanted)) < 1e-6
