"""The compile gate: its rules one by one, a part of it for real, and that it fails where it must. `make gate` runs it all."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: there is nothing to compile")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def module(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    return loaded


gate = module("gate")
MachineCode = module("machine_code").MachineCode
GOOD = MachineCode(
    registers=200, instructions=1000, shared=64 * 1024, spilled=0, stack=0, matrix={"HGMMA": 8, "HMMA": 0, "UTCMMA": 0},
    async_copies=16, tma_loads=8, wide_stores=16, narrow_stores=0,
)  # fmt: skip
BY_BOTH = {"TMA_W": True, "TMA_X": False}
"""Weights by TMA, rows through pointers."""


def test_good_code_passes():
    assert gate.violations("sm_90", "gate_up_forward", BY_BOTH, GOOD) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spilled": 3}, "spills: 3 accesses"),
        ({"stack": 8}, "8 bytes of stack"),
        ({"shared": 228 * 1024}, "shared memory 233472 > 232448"),
        ({"warnings": ("ptxas info : (C7511) Potential Performance Loss: wgmma serialized",)}, "C7511"),
        ({"matrix": {"HGMMA": 0, "HMMA": 64, "UTCMMA": 0}}, "no HGMMA"),
        ({"matrix": {"HGMMA": 8, "HMMA": 1, "UTCMMA": 0}}, "HMMA beside HGMMA"),
        ({"async_copies": 0}, "without asynchronous copies"),
        ({"tma_loads": 0}, "no TMA load"),
        ({"narrow_stores": 1}, "1 stores of less than 16 bytes"),
        ({"wide_stores": 0}, "0 of 16"),
    ],
)
def test_each_rule_is_broken_by_its_own_fault(changes, message):
    found = gate.violations("sm_90", "gate_up_forward", BY_BOTH, replace(GOOD, **changes))
    assert any(message in violation for violation in found), found


def test_operands_that_all_come_by_tma_need_no_asynchronous_copies():
    code = replace(GOOD, async_copies=0)
    assert gate.violations("sm_90", "down_forward", {"TMA_W": True, "TMA_ACT": True}, code) == []
    # The gathered operand of this one cannot come by TMA, whatever its constants say.
    assert gate.violations("sm_90", "down_backward", {"TMA_W": True}, code)


def test_only_kernels_that_multiply_need_matrix_instructions():
    code = replace(GOOD, matrix={"HGMMA": 0, "HMMA": 0, "UTCMMA": 0}, async_copies=0, tma_loads=0, narrow_stores=9)
    assert gate.violations("sm_90", "combine", {}, code) == []


@pytest.mark.parametrize(("registers", "passes"), [(181, True), (220, True), (179, False), (221, False)])
def test_registers_may_move_by_a_tenth(registers, passes):
    figures = {"registers": registers, "instructions": 1000}
    assert (gate.moved(figures, {"registers": 200, "instructions": 1000}) == []) is passes


def test_a_kernel_without_golden_figures_fails():
    assert "no golden figures" in gate.moved({"registers": 1, "instructions": 1}, None)[0]


def run_gate(*arguments, configs=None):
    environment = os.environ | ({"ROUTEPACK_KERNEL_CONFIGS": str(configs)} if configs else {})
    command = [sys.executable, str(BENCHMARKS / "gate.py"), "--triton", "installed", "--archs", "sm_90", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def installed_is_golden():
    import triton

    return triton.__version__ in json.loads((BENCHMARKS / "gate_golden.json").read_text())


def test_a_shipped_kernel_passes_for_real():
    if not installed_is_golden():
        pytest.skip("the installed triton has no golden figures: see benchmarks/gate.py --update")
    done = run_gate("--kernels", "down_forward", "input_gradient", "--variants", "tokens")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed, 0 failed" in done.stdout


def test_a_config_that_spills_or_needs_too_much_shared_memory_fails_for_real(tmp_path):
    configs = {
        "sm_90": {
            "down_forward": {
                "large": {"BM": 128, "BN": 256, "BK": 64, "num_warps": 4, "num_stages": 3},
                "small": {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 5},
            }
        }
    }
    (tmp_path / "configs.json").write_text(json.dumps(configs))
    done = run_gate("--kernels", "down_forward", "--variants", "tokens", configs=tmp_path / "configs.json")
    assert done.returncode == 1
    large, small = (line for line in done.stdout.splitlines() if line.startswith("| sm_90"))
    assert "spills" in large
    assert "shared memory 2" in small
