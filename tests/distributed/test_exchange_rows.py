"""The row exchange's bookkeeping, rank by rank in one process; the collectives run in integrations/torchtitan."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routepack.core.errors import PlanError
from routepack.distributed.exchange_rows import RowExchange, RowMoves


def moved(shards, row_moves, staging_bytes=2**20):
    exchange = RowExchange.of(shards, row_moves, staging_bytes=staging_bytes)
    return exchange.run(torch.empty(exchange.staged_bytes, dtype=torch.uint8))


@st.composite
def moves(draw):
    world_size = draw(st.sampled_from([1, 2, 4]))
    per_rank = draw(st.integers(1, 4))
    num_slots = world_size * per_rank
    source_P = np.asarray(draw(st.permutations(range(num_slots))))
    rank_of_P, row_of_P = np.divmod(np.arange(num_slots), per_rank)
    return RowMoves(rank_of_P=rank_of_P, row_of_P=row_of_P, source_P=source_P), world_size, per_rank


@given(moves())
def test_what_one_rank_sends_the_other_expects(case):
    row_moves, world_size, _ = case
    sent = [row_moves.sent_rows(rank, world_size) for rank in range(world_size)]
    received = [row_moves.received_rows(rank, world_size) for rank in range(world_size)]
    for a in range(world_size):
        for b in range(world_size):
            assert len(sent[a][b]) == len(received[b][a])


@given(moves())
def test_rows_arrive_where_the_sources_say(case):
    row_moves, world_size, per_rank = case
    before = np.arange(world_size * per_rank)
    after = before.copy()
    for a in range(world_size):
        for b in range(world_size):
            sources = a * per_rank + row_moves.sent_rows(a, world_size)[b]
            targets = b * per_rank + row_moves.received_rows(b, world_size)[a]
            after[targets] = before[sources]
    assert np.array_equal(after, before[row_moves.source_P])


def test_rows_that_stay_are_not_sent():
    row_moves = RowMoves(rank_of_P=np.array([0, 0, 1, 1]), row_of_P=np.array([0, 1, 0, 1]), source_P=np.array([0, 3, 2, 1]))
    assert [rows.tolist() for rows in row_moves.sent_rows(0, 2)] == [[], [1]]


def test_one_rank_permutes_its_rows_in_place_whatever_their_dtype():
    shards = [torch.randn(3, 2, 5), torch.randn(3, 4).bfloat16(), torch.arange(3)]
    before = [shard.clone() for shard in shards]
    source_P = np.array([2, 0, 1])
    row_moves = RowMoves(rank_of_P=np.zeros(3, np.int64), row_of_P=np.arange(3), source_P=source_P)
    assert moved(shards, row_moves) == 0
    for shard, old in zip(shards, before, strict=True):
        assert torch.equal(shard, old[source_P])


def permuted(num_rows, seed):
    source_P = np.random.default_rng(seed).permutation(num_rows)
    return RowMoves(rank_of_P=np.zeros(num_rows, np.int64), row_of_P=np.arange(num_rows), source_P=source_P), source_P


@given(st.integers(0, 1000), st.integers(14, 5000))
def test_any_permutation_arrives_through_any_staging_memory(seed, staging_bytes):
    row_moves, source_P = permuted(7, seed)
    shards = [torch.randn(7, 3, 5), torch.randn(7, 11).bfloat16(), torch.arange(7), torch.zeros(7, 0)]
    before = [shard.clone() for shard in shards]
    exchange = RowExchange.of(shards, row_moves, staging_bytes=staging_bytes)
    assert exchange.staged_bytes <= staging_bytes
    exchange.run(torch.empty(exchange.staged_bytes, dtype=torch.uint8))
    assert all(torch.equal(shard, old[source_P]) for shard, old in zip(shards, before, strict=True))


@given(moves())
def test_staging_memory_is_for_the_rank_that_moves_most(case):
    row_moves, world_size, _ = case
    staged = [sum(map(len, row_moves.received_rows(rank, world_size))) for rank in range(world_size)]
    assert row_moves.most_staged_rows == max(staged)


def test_memory_for_less_than_a_byte_of_each_row_is_refused():
    row_moves, _ = permuted(8, 1)
    with pytest.raises(PlanError, match=r"staging_bytes=3 is less than two bytes for each of the \d rows"):
        RowExchange.of([torch.zeros(8, 4)], row_moves, staging_bytes=3)


def test_a_shard_that_is_not_contiguous_is_refused_before_anything_moves():
    row_moves, _ = permuted(4, 1)
    with pytest.raises(PlanError, match="is not contiguous"):
        RowExchange.of([torch.zeros(6, 4).T], row_moves, staging_bytes=2**20)
