"""Checkpoints: the same tensors at any ranks, EP degree and placement; whole or absent."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from routepack.core.errors import CheckpointError, ConfigError
from routepack.torchtitan.checkpoints.checkpoint import PlacedCheckpointManager
from routepack.training import folders


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not np.array_equal(value, other[name])]


def largest(one, other):
    return max(float(np.abs(value - other[name]).max()) for name, value in one.items())


SAME = [
    ("pair", "saves", "loads again"),
    pytest.param("slow_pair", "saves asynchronously", "loads asynchronously", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "save", "load"), SAME)
def test_a_load_into_the_same_layout_goes_on_bit_for_bit(request, ranks, save, load):
    for result in request.getfixturevalue(ranks):
        saved, loaded = result[save], result[load]
        assert loaded["step"] == 2
        assert np.array_equal(loaded["placement"], saved["placement"])
        assert differing(saved["saved"], loaded["loaded"]) == []
        assert loaded["went_on"]["losses"] == saved["went_on"]["losses"]
        assert differing(saved["went_on"]["tensors"], loaded["went_on"]["tensors"]) == []


def test_a_load_into_another_layout_takes_the_same_tensors_and_goes_on_within_rounding(pair):
    saved, loaded = pair[0]["saves"], pair[0]["loads alone"]
    assert differing(saved["saved"], loaded["loaded"]) == []
    assert largest(saved["went_on"]["tensors"], loaded["went_on"]["tensors"]) < 1e-6
    assert largest(saved["saved"], saved["went_on"]["tensors"]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("key", ["quad", "quad_ep4", "quad_replicated", "pair", "pair_ep1", "alone"])
def test_what_four_ranks_saved_is_loaded_anywhere(layouts, key):
    saved, loaded = layouts["saves"], layouts[f"loads {key}"]
    assert differing(saved["saved"], loaded["loaded"]) == []
    assert largest(saved["went_on"]["tensors"], loaded["went_on"]["tensors"]) < (1e-6 if key != "quad" else 1e-30)
    restored = np.array_equal(loaded["placement"], saved["placement"])
    assert restored == (key in ("quad", "quad_replicated", "pair"))


@pytest.mark.slow
@pytest.mark.parametrize(("save", "load"), [("saves", "loads torchtitan"), ("saves as torchtitan", "loads theirs")])
def test_checkpoints_are_exchanged_with_torchtitans_own(slow_pair, save, load):
    assert slow_pair[0][load]["step"] == 2
    assert differing(slow_pair[0][save]["saved"], slow_pair[0][load]["loaded"]) == []


@pytest.mark.slow
def test_slots_saved_as_if_they_were_experts_are_caught(slow_pair_faulty):
    saved, loaded = slow_pair_faulty[0]["saves"], slow_pair_faulty[0]["loads again"]
    wrong = differing(saved["saved"], loaded["loaded"])
    assert len(wrong) == 36
    assert all("inner_experts" in name for name in wrong)


RESISTING = [("pair", "resists"), pytest.param("slow_pair", "resists asynchronously", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("ranks", "key"), RESISTING)
def test_a_full_disk_on_one_rank_is_said_on_all_and_costs_no_checkpoint(request, ranks, key):
    for result in request.getfixturevalue(ranks):
        said = result[key]["said"]
        assert "CheckpointError: rank 1 failed while " in said["full"]
        assert "was saved: OSError: [Errno 27] File too large" in said["full"]
        assert "Complete checkpoints are as they were." in said["full"]
        assert said["saved"] == said["saved again"] == "no error"
        assert result[key]["kept"] == ["step-2"]
        assert result[key]["kept_later"][-1] == "step-6"
        assert result[key]["resumed"] == 6


@pytest.mark.parametrize("key", ["keeps", "keeps asynchronously"])
def test_as_many_checkpoints_are_kept_as_was_asked_for(guarded, key):
    assert guarded[0][key]["closed"] == ["step-3", "step-4"]


def test_the_last_save_keeps_no_more_than_others(guarded):
    assert guarded[0]["keeps"]["step 3"] == ["step-2", "step-3"]
    assert guarded[0]["keeps"]["step 4"] == ["step-3", "step-4"]


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("layers", r"PlanError: the placement is of \(3, 16\) \[layers, experts\]; the model has \(4, 16\)"),
        ("experts", r"PlanError: the placement is of \(4, 8\)"),
        ("damaged", r"CheckpointError: .*step-8 cannot be read .*: delete it"),
        ("fewer experts", "CheckpointError: rank 0 failed while the checkpoint .*step-6 was loaded"),
        ("fewer layers", "CheckpointError: rank 0 failed while the checkpoint .*step-6 was loaded"),
        ("wider", "CheckpointError: rank 0 failed while the checkpoint .*step-6 was loaded"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_on_every_rank(pair, attempt, message):
    for result in pair:
        assert re.search(message, result["resists"]["said"][attempt]), result["resists"]["said"][attempt]


def test_an_export_does_not_depend_on_the_placement(pair):
    folder = pair[0]["folder"]
    assert pair[0]["exports"] == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    exported, moved = (load_file(folder / name / pair[0]["exports"][0]) for name in ("exported", "exported_moved"))
    assert differing(exported, moved) == []
    experts = [exported[f"model.layers.1.mlp.experts.{e}.gate_proj.weight"] for e in range(16)]
    assert len({expert.tobytes() for expert in experts}) == 16
    index = json.loads((folder / "exported" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == exported.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in exported.values())


def test_an_export_names_the_local_copys_values(pair):
    from routepack.torchtitan.model.models import TinyQwen3MoE, build_local_model

    local = dict(build_local_model(TinyQwen3MoE(), seed=7).named_parameters())
    exported = load_file(pair[0]["folder"] / "exported_moved" / pair[0]["exports"][0])
    for name, ours in (("gate", "w1_EFD"), ("down", "w2_EDF"), ("up", "w3_EFD")):
        weight = local[f"layers.2.moe.routed_experts.inner_experts.{ours}"].detach().numpy()
        for expert in range(16):
            assert np.array_equal(exported[f"model.layers.2.mlp.experts.{expert}.{name}_proj.weight"], weight[expert])


def written(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_text(text)
    return folder


def test_a_folder_takes_its_name_in_one_go_in_place_of_an_older_one(tmp_path):
    final = written(tmp_path / "step-4", "old")
    unfinished = folders.fresh_folder(final)
    assert list(unfinished.iterdir()) == []
    written(unfinished, "new")
    folders.commit(unfinished, final)
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
    assert (final / ".metadata").read_text() == "new"


def test_what_an_interrupted_save_left_is_deleted_and_never_taken_for_a_checkpoint(tmp_path):
    written(folders.fresh_folder(tmp_path / "step-6"), "half")
    written(folders.discard(written(tmp_path / "step-2", "old")), "half deleted")
    manager = object.__new__(PlacedCheckpointManager)
    manager.enable, manager.folder = False, str(tmp_path)
    written(tmp_path / "step-4", "whole")
    (tmp_path / "step-5").mkdir()
    assert manager._complete_steps() == [4]
    folders.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-5"]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be made"):
        folders.fresh_folder(tmp_path / "file" / "step-1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"async_mode": "async_with_pinned_mem"}, "choose 'async'"), ({"folder": "gs://bucket/run"}, "name a mounted folder")],
)
def test_saves_that_could_tear_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        PlacedCheckpointManager.Config(**changes)
