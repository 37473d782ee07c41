"""TorchTitan's device, and what importing RoutePack leaves as it is, each in a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[2] / "src"

on_cpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator, which TorchTitan uses as it is")


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE)}, timeout=200
    )
    return done.stdout + done.stderr


@on_cpu
def test_torchtitan_has_the_cpu_inside_the_block_and_its_own_device_after_it():
    code = """
from torchtitan.components import metrics
from torchtitan.distributed import parallel_dims, utils
from torchtitan.tools import utils as tools
from routepack.torchtitan.model import cpu_device
devices = lambda: {module.device_type for module in (metrics, parallel_dims, utils, tools)}
before, found = devices(), tools.device_module
with cpu_device.torchtitan_on_cpu():
    print(*devices(), tools.device_module.get_device_name(), utils.device_module.device_count())
print(devices() == before, tools.device_module is utils.device_module is metrics.device_module is found)
"""
    assert run(code).split() == ["cpu", "cpu", "1", "True", "True"]


@on_cpu
def test_one_process_trains_without_a_launcher_though_torchtitan_was_imported_first(tmp_path):
    code = f"""
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
import torchtitan.distributed.utils
import routepack as rp
from routepack.torchtitan.trainer.trainer import RoutePackTrainer
from routepack.torchtitan.model.models import TinyQwen3MoE
from routepack.torchtitan.trainer.settings import TrainerSettings
from routepack.training.losses import CrossEntropyTokenLoss
trainer = RoutePackTrainer.from_settings(model=TinyQwen3MoE(num_layers=1), settings=TrainerSettings(dump_folder="{tmp_path}"))
print(trainer.placement.num_experts, len(trainer.logical_state_dict()))
batch = rp.testing.synthetic_batch(num_sequences=4, num_layers=1, num_experts=16, top_k=2, max_length=20, vocab_size=64)
one = rp.Topology(data_parallel_degree=1, expert_parallel_degree=1)
plan = rp.Planner(topology=one, packer=rp.FirstFitPacker(max_tokens=64), rerouter=rp.IdentityRerouter()).plan(batch)
print(trainer.update(batch, plan, CrossEntropyTokenLoss())["loss"] > 0, abs(trainer.log_probabilities(batch, plan)).max() > 0)
from routepack.distributed.collectives import leave
leave()
"""
    assert run(code).split() == ["16", "13", "True", "True"]


IMPORTS = """
import importlib, os, pkgutil, sys, warnings
sys.argv = ["program"]

def load(name):
    try:
        importlib.import_module(name)
    except ImportError:
        assert not name.startswith("routepack"), name

def import_ours():
    import routepack.torchtitan
    for module in pkgutil.walk_packages(routepack.torchtitan.__path__, "routepack.torchtitan."):
        if not module.name.endswith("__main__"):  # it runs a rank
            load(module.name)
"""

LOADED = f"""{IMPORTS}
import_ours()
print(*[name for name in sys.modules if name != "__main__" and name.partition(".")[0] != "routepack"])
"""
"""The modules of others that RoutePack's import, in an order in which they can be imported."""

COMPARED = """
def state():
    names = [n for n in sys.modules if n in ("torch", "torch.distributed", "torch.cpu") or n.partition(".")[0] == "torchtitan"]
    found = {(n, key): id(value) for n in names for key, value in vars(sys.modules[n]).items() if key != "__warningregistry__"}
    return found | {("warnings", "filters"): list(warnings.filters), ("os", "environ"): dict(os.environ)}

before = state()
"""


@pytest.fixture(scope="module")
def others_loaded():
    """A program in which everything is loaded that RoutePack's TorchTitan modules import of others."""
    names = run(LOADED).split()
    assert "torchtitan.trainer" in names
    return f"{IMPORTS}\nfor name in {names}: load(name)\n{COMPARED}"


CHANGED = "after = state(); print(sorted('.'.join(k) for k in after if before.get(k) != after[k]))"


def test_importing_routepacks_modules_changes_nothing_of_others(others_loaded):
    output = run(f"{others_loaded}\nimport_ours()\nassert 'routepack.torchtitan.trainer.trainer' in sys.modules\n{CHANGED}")
    assert output.split("\n")[-2] == "[]"


def test_changes_of_others_would_be_seen(others_loaded):
    changes = """
import torch.distributed
import torchtitan.tools.utils
torchtitan.tools.utils.device_type = "some"
torch.distributed.set_timeout = print
warnings.filterwarnings("ignore", "some")
os.environ["SOME"] = "1"
"""
    seen = ["os.environ", "torch.distributed.set_timeout", "torchtitan.tools.utils.device_type", "warnings.filters"]
    assert run(f"{others_loaded}\n{changes}\n{CHANGED}").split("\n")[-2] == str(seen)
