"""Demand counted on several gloo ranks: one launch for each number of ranks, many checks in it."""

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import TraceError
from routepack.distributed.gather_demand import _check_permutation, collect_demand

HERE = Path(__file__).parent
SPEC = importlib.util.spec_from_file_location("gathering_worker", HERE / "gathering_worker.py")
worker = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(worker)


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    """What each rank gets, by rank."""
    folder, ranks = tmp_path_factory.mktemp("gathering"), request.param
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [sys.executable, str(HERE / "gathering_worker.py"), str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen([*command, str(rank), str(ranks)], env=environment, **pipes) for rank in range(ranks)]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(ranks)]


def one_process():
    return RoutingDemandCollector().collect(worker.window())


@pytest.mark.parametrize("case", ["interleaved", "in rank order", "an idle rank", "after the errors"])
def test_every_rank_gets_the_demand_that_one_process_would_count(results, case):
    expected = one_process()
    assert expected.estimated_S.sum() == 3
    for result in results:
        got = result[case]
        assert got["digest"] == expected.digest
        assert (got["layers"], got["groups"]) == ([1, 2, 5], expected.group_S.tolist())
        assert (got["estimated"], got["masked"]) == (expected.estimated_S.tolist(), expected.num_masked_rows)


def test_only_counts_travel(results):
    """[L, E] counts of 2 bytes, and length, group, modality, coverage and position, a sequence; and the layers' numbers."""
    share = [len(np.arange(rank, 23, len(results))) for rank in range(len(results))]
    for result, sequences in zip(results, share, strict=True):
        ((in_arrays, pickled),) = result["interleaved"]["sent"]
        assert in_arrays == sequences * (3 * 16 * 2 + 5 * 8) + 3 * 4
        assert pickled < in_arrays + 1500


@pytest.mark.parametrize(
    ("case", "mine", "others"),
    [
        ("a bad id on one rank", "expert id 200 is not below num_experts=16", "rank 1 could not count"),
        ("another model on one rank", r"rank 1 recorded \(4, 16, 2\)", r"rank 1 recorded \(4, 16, 2\)"),
        ("the same place twice", "each once", "each once"),
    ],
)
def test_an_error_on_one_rank_is_an_error_on_all(results, case, mine, others):
    for rank, result in enumerate(results):
        assert isinstance(result[case], str)
        with pytest.raises(ValueError, match=mine if rank == 1 else others):
            raise ValueError(result[case])


def test_a_single_rank_counts_alone():
    assert collect_demand(RoutingDemandCollector(), worker.window()).digest == one_process().digest


@pytest.mark.parametrize(
    ("positions", "ranks", "wrong"),
    [
        ([0, 1, 1, 2], [0, 0, 1, 1], "1 is held by ranks 0 and 1, and 3 by none"),
        ([0, 0, 1, 2], [0, 0, 1, 1], "0 is held by rank 0 twice, and 3 by none"),
        ([0, 1, 2, 7], [0, 0, 1, 1], "rank 1 has 7"),
        ([0, 1, 2, -1], [0, 0, 1, 2], "rank 2 has -1"),
    ],
)
def test_numbers_that_overlap_are_told_with_the_ranks_that_hold_them(positions, ranks, wrong):
    with pytest.raises(TraceError, match=rf"sequences_S of all ranks must be 0 .. 3, each once: {wrong}"):
        _check_permutation(np.array(positions), np.array(ranks), "sequences_S")
