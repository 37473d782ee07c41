import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import ConfigError, TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.solvers.expert_counts import find_repeated


def batch_of(ids_TLK, rows, *, num_experts, tokens=None, valid_T=None):
    return RolloutBatch(
        routed_experts_TLK=ids_TLK,
        cu_seqlens=np.concatenate([[0], np.cumsum(rows)]).astype(np.int64),
        num_tokens_S=np.asarray(rows) + 1 if tokens is None else tokens,
        num_experts=num_experts,
        valid_T=valid_T,
    )


@st.composite
def recorded(draw):
    experts = draw(st.sampled_from([2, 5, 256, 257, 40_000]))
    layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    rows = draw(st.lists(st.integers(1, 30), min_size=1, max_size=9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fits = [d for d in (np.uint8, np.int16, np.uint16, np.int32, np.int64) if np.iinfo(d).max >= experts - 1]
    # Distinct in a row: an offset below E on top of a first id.
    offsets = np.stack([np.zeros((sum(rows), layers), int), rng.integers(1, experts, (sum(rows), layers))], axis=-1)[
        ..., :top_k
    ]
    ids = ((rng.integers(0, experts, (sum(rows), layers, 1)) + offsets) % experts).astype(draw(st.sampled_from(fits)))
    valid = rng.random(sum(rows)) < draw(st.sampled_from([0.7, 1.0]))
    return batch_of(ids, rows, num_experts=experts, valid_T=draw(st.sampled_from([valid, None])))


def loop_count(batch):
    counts = np.zeros((batch.num_sequences, batch.num_layers, batch.num_experts), int)
    for s in range(batch.num_sequences):
        for t in range(batch.cu_seqlens[s], batch.cu_seqlens[s + 1]):
            if batch.valid_T is None or batch.valid_T[t]:
                for layer in range(batch.num_layers):
                    for expert in batch.routed_experts_TLK[t, layer]:
                        counts[s, layer, expert] += 1
    return counts


@given(recorded(), st.integers(1, 3))
def test_counts_equal_a_plain_loop(batch, threads):
    demand = RoutingDemandCollector(min_coverage=0.0, num_threads=threads).collect(batch)
    np.testing.assert_array_equal(demand.tokens_SLE, loop_count(batch))


@given(recorded())
def test_adding_one_by_one_gives_the_same_demand(batch):
    collector = RoutingDemandCollector(num_experts=batch.num_experts, min_coverage=0.0)
    for s in range(batch.num_sequences):
        rows = slice(batch.cu_seqlens[s], batch.cu_seqlens[s + 1])
        valid = None if batch.valid_T is None else batch.valid_T[rows]
        collector.add(batch.routed_experts_TLK[rows], num_tokens=int(batch.num_tokens_S[s]), valid_T=valid)
    demand = collector.demand()
    whole = RoutingDemandCollector(min_coverage=0.0).collect(batch)
    assert (demand.digest, demand.num_masked_rows) == (whole.digest, whole.num_masked_rows)


def test_masked_rows_may_hold_anything():
    ids = np.array([[[0]], [[-1]], [[99]], [[1]]], np.int32)
    demand = RoutingDemandCollector().collect(batch_of(ids, [4], num_experts=2, valid_T=[True, False, False, True]))
    assert (demand.tokens_SLE.tolist(), demand.num_masked_rows) == ([[[1, 1]]], 2)


def test_zero_filler_behind_a_mask_does_not_credit_expert_0():
    ids = np.array([[[2, 3]], [[2, 3]], [[0, 0]]], np.uint8)
    demand = RoutingDemandCollector().collect(batch_of(ids, [3], num_experts=4, tokens=[3], valid_T=[True, True, False]))
    assert demand.tokens_LE.tolist() == [[0, 0, 2, 2]]


def test_255_is_an_expert_like_any_other_at_256_experts():
    ids = np.full((3, 1, 1), 255, np.uint8)
    assert RoutingDemandCollector().collect(batch_of(ids, [3], num_experts=256)).tokens_LE[0, 255] == 3


def test_a_long_sequence_does_not_wrap_around():
    ids = np.zeros((70_000, 1, 1), np.uint8)
    assert RoutingDemandCollector().collect(batch_of(ids, [70_000], num_experts=1)).tokens_LE.tolist() == [[70_000]]


def test_filler_that_nobody_masked_is_named():
    ids = np.zeros((4, 1, 2), np.uint8)
    with pytest.raises(TraceError, match=r"sequence 0, row 0, layer 0: expert id 0 stands twice in the row.*filler .*valid_T"):
        RoutingDemandCollector().collect(batch_of(ids, [4], num_experts=4))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
def test_an_expert_twice_in_one_row_names_its_place(dtype):
    ids = np.tile(np.array([0, 1, 7], dtype), (5, 2, 1))
    ids[:, 0] = [7, 0, 3]
    ids[4, 1, 2] = 0
    batch = batch_of(ids, [3, 2], num_experts=8)
    with pytest.raises(TraceError, match=r"sequence 1, row 1, layer 1: expert id 0 stands twice .*top_k=3 different experts"):
        RoutingDemandCollector().collect(batch)
    masked = batch_of(ids, [3, 2], num_experts=8, valid_T=[True] * 4 + [False])
    assert RoutingDemandCollector().collect(masked).num_masked_rows == 1


@st.composite
def rows_with_repeats(draw):
    top_k = draw(st.sampled_from([1, 2, 3, 8, 16, 17, 20]))
    rows, layers = draw(st.sampled_from([1, 5, 1500])), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from([np.uint8, np.int16, np.uint16, np.int32, np.int64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids_TLK = rng.permuted(np.tile(np.arange(20, dtype=dtype), (rows, layers, 1)), axis=-1)[..., :top_k]
    if top_k > 1:
        for _ in range(draw(st.integers(0, 3))):
            t, layer = rng.integers(rows), rng.integers(layers)
            one, other = rng.choice(top_k, 2, replace=False)
            ids_TLK[t, layer, one] = ids_TLK[t, layer, other]
    valid_T = draw(st.sampled_from([None, rng.random(rows) < 0.7]))
    return np.ascontiguousarray(ids_TLK), valid_T


@given(rows_with_repeats(), st.sampled_from([1, 2]))
def test_the_first_repeated_id_is_found_and_no_other(case, threads):
    ids_TLK, valid_T = case
    # Its row, layer and place, by comparing each id with those before it.
    repeats = [
        k > 0 and row[k] in row[:k].tolist()
        for t, layers in enumerate(ids_TLK)
        for row in layers
        for k in range(len(row))
        if valid_T is None or valid_T[t]
    ]
    kept = np.arange(len(ids_TLK)) if valid_T is None else np.flatnonzero(valid_T)
    width = ids_TLK.shape[1] * ids_TLK.shape[2]
    first = repeats.index(True) if True in repeats else -1
    expected = -1 if first < 0 else int(kept[first // width]) * width + first % width
    assert find_repeated(ids_TLK, 20, valid_T, threads) == expected


def test_more_experts_than_bytes_can_name_are_counted_all_the_same():
    ids = np.array([[[3]], [[255]]], np.uint8)
    tokens_LE = RoutingDemandCollector().collect(batch_of(ids, [2], num_experts=512)).tokens_LE
    assert (tokens_LE[0, 3], tokens_LE[0, 255], tokens_LE.sum()) == (1, 1, 2)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
def test_an_id_beyond_the_experts_names_its_place(dtype):
    ids = np.tile(np.array([0, 1], dtype), (5, 2, 1))
    ids[4, 1, 0] = 9
    with pytest.raises(TraceError, match=r"sequence 1, row 1, layer 1: expert id 9 is not below num_experts=8"):
        RoutingDemandCollector().collect(batch_of(ids, [3, 2], num_experts=8))


def test_a_negative_id_without_a_mask_says_what_to_do():
    ids = np.array([[[0]], [[-1]]], np.int32)
    with pytest.raises(TraceError, match=r"sequence 0, row 1, layer 0: expert id -1 is negative: mark rows"):
        RoutingDemandCollector().collect(batch_of(ids, [2], num_experts=2))


def test_a_sequence_without_routes_gets_the_window_s_mean():
    ids = np.array([[[0]], [[0]], [[0]], [[1]]], np.uint8)
    demand = RoutingDemandCollector().collect(batch_of(ids, [4, 0], num_experts=2, tokens=[5, 8]))
    assert demand.tokens_SLE.tolist() == [[[3, 1]], [[6, 2]]]
    assert demand.estimated_S.tolist() == [False, True]


def test_no_routes_at_all_is_an_error_that_names_the_engine():
    with pytest.raises(TraceError, match=r"none of the 2 sequences .* rollout engine returns routed experts"):
        RoutingDemandCollector().collect(batch_of(np.zeros((0, 1, 1), np.uint8), [0, 0], num_experts=2, tokens=[5, 8]))


def test_demand_starts_over():
    collector = RoutingDemandCollector(num_experts=2)
    collector.add(np.zeros((1, 1, 1), np.uint8), num_tokens=2)
    collector.demand()
    with pytest.raises(TraceError, match="no sequence was added"):
        collector.demand()


def test_sequences_of_different_models_are_refused():
    collector = RoutingDemandCollector(num_experts=2)
    collector.add(np.zeros((1, 1, 1), np.uint8), num_tokens=2)
    with pytest.raises(TraceError, match="sequence 1 records 2 layers of top-1 routes"):
        collector.add(np.zeros((1, 2, 1), np.uint8), num_tokens=2)
    with pytest.raises(TraceError, match="sequence 1 records 1 layers of top-2 routes"):
        collector.add(np.array([[[0, 1]]], np.uint8), num_tokens=2)


@pytest.mark.parametrize("options", [{"min_coverage": 1.5}, {"num_threads": -1}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        RoutingDemandCollector(**options)
