"""Files from anywhere: whole ones are read, all others are errors that name the file, and nothing is ever unpickled."""

import io
import json
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.core.errors import ConfigError, RoutePackError, TraceError
from routepack.traces.formats import ImportOptions, ModelRouting, read
from routepack.traces.formats.sources import open_source, read_npz

IDS = (np.arange(9 * 2 * 2).reshape(9, 2, 2) % 16).astype(np.uint8)
ARRAYS = {"routed_experts": IDS, "cu_seqlens": np.array([0, 4, 9]), "num_tokens": np.array([5, 6])}
MODEL = ModelRouting(num_experts=16, top_k=2, num_layers=2)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_read(tmp_path, save):
    save(tmp_path / "a.npz", **ARRAYS)
    batch = read("arrays", tmp_path / "a.npz", MODEL).batch
    assert np.array_equal(batch.routed_experts_TLK, IDS)


def test_stored_arrays_are_mapped_not_copied(tmp_path):
    np.savez(tmp_path / "a.npz", **ARRAYS | {"routed_experts": np.zeros((4000, 100, 8), np.uint8)})
    tracemalloc.start()
    arrays = read_npz(tmp_path / "a.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert arrays["routed_experts"].shape == (4000, 100, 8)
    assert peak < 500_000


@pytest.mark.parametrize("name", ["rollouts.pt", "rollouts.pkl", "rollouts.bin"])
def test_pickles_are_not_opened(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(ConfigError, match="is a pickle, which can run code"):
        read("arrays", tmp_path / name, MODEL)
    assert not (tmp_path / "ran").exists()


def test_pickled_objects_inside_npz_are_refused(tmp_path):
    objects = np.empty(1, object)
    objects[0] = Bomb(tmp_path / "ran")
    np.savez(tmp_path / "a.npz", **ARRAYS, extra=objects)
    (tmp_path / "ran").unlink(missing_ok=True)
    with pytest.raises(TraceError, match="no Python objects"):
        read("arrays", tmp_path / "a.npz", MODEL)
    assert not (tmp_path / "ran").exists()


def member(header, data=b""):
    """An .npz of one array with that header text."""
    text = header.encode().ljust(117) + b"\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("routed_experts.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000, 48, 8), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 2, 2), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (9999999999999999999999,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '|V8', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '|u1', 'shape': (1,), }",
        "__import__('os').system('true')",
        "{" * 100,
    ],
)
def test_hostile_headers_are_refused_without_their_memory(tmp_path, header):
    (tmp_path / "a.npz").write_bytes(member(header, b"\0" * 36))
    tracemalloc.start()
    with pytest.raises(TraceError, match=r"a\.npz"):
        read("arrays", tmp_path / "a.npz", MODEL)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("size", [200_000, 50_000_000])
