"""The row exchange's bookkeeping, rank by rank in one process; the collectives run in integrations/torchtitan."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routepack import distributed
from routepack.distributed import RowMoves
from routepack.errors import PlanError, TraceError


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
    assert distributed.exchange_rows(shards, row_moves) == 0
    for shard, old in zip(shards, before, strict=True):
        assert torch.equal(shard, old[source_P])


def test_one_rank_agrees_with_itself():
    distributed.agree("ab" * 32, "plan")


def test_an_error_is_raised_where_it_arose():
    with pytest.raises(TraceError, match="mine"):
        distributed.agree("ab" * 32, "plan", error=TraceError("mine"))


def test_a_plan_that_nobody_made_cannot_be_shared():
    with pytest.raises(PlanError, match="rank 0 has no plan"):
        distributed.broadcast_plan(None)
