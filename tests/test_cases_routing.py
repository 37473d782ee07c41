"""Recorded routes, padding and layout: what went wrong in public stacks, one test each, named by the thread.

formats/cases.py holds the same kinds for every stack's form; here each is met in the stack where it was reported.
"""

import numpy as np
import pytest

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import ConfigError, TraceError
from routepack.core.plans import Certificate, ExpertPlacement, Packing, Plan, Topology
from routepack.core.rollouts import RolloutBatch
from routepack.microbatches.materialize import microbatches, spread_routes
from routepack.microbatches.truncate import truncate
from routepack.testing import synthetic_batch
from routepack.traces import formats
from routepack.traces.formats import ImportOptions, ModelRouting
from routepack.traces.formats.payloads import encoded, envelope

LENIENT = ImportOptions(policy="lenient", max_missing_share=1.0)


def routes(rows, *, experts=64, layers=4, top_k=4, seed=0):
    """Distinct ids in a row, none of them 0."""
    return 1 + np.argsort(np.random.default_rng(seed).random((rows, layers, experts - 1)), axis=2)[:, :, :top_k]


def model(experts=64, layers=4, **options):
    return ModelRouting(num_experts=experts, top_k=4, num_layers=layers, **options)


def sglang(prompt, output, ids, start=0):
    meta = {"prompt_tokens": prompt, "completion_tokens": output, "routed_experts": encoded(ids.astype(np.int32))}
    return {"meta_info": meta | ({"routed_experts_start_len": start} if start else {})}


def imported(stack, source, *, experts=64, **options):
    return formats.load(stack, source, model(experts), **options)


# Recorded routes


@pytest.mark.parametrize(("prompt", "output", "rows"), [(5, 0, 4), (5, 0, 5), (3, 2, 4), (3, 2, 5)])
def test_sglang_20964_rows_may_be_as_many_as_tokens_or_one_fewer(prompt, output, rows):
    batch = imported("sglang", [sglang(prompt, output, routes(rows))]).batch
    assert (len(batch.routed_experts_TLK), batch.num_tokens_S.tolist(), batch.valid_T) == (rows, [5], None)


def test_ms_swift_9799_rows_that_fit_no_tokens_name_sequence_rows_and_tokens():
    records = [{"num_tokens": 9, "routed_experts": routes(8)}, {"num_tokens": 9, "routed_experts": routes(6)}]
    with pytest.raises(TraceError, match=r"sequence 1 has 6 recorded rows for 9 tokens: 8 or 9 are needed"):
        imported("vllm", records)
    few = imported("vllm", records, options=LENIENT)
    assert few.batch.valid_T.tolist() == [True] * 14 + [False] * 2
    assert few.report.problems == {"rows missing": 1}
    records[1]["routed_experts"] = routes(11)
    with pytest.raises(TraceError, match=r"sequence 1 has 11 recorded rows for 9 tokens: rows must be 8 or 9"):
        imported("vllm", records)
    many = imported("vllm", records, options=LENIENT)
    assert len(many.batch.routed_experts_TLK) == 8
    assert many.report.problems == {"more rows than tokens: routes dropped": 1}


def test_verl_6029_whole_histories_are_merged_not_concatenated():
    ids = routes(11)
    turns = [sglang(5, 3, ids[:7]), sglang(8, 4, ids)]
    batch = imported("sglang", [{"turns": turns}]).batch
    assert np.array_equal(batch.routed_experts_TLK, ids)
    with pytest.raises(TraceError, match="sequence 0 has 18 recorded rows for 12 tokens"):
        imported("vllm", [{"num_tokens": 12, "routed_experts": np.concatenate([ids[:7], ids])}])


@pytest.mark.parametrize(("merge", "seed"), [("keep_first", 1), ("keep_last", 3)])
def test_verl_6054_who_wins_is_said_where_newer_weights_recorded_again(merge, seed):
    """Three turns, each with the routes of its whole history under the weights of its time."""
    turns = [sglang(4, 3, routes(6, seed=1)), sglang(7, 2, routes(8, seed=2)), sglang(9, 2, routes(10, seed=3))]
    with pytest.raises(TraceError, match="6 rows from row 0 on that a later turn recorded differently: say merge=keep_first"):
        imported("sglang", [{"turns": turns}])
    batch = imported("sglang", [{"turns": turns}], options=ImportOptions(merge=merge)).batch
    assert np.array_equal(batch.routed_experts_TLK[:6], routes(10 if seed == 3 else 6, seed=seed)[:6])


