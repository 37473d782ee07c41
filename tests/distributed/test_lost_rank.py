"""What a gloo rank gets where the other one was killed, or does not answer: one launch for each, every collective in it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAMES = ("first", "meet", "agree", "from_rank", "from_all", "sum_over_ranks", "max_over_ranks", "exchange",
         "messages to a rank", "messages from a rank")  # fmt: skip


# Where the other rank is silent, the first call alone waits for it, so two kinds of waiting come first in turn.
@pytest.fixture(scope="module", params=["killed", "sum_over_ranks", "messages from a rank"])
def said(request, tmp_path_factory):
    """What each collective raises on rank 0."""
    folder = tmp_path_factory.mktemp("lost")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [sys.executable, str(HERE / "lost_rank_worker.py"), str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), request.param], env=environment, **pipes) for rank in range(2)]
    try:
        output, _ = ranks[0].communicate(timeout=120)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[0].returncode == 0, output
    return request.param, json.loads((folder / "said.json").read_text())


@pytest.mark.parametrize("collective", NAMES)
def test_a_lost_rank_is_named_by_every_collective(said, collective):
    assert said[1][collective].startswith("RankLostError: rank 0 lost another rank while"), said


def test_what_gloo_says_of_it_is_kept(said):
    first, messages = said
    assert re.search("Connection (closed|reset) by peer" if first == "killed" else "Timed out waiting", messages["first"])
