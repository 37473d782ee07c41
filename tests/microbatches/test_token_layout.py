import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.core.errors import ConfigError, TraceError
from routepack.core.plans import ExpertPlacement
from routepack.microbatches.token_layout import (
    PADDING,
    ContiguousSlices,
    ZigzagSlices,
    lay_out,
    lay_out_routes,
    packed_layout,
    spread_routes,
    truncate,
)
from routepack.testing import synthetic_batch

# Three choices on four ranks: filler that starts over in every row cannot come out even.
EXPERTS, LAYERS, TOP_K = 16, 3, 3


@st.composite
def packings(draw):
    """Lengths, a context-parallel degree, and tokens whose route tells which token they are."""
    lengths = np.asarray(draw(st.lists(st.integers(1, 20), min_size=1, max_size=6)))
    total = int(lengths.sum())
    first = np.arange(total)[:, None, None] + np.arange(LAYERS)[:, None]
    return lengths, draw(st.sampled_from([1, 2, 4])), np.arange(total), (first + np.arange(TOP_K)) % EXPERTS


def placement(seed=0):
    order = np.argsort(np.random.default_rng(seed).random((LAYERS, EXPERTS)), axis=1)
    return ExpertPlacement(physical_to_logical_LP=order)


@given(packings(), st.sampled_from([ZigzagSlices, ContiguousSlices]))
def test_tokens_and_routes_stay_beside_one_another(packing, kind):
    lengths, degree, tokens, routes = packing
    whole = packed_layout(lengths, pad_sequences_to=2 * degree, pad_to_multiple_of=4 * degree)
    for rank in range(degree):
        part = kind(degree).of_rank(whole, rank)
        token_n = lay_out(tokens, part, PADDING)
        route_n = lay_out_routes(routes.astype(np.int16), part, placement(), 4)
        real = token_n != PADDING
        assert np.array_equal(route_n[real], routes[token_n[real]])
        assert len(token_n) == len(whole.source_n) // degree


@given(packings(), st.sampled_from([ZigzagSlices, ContiguousSlices]))
def test_every_token_is_on_one_rank(packing, kind):
    lengths, degree, tokens, _ = packing
    whole = packed_layout(lengths, pad_sequences_to=2 * degree, pad_to_multiple_of=2 * degree)
    parts = [lay_out(tokens, kind(degree).of_rank(whole, rank), PADDING) for rank in range(degree)]
    everything = np.concatenate(parts)
    assert sorted(everything[everything != PADDING].tolist()) == tokens.tolist()


@given(packings())
def test_zigzag_gives_every_rank_a_piece_from_either_end(packing):
    """What slime and Megatron do, piece by piece: rank r holds pieces r and 2 * degree - 1 - r of each sequence."""
    lengths, degree, _, _ = packing
    whole = packed_layout(lengths, pad_sequences_to=2 * degree)
    for rank in range(degree):
        expected = []
        for first, end in zip(whole.cu_seqlens[:-1], whole.cu_seqlens[1:], strict=True):
            pieces = np.split(np.arange(first, end), 2 * degree)
            expected += [*pieces[rank], *pieces[2 * degree - 1 - rank]]
        assert ZigzagSlices(degree).places(whole, rank).tolist() == expected


@given(packings())
def test_zigzag_evens_out_causal_attention(packing):
    _, degree, _, _ = packing
    size = 2 * degree * 8
    whole = packed_layout(np.array([size]))
    work = [int(ZigzagSlices(degree).places(whole, rank).sum()) for rank in range(degree)]
    assert max(work) == min(work)


@given(packings(), st.integers(0, 9))
def test_padding_of_all_slices_spreads_as_one(packing, seed):
    """Over all context-parallel ranks together, padding is even over the EP ranks, and distinct in every row."""
    lengths, degree, _, routes = packing
    whole = packed_layout(lengths, pad_sequences_to=2 * degree, pad_to_multiple_of=8 * degree, first_ordinal=seed)
    placed, loads = placement(seed), np.zeros((LAYERS, 4), int)
    for rank in range(degree):
        part = ZigzagSlices(degree).of_rank(whole, rank)
        filled = lay_out_routes(routes, part, placed, 4)[part.source_n == PADDING]
        assert (np.diff(np.sort(filled, axis=2), axis=2) > 0).all()
        for layer in range(LAYERS):
            loads[layer] += np.bincount(placed.rank_of_LE(4)[layer][filled[:, layer].ravel()], minlength=4)
    assert (loads.max(axis=1) - loads.min(axis=1) <= 1).all()


def test_filler_by_position_would_not_spread():
    """The negative control of the test above: filler that starts over in every row goes to one rank."""
    placed = ExpertPlacement.identity(LAYERS, EXPERTS)
    naive = np.broadcast_to(np.arange(TOP_K), (100, LAYERS, TOP_K))
    load = np.bincount(placed.rank_of_LE(4)[0][naive[:, 0].ravel()], minlength=4)
    assert load.tolist() == [300, 0, 0, 0]


def test_slices_that_do_not_divide_are_refused():
    layout = packed_layout(np.array([5, 3]))
    with pytest.raises(ConfigError, match="pad_sequences_to=4"):
        ZigzagSlices(2).of_rank(layout, 0)
    with pytest.raises(ConfigError, match="pad_to_multiple_of=3"):
        ContiguousSlices(3).of_rank(layout, 0)
    with pytest.raises(ConfigError, match="rank=2 is not one of the 2"):
        ContiguousSlices(2).of_rank(layout, 2)


def test_fewer_routes_than_tokens_are_refused():
    layout = packed_layout(np.array([5, 3]))
    with pytest.raises(TraceError, match="7 packed tokens do not fill a layout of 8"):
        lay_out_routes(np.zeros((7, LAYERS, TOP_K), np.uint8), layout, placement(), 4)


@pytest.mark.parametrize(
    ("top_k", "ranks", "message"), [(17, 4, "top_k=17"), (4, 3, "does not divide"), (4, 0, "does not divide")]
)
def test_filler_that_cannot_be_distinct_or_even_is_refused(top_k, ranks, message):
    with pytest.raises(ConfigError, match=message):
        spread_routes(np.arange(3), top_k, placement(), ranks)


@given(st.integers(1, 40))
def test_truncation_cuts_tokens_and_routes_together(limit):
    batch = synthetic_batch(num_sequences=8, max_length=40)
    cut = truncate(batch, limit)
    assert cut.num_tokens_S.tolist() == np.minimum(batch.num_tokens_S, limit).tolist()
    for s in range(8):
        rows = cut.routed_experts_of(s)
        assert np.array_equal(rows, batch.routed_experts_of(s)[: cut.num_tokens_S[s]])
        tokens = slice(cut.cu_tokens[s], cut.cu_tokens[s + 1])
        whole = batch.token_fields["token_ids"][batch.cu_tokens[s] :]
        assert np.array_equal(cut.token_fields["token_ids"][tokens], whole[: cut.num_tokens_S[s]])
