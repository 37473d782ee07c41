import json

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from routepack.core.errors import ConfigError, TraceError
from routepack.core.rollouts import RolloutBatch, RoutingDemand
from routepack.traces.trace_files import (
    concatenate,
    load_demand,
    load_trace,
    load_window,
    save_demand,
    save_trace,
)


def batch_of(lengths=(3, 1, 5), experts=8, layers=2, top_k=2, **fields):
    rng = np.random.default_rng(0)
    lengths = np.asarray(lengths)
    rows = lengths - 1
    ids = rng.permuted(np.tile(np.arange(experts, dtype=np.uint8), (rows.sum(), layers, 1)), axis=2)[..., :top_k]
    return RolloutBatch(
        routed_experts_TLK=ids,
        cu_seqlens=np.concatenate([[0], np.cumsum(rows)]),
        num_tokens_S=lengths,
        num_experts=experts,
        **fields,
    )


def full_batch():
    return batch_of(
        valid_T=np.array([True, False, True, True, True, True]),
        group_S=[0, 0, 1],
        layer_ids_L=[1, 4],
        token_fields={"token_ids": np.arange(9), "loss_mask": np.ones(9, bool)},
        sequence_fields={"rewards": np.array([0.0, 1.0, 0.5], np.float32)},
        source="test",
        weights_version="7",
    )


def assert_same(a: RolloutBatch, b: RolloutBatch):
    for name in ("routed_experts_TLK", "cu_seqlens", "num_tokens_S", "layer_ids_L", "valid_T", "group_S"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    for name in ("token_fields", "sequence_fields"):
        assert getattr(a, name).keys() == getattr(b, name).keys()
        for key in getattr(a, name):
            np.testing.assert_array_equal(getattr(a, name)[key], getattr(b, name)[key])
    assert (a.num_experts, a.source, a.weights_version) == (b.num_experts, b.source, b.weights_version)


def test_a_trace_comes_back_as_it_was(tmp_path):
    save_trace(full_batch(), tmp_path / "t.safetensors")
    assert_same(load_trace(tmp_path / "t.safetensors"), full_batch())


def test_a_trace_is_mapped_not_copied(tmp_path):
    save_trace(full_batch(), tmp_path / "t.safetensors")
    ids = load_trace(tmp_path / "t.safetensors").routed_experts_TLK
    base = ids
    while base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    assert not ids.flags.writeable


def test_shards_read_as_one_trace(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for i, lengths in enumerate([(3, 2), (6,)]):
        save_trace(batch_of(lengths), folder / f"part-{i}.safetensors")
    whole = load_window(folder)
    assert whole.num_tokens_S.tolist() == [3, 2, 6]
    np.testing.assert_array_equal(whole.routed_experts_of(2), batch_of((6,)).routed_experts_TLK)


def test_shards_of_different_models_are_refused():
    with pytest.raises(TraceError, match="disagree on num_experts: 8 and 16"):
        concatenate([batch_of(), batch_of(experts=16)])


def test_a_demand_comes_back_as_it_was(tmp_path):
    demand = RoutingDemand(tokens_SLE=[[[2, 0, 2]], [[1, 1, 0]]], length_S=[2, 1], top_k=2, group_S=[0, 1], name="tiny")
    save_demand(demand, tmp_path / "d.safetensors")
    again = load_demand(tmp_path / "d.safetensors")
    assert (again.digest, again.name, again.group_S.tolist()) == (demand.digest, "tiny", [0, 1])


@pytest.mark.parametrize("keep", [0, 4, 7, 60, -1, -40])
def test_a_truncated_file_is_named_as_such(tmp_path, keep):
    path = tmp_path / "t.safetensors"
    save_trace(full_batch(), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TraceError, match="not a whole safetensors file"):
        load_trace(path)


@pytest.mark.parametrize("load", [load_trace, load_demand, load_window])
def test_a_missing_file_is_named(tmp_path, load):
    with pytest.raises(TraceError, match=r"none\.safetensors cannot be read"):
        load(tmp_path / "none.safetensors")


def test_a_file_of_another_format_is_named(tmp_path):
    save_trace(full_batch(), tmp_path / "t.safetensors")
    with pytest.raises(TraceError, match=r"format 'routepack.trace/1'; 'routepack.demand/1' is needed"):
        load_demand(tmp_path / "t.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": "many"}, "not a whole number"),
        ({"num_experts": None}, "lacks the metadata entry 'num_experts'"),
        ({"top_k": "3"}, "top_k=3"),
        ({"num_layers": "1"}, "draft"),
        ({"id_space": "physical"}, "logical"),
        ({"token_fields": "absent"}, "does not hold: absent"),
    ],
)
def test_hostile_metadata_is_a_trace_error(tmp_path, change, message):
    path = tmp_path / "t.safetensors"
    save_trace(batch_of(), path)
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["__metadata__"] = {k: v for k, v in (header["__metadata__"] | change).items() if v is not None}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    with pytest.raises(TraceError, match=message):
        load_trace(path)


