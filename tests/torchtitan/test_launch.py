"""`routepack train`: what it starts, how that ends, and what is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from routepack.cli.main import app, main
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import ConfigError
from routepack.planning.plan_files import load_plan
from routepack.planning.verification import verify
from routepack.torchtitan.launch import launch, ranks
from routepack.traces.trace_files import load_trace

# torch leaves the files of a rank that ended by itself to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
ROOT = Path(__file__).parents[2]
TINY_RL = str(ROOT / "configs/tiny_rl.yaml")
SMALL = [
    "topology.data_parallel_degree=2",
    "model.dim=32",
    "model.moe_hidden_dim=16",
    "model.num_layers=2",
    "model.num_experts=4",
    "task.max_answer_symbols=16",
    "warmup.num_steps=2",
    "warmup.batch_size=8",
    "rl.num_steps=2",
    "rollout.prompts_per_step=4",
    "rollout.rollouts_per_prompt=2",
    "rollout.max_new_tokens=20",
    "packer.max_tokens=64",
    "num_proposals=500",
]


def command(*arguments):
    return [sys.executable, "-c", "from routepack.cli.main import main; main()", "train", TINY_RL, *map(str, arguments)]


def environment():
    unset = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in unset} | {"PYTHONPATH": str(ROOT / "src")}


def train(*arguments, timeout=200):
    return subprocess.run(command(*arguments), env=environment(), capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two ranks, two warm-up and two RL steps, from end to end."""
    out = tmp_path_factory.mktemp("run") / "results"
    return train(*SMALL, f"out={out}"), out


def test_a_run_ends_with_code_zero_and_nothing_to_say_on_stderr(run):
    done, _ = run
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_is_plain_lines_when_not_a_terminal(run):
    done, _ = run
    assert "\x1b" not in done.stdout
    assert "Supervised warm-up" in done.stdout
    assert "microbatches" in done.stdout
    assert "EP-rank imbalance" in done.stdout


def test_the_plan_left_behind_verifies_against_the_trace_left_behind(run):
    _, out = run
    trace, plan = load_trace(out / "trace.safetensors"), load_plan(out / "plan.safetensors")
    assert verify(plan, RoutingDemandCollector().collect(trace)) == []


def test_the_trace_holds_what_training_used(run):
    _, out = run
    trace = load_trace(out / "trace.safetensors")
    assert trace.num_sequences == 8
    assert set(trace.token_fields) >= {"token_ids", "loss_mask", "logprobs", "logprobs_old", "advantages"}
    assert (np.diff(trace.cu_seqlens) == trace.num_tokens_S - 1).all()


def test_the_trainer_replays_what_the_sampler_computed(run):
    _, out = run
    for step in json.loads((out / "summary.json").read_text())["steps"]:
        assert 0 < step["logprob_difference_max"] < 1e-4


def test_the_summary_has_every_steps_figures(run):
    _, out = run
    summary = json.loads((out / "summary.json").read_text())
    assert summary["num_steps"] == len(summary["steps"]) == 2
    assert all(
        {"reward", "loss", "tokens_per_second", "plan/plan_ms", "experts_moved"} <= set(step) for step in summary["steps"]
    )
    assert summary["imbalance_planned"] <= summary["imbalance_baseline"]


def test_scalars_are_written_for_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, out = run
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    assert {"rl/reward", "rl/plan/value", "rl/plan/baseline_value", "warmup/loss"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("rl/reward")] == [0, 1]


def test_no_half_written_file_is_left(run):
    _, out = run
    assert not [path for path in out.rglob("*") if path.name.endswith(".tmp")]


def test_the_resolved_config_is_kept_and_can_be_run_again(run):
    _, out = run
    kept = OmegaConf.load(out / "config.yaml")
    assert kept.topology.data_parallel_degree == 2
    launch.check(kept)


