from dataclasses import fields
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.core.errors import ConfigError, PlanError, TraceError
from routepack.core.plans import Certificate, ExpertPlacement, Packing, Plan, Topology
from routepack.core.rollouts import RolloutBatch
from routepack.microbatches.materialize import NATIVE, NO_TARGET, microbatches, scatter_back, spread_routes

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2


def batch_of(num_tokens_S, missing_rows_S=None, valid_T=None, routed=None, seed=0):
    """Sequences whose tokens and routes tell where they come from: token t of sequence s is 1000 s + t."""
    rng = np.random.default_rng(seed)
    num_tokens_S = np.asarray(num_tokens_S)
    rows_S = num_tokens_S - (np.zeros_like(num_tokens_S) if missing_rows_S is None else np.asarray(missing_rows_S))
    noise = rng.random((rows_S.sum(), NUM_LAYERS, NUM_EXPERTS))
    position_N = np.concatenate([np.arange(n) for n in num_tokens_S])
    sequence_N = np.repeat(np.arange(len(num_tokens_S)), num_tokens_S)
    return RolloutBatch(
        routed_experts_TLK=np.argsort(noise, axis=2)[:, :, :TOP_K].astype(np.uint8) if routed is None else routed,
        cu_seqlens=np.concatenate([[0], np.cumsum(rows_S)]),
        num_tokens_S=num_tokens_S,
        num_experts=NUM_EXPERTS,
        valid_T=valid_T,
        token_fields={
            "token_ids": 1000 * sequence_N + position_N,
            "loss_mask": position_N > 0,
            "advantages": rng.normal(size=len(position_N)).astype(np.float32),
        },
    )


def plan_of(batch, cell_of_S, ranks=1, ep=1, placement=None):
    num_microbatches = int(np.max(cell_of_S)) // ranks + 1
    return Plan(
        topology=Topology(data_parallel_degree=ranks, expert_parallel_degree=ep),
        placement=placement or ExpertPlacement.identity(NUM_LAYERS, NUM_EXPERTS),
        packing=Packing(cell_of_S=cell_of_S, num_microbatches=num_microbatches, data_parallel_degree=ranks),
        length_S=batch.num_tokens_S,
        max_tokens=10_000,
        sync="step",
        value=1.0,
        bound=1.0,
        baseline_value=1.0,
        certificate=Certificate(num_microbatches=num_microbatches, lower_bound=1, method="none"),
    )


@st.composite
def windows(draw):
    """A batch, a legal plan of it, and the number of ranks."""
    ranks = draw(st.sampled_from([1, 2, 4]))
    num_cells = ranks * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 9), min_size=num_cells, max_size=num_cells + 8))
    missing = draw(st.lists(st.integers(0, 1), min_size=len(lengths), max_size=len(lengths)))
    batch = batch_of(lengths, missing)
    cells = draw(st.permutations(np.arange(len(lengths)) % num_cells))
    return batch, plan_of(batch, np.asarray(cells), ranks), ranks


def all_cells(batch, plan, ranks, **options):
    return [cell for rank in range(ranks) for cell in microbatches(plan, batch, rank, **options)]


@given(windows())
def test_every_token_after_the_first_is_predicted_once(window):
    batch, plan, ranks = window
    predicted = np.concatenate([cell.target_index_n for cell in all_cells(batch, plan, ranks)])
    expected = np.setdiff1d(np.arange(batch.num_tokens_S.sum()), batch.cu_tokens[:-1])
    assert sorted(predicted[predicted != NO_TARGET]) == expected.tolist()


@given(windows())
def test_targets_follow_the_fed_tokens(window):
    batch, plan, ranks = window
    for cell in all_cells(batch, plan, ranks):
        has_target = cell.target_index_n != NO_TARGET
        assert np.array_equal(cell.targets_n[has_target], cell.token_ids_n[has_target] + 1)


@given(windows())
def test_positions_restart_with_each_sequence(window):
    batch, plan, ranks = window
    for cell in all_cells(batch, plan, ranks):
        assert np.array_equal(cell.positions_n, cell.token_ids_n % 1000)
        assert np.array_equal(np.flatnonzero(cell.positions_n == 0), cell.cu_seqlens[:-1])