def test_an_oversized_header_is_refused_without_its_memory(tmp_path, size, compression):
    text = ("{'descr': '|u1', 'fortran_order': False, 'shape': (1,), }" + " " * size + "\n").encode()
    with zipfile.ZipFile(tmp_path / "a.npz", "w", compression) as archive:
        archive.writestr("routed_experts.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + b"\0")
    tracemalloc.start()
    with pytest.raises(TraceError, match=r"a\.npz"):
        read("arrays", tmp_path / "a.npz", MODEL)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_either_order_and_of_no_size_come_back(tmp_path, save, order):
    arrays = {"ids": np.asarray(IDS, order=order), "none": np.empty((0, 3), np.int16), "wide": np.arange(7, dtype=">i8")}
    save(tmp_path / "a.npz", **arrays)
    for name, array in read_npz(tmp_path / "a.npz").items():
        np.testing.assert_array_equal(array, arrays[name])
        assert array.dtype == arrays[name].dtype


def test_a_size_that_compression_cannot_give_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", **ARRAYS)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    place = content.rfind(b"PK\1\2")
    content[place + 24 : place + 28] = struct.pack("<I", 2**32 - 2)
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(TraceError, match="promises 4294967294 bytes"):
        read("arrays", tmp_path / "a.npz", MODEL)


@pytest.fixture(scope="module")
def whole_npz(tmp_path_factory):
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    np.savez(path, **ARRAYS)
    return path


@given(st.data())
def test_a_damaged_npz_is_read_right_or_refused(whole_npz, data):
    content = bytearray(whole_npz.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + 1] = data.draw(st.binary(min_size=0, max_size=4))
    damaged = whole_npz.with_name("damaged.npz")
    damaged.write_bytes(content[: data.draw(st.sampled_from([None, len(content) // 2, len(content) - 1]))])
    try:
        batch = read("arrays", damaged, MODEL, options=ImportOptions(policy="lenient", max_missing_share=1.0)).batch
    except RoutePackError:
        return
    valid = slice(None) if batch.valid_T is None else batch.valid_T
    assert (batch.routed_experts_TLK[valid] < 16).all()


@pytest.mark.parametrize("cut", [1, 8, 200])
def test_a_truncated_safetensors_is_refused(tmp_path, cut):
    from safetensors.numpy import save_file

    save_file(ARRAYS, tmp_path / "a.safetensors")
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[:-cut])
    with pytest.raises(TraceError, match=r"a\.safetensors"):
        read("arrays", tmp_path / "a.safetensors", MODEL)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"num_tokens": 5, "routed_', "line 2 is no JSON"),
        ("[1, 2]", "line 2 is a list"),
        ("[" * 100_000, "line 2 is no JSON"),
        ('{"num_tokens": 1e400, "routed_experts": []}', "num_tokens"),
        ('{"num_tokens": 5, "routed_experts": [[[1, 2]], [[1]]]}', "routed_experts"),
        (
            '{"num_tokens": 5, "routed_experts": {"data": "AAAA", "shape": [1000000000000, 1, 1], "dtype": "uint8"}}',
            "was it cut off|Was it cut off",
        ),
        ('{"num_tokens": 5, "routed_experts": {"data": "AAAA", "shape": [3, 1, 1], "dtype": "object"}}', "dtype 'object'"),
        ('{"num_tokens": 5, "routed_experts": "nrlre1:int8:99999999999x9x9:AAAA"}', "Was it cut off"),
        ('{"num_tokens": 5, "routed_experts": "nrlre1:int8:-1x9x9:AAAA"}', "reads <S>x<L>x<K>"),
        ('{"num_tokens": 5, "routed_experts": "***"}', "no base64"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    good = json.dumps({"num_tokens": 3, "routed_experts": IDS[:2].tolist()})
    (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(TraceError, match=message):
        read("arrays", tmp_path / "a.jsonl", MODEL)


def test_a_claimed_length_takes_no_memory():
    from routepack.traces import formats

    record = {
        "meta_info": {
            "prompt_tokens": 2**40,
            "completion_tokens": 5,
            "routed_experts": formats.payloads.encoded(IDS.astype(np.int32)),
        }
    }
    other = {
        "meta_info": {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "routed_experts": formats.payloads.encoded(IDS.astype(np.int32)),
        }
    }
    result = formats.load("sglang", [record, other], MODEL, options=ImportOptions(policy="lenient", max_missing_share=1.0))
    assert result.report.problems == {"hardly any rows: routes dropped": 1}
    assert len(result.batch.routed_experts_TLK) == 9


def test_progress_counts_bytes(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    seen = []
    assert [record["a"] for record in open_source(tmp_path / "a.jsonl", lambda done, total: seen.append((done, total)))] == [
        1,
        2,
    ]
    assert seen == [(9, 19), (10, 19), (19, 19)]


def test_a_folder_is_read_in_name_order(tmp_path):
    for rank in (1, 0):
        (tmp_path / f"router_trace_rank{rank}.jsonl").write_text(
            json.dumps({"step": 0, "layer": 3, "rank": rank, "num_tokens": 1, "topk": 2, "top_indices": [[rank, 5]]}) + "\n"
        )
    (tmp_path / "other.txt").write_text("x")
    batch = read("megatron", tmp_path, MODEL.__class__(num_experts=16)).batch
    assert batch.routed_experts_TLK[:, 0, 0].tolist() == [0, 1]
    assert batch.layer_ids_L.tolist() == [3]
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"no \.jsonl files"):
        read("megatron", tmp_path / "empty", MODEL)
