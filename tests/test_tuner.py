"""benchmarks/tune_kernels.py: what it tries, and that a dry run leaves a file that the layer can use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from routepack.triton_kernels import tile_configs as configs

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tuner():
    with pytest.MonkeyPatch.context() as paths:
        paths.syspath_prepend(str(ROOT / "benchmarks"))
        import tune_kernels

        yield tune_kernels


@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_the_shipped_config_comes_first_and_none_comes_twice(tuner, kernel):
    shipped = configs.TABLE["sm_90", kernel, configs.LARGE]
    tried = list(tuner.candidates(kernel, shipped))
    assert tried[0] == shipped
    assert len(set(tried)) == len(tried) > 20


def test_a_config_is_used_inside_the_block_alone(tuner):
    shipped = configs.config_for("down_forward", "sm_90", 1000.0)
    other = next(config for config in tuner.candidates("down_forward", shipped) if config != shipped)
    with tuner.using("down_forward", other):
        assert configs.config_for("down_forward", "sm_90", 1000.0) == other
        assert configs.config_for("gate_up_forward", "sm_90", 1000.0) != other
    assert configs.config_for("down_forward", "sm_90", 1000.0) == shipped


@pytest.mark.slow
def test_a_candidate_that_spills_is_rejected_with_the_reason(tuner):
    shipped = configs.TABLE["sm_90", "down_forward", configs.LARGE]
    spilling = configs.KernelConfig(BM=128, BN=256, BK=64, num_warps=4, num_stages=3)
    kept, refused = tuner.rejected("sm_90", "down_forward", configs.LARGE, [shipped, spilling])
    assert kept == []
    assert any("spills" in reason for reason in refused)


@pytest.mark.slow
def test_a_dry_run_writes_configs_that_can_be_used(tmp_path):
    out = tmp_path / "configs.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks/tune_kernels.py"),
        "--dry",
        "--arch",
        "sm_80",
        "--limit",
        "2",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("candidates pass the gate") == 2 * len(configs.KERNELS)
    assert set(configs.read_configs(out)) == {
        ("sm_80", kernel, rows) for kernel in configs.KERNELS for rows in ("large", "small")
    }
