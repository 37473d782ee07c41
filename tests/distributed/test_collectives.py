"""What each rank does on its own; the collectives run in integrations/torchtitan."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from routepack.core.errors import PlanError, RankLostError, TraceError
from routepack.distributed import collectives


def test_one_rank_agrees_with_itself():
    collectives.agree("ab" * 32, "plan")


def test_an_error_is_raised_where_it_arose():
    with pytest.raises(TraceError, match="mine"):
        collectives.agree("ab" * 32, "plan", error=TraceError("mine"))


def test_a_plan_that_cannot_be_made_cannot_be_shared(monkeypatch):
    with pytest.raises(TraceError, match="no window"):
        collectives.from_rank(0, refuse, "plan")
    monkeypatch.setattr(collectives, "num_ranks", lambda: 2)
    monkeypatch.setattr(collectives, "this_rank", lambda: 1)
    monkeypatch.setattr(
        dist, "broadcast_object_list", lambda shared, src: shared.__setitem__(0, (None, "TraceError: no window"))
    )
    with pytest.raises(PlanError, match="rank 0 could not make the plan: TraceError: no window"):
        collectives.from_rank(0, refuse, "plan")


def refuse():
    raise TraceError("no window")


def test_a_lost_peer_is_named_with_what_was_going_on():
    message = r"lost another rank while experts moved \(\[gloo/x.cc:1\] Connection closed\)"
    with pytest.raises(RankLostError, match=message), collectives.together("experts moved"):
        raise RuntimeError("[gloo/x.cc:1] Connection closed\nmore")


def test_a_connection_that_gloo_gave_up_is_a_lost_peer():
    with pytest.raises(RankLostError, match="while experts moved"), collectives.together("experts moved"):
        raise RuntimeError("Application timeout caused pair closure")


@pytest.mark.parametrize("kind", [dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError, dist.DistError])
def test_torchs_own_errors_are_told_by_their_type(kind):
    with pytest.raises(RankLostError, match=r"while experts moved \(no answer\)"), collectives.together("experts moved"):
        raise kind("no answer")


@pytest.mark.parametrize(
    "text",
    ["shape mismatch", "my timeout", "Connection closed by peer", "gloo and nccl differ", "the grader's ProcessGroup timed out",
     "in [x/gloo/pair.cc:1] nothing", "[my/loss.cc:7] Timed out waiting"],
)  # fmt: skip
def test_an_error_that_is_not_the_transports_passes(text):
    error = RuntimeError(text)
    with pytest.raises(RuntimeError) as caught, collectives.together("experts moved"):
        raise error
    assert caught.value is error


COLLECTIVES = {
    "meet": lambda: collectives.meet("ranks started"),
    "agree": lambda: collectives.agree("ab" * 32, "plan"),
    "from_rank": lambda: collectives.from_rank(0, lambda: 1, "plan"),
    "from_all": lambda: collectives.from_all(1, "the layout"),
    "sum_over_ranks": lambda: collectives.sum_over_ranks(torch.zeros(1)),
    "max_over_ranks": lambda: collectives.max_over_ranks(torch.zeros(1)),
    "exchange": lambda: collectives.exchange([b"for rank 0", b"for rank 1"], "sequences"),
    "begin_messages": lambda: collectives.begin_messages([(1, torch.zeros(1))], []),
}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_names_a_lost_rank(collective, monkeypatch):
    def lost(*_, **__):
        raise RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    monkeypatch.setattr(collectives, "num_ranks", lambda: 2)
    for name in ("barrier", "all_reduce", "all_gather", "all_gather_object", "broadcast_object_list", "all_to_all_single",
                 "batch_isend_irecv"):  # fmt: skip
        monkeypatch.setattr(dist, name, lost)
    monkeypatch.setattr(dist, "P2POp", lambda *_: None)
    with pytest.raises(RankLostError, match="rank 0 lost another rank while"):
        COLLECTIVES[collective]()


UNENDING = """
import threading, time, torch
from routepack.distributed.collectives import leave

def work():
    while True:
        torch.randn(400, 400) @ torch.randn(400, 400)

threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""


def ended(code):
    """How a process ends that has a thread in torch's C++ code until the end."""
    source = str(Path(collectives.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", UNENDING + code], env=environment, capture_output=True, text=True, check=False)
    return run.returncode, run.stderr


@pytest.mark.slow
def test_leaving_is_clean_while_threads_still_run():
    assert [ended("print('all is saved', flush=True); leave()") for _ in range(3)] == [(0, "")] * 3


@pytest.mark.slow
def test_pythons_own_way_out_is_not():
    # The abort that 4-rank runs showed now and then; where Python no longer does this, leave() has become needless.
    code, said = ended("")
    assert code == -signal.SIGABRT
    assert "terminate called without an active exception" in said
