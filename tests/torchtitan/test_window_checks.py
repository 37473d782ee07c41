"""`routepack check` looks at all that training needs, and train at what headers tell, before a rank starts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import traces
import windows

from routepack.core.config import load
from routepack.core.errors import ConfigError, TraceError
from routepack.torchtitan.launch import launch
from routepack.traces.trace_files import load_trace, save_trace

GRPO = "loss._target_=routepack.training.losses.GRPOTokenLoss"
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def folder(tmp_path):
    traces.written_windows(tmp_path, 2)
    return tmp_path


def check(folder, *changes):
    return launch.check(load([traces.written_config(folder)], [GRPO, *changes]))


def spoil(folder, **fields):
    """Change token fields of the second window; None takes one away."""
    path = folder / "window1.safetensors"
    batch = load_trace(path)
    changed = {**batch.token_fields, **fields}
    save_trace(replace(batch, token_fields={k: np.array(v) for k, v in changed.items() if v is not None}), path)


def with_value(folder, name, value):
    batch = load_trace(folder / "window1.safetensors")
    field = batch.token_fields[name].copy()
    field[int(np.flatnonzero(batch.token_fields["loss_mask"])[5])] = value
    spoil(folder, **{name: field})


def test_windows_that_can_be_trained_on_are_counted(folder):
    tokens = sum(int(windows.window(number).num_tokens_S.sum()) for number in range(2))
    assert f"2 windows of {tokens} tokens, " in check(folder)
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logprobs_old", -np.inf, r"window1.safetensors: logprobs_old is -inf at sequence \d+, token \d+"),
        ("advantages", np.nan, "window1.safetensors: advantages is nan at sequence"),
        ("token_ids", -1, "window1.safetensors has token id -1"),
        ("token_ids", 64, "window1.safetensors has token id 64"),
        ("token_ids", None, "window1.safetensors has token fields .* but no token_ids"),
        ("loss_mask", None, "window1.safetensors has token fields .* but no loss_mask"),
        ("logprobs_old", None, "window1.safetensors has token fields .* but no logprobs_old"),
        ("advantages", None, "window1.safetensors has token fields .* but no advantages"),
    ],
)
def test_a_window_that_cannot_be_trained_on_is_named(folder, name, value, message):
    if value is None:
        spoil(folder, **{name: None})
    else:
        with_value(folder, name, value)
    with pytest.raises(TraceError, match=message):
        check(folder)


def test_a_window_that_trains_no_token_is_named(folder):
    spoil(folder, loss_mask=np.zeros(int(windows.window(1).num_tokens_S.sum()), bool))
    with pytest.raises(TraceError, match=r"window1.safetensors: loss_mask trains no token of this window"):
        check(folder)


def test_a_window_with_a_route_that_cannot_be_replayed_is_named(folder):
    batch = load_trace(folder / "window1.safetensors")
    routes = batch.routed_experts_TLK.copy()
    routes[:, 0, 1] = routes[:, 0, 0]
    save_trace(windows.with_routes(batch, routes, batch.cu_seqlens), folder / "window1.safetensors")
    with pytest.raises(TraceError, match=r"window1.safetensors: sequence 0, row 0, layer 0 routes to experts"):
        check(folder)


@pytest.mark.parametrize("what", [check, lambda folder, *changes: experiment(folder, *changes).check_ready()])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("packer.max_tokens=20", r"window0.safetensors: sequence \d+ has \d+ tokens; packer.max_tokens=20 is what"),
        ("model.max_seq_len=16", r"window0.safetensors: a sequence has \d+ tokens, number \d+; model.max_seq_len=16 feeds in"),
        ("trainer.initial_weights=nowhere", "trainer.initial_weights=nowhere is no folder"),
        ("windows=null", "windows is not set: name trace files"),
        ("launch.device=gpu", "launch.device='gpu' is unknown: choose cpu, cuda, "),
        ("out=/proc/results", "out=/proc/results cannot be made: /proc: .*: choose another folder"),
        ("out=/dev/null/results", "out=/dev/null/results cannot be made: /dev/null: Not a directory"),
    ],
)
def test_what_training_lacks_is_said_beforehand(folder, what, change, message):
    with pytest.raises((ConfigError, TraceError), match=message):
        what(folder, change)


def experiment(folder, *changes):
    return launch.experiment_of(load([traces.written_config(folder)], [GRPO, *changes]))


def test_train_finds_a_missing_field_before_a_rank_starts(folder):
    spoil(folder, advantages=None)
    with pytest.raises(TraceError, match=r"window1.safetensors has token fields .* but no advantages"):
        experiment(folder).check_ready()


def test_a_config_whose_windows_are_still_to_be_named_is_built_all_the_same():
    assert "weights" in launch.check(load([CONFIGS / "qwen3_30b_a3b.yaml"]))


def test_a_config_of_plan_is_no_config_of_train():
    with pytest.raises(ConfigError, match="trace: this is a config of 'routepack plan'"):
        launch.experiment_of(load([CONFIGS / "plan.yaml"]))
