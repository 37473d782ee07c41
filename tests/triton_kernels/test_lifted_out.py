"""The folder lifts out: copied into another project, under another name, it works where there is no routepack."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import routepack.triton_kernels as package

FOLDER = Path(package.__file__).parent

SCRIPT = """
import importlib.abc, os, sys

class NoRoutepack(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "routepack":
            raise ModuleNotFoundError("there is no routepack here")

sys.meta_path.insert(0, NoRoutepack())
import torch
from my_project.layers.moe import PermutedMoE, reference
from my_project.layers.moe.testing import random_problem, relative_errors

moe = PermutedMoE(dim=16, hidden_dim=8, num_experts=4, top_k=2, implementation=sys.argv[1])
moe(torch.randn(3, 16)).sum().backward()
problem = random_problem(T=20, D=16, F=8, K=2, E=4, routing="skipped").requiring_grad()
with torch.no_grad():
    moe.experts.w1_EFD.copy_(problem.w1), moe.experts.w3_EFD.copy_(problem.w3), moe.experts.w2_EDF.copy_(problem.w2)
out = moe.experts(problem.x, problem.ids, problem.scores)
leaves = (problem.x, problem.scores, moe.experts.w1_EFD, moe.experts.w3_EFD, moe.experts.w2_EDF)
actual = [out.detach(), *torch.autograd.grad(out, leaves, problem.dout)]
assert max(relative_errors(actual, problem.reference())) < 1e-5
assert torch.ops.my_project.experts
assert not hasattr(torch.ops.routepack, "experts")
assert not [name for name in sys.modules if name.startswith("routepack")]
"""


@pytest.mark.parametrize("implementation", ["eager", "triton"])
def test_a_copy_under_another_name_needs_no_routepack(tmp_path, implementation):
    if implementation == "triton":
        pytest.importorskip("triton")
    shutil.copytree(FOLDER, tmp_path / "my_project/layers/moe", ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, implementation]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_two_copies_live_side_by_side(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "my_moe", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import torch, my_moe, routepack.triton_kernels as own\nassert torch.ops.my_moe.experts != torch.ops.routepack.experts"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(FOLDER.parents[1])])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_import_is_torch_triton_or_a_neighbour(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [] if node.level == 1 else [node.module or ""]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert {name.partition(".")[0] for name in names} <= {"torch", "triton", *sys.stdlib_module_names}
