"""Training on recorded windows: it learns, resumes, and refuses what another model recorded."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import traces
import windows
from safetensors.numpy import load_file

from routepack.core.config import load
from routepack.core.errors import ConfigError, TraceError
from routepack.torchtitan.launch.launch import check_devices, experiment_of, torchrun
from routepack.torchtitan.model import cpu_device
from routepack.torchtitan.model.models import TinyQwen3MoE
from routepack.torchtitan.recorded.recorded_windows import UpdateSettings, load_training_window
from routepack.traces.trace_files import load_trace, save_trace
from routepack.training.losses import CrossEntropyTokenLoss, GRPOTokenLoss

CONFIGS = Path(__file__).parents[2] / "configs"


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not np.array_equal(value, other[name])]


def test_the_loss_falls_window_by_window(trace_pair):
    losses = trace_pair[0]["whole"]["losses"]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5
    assert trace_pair[0]["whole"]["losses"] == trace_pair[1]["whole"]["losses"]


def test_every_window_is_trained_under_a_plan_that_moves_experts(trace_pair):
    figures = trace_pair[0]["whole"]["figures"]
    assert figures["experts_moved"] > 0
    assert figures["plan/planned.imbalance_mean"] <= figures["plan/baseline.imbalance_mean"]
    assert {"plan/exposed_ms", "step_seconds", "move_ms", "tokens_per_second", "seconds/read"} <= figures.keys()


def test_a_run_in_two_parts_ends_at_the_bits_of_one(trace_pair):
    whole, first, second = (trace_pair[0][key] for key in ("whole", "first part", "second part"))
    assert (first["windows_done"], second["windows_done"], second["step"]) == (3, 6, 6)
    assert second["losses"] == whole["losses"]
    assert differing(first["state"], whole["state"]) != []
    assert differing(second["state"], whole["state"]) == []


def test_a_run_with_nothing_left_does_nothing(trace_pair):
    assert trace_pair[0]["nothing left"]["losses"] == trace_pair[0]["whole"]["losses"]
    assert differing(trace_pair[0]["nothing left"]["state"], trace_pair[0]["whole"]["state"]) == []


def test_recomputed_logprobs_are_those_of_the_weights_at_hand_and_recorded_ones_are_not(trace_pair):
    recomputed, recorded = (trace_pair[0][key]["figures"] for key in ("recomputed", "recorded"))
    assert abs(recomputed["policy_kl"]) < 1e-6
    assert recomputed["clip_fraction"] == 0.0
    assert recorded["policy_kl"] > 0.1
    assert ("seconds/logprobs" in recomputed, "seconds/logprobs" in recorded) == (True, False)


def test_a_window_can_be_trained_several_times_in_mini_batches(trace_pair):
    result = trace_pair[0]["several"]
    assert (result["step"], result["windows_done"], result["figures"]["optimizer_steps"]) == (4, 1, 4)


def test_the_step_log_has_a_line_for_every_step(trace_pair):
    from routepack.cost.step_log import load_steps

    assert len(load_steps([trace_pair[0]["folder"] / "steps.jsonl"])) > 6


def test_every_rank_names_a_field_that_a_window_lacks(trace_pair):
    for result in trace_pair:
        assert "has token fields" in result["unlabelled"]
        assert "no loss_mask" in result["unlabelled"]


def test_weights_come_back_from_hugging_faces_format_bit_for_bit_in_any_layout_and_placement(trace_pair):
    exported = trace_pair[0]["loads"]["state"]
    for key in ("loads ep=1", "starts"):
        assert differing(trace_pair[0][key]["state"], exported) == []
    assert len(differing(trace_pair[0]["loads"]["before"], exported)) > 20
    local = load_file(trace_pair[0]["folder"] / "exported" / "model-00001-of-00001.safetensors")
    for expert in range(16):
        ours = exported["layers.2.moe.routed_experts.inner_experts.w1_EFD"][expert]
        assert np.array_equal(ours, local[f"model.layers.2.mlp.experts.{expert}.gate_proj.weight"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lacking", "lacks 1 of the model's weights, such as model.norm.weight"),
        ("misshapen", "model.norm.weight has shape (63,)"),
        ("foreign", "has 1 weights that are no parameter of this model, such as model.layers.9.mlp.gate.weight"),
        ("truncated", "cannot be read"),
        ("empty", "holds no safetensors files"),
    ],
)
def test_weights_of_another_model_are_refused_on_every_rank_and_nothing_changes(trace_pair, name, message):
    for result in trace_pair:
        assert message in result["refuses"][name]
        assert result["refuses"]["unchanged"]


@pytest.mark.parametrize("key", ["memory ep=2", "memory ep=1", "memory in bfloat16"])
def test_the_estimate_is_what_the_fullest_rank_measures(trace_pair, key):
    estimate = trace_pair[0][key]["estimate"]
    for part in ("weights", "optimizer", "rotary"):
        assert getattr(estimate, part) == max(result[key][part] for result in trace_pair), part


def test_the_estimate_of_logits_is_most_of_what_a_step_allocates_at_a_time(trace_pair):
    for result in trace_pair:
        assert 0.9 < result["peaks"]["logits"] / result["peaks"]["peak"] < 1.05


@pytest.fixture
def folder(tmp_path):
    traces.written_windows(tmp_path, 1)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.num_layers=3", "window0.safetensors was recorded with 4 MoE layers; model qwen3 moe_3x16 has 3"),
        ("model.num_experts=8", "was recorded with 16 experts; model qwen3 moe_4x8 has 8"),
        ("model.top_k=3", r"was recorded with 2 experts a token \(top_k\); model qwen3 moe_4x16 has 3"),
    ],
)
def test_a_trace_of_another_model_is_refused_with_both_numbers(folder, change, message):
    with pytest.raises(TraceError, match=message):
        experiment_of(load([traces.written_config(folder)], [change]))


def test_a_trace_of_other_layers_is_refused(folder):
    batch = load_trace(folder / "window0.safetensors")
    save_trace(replace(batch, layer_ids_L=np.array([1, 2, 3, 4])), folder / "window1.safetensors")
    with pytest.raises(TraceError, match=r"recorded layers \[1, 2, 3, 4\]; the model's MoE layers are \[0, 1, 2, 3\]"):
        experiment_of(load([traces.written_config(folder)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("update.updates_per_window=0", "update.updates_per_window=0 must be a whole number of at least 1"),
        ("update.minibatches_per_window=3", "update.minibatches_per_window=3 does not divide packer.microbatch_multiple=2"),
        ("rollout.temperature=1", "rollout is no option of a config that trains on recorded windows"),
        ("trainer.num_steps=3", "trainer.num_steps is not set here: it follows from windows"),
        ("windows=none/*.safetensors", r"windows=none/\*.safetensors finds no file"),
        ("windows=[]", "must name trace files, folders or globs"),
        ("trainer.spmd_backend=dtensor", "trainer.spmd_backend='dtensor' is unknown: choose partial_dtensor or spmd_types"),
        ("trainer.spmd_backend=full_dtensor", "trainer.spmd_backend='full_dtensor' is not supported"),
        ("launch.device_memory_gib=0.0001", "launch.device_memory_gib=0.0001 is too little"),
    ],
)
def test_a_wrong_option_is_named(folder, change, message):
    with pytest.raises(ConfigError, match=message):
        experiment_of(load([traces.written_config(folder)], [change]))


def test_the_default_spmd_backend_asks_for_the_torch_that_it_needs(folder, monkeypatch):
    from routepack.torchtitan.trainer import settings

    monkeypatch.setattr(settings, "torch_version", lambda: (2, 13))
    with pytest.raises(ConfigError, match=r"trainer.spmd_backend='spmd_types' needs torch 2.14 or newer"):
        experiment_of(load([traces.written_config(folder)], ["trainer.spmd_backend=spmd_types"]))
    monkeypatch.setattr(settings, "torch_version", lambda: (2, 14))
    assert (
        experiment_of(load([traces.written_config(folder)], ["trainer.spmd_backend=spmd_types"])).trainer.spmd_backend
        == "spmd_types"
    )


def test_windows_may_be_named_later_but_not_at_the_start(folder):
    experiment = experiment_of(load([traces.written_config(folder)], ["windows=null"]))
    with pytest.raises(ConfigError, match=r"windows is not set: name trace files"):
        experiment.check_ready()


def test_windows_are_trained_in_the_order_that_names_them(folder):
    for number in (1, 2, 10):
        save_trace(windows.window(number), folder / f"window{number}.safetensors")
    listed = experiment_of(
        load([traces.written_config(folder)], [f"windows=[{folder}/window2.safetensors,{folder}/window1*]"])
    ).windows()
    assert [path.name for path in listed] == ["window2.safetensors", "window1.safetensors", "window10.safetensors"]


def test_a_folder_of_initial_weights_must_be_there_at_the_start(folder):
    experiment = experiment_of(load([traces.written_config(folder)], ["trainer.initial_weights=nowhere"]))
    with pytest.raises(ConfigError, match=r"trainer.initial_weights=nowhere is no folder"):
        experiment.check_ready()


def test_the_samplers_logprobs_stand_in_for_the_old_ones(folder):
    batch = windows.window(0)
    fields = dict(batch.token_fields)
    fields["logprobs"] = fields.pop("logprobs_old")
    save_trace(replace(batch, token_fields=fields), path := folder / "sampled.safetensors")
    read = load_training_window(path, TinyQwen3MoE(), GRPOTokenLoss(), UpdateSettings())
    assert np.array_equal(read.token_fields["logprobs_old"], fields["logprobs"])


def test_a_window_without_logprobs_is_refused_unless_they_are_recomputed_or_nobody_reads_them(folder):
    batch = windows.window(0)
    fields = {name: value for name, value in batch.token_fields.items() if name != "logprobs_old"}
    save_trace(replace(batch, token_fields=fields), path := folder / "bare.safetensors")
    with pytest.raises(TraceError, match=r"no logprobs_old: record logprobs, or set update.recompute_logprobs=true"):
        load_training_window(path, TinyQwen3MoE(), GRPOTokenLoss(), UpdateSettings())
    load_training_window(path, TinyQwen3MoE(), GRPOTokenLoss(), UpdateSettings(recompute_logprobs=True))
    load_training_window(path, TinyQwen3MoE(), CrossEntropyTokenLoss(), UpdateSettings())


def test_a_token_beyond_the_vocabulary_is_refused(folder):
    path = folder / "window0.safetensors"
    with pytest.raises(TraceError, match=r"has token id 61; the model's vocabulary has 60, 0 .. 59"):
        load_training_window(path, TinyQwen3MoE(vocab_size=60), CrossEntropyTokenLoss(), UpdateSettings())


@pytest.mark.parametrize(
    ("name", "line"), [("qwen3_30b_a3b", "--nproc-per-node=8 --nnodes=2"), ("deepseek_v3_16b", "--nproc-per-node=8")]
)
def test_a_machine_without_devices_is_refused_by_name_with_the_launchers_line(name, line):
    experiment = experiment_of(load([CONFIGS / f"{name}.yaml"]))
    assert torchrun(experiment) == f"torchrun {line}"
    with pytest.raises(ConfigError, match=rf"launch.device=cuda: every rank needs one, .*{line}"):
        check_devices(experiment, 8)


def test_a_machine_with_too_few_devices_is_refused(folder, monkeypatch):
    import torch

    experiment = experiment_of(load([CONFIGS / "qwen3_30b_a3b.yaml"]))
    monkeypatch.setattr(cpu_device, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    check_devices(experiment, 4)
    with pytest.raises(ConfigError, match=r"16 ranks on this machine need as many cuda devices, and it has 4: use torchrun"):
        check_devices(experiment, 16)
