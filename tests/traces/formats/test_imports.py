"""What the table of cases does not show: models, copies, memory, top-1 models, and what each stack's form can say."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routepack.core.errors import ConfigError, TraceError
from routepack.traces import formats
from routepack.traces.formats import ImportOptions, ModelRouting, payloads
from routepack.traces.formats.payloads import _ids, encoded

ROOT = Path(__file__).parents[3]
MODEL = ModelRouting(num_experts=32, top_k=2, num_layers=4)


def routes(rows, *, layers=4, experts=32, seed=0):
    return 1 + np.argsort(np.random.default_rng(seed).random((rows, layers, experts - 1)), axis=2)[:, :, :2]


# Models


@pytest.mark.parametrize("experts", ["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"])
@pytest.mark.parametrize("top_k", ["num_experts_per_tok", "top_k_experts", "moe_topk", "moe_router_topk"])
def test_vllm_41401_experts_and_top_k_go_by_many_names(experts, top_k):
    model = ModelRouting.from_config({experts: 64, top_k: 6, "num_hidden_layers": 27})
    assert (model.num_experts, model.top_k, model.num_layers) == (64, 6, 27)


def test_vllm_41401_an_override_wins_and_a_text_config_counts():
    nested = {"text_config": {"num_experts": 128, "num_experts_per_tok": 8}, "num_hidden_layers": 3}
    assert ModelRouting.from_config(nested).top_k == 8
    assert ModelRouting.from_config(nested, num_experts=96, top_k=4) == ModelRouting(num_experts=96, top_k=4, num_layers=3)
    with pytest.raises(ConfigError, match="none of num_experts, n_routed_experts"):
        ModelRouting.from_config({"hidden_size": 64})


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"first_k_dense_replace": 1}, [1, 2, 3, 4, 5]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2, 4]),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, [1, 2, 4, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 3]}, [1, 2, 4, 5]),
    ],
)
def test_dense_layers_are_known_from_the_config(config, layers):
    model = ModelRouting.from_config(config | {"num_experts": 8, "num_hidden_layers": 6})
    assert list(model.moe_layers) == layers


def test_RL_3903_a_layer_named_twice_is_refused():
    with pytest.raises(ConfigError, match=r"moe_layers=\[0, 1, 1\] must name each MoE layer once"):
        ModelRouting(num_experts=8, moe_layers=[0, 1, 1])


def test_columns_of_moe_layers_alone_keep_their_absolute_numbers():
    model = ModelRouting(num_experts=32, num_layers=6, moe_layers=[1, 2, 4, 5])
    batch = formats.load("vllm", [{"num_tokens": 6, "routed_experts": routes(5)}], model).batch
    assert batch.layer_ids_L.tolist() == [1, 2, 4, 5]


def test_a_layer_that_routes_only_later_is_no_dense_layer():
    ids = routes(5)
    first = ids.copy()
    first[:, 2] = 0
    records = [{"num_tokens": 6, "routed_experts": first}, {"num_tokens": 6, "routed_experts": ids}]
    with pytest.raises(TraceError, match=r"sequence 1: layer 2 routes here, but was all zero .*moe_layers"):
        formats.load("vllm", records, MODEL)


def test_a_named_layer_of_zeros_is_no_route_and_is_reported():
    ids = routes(5)
    ids[:, 2] = 0
    model = ModelRouting(num_experts=32, moe_layers=range(4))
    with pytest.raises(TraceError, match=r"row 0, layer 2 is \[0, 0\]"):
        formats.load("vllm", [{"num_tokens": 6, "routed_experts": ids}], model)
    options = ImportOptions(policy="lenient", max_missing_share=1.0)
    report = formats.load("vllm", [{"num_tokens": 6, "routed_experts": ids}], model, options=options).report
    assert "MoE layers [2] hold nothing but zeros: they were not recorded." in report.suspicious


def test_a_layer_of_zeros_and_minus_ones_mixed_is_no_dense_layer():
    ids = routes(5)
    ids[:, 0] = [-1, 0]
    with pytest.raises(TraceError, match=r"5 rows with a negative id; row 0, layer 0 is \[-1, 0\]"):
        formats.load("miles", [{"tokens": range(6), "rollout_routed_experts": ids}], MODEL)


# Ids that are no marker


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        (np.int32, -7, r"a negative id; row 2, layer 0 is \[-7, -7\]"),
        (np.int64, -(2**40), r"a negative id; row 2, layer 0 is \[-1099511627776, -1099511627776\]"),
        (np.int64, 2**40, r"id not below num_experts; row 2, layer 0 is \[1099511627776, 1099511627776\]"),
        (np.uint64, 2**63 + 5, r"id not below num_experts; row 2, layer 0 is \[9223372036854775813, 9223372036854775813\]"),
        (np.uint64, 2**64 - 1, r"id not below num_experts; row 2, layer 0 is \[18446744073709551615, 18446744073709551615\]"),
        (np.uint8, 255, r"id not below num_experts; row 2, layer 0 is \[255, 255\]"),
    ],
)
@pytest.mark.parametrize("stack", ["arrays", "miles"])
def test_only_minus_1_says_that_a_row_was_not_recorded(stack, dtype, value, message):
    ids = routes(5).astype(dtype)
    ids[2] = value
    record = {"token_ids": range(6), "tokens": range(6), "routed_experts": ids, "rollout_routed_experts": ids}
    with pytest.raises(TraceError, match=message):
        formats.load(stack, [record], MODEL)
    lenient = formats.load(stack, [record], MODEL, options=ImportOptions(policy="lenient"))
    assert lenient.batch.valid_T.tolist() == [True, True, False, True, True]
    ids = routes(5)
    ids[2] = -1
    record |= {"routed_experts": ids, "rollout_routed_experts": ids}
    assert formats.load(stack, [record], MODEL).batch.valid_T.tolist() == [True, True, False, True, True]


def test_a_layer_of_negative_ids_is_no_dense_layer():
    ids = routes(5)
    ids[:, 0] = -7
    with pytest.raises(TraceError, match=r"5 rows with a negative id; row 0, layer 0 is \[-7, -7\]"):
        formats.load("miles", [{"tokens": range(6), "rollout_routed_experts": ids}], MODEL)


# Masks


def masked_source(stack, mask):
    ids = np.broadcast_to(routes(6), (2, 6, 4, 2))
    name = "rollout_expert_indices" if stack == "skyrl" else "routed_experts"
    return {name: ids, "attention_mask": np.stack([np.ones(6), np.asarray(mask)]).astype(np.asarray(mask).dtype)}


@pytest.mark.parametrize("value", [0.5, np.nan, 7.0, -1.0, 2, -1])
@pytest.mark.parametrize("stack", ["verl", "skyrl"])
def test_an_attention_mask_holds_nothing_but_0_and_1(stack, value):
    source = masked_source(stack, [1, 1, value, 1, 1, 1])
    with pytest.raises(TraceError, match=rf"attention_mask holds {value!r} at sequence 1, position 2 .*: give 0, 1 or bool"):
        formats.load(stack, source, MODEL)


@pytest.mark.parametrize("mask", [[1, 1, 0, 1, 1, 1], [0, 1, 0, 0, 1, 0], [True, False, True, False, True, True]])
@pytest.mark.parametrize("stack", ["verl", "skyrl"])
def test_a_hole_in_an_attention_mask_is_refused(stack, mask):
    hole = 1 + mask.index(1)
    hole += mask[hole:].index(0)
    with pytest.raises(TraceError, match=rf"sequence 1: attention_mask has \d runs of tokens; position {hole} between"):
        formats.load(stack, masked_source(stack, mask), MODEL)


@pytest.mark.parametrize("mask", [[1.0] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [False, True, True, True, True, False]])
@pytest.mark.parametrize("stack", ["verl", "skyrl"])
def test_padding_may_stand_on_either_side(stack, mask):
    batch = formats.load(stack, masked_source(stack, mask), MODEL).batch
    assert batch.num_tokens_S.tolist() == [6, sum(mask)]


@pytest.mark.parametrize("value", [2, -1])
@pytest.mark.parametrize(
    ("stack", "name", "where"),
    [
        ("verl", "replay_mask", "sequence 0, position 3"), ("skyrl", "router_padding_mask", "sequence 0, position 3"),
        ("arrays", "valid", "row 3"),
    ],
)  # fmt: skip
def test_a_mask_of_rows_holds_nothing_but_0_and_1(stack, name, where, value):
    source = masked_source(stack, [1] * 6) | {name: np.array([[1, 1, 1, value, 1, 1], [1] * 6])}
    if stack == "arrays":
        source = {"routed_experts": routes(6), "cu_seqlens": [0, 6], "valid": source[name][0]}
    with pytest.raises(TraceError, match=rf"{stack}: {name} holds {value} at {where}"):
        formats.load(stack, source, MODEL)


@pytest.mark.parametrize("lengths", [[6, 2.5], [6, -1], [6, 7], [6, np.nan]])
def test_lengths_are_whole_numbers_up_to_the_width(lengths):
    source = {"routed_experts": np.broadcast_to(routes(6), (2, 6, 4, 2)), "input_lengths": np.asarray(lengths)}
    with pytest.raises(TraceError, match=r"nemo-rl: lengths"):
        formats.load("nemo-rl", source, MODEL)


# Top-1 models, where no id can repeat


def test_zero_rows_of_a_deep_top_1_model_are_not_recorded():
    ids = np.random.default_rng(0).integers(1, 128, (6, 48, 1))
    ids[3] = 0
    batch = formats.load("vllm", [{"num_tokens": 7, "routed_experts": ids}], ModelRouting(num_experts=128)).batch
    assert batch.valid_T.tolist() == [True, True, True, False, True, True]


def test_zero_rows_of_a_shallow_top_1_model_tell_nothing():
    records = [{"num_tokens": 4, "routed_experts": np.array([[[0]], [[1]], [[2]]])}]
    with pytest.raises(TraceError, match="may be routes to expert 0, or rows that were not recorded"):
        formats.load("vllm", records, ModelRouting(num_experts=4))
    assert formats.load("arrays", records, ModelRouting(num_experts=4)).batch.valid_T is None


def test_veomni_refuses_top_1_models():
    source = {"routed_experts": {"values": np.ones((3, 48, 1), np.int16), "offsets": [0, 3]}}
    with pytest.raises(TraceError, match="a top-1 model repeats none"):
        formats.load("verl", source, ModelRouting(num_experts=128), veomni=True)


# What the stacks' own masks say


def test_verl_replay_mask_of_R3():
    ids = routes(12)
    source = {"routed_experts": {"values": ids.astype(np.int16), "offsets": [0, 5, 12]}, "replay_mask": np.arange(12) % 5 != 4}
    batch = formats.load("verl", source, MODEL).batch
    assert np.array_equal(batch.valid_T, np.arange(12) % 5 != 4)


def test_verl_nested_tensors_are_taken_as_they_are():
    ids = torch.from_numpy(routes(12).astype(np.int16))
    nested = torch.nested.nested_tensor_from_jagged(ids, torch.tensor([0, 5, 12]))
    tokens = torch.nested.nested_tensor_from_jagged(torch.arange(12), torch.tensor([0, 5, 12]))
    result = formats.load("verl", {"routed_experts": nested, "input_ids": tokens}, ModelRouting(num_experts=300, num_layers=4))
    assert result.batch.token_fields["token_ids"].tolist() == list(range(12))
    assert np.shares_memory(result.batch.routed_experts_TLK, ids.numpy())


def test_skyrl_mask_keeps_a_real_row_that_reads_like_filler():
    ids = routes(5)
    ids[2] = [0, 1]
    source = {
        "rollout_expert_indices": ids.astype(np.uint8), "cu_seqlens": [0, 5], "num_tokens": [6],
        "router_padding_mask": np.array([False, False, False, True, False]),
    }  # fmt: skip
    assert formats.load("skyrl", source, MODEL).batch.valid_T.tolist() == [True, True, True, False, True]


def test_nemo_rl_filler_inside_counts_for_nothing_where_chance_is_out_of_the_question():
    """Where turns were joined, the last row of an earlier one is 0 .. top_k - 1."""
    ids = np.argsort(np.random.default_rng(0).random((9, 24, 128)), axis=2)[:, :, :4]
    ids[4] = np.arange(4)
    source = {"routed_experts": ids[None].astype(np.int8), "input_lengths": [9]}
    deep = formats.load("nemo-rl", source, ModelRouting(num_experts=128)).batch
    assert deep.valid_T.tolist() == [True] * 4 + [False] + [True] * 3
    shallow = {"routed_experts": ids[None, :, :1].astype(np.int8), "input_lengths": [9]}
    assert formats.load("nemo-rl", shallow, ModelRouting(num_experts=128)).batch.valid_T is None


def test_verifiers_1672_a_last_node_one_row_short_is_kept():
    ids = routes(7)
    nodes = [
        {"token_ids": [1, 2, 3, 4], "routed_experts": ids[:4], "sampled": False},
        {"token_ids": [5, 6, 7, 8], "routed_experts": ids[4:], "sampled": True},
    ]
    batch = formats.load("verifiers", [{"nodes": nodes}], MODEL).batch
    assert np.array_equal(batch.routed_experts_TLK, ids)
    assert batch.num_tokens_S.tolist() == [8]


def test_prime_rl_1807_a_copied_boundary_row_counts_for_nothing():
    ids = routes(9)
    ids[4] = ids[3]
    nodes = [
        {"token_ids": [1, 2], "routed_experts": ids[:2], "sampled": False},
        {"token_ids": [3, 4, 5], "routed_experts": ids[2:5], "sampled": True},
        {"token_ids": [6, 7, 8, 9, 10], "routed_experts": ids[5:], "sampled": True},
    ]
    batch = formats.load("verifiers", [{"nodes": nodes}], MODEL).batch
    assert batch.valid_T.tolist() == [True] * 4 + [False] + [True] * 4


def test_areal_histories_are_told_apart_without_versions():
    ids = routes(11)
    record = {
        "input_tokens": [0] * 4,
        "output_tokens": [0] * 8,
        "routed_experts": np.concatenate([ids[:6], ids]).reshape(17, -1),
    }
    batch = formats.load("areal", [record], MODEL).batch
    assert np.array_equal(batch.routed_experts_TLK, ids)


def test_areal_three_histories_need_their_versions_or_the_last():
    ids = routes(11)
    three = np.concatenate([ids[:5], ids[:8], ids]).reshape(24, -1)
    record = {"input_tokens": [0] * 4, "output_tokens": [0] * 8, "routed_experts": three}
    with pytest.raises(TraceError, match="neither versions nor their size tell apart"):
        formats.load("areal", [record], MODEL)
    versions = record | {"output_versions": [0, 0, 1, 1, 1, 2, 2, 2]}
    for one in (
        formats.load("areal", [versions], MODEL),
        formats.load("areal", [record], MODEL, options=ImportOptions(merge="keep_last")),
    ):
        assert np.array_equal(one.batch.routed_experts_TLK, ids)


def test_megatron_lines_of_several_ranks_microbatches_and_draft_layers():
    lines = [
        {"step": 0, "layer": layer, "rank": rank, "num_tokens": 2, "topk": 2, "top_indices": [[layer, 9], [rank, 20 + m]]}
        for rank in (0, 1) for m in (0, 1) for layer in (3, 1)
    ]  # fmt: skip
    lines.insert(3, lines[0] | {"block": "mtp", "mtp_idx": 0, "layer": 1})
    batch = formats.load("megatron", lines, ModelRouting(num_experts=32)).batch
    assert batch.layer_ids_L.tolist() == [1, 3]
    assert batch.num_sequences == 4
    assert batch.routed_experts_TLK[:, :, 0].tolist() == [[1, 3], [0, 0], [1, 3], [0, 0], [1, 3], [1, 1], [1, 3], [1, 1]]


def test_megatron_replay_data_divides_by_offsets():
    ids = routes(9)
    batch = formats.load("megatron", [ids[:, layer] for layer in range(4)], MODEL, cu_seqlens=[0, 4, 9]).batch
    assert batch.num_tokens_S.tolist() == [4, 5]
    assert np.array_equal(batch.routed_experts_TLK, ids)


def test_miles_session_replies_are_read():
    ids, meta = routes(5).astype(np.int32), json.dumps({"samples": [{"nulls": []}, {"nulls": ["rollout_routed_experts"]}]})
    tensors = {
        "rollout_routed_experts.0": ids, "tokens.0": np.arange(6), "tokens.1": np.arange(9),
        "_samples_meta": np.frombuffer(meta.encode(), np.uint8),
    }  # fmt: skip
    result = formats.load("miles", tensors, MODEL)
    assert np.array_equal(result.batch.routed_experts_TLK, ids)
    assert result.report.without_routes == 1


def test_sglang_newer_versions_say_their_dtype():
    ids = routes(5).astype(np.uint8)
    meta = {"prompt_tokens": 2, "completion_tokens": 4, "routed_experts": encoded(ids), "routed_experts_dtype": "uint8"}
    assert np.array_equal(formats.load("sglang", [{"meta_info": meta}], MODEL).batch.routed_experts_TLK, ids)


# Options


def test_RL_3327_require_names_how_many_lack_routes():
    records = [{"num_tokens": 6, "routed_experts": routes(5)}, {"num_tokens": 4}, {"num_tokens": 3}]
    with pytest.raises(
        TraceError, match=r"2 of 3 sequences have no recorded routes: start the engine with enable_return_routed"
    ):
        formats.load("vllm", records, MODEL, options=ImportOptions(require=True))
    report = formats.load("vllm", records, MODEL).report
    assert report.without_routes == 2
    assert "2 sequences have no routes; planning estimates them from the others (vllm)." in report.notes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "loose"}, "policy='loose'"),
        ({"merge": "last"}, "merge='last'"),
        ({"max_missing_share": 2.0}, "max_missing_share=2.0"),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ImportOptions(**options)


@pytest.mark.parametrize("stack", sorted(formats.STACKS))
@pytest.mark.parametrize("given", [{"model": None}, {"options": None}, {"model": {"num_experts": 4}}, {"options": "strict"}])
def test_a_model_and_options_of_another_kind_are_refused(stack, given):
    arguments = {"model": MODEL, "options": ImportOptions()} | given
    with pytest.raises(ConfigError, match=rf"{next(iter(given))}=.* give a (ModelRouting|ImportOptions)"):
        formats.load(stack, [], **arguments)


@pytest.mark.parametrize(
    ("stack", "names"),
    [
        ("verl", "prompt_ids and response_ids"), ("skyrl", "prompt_ids and response_ids"), ("slime", "tokens"),
        ("miles", "tokens"), ("vllm", "prompt_token_ids and token_ids"), ("prime-rl", "token_ids"),
        ("nemo-rl", "prompt_token_ids and generation_token_ids"), ("arrays", "token_ids"),
        ("areal", "input_tokens and output_tokens"),
    ],
)  # fmt: skip
def test_a_record_of_another_stack_is_named_as_one(stack, names):
    record = {"text": "a", "something_routed": [1]}
    with pytest.raises(TraceError, match=rf"{stack}, \w+ 0: no tokens were found: a record has {names}.* has text, something"):
        formats.load(stack, [record], MODEL)


def test_an_unknown_stack_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="from='trl' is no stack that RoutePack reads: choose from vllm, sglang"):
        formats.load("trl", [], MODEL)


def test_progress_counts_sequences():
    seen = []
    records = [{"num_tokens": 6, "routed_experts": routes(5)}] * 3
    formats.load("vllm", records, MODEL, options=ImportOptions(progress=seen.append))
    assert seen == [1, 2, 3]


# Copies and memory


@pytest.mark.parametrize(
    ("stack", "source"),
    [
        ("arrays", lambda ids, edges: {"routed_experts": ids, "cu_seqlens": edges, "num_tokens": np.diff(edges) + 1}),
        ("skyrl", lambda ids, edges: {"rollout_expert_indices": ids, "cu_seqlens": edges, "num_tokens": np.diff(edges) + 1}),
        ("verl", lambda ids, edges: {"routed_experts": {"values": ids, "offsets": edges}, "num_tokens": np.diff(edges) + 1}),
    ],
)
def test_packed_arrays_of_the_right_dtype_are_not_copied(stack, source):
    ids, edges = routes(30).astype(np.uint8), np.array([0, 11, 30])
    result = formats.load(stack, source(ids, edges), MODEL)
    assert np.shares_memory(result.batch.routed_experts_TLK, ids)
    assert not result.report.copied


@given(st.integers(0, 2**32 - 1))
def test_blocks_of_threads_judge_as_one(seed):
    """A large array is judged in blocks; each row's verdict is that of the array read at once."""
    from routepack.traces.formats import _kernels

    rng = np.random.default_rng(seed)
    ids = routes(40, seed=seed % 7).astype(np.int32)
    ids[rng.integers(0, 40, 5)] = rng.integers(-1, 34, (5, 4, 2))
    ids[rng.integers(1, 40, 3)] = 0
    kept, whole, parts = np.array([0, 2, 3]), np.zeros(40, np.uint8), np.zeros(40, np.uint8)
    _kernels.judge_rows(ids, kept, 32, whole)
    before, _kernels.PIECE = _kernels.PIECE, 16
    try:
        out = np.empty((40, 3, 2), np.uint8)
        _kernels.judge_rows(ids, kept, 32, parts, out)
    finally:
        _kernels.PIECE = before
    assert np.array_equal(whole, parts)
    good = (whole & 0x0F) == 0
    assert np.array_equal(out[good], ids[good][:, kept])