def test_prime_rl_1807_the_boundary_row_comes_from_the_later_turn():
    ids = routes(9)
    padded = np.concatenate([ids[:4], np.zeros_like(ids[:1])])
    for first in (ids[:4], padded):
        payloads = [
            {"data": encoded(part.astype(np.uint8)), "shape": list(part.shape), "dtype": "uint8", "start": start}
            for part, start in ((first, 0), (ids[4:], 4))
        ]
        batch = imported("prime-rl", [{"num_tokens": 10, "turns": payloads}]).batch
        assert batch.valid_T is None
        assert np.array_equal(batch.routed_experts_TLK, ids)


def test_verifiers_1672_a_sample_one_row_short_is_kept():
    payload = {"data": encoded(routes(3).astype(np.uint8)), "shape": [3, 4, 4], "dtype": "uint8", "start": 0}
    batch = imported("verifiers", [{"token_ids": [1, 2, 3, 4], "routed_experts": payload}]).batch
    assert (len(batch.routed_experts_TLK), batch.num_tokens_S.tolist()) == (3, [4])


def test_verifiers_1394_tokens_and_routes_are_cut_by_one_function():
    with pytest.raises(TraceError, match=r"20 recorded rows for 8 tokens.*Cut routes together with tokens"):
        imported("vllm", [{"num_tokens": 8, "routed_experts": routes(20)}])
    cut = truncate(synthetic_batch(num_sequences=4, max_length=64), 8)
    assert (np.diff(cut.cu_seqlens) <= cut.num_tokens_S).all()
    assert cut.num_tokens_S.max() == 8


@pytest.mark.parametrize("stack", ["vllm", "sglang"])
def test_vllm_48622_sglang_26980_draft_layers_are_refused(stack):
    ids = routes(5, layers=5)
    source = {"vllm": [{"num_tokens": 6, "routed_experts": ids}], "sglang": [sglang(2, 4, ids)]}[stack]
    with pytest.raises(TraceError, match=r"num_layers=4: leave draft \(MTP\) layers out"):
        imported(stack, source)


def test_vllm_35744_vllm_37118_a_start_beyond_the_sequence_is_refused_before_any_gather():
    deltas = [{"routed_experts": routes(4), "start": 262_144}]
    with pytest.raises(TraceError, match=r"sequence 0 has rows 262144 .. 262147 for 9 tokens"):
        imported("vllm", [{"num_tokens": 9, "deltas": deltas}])


def test_vllm_39568_a_hole_of_zeros_is_counted_for_nothing_and_reported():
    ids = routes(30)
    ids[10:20] = 0
    result = imported("vllm", [{"num_tokens": 31, "routed_experts": ids}])
    assert result.report.masked_rows == {"all zero": 10}
    assert RoutingDemandCollector().collect(result.batch).tokens_LE.sum(axis=1).tolist() == [20 * 4] * 4
    assert not RoutingDemandCollector().collect(result.batch).tokens_LE[:, 0].any()


def test_vllm_39917_slime_1145_samples_without_routes_are_counted():
    records = [{"num_tokens": 9, "routed_experts": None if s in (2, 5) else routes(8, seed=s)} for s in range(8)]
    result = imported("vllm", records)
    assert result.report.without_routes == 2
    assert RoutingDemandCollector().collect(result.batch).estimated_S.tolist() == [s in (2, 5) for s in range(8)]
    only_first = [{"tokens": range(9), "rollout_routed_experts": routes(8) if s == 0 else None} for s in range(8)]
    assert imported("slime", only_first).report.coverage == 1 / 8


def test_vllm_37094_deltas_merge_by_their_start_and_overlap_must_agree():
    ids = routes(9)
    deltas = [{"routed_experts": ids[:5], "start": 0}, {"routed_experts": ids[3:], "start": 3}]
    assert np.array_equal(imported("vllm", [{"num_tokens": 10, "deltas": deltas}]).batch.routed_experts_TLK, ids)
    deltas[1]["routed_experts"] = routes(6, seed=9)
    with pytest.raises(TraceError, match="2 rows from row 3 on that a later turn recorded differently"):
        imported("vllm", [{"num_tokens": 10, "deltas": deltas}])