def test_wrong_input_exits_1_with_one_line_and_starts_nothing(tmp_path):
    done = train("rollout.temprature=1", f"out={tmp_path / 'results'}", timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("routepack: rollout.temprature is no option")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("override", ["model.num_experts=15", "packer._target_=routepack.Planner", "rl.steps=3"])
def test_the_command_refuses_before_any_folder_is_made(override, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(lambda: app(["train", TINY_RL, override, f"out={tmp_path / 'results'}"], prog_name="routepack"))
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("routepack: ")
    assert not (tmp_path / "results").exists()


def test_a_port_in_use_is_refused_by_name():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"launch.port={port} cannot be used \(.*in use.*\): choose another"):
            ranks.rendezvous_port(port)


def test_port_zero_finds_a_free_one():
    assert 1024 <= ranks.rendezvous_port(0) <= 65_535


def test_a_launcher_with_too_few_ranks_is_refused(monkeypatch):
    experiment = launch.build_experiment(launch.load([TINY_RL], []))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"data_parallel_degree=4 needs as many ranks; the launcher started 3"):
        launch.check_world_size(experiment)


def ranks_that(folder, *programs):
    """Ranks that run a program each, without RoutePack."""
    choose = "import os, sys; exec(sys.argv[1 + int(os.environ['RANK'])])"
    return launched(["-S", "-c", choose, *programs], folder, len(programs))


def launched(arguments, folder, num_ranks):
    files = ranks.RankFiles(folder)
    environments = [{"RANK": str(rank)} for rank in range(num_ranks)]
    return ranks.start(arguments, environments, files), files


def reported(folder, *programs):
    started, files = ranks_that(folder, *programs)
    return ranks.report(ranks.wait_for(started), files)


def leaves(message, *, second_hand=False):
    """A program that writes to its log, leaves an error of RoutePack's in its file, and fails."""
    error = {"message": message, "kind": "PlanError", "second_hand": second_hand, "extraInfo": {"timestamp": "1"}}
    content = json.dumps({"message": error})
    return f"open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({content!r}); sys.stderr.write('noise'); sys.exit(1)"


SLEEPS = "import time; time.sleep(60)"
CAUSE = leaves("the cause.")
CRASHES = "sys.stderr.write('Traceback of a lost peer\\n'); sys.exit(70)"


def test_ranks_that_end_well_give_no_failure(tmp_path):
    started, _ = ranks_that(tmp_path, "", "")
    assert ranks.wait_for(started) == {}


def test_run_ranks_gives_zero_where_all_end_well_and_the_code_of_one_that_does_not(tmp_path, capsys):
    assert ranks.run_ranks(["-S", "-c", ""], [{}, {}], tmp_path) == 0
    assert ranks.run_ranks(["-S", "-c", "import sys; sys.exit(7)"], [{}, {}], tmp_path) == 7
    assert "rank 0 ended with code 7" in capsys.readouterr().err


def test_one_failed_rank_ends_the_wait_and_its_message_alone_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ranks, "SETTLE_SECONDS", 0.5)
    started, files = ranks_that(tmp_path, CRASHES, CAUSE, SLEEPS)
    assert ranks.report(ranks.wait_for(started), files) == 1
    assert capsys.readouterr().err == "routepack: the cause.\n"
    assert started.wait(timeout=0).failures[2].exitcode == -signal.SIGTERM


def test_the_rank_with_the_cause_is_shown_before_one_that_only_heard_of_it(tmp_path, capsys):
    heard = leaves("another rank could not use its plan.", second_hand=True)
    assert reported(tmp_path, heard, CAUSE) == 1
    assert capsys.readouterr().err == "routepack: the cause.\n"


def test_a_rank_that_only_heard_of_a_cause_is_shown_where_nobody_knows_more(tmp_path, capsys):
    assert reported(tmp_path, leaves("another rank could not use its plan.", second_hand=True), CRASHES) == 1
    assert capsys.readouterr().err == "routepack: another rank could not use its plan.\n"


def test_what_a_log_says_decides_nothing(tmp_path, capsys):
    quotes = "sys.stderr.write('routepack: what another program said.\\n'); sys.exit(70)"
    assert reported(tmp_path, quotes) == 70
    assert capsys.readouterr().err.endswith(f"routepack: rank 0 ended with code 70; its log is {tmp_path}/rank0.log.\n")


def test_an_error_of_an_earlier_run_is_not_told_again(tmp_path, capsys):
    assert reported(tmp_path, CAUSE) == 1
    assert reported(tmp_path, CRASHES) == 70
    assert capsys.readouterr().err.count("the cause") == 1


