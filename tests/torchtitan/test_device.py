"""Choosing TorchTitan's device, each in a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[2] / "src"

on_cpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator, which TorchTitan uses as it is")


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE)}, timeout=100
    )
    return done.stdout + done.stderr


@on_cpu
def test_torchtitan_runs_on_the_cpu_after_the_import():
    code = "import routepack.torchtitan; from torchtitan.distributed import utils; print(utils.device_type)"
    assert run(code).split() == ["cpu"]


@on_cpu
def test_too_late_an_import_says_so():
    output = run("import torchtitan.distributed.utils; import routepack.torchtitan")
    assert "ConfigError: TorchTitan has no accelerator here and chose its device when torchtitan." in output


@on_cpu
def test_one_process_trains_without_a_launcher(tmp_path):
    code = f"""
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
from routepack.torchtitan.trainer.trainer import RoutePackTrainer
from routepack.torchtitan.model.models import TinyQwen3MoE
from routepack.torchtitan.trainer.settings import TrainerSettings
trainer = RoutePackTrainer.from_settings(model=TinyQwen3MoE(num_layers=1), settings=TrainerSettings(dump_folder="{tmp_path}"))
print(trainer.placement.num_experts, len(trainer.logical_state_dict()))
from routepack.distributed.collectives import leave
leave()
"""
    assert run(code).split() == ["16", "13"]