def test_vllm_41401_top_k_is_found_under_other_names():
    config = {"num_experts": 128, "moe_topk": 8, "num_hidden_layers": 4}
    assert ModelRouting.from_config(config).top_k == 8
    assert ModelRouting.from_config(config, top_k=4).top_k == 4


def test_vllm_ascend_15451_three_quarters_of_zero_rows_are_an_error():
    ids = routes(40)
    ids[10:] = 0
    with pytest.raises(TraceError, match=r"75% of the recorded rows are no routes \(all zero: 30\)"):
        imported("vllm", [{"num_tokens": 41, "routed_experts": ids}])


def test_sglang_36404_rows_of_minus_one_are_masked_and_stale_rows_are_reported():
    ids = routes(100)
    ids[20:25] = -1
    ids[33:] = ids[33]
    report = imported("sglang", [sglang(50, 51, ids)]).report
    assert report.masked_rows == {"all -1": 5}
    assert report.longest_repeat == 67
    assert report.suspicious == [
        "67 equal rows stand in a run, in sequence 0 from row 33 on: are they left over from another batch?"
    ]


def test_sglang_9499_expert_255_of_256_is_no_sentinel():
    ids = routes(6, experts=256)
    ids[:, :, 0] = 255
    ids[:, :, 1:] = [1, 2, 3]
    batch = imported("vllm", [{"num_tokens": 7, "routed_experts": ids.astype(np.uint8)}], experts=256).batch
    assert (batch.routed_experts_TLK.dtype, batch.valid_T) == (np.uint8, None)
    assert RoutingDemandCollector().collect(batch).tokens_LE[:, 255].tolist() == [6] * 4


def test_sglang_24851_deltas_do_not_copy_the_prefix_again():
    ids = routes(100)
    turns = [sglang(20, 1 + 20 * t, ids[20 * t : 20 * (t + 1)], start=20 * t) for t in range(5)]
    assert np.array_equal(imported("sglang", [{"turns": turns}]).batch.routed_experts_TLK, ids)


def test_verl_6211_SkyRL_2235_padding_takes_no_memory():
    lengths, width = [10, 800], 1000
    padded = np.zeros((2, width, 4, 4), np.int16)
    mask = np.zeros((2, width), bool)
    for s, n in enumerate(lengths):
        padded[s, width - n : width - 1], mask[s, width - n :] = routes(n - 1, seed=s), True
    batch = imported("verl", {"routed_experts": padded, "attention_mask": mask}).batch
    assert batch.routed_experts_TLK.nbytes == sum(lengths) * 4 * 4 * 1
    assert batch.cu_seqlens.tolist() == [0, 10, 810]


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.int16), (32_768, np.int16), (32_769, np.int32)])
def test_verl_7407_prime_rl_3051_the_dtype_follows_from_the_experts(experts, dtype):
    ids = routes(5)
    ids[2, 1, 0] = experts - 1
    batch = imported("slime", [{"tokens": range(6), "rollout_routed_experts": ids.astype(np.int64)}], experts=experts).batch
    assert batch.routed_experts_TLK.dtype == dtype
    assert batch.routed_experts_TLK[2, 1, 0] == experts - 1


def test_Gym_2089_nested_lists_are_taken_once_with_a_note():
    ids = routes(5)
    result = imported("nemo-rl", [{"num_tokens": 6, "routed_experts": ids.tolist()}])
    assert np.array_equal(result.batch.routed_experts_TLK, ids)
    assert "nested lists" in result.report.notes[0]
    assert not imported("nemo-rl", [{"num_tokens": 6, "routed_experts": envelope(ids.astype(np.int8))}]).report.notes


def test_verifiers_2043_samples_of_different_width_are_promoted():
    wide = routes(5, experts=512)
    wide[0, 0, 0] = 511
    samples = [
        {
            "num_tokens": 6,
            "routed_experts": {"data": encoded(ids), "shape": list(ids.shape), "dtype": ids.dtype.name, "start": 0},
        }
        for ids in (routes(5).astype(np.uint8), wide.astype(np.uint16))
    ]
    batch = imported("verifiers", samples, experts=512).batch
    assert batch.routed_experts_TLK.dtype == np.int16
    assert batch.routed_experts_TLK[5, 0, 0] == 511