@given(windows(), st.sampled_from([1, 4, 16]))
def test_routes_stand_beside_the_token_that_was_fed_in(window, multiple):
    batch, plan, ranks = window
    for cell in all_cells(batch, plan, ranks, pad_to_multiple_of=multiple):
        fed = zip(cell.token_ids_n, cell.routed_experts_nLK, strict=True)
        for token, route in islice(fed, cell.num_tokens - cell.num_padding):
            rows = batch.routed_experts_of(token // 1000)
            recorded = rows[token % 1000] if token % 1000 < len(rows) else NATIVE
            assert (route == recorded).all()


@given(windows(), st.sampled_from([1, 4, 16]))
def test_scattering_back_undoes_the_packing(window, multiple):
    batch, plan, ranks = window
    cells = all_cells(batch, plan, ranks, pad_to_multiple_of=multiple)
    back = scatter_back(cells, [cell.fields["advantages"] for cell in cells], int(batch.num_tokens_S.sum()))
    expected = batch.token_fields["advantages"].copy()
    expected[batch.cu_tokens[:-1]] = 0
    assert np.array_equal(back, expected)


@given(windows(), st.sampled_from([4, 16]))
def test_padding_fills_to_the_multiple_and_predicts_nothing(window, multiple):
    batch, plan, ranks = window
    for cell in all_cells(batch, plan, ranks, pad_to_multiple_of=multiple):
        assert cell.num_tokens % multiple == 0
        assert cell.num_padding < multiple
        padding = slice(cell.cu_seqlens[-1], None)
        assert (cell.target_index_n[padding] == NO_TARGET).all()
        assert not cell.fields["loss_mask"][padding].any()
        assert np.array_equal(cell.positions_n[padding], np.arange(cell.num_padding))


@given(st.integers(1, 40), st.sampled_from([1, 2, 4, 8]), st.integers(1, NUM_EXPERTS), st.integers(0, 50), st.integers(0, 9))
def test_routes_of_padding_are_distinct_and_even_over_the_ranks(num_padding, ep, top_k, first, seed):
    rng = np.random.default_rng(seed)
    placement = ExpertPlacement(physical_to_logical_LP=np.argsort(rng.random((NUM_LAYERS, NUM_EXPERTS)), axis=1))
    routes_nLK = spread_routes(first + np.arange(num_padding), top_k, placement, ep)
    assert (np.diff(np.sort(routes_nLK, axis=2), axis=2) > 0).all()
    assert (np.ptp(load_of_ranks(routes_nLK, placement, ep), axis=1) <= 1).all()


def load_of_ranks(routes_nLK, placement, ep):
    """[L, R]: how many of these choices each expert-parallel rank gets."""
    rank_of_LE = placement.rank_of_LE(ep)
    return np.array(
        [np.bincount(rank_of_LE[layer][routes_nLK[:, layer].ravel()], minlength=ep) for layer in range(routes_nLK.shape[1])]
    )


@given(st.lists(st.integers(2, 9), min_size=4, max_size=4), st.sampled_from([8, 16]), st.integers(0, 9))
def test_padding_of_all_ranks_spreads_as_one(lengths, multiple, seed):
    """All ranks' padding together is even over the expert-parallel ranks, and different experts in every row."""
    batch = batch_of([sum(lengths) + 1] * 4)
    placement = ExpertPlacement(physical_to_logical_LP=np.argsort(np.random.default_rng(seed).random((3, NUM_EXPERTS)), axis=1))
    plan = plan_of(batch, np.arange(4), ranks=4, ep=4, placement=placement)
    cells = all_cells(batch, plan, 4, pad_to_multiple_of=multiple)
    filled = np.concatenate([cell.routed_experts_nLK[cell.cu_seqlens[-1] :] for cell in cells])
    assert len(filled) == 4 * (-sum(lengths) % multiple)
    assert (np.diff(np.sort(filled, axis=2), axis=2) > 0).all()
    assert (np.ptp(load_of_ranks(filled, placement, 4), axis=1) <= 1).all()


def test_filler_by_position_would_not_spread():
    """The negative control of the test above: filler that starts over in every row goes to one rank."""
    naive = np.broadcast_to(np.arange(TOP_K), (100, NUM_LAYERS, TOP_K))
    loads = load_of_ranks(naive, ExpertPlacement.identity(NUM_LAYERS, NUM_EXPERTS), 4)
    assert loads[0].tolist() == [200, 0, 0, 0]


@pytest.mark.parametrize(
    ("top_k", "ranks", "message"), [(17, 4, "top_k=17"), (4, 3, "does not divide"), (4, 0, "does not divide")]
)
def test_filler_that_cannot_be_distinct_or_even_is_refused(top_k, ranks, message):
    with pytest.raises(ConfigError, match=message):
        spread_routes(np.arange(3), top_k, ExpertPlacement.identity(NUM_LAYERS, NUM_EXPERTS), ranks)


def test_rows_that_the_mask_excludes_route_natively():
    valid_T = np.array([True, False, True, True, False])
    batch = batch_of([3, 2], valid_T=valid_T)
    (cell,) = microbatches(plan_of(batch, [0, 0]), batch, 0)
    assert (cell.routed_experts_nLK == NATIVE).all(axis=(1, 2)).tolist() == [False, True, False]


def test_excluded_rows_may_hold_anything():
    batch = batch_of(
        [3], valid_T=np.array([True, False, True]), routed=np.array([[[0, 1]] * 3, [[-1, -1]] * 3, [[2, 3]] * 3], np.int16)
    )
    (cell,) = microbatches(plan_of(batch, [0]), batch, 0)
    assert cell.routed_experts_nLK[:, 0].tolist() == [[0, 1], [NATIVE, NATIVE]]


@pytest.mark.parametrize("row", [[3, 3], [-1, 2], [0, 8], [0, 65_536]])
def test_recorded_rows_that_cannot_be_replayed_are_refused(row):
    routed = np.tile(np.array([0, 1], np.int32), (4, NUM_LAYERS, 1))
    routed[1, 2] = row
    batch = batch_of([4], routed=routed)
    with pytest.raises(TraceError, match=r"sequence 0, row 1, layer 2 .* different ids of 0 \.\. 7"):
        microbatches(plan_of(batch, [0]), batch, 0)


def test_a_sequence_without_rows_routes_natively():
    batch = batch_of([4, 3], missing_rows_S=[4, 1])
    (cell,) = microbatches(plan_of(batch, [0, 0]), batch, 0)
    assert (cell.routed_experts_nLK[:3] == NATIVE).all()
    assert (cell.routed_experts_nLK[3:] != NATIVE).all()


def test_a_sequence_of_one_token_is_fed_in_and_predicts_nothing():
    batch = batch_of([1, 2])
    (cell,) = microbatches(plan_of(batch, [0, 0]), batch, 0)
    assert cell.token_ids_n.tolist() == [0, 1000]
    assert cell.target_index_n.tolist() == [NO_TARGET, 2]


def test_sequences_stand_in_the_order_of_the_plan():
    batch = batch_of([2, 2, 2])
    plan = plan_of(batch, [0, 0, 0])
    packing = Packing(cell_of_S=[0, 0, 0], order_S=[2, 0, 1], num_microbatches=1, data_parallel_degree=1)
    (cell,) = microbatches(plan_with(plan, packing), batch, 0)
    assert cell.token_ids_n.tolist() == [1000, 2000, 0]


def plan_with(plan, packing):
    return Plan(
        **{
            **{name: getattr(plan, name) for name in (field.name for field in fields(plan)) if name != "digest"},
            "packing": packing,
        }
    )


def test_a_plan_of_other_lengths_is_refused():
    batch = batch_of([4, 3])
    with pytest.raises(PlanError, match="plan this batch"):
        microbatches(plan_of(batch_of([3, 4]), [0, 0]), batch, 0)


def test_a_plan_of_other_experts_is_refused():
    batch = batch_of([4])
    plan = plan_of(batch, [0], placement=ExpertPlacement.identity(NUM_LAYERS, 2 * NUM_EXPERTS))
    with pytest.raises(PlanError, match=r"places \(3, 16\)"):
        microbatches(plan, batch, 0)


def test_a_batch_without_tokens_is_refused():
    whole = batch_of([4])
    batch = RolloutBatch(
        routed_experts_TLK=whole.routed_experts_TLK, cu_seqlens=whole.cu_seqlens, num_tokens_S=[4], num_experts=NUM_EXPERTS
    )
    with pytest.raises(TraceError, match="no token_ids"):
        microbatches(plan_of(batch, [0]), batch, 0)


@pytest.mark.parametrize(
    ("rank", "multiple", "message"), [(1, 1, "rank=1"), (-1, 1, "rank=-1"), (0, 0, "pad_to_multiple_of=0")]
)
def test_options_out_of_range_are_refused(rank, multiple, message):
    batch = batch_of([4])
    with pytest.raises(ConfigError, match=message):
        microbatches(plan_of(batch, [0]), batch, rank, pad_to_multiple_of=multiple)