@pytest.mark.parametrize("save", [save_trace, save_demand])
def test_saving_another_noun_is_refused_and_writes_nothing(tmp_path, save):
    with pytest.raises(ConfigError, match=r"'abc' is a str; give a R"):
        save("abc", tmp_path / "t.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_an_unplaceable_tensor_is_named(tmp_path):
    tensors = {
        "routed_experts": np.zeros((2, 1, 1), np.uint8),
        "cu_seqlens": np.array([0, 2]),
        "num_tokens": np.array([3]),
        "odd": np.zeros(17),
    }
    save_file(tensors, tmp_path / "t.safetensors", metadata={"format": "routepack.trace/1", "num_experts": "4"})
    with pytest.raises(TraceError, match=r"'odd'.*neither tokens nor sequences"):
        load_trace(tmp_path / "t.safetensors")


def test_nothing_is_left_behind_when_writing_fails(tmp_path):
    with pytest.raises(ConfigError, match="choose a folder that exists"):
        save_trace(batch_of(), tmp_path / "absent" / "t.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="it is a folder"):
        save_trace(batch_of(), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_an_older_file_survives_a_failed_write(tmp_path, monkeypatch):
    path = tmp_path / "t.safetensors"
    save_trace(batch_of(), path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise SafetensorError("disk full")

    monkeypatch.setattr("routepack.core.tensor_files.save_file", fail)
    with pytest.raises(ConfigError, match=r"cannot write .* disk full"):
        save_trace(batch_of((4, 4)), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


def spoiled(path, **changes):
    """A trace file with some tensors replaced."""
    save_trace(batch_of(), path)
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    save_file(load_file(path) | changes, path, metadata=metadata)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": np.array([0, 99])}, "cu_seqlens must hold"),
        ({"num_tokens": np.array([0, 1, 5])}, "sequence 0 has 0 tokens"),
        ({"valid": np.ones(2, bool)}, "valid_T has 2 entries"),
        ({"layer_ids": np.array([5, 5], np.int32)}, "must name each"),
    ],
)
def test_what_is_wrong_inside_a_file_comes_with_its_name(tmp_path, changes, message):
    (tmp_path / "shards").mkdir()
    save_trace(batch_of(), tmp_path / "shards/a.safetensors")
    spoiled(tmp_path / "shards/b.safetensors", **changes)
    for path in (tmp_path / "shards/b.safetensors", tmp_path / "shards"):
        with pytest.raises(TraceError, match=rf"^{tmp_path}/shards/b\.safetensors: .*{message}"):
            load_window(path)


def test_the_shard_that_disagrees_is_named(tmp_path):
    save_trace(batch_of(), tmp_path / "a.safetensors")
    save_trace(batch_of(experts=16), tmp_path / "b.safetensors")
    with pytest.raises(TraceError, match=rf"^{tmp_path}/b\.safetensors: shards disagree on num_experts"):
        load_trace(tmp_path)


def test_a_demand_that_is_wrong_comes_with_its_file(tmp_path):
    demand = RoutingDemand(tokens_SLE=[[[2, 0, 2]]], length_S=[2], top_k=2)
    save_demand(demand, tmp_path / "d.safetensors")
    with safe_open(tmp_path / "d.safetensors", framework="np") as file:
        metadata = file.metadata()
    tensors = load_file(tmp_path / "d.safetensors") | {"length_S": np.array([2, 2])}
    save_file(tensors, tmp_path / "d.safetensors", metadata=metadata)
    with pytest.raises(TraceError, match=rf"^{tmp_path}/d\.safetensors: length_S has 2 entries"):
        load_window(tmp_path / "d.safetensors")


@pytest.mark.parametrize("load", [load_trace, load_window])
@pytest.mark.parametrize("name", ["a.safetensors", ""])
def test_a_trace_without_sequences_says_so(tmp_path, load, name):
    empty = RolloutBatch(routed_experts_TLK=np.zeros((0, 2, 2), np.uint8), cu_seqlens=[0], num_tokens_S=np.zeros(0, np.int64),
                         num_experts=8)  # fmt: skip
    save_trace(empty, tmp_path / "a.safetensors")
    with pytest.raises(TraceError, match=rf"^{tmp_path / name} holds no sequences"):
        load(tmp_path / name)