def test_RL_3327_slime_1909_no_routes_at_all_name_the_switch():
    with pytest.raises(TraceError, match="3 of 3 sequences have no recorded routes: train with --use-rollout-routing-replay"):
        imported("slime", [{"tokens": range(9), "rollout_routed_experts": None}] * 3)
    some = [{"num_tokens": 9, "routed_experts": routes(8)}, {"num_tokens": 9}]
    with pytest.raises(TraceError, match="1 of 2 sequences have no recorded routes"):
        imported("vllm", some, options=ImportOptions(require=True))


def test_RL_3903_layers_that_share_a_number_are_refused():
    with pytest.raises(ConfigError, match="must name each MoE layer once"):
        model(moe_layers=[0, 1, 1, 3])
    with pytest.raises(TraceError, match="must name each of the 4 recorded layers once"):
        RolloutBatch(
            routed_experts_TLK=routes(5), cu_seqlens=[0, 5], num_tokens_S=[6], num_experts=64, layer_ids_L=[0, 1, 1, 3]
        )


# Padding and layout


def load_of_ranks(routes_nLK, placement, ranks):
    rank_of_LE = placement.rank_of_LE(ranks)
    return [
        np.bincount(rank_of_LE[layer][routes_nLK[:, layer].ravel()], minlength=ranks) for layer in range(routes_nLK.shape[1])
    ]


def test_verl_7524_a_hundred_padding_rows_spread_over_the_ranks():
    placement = ExpertPlacement(physical_to_logical_LP=np.argsort(np.random.default_rng(0).random((4, 128)), axis=1))
    rows = spread_routes(np.arange(100), 8, placement, 8)
    assert all(load.max() - load.min() <= 1 for load in load_of_ranks(rows, placement, 8))
    assert (np.diff(np.sort(rows, axis=2), axis=2) > 0).all()


def padded_microbatches(routes_TLK, num_tokens_S, *, experts, multiple, ep=1):
    """Each rank's only microbatch, of one sequence, padded; experts stand where they began."""
    S, placement = len(num_tokens_S), ExpertPlacement.identity(routes_TLK.shape[1], experts)
    batch = RolloutBatch(
        routed_experts_TLK=routes_TLK,
        cu_seqlens=np.cumsum([0, *num_tokens_S]),
        num_tokens_S=num_tokens_S,
        num_experts=experts,
        token_fields={"token_ids": np.arange(sum(num_tokens_S))},
    )
    plan = Plan(
        topology=Topology(data_parallel_degree=S, expert_parallel_degree=ep),
        placement=placement,
        packing=Packing(cell_of_S=np.arange(S), num_microbatches=1, data_parallel_degree=S),
        length_S=batch.num_tokens_S,
        max_tokens=1_000,
        sync="step",
        value=1.0,
        bound=1.0,
        baseline_value=1.0,
        certificate=Certificate(num_microbatches=1, lower_bound=1, method="none"),
    )
    return [microbatches(plan, batch, rank, pad_to_multiple_of=multiple)[0] for rank in range(S)], placement


@pytest.mark.parametrize("top_k", [4, 8])
def test_miles_2697_filler_goes_by_the_padding_s_number_not_by_its_place(top_k):
    """Padding of many short sequences: filler that started over at each would load some ranks alone."""
    cells, placement = padded_microbatches(routes(64 * 8, top_k=top_k), [8] * 64, experts=64, multiple=8, ep=8)
    filled = np.concatenate([cell.routed_experts_nLK[cell.cu_seqlens[-1] :] for cell in cells])
    assert len(filled) == 64
    assert all(load.tolist() == [8 * top_k] * 8 for load in load_of_ranks(filled, placement, 8))


def test_SkyRL_2091_ids_are_widened_before_filler_is_written():
    (cell,), placement = padded_microbatches(routes(4).astype(np.uint8), [4], experts=512, multiple=128)
    filled = cell.routed_experts_nLK
    assert filled.max() > 255
    assert np.array_equal(filled[3:], spread_routes(np.arange(125), 4, placement, 1))


def test_prime_rl_3350_slime_941_padding_is_never_all_expert_0():
    (cell,), placement = padded_microbatches(routes(8), [8], experts=64, multiple=16)
    filled = cell.routed_experts_nLK[cell.cu_seqlens[-1] :]
    assert len(filled) == 9
    assert filled.any(axis=(1, 2)).all()
    with pytest.raises(ConfigError, match="does not divide the 64 experts"):
        spread_routes(np.arange(9), 4, placement, 7)