KILLED = "os.kill(os.getpid(), 9)"


def test_a_killed_rank_is_named_with_its_signal(tmp_path, capsys):
    assert reported(tmp_path, CRASHES, KILLED) == 128 + signal.SIGKILL
    assert f"rank 1 was ended by SIGKILL; its log is {tmp_path}/rank1.log" in capsys.readouterr().err


def test_what_the_others_were_at_is_told_beside_the_rank_that_was_killed(tmp_path, capsys):
    heard = leaves("rank 0 lost another rank while experts moved.", second_hand=True)
    assert reported(tmp_path, heard, KILLED) == 128 + signal.SIGKILL
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "routepack: rank 0 lost another rank while experts moved."
    assert last == f"routepack: rank 1 was ended by SIGKILL; its log is {tmp_path}/rank1.log."


def test_a_rank_that_ignores_the_request_to_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(ranks, "SETTLE_SECONDS", 0.0)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('ready', 'w'); time.sleep(60)"
    waits = "import time\nwhile not os.path.exists('ready'): time.sleep(0.05)\nsys.exit(1)"
    monkeypatch.chdir(tmp_path)
    started, _ = ranks_that(tmp_path, deaf, waits)
    assert list(ranks.wait_for(started)) == [1]
    assert started.wait(timeout=0).failures[0].exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("ConfigError('a limit')", ("ConfigError", "a limit", False)),
        ("RankLostError('gone')", ("RankLostError", "gone", True)),
        ("heard(PlanError('another rank'))", ("PlanError", "another rank", True)),
        ("ZeroDivisionError('a bug')", ("ZeroDivisionError", "a bug", None)),
    ],
)
def test_a_rank_leaves_its_error_in_the_file_that_the_launcher_names(tmp_path, raised, said):
    program = f"""
from torch.distributed.elastic.multiprocessing.errors import record
from routepack.core.errors import *
from routepack.core.errors import heard
from routepack.torchtitan.launch.error_files import ErrorFiles
def fail():
    raise {raised}
record(fail, ErrorFiles())()
"""
    path = tmp_path / "error.json"
    told = environment() | {"TORCHELASTIC_ERROR_FILE": str(path)}
    subprocess.run([sys.executable, "-c", program], env=told, capture_output=True, check=False)
    error = json.loads(path.read_text())["message"]
    assert (error["kind"], error["message"], error["second_hand"]) == said
    assert int(error["extraInfo"]["timestamp"]) > 0


def children_of(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(line) for line in listed.split()]


def started(out, *arguments):
    arguments = command(*arguments, f"out={out}")
    process = subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "microbatches" not in (line := process.stdout.readline()):
        assert line, process.communicate()
    return process, children_of(process.pid)


def is_gone(pid):
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(tmp_path):
    process, pids = started(tmp_path / "results", *SMALL, "rl.num_steps=1000")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "routepack: interrupted; ending all ranks.\n")
    assert len(pids) == 2
    assert all(map(is_gone, pids))


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_was_killed_and_leave_nothing_half_written(tmp_path):
    process, pids = started(tmp_path / "results", *SMALL, "rl.num_steps=1000")
    process.kill()
    process.communicate(timeout=30)
    assert len(pids) == 2
    assert all(map(is_gone, pids))
    assert "is gone; this rank ends" in (tmp_path / "results/logs/rank1.log").read_text()
    assert not list((tmp_path / "results").rglob("*.tmp"))


@pytest.mark.slow
def test_a_rank_killed_while_training_ends_the_others_with_its_signal(tmp_path):
    process, pids = started(tmp_path / "results", *SMALL, "rl.num_steps=1000")
    os.kill(pids[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 was ended by SIGKILL" in err
    assert all(map(is_gone, pids))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_reward_rises(tmp_path):
    done = train("rl.num_steps=20", f"out={tmp_path / 'results'}", timeout=850)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "results/summary.json").read_text())
    assert summary["reward_last"] > summary["reward_first"] + 0.1
    assert summary["imbalance_planned"] < summary["imbalance_baseline"]