@pytest.fixture(scope="module")
def small_blocks():
    """Base64 text decoded in blocks of 4096 characters, so that short texts have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payloads, "BLOCK", 4096)
        yield


@pytest.mark.usefixtures("small_blocks")
@given(
    st.integers(0, 7000), st.integers(0, 2**32 - 1), st.sampled_from(["int32", "uint8", "int16", "int64"]), st.booleans(),
)  # fmt: skip
def test_base64_in_blocks_is_decoded_as_at_once(size, seed, dtype, is_wide):
    rng = np.random.default_rng(seed)
    most = 40_000 if is_wide and dtype in ("int32", "int64") else 100
    ids = rng.integers(-1 if dtype[0] == "i" else 0, most, size).astype(dtype)
    text = encoded(ids)
    found = _ids(text, dtype, "here")
    assert np.array_equal(found, ids)
    is_narrowed = len(text) > 4096 and ids.itemsize > 2 and ids.max() < 2**15
    assert found.dtype == (np.int16 if is_narrowed else ids.dtype)


@pytest.mark.usefixtures("small_blocks")
@given(
    st.integers(0, 2**32 - 1), st.integers(100, 7000), st.sampled_from("-=é\n _.\x7f\0"), st.sampled_from(["int16", "int32"])
)
def test_text_that_is_no_base64_is_refused(seed, size, wrong, dtype):
    rng = np.random.default_rng(seed)
    text = encoded(rng.integers(0, 2**15, size).astype(dtype))
    place = int(rng.integers(0, len(text) - 2))
    with pytest.raises(TraceError, match="no base64 text"):
        _ids(text[:place] + wrong + text[place + 1 :], dtype, "here")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [3070, 3071])
@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_base64_with_padding_where_a_block_ends_is_refused(dtype, size):
    first = encoded(np.zeros(size, np.uint8))
    assert (len(first), first[-1]) == (4096, "=")
    with pytest.raises(TraceError, match="no base64 text"):
        _ids(first + encoded(np.arange(3000, dtype=dtype)), dtype, "here")


MEMORY = """
import sys, numpy as np
sys.path.insert(0, "benchmarks")
import importlib
bench = importlib.import_module("import")
bench.one(sys.argv[1], 6_000_000)
"""


@pytest.mark.parametrize("form", ["slime", "sglang", "verl-padded"])
def test_an_import_takes_little_more_memory_than_its_result(form):
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, form], cwd=ROOT, capture_output=True, text=True, timeout=250,
        env={**__import__("os").environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout)
    assert figures["copied"]
    # 1.3 of 50 million ids; of six million, a sequence's buffers and the interpreter's own growth weigh more.
    assert 0.9 < figures["growth"] < 1.6
