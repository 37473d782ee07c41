"""benchmarks/kernels_h200.py: what it would say on a GPU is only worth something if its checks can fail."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_are_importable():
    with pytest.MonkeyPatch.context() as paths:
        paths.syspath_prepend(str(ROOT / "benchmarks"))
        yield


@pytest.fixture
def checks(monkeypatch):
    """The checks on ours computed in plain torch, as the interpreter would take seconds for each."""
    import moe_checks
    import moe_peers

    from routepack.triton_kernels import moe_experts

    def layer(given, spoil=lambda out: out, **options):
        x, scores, w1, w3, w2 = given.separate
        return moe_peers.Layer(lambda: spoil(moe_experts(x, given.ids_TK, scores, w1, w3, w2, **options)), given.separate)

    monkeypatch.setitem(moe_peers.IMPLEMENTATIONS, "plain", layer)
    monkeypatch.setitem(moe_peers.IMPLEMENTATIONS, "half", lambda given: layer(given, lambda out: out * 0.5))
    noise = lambda out: out + 1e-7 * torch.rand_like(out)  # noqa: E731
    monkeypatch.setitem(moe_peers.IMPLEMENTATIONS, "noisy", lambda given: layer(given, noise))
    unwritten = lambda out: torch.where(torch.arange(len(out))[:, None] == 3, torch.empty_like(out), out)  # noqa: E731
    monkeypatch.setitem(moe_peers.IMPLEMENTATIONS, "unwritten", lambda given: layer(given, unwritten))
    return moe_checks


def outcomes(checks, name, *, seconds=60.0):
    rows = checks.check_all([name], checks.DRY, time.monotonic() + seconds)
    return {row["check"]: row["passed"] for row in rows}


def test_a_right_layer_passes_but_for_its_host_synchronisation(checks):
    found = outcomes(checks, "plain")
    assert not found.pop("no host synchronisation")  # the loop over experts reads their counts
    assert len(found) == 9
    assert all(found.values())


@pytest.mark.parametrize("name", ["half", "unwritten"])
def test_a_wrong_or_unwritten_result_fails(checks, name):
    assert outcomes(checks, name)["float64 reference: qwen3_30b_a3b, balanced"] is False


def test_a_result_that_changes_from_run_to_run_fails(checks):
    found = outcomes(checks, "noisy")
    assert found["2 runs bit-equal"] is False
    assert found["float64 reference: qwen3_30b_a3b, balanced"] is True


def test_checks_beyond_the_deadline_are_neither_passed_nor_failed(checks):
    assert set(outcomes(checks, "plain", seconds=-1.0).values()) == {None}


@pytest.mark.parametrize("routing", ["balanced", "zipf", "hot", "empty"])
def test_routings_are_what_they_say(routing):
    from moe_cases import Shape, routed

    shape = Shape("some", 512, 8, 8, 2, 8)
    ids_TK = routed(shape, routing, torch.Generator().manual_seed(0))
    counts_E = ids_TK.flatten().bincount(minlength=8)
    assert (ids_TK[:, 0] != ids_TK[:, 1]).all()
    expected = {
        "balanced": lambda: counts_E.max() == counts_E.min(),
        "zipf": lambda: counts_E[0] > 2 * counts_E[7],
        "hot": lambda: counts_E[7] == 512,
        "empty": lambda: (counts_E[::2] == 0).all() and (counts_E[1::2] > 0).all(),
    }
    assert expected[routing]()


def test_the_floor_is_that_of_the_roofline():
    from moe_cases import SHAPES, floor_seconds

    # The groundwork's table: 790 TFLOP/s and 4.3 TB/s, kernels one after another.
    floor = floor_seconds(SHAPES[0], flops_per_second=790e12, bytes_per_second=4.3e12)
    assert floor["forward"] == pytest.approx(3.41e-3, rel=2e-3)
    assert floor["backward"] == pytest.approx(6.54e-3, rel=2e-3)
    faster = floor_seconds(replace(SHAPES[0], num_tokens=SHAPES[0].num_tokens // 2), 790e12, 4.3e12)
    assert faster["both"] < 0.6 * floor["both"]


@pytest.mark.slow
def test_every_path_runs_on_a_cpu(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/kernels_h200.py"), "--dry", "--out", str(tmp_path), "--shapes", "mixtral"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log_ours.txt").read_text()
    results = json.loads((tmp_path / "kernels.json").read_text())
    assert results["ended"] == dict.fromkeys(("ours", "transformers", "liger", "sonic", "liger_autotuned"), "complete")
    assert all(row["passed"] for row in results["checks"])
    timed = {(row["implementation"], row["routing"], row["mode"]) for row in results["timings"]}
    modes, routings = ("forward", "backward", "both"), ("balanced", "zipf")
    ours = ("ours", "ours_permuted", "ours_recompute", "grouped_mm")
    assert {(name, routing, mode) for name in ours for routing in routings for mode in modes} <= timed
    # A peer is timed, or listed as missing with a reason.
    missing = {row["implementation"]: row["reason"] for row in results["missing"]}
    for peer in ("transformers", "liger", "sonic"):
        assert peer in {name for name, _, _ in timed} or missing[peer]
    kernels = {row["kernel"] for row in results["kernels"]}
    assert {"gate_up_forward", "down_forward", "down_backward", "input_gradient", "weight_gradient", "combine"} <= kernels
    assert "| mixtral | balanced | ours |" in (tmp_path / "kernels.md").read_text()
