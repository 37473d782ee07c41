import numpy as np
import pytest
import torch

from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch, RoutingDemand


def batch_of(rows, tokens, experts=4, **fields):
    return RolloutBatch(
        routed_experts_TLK=np.zeros((sum(rows), 1, 1), np.uint8),
        cu_seqlens=np.concatenate([[0], np.cumsum(rows)]),
        num_tokens_S=tokens,
        num_experts=experts,
        **fields,
    )


@pytest.mark.parametrize("rows", [5, 4, 0])
def test_rows_may_be_all_tokens_or_one_less_or_none(rows):
    assert batch_of([rows], [5]).routed_experts_of(0).shape == (rows, 1, 1)


@pytest.mark.parametrize("rows", [2, 3, 6, 7])
def test_other_row_counts_name_sequence_rows_and_tokens(rows):
    with pytest.raises(TraceError, match=f"sequence 1 has {rows} recorded rows for 5 tokens"):
        batch_of([3, rows], [3, 5])


def test_layer_numbers_must_be_unique():
    with pytest.raises(TraceError, match="draft or MTP"):
        RolloutBatch(
            routed_experts_TLK=np.zeros((1, 2, 1), np.uint8),
            cu_seqlens=[0, 1],
            num_tokens_S=[1],
            num_experts=2,
            layer_ids_L=[1, 1],
        )


def test_offsets_beyond_the_rows_are_refused():
    with pytest.raises(TraceError, match="ascending offsets from 0 to the 2 recorded rows"):
        RolloutBatch(routed_experts_TLK=np.zeros((2, 1, 1), np.uint8), cu_seqlens=[0, 3], num_tokens_S=[3], num_experts=2)


def test_a_token_field_must_cover_every_token():
    with pytest.raises(TraceError, match=r"'token_ids' has shape \(4,\); its first axis must be the 5 tokens"):
        batch_of([4], [5], token_fields={"token_ids": np.arange(4)})


def test_torch_tensors_share_their_memory():
    ids = torch.zeros(4, 1, 1, dtype=torch.int32)
    batch = RolloutBatch(routed_experts_TLK=ids, cu_seqlens=torch.tensor([0, 4]), num_tokens_S=torch.tensor([5]), num_experts=9)
    ids[2] = 7
    assert batch.routed_experts_TLK[2] == 7


def test_a_float_mask_with_fractions_is_refused():
    with pytest.raises(TraceError, match="valid_T"):
        batch_of([2], [3], valid_T=[0.5, 1.0])


def test_counts_narrow_to_uint16_where_they_fit():
    small = RoutingDemand(tokens_SLE=np.full((1, 1, 2), 2, np.int64), length_S=[2], top_k=2)
    large = RoutingDemand(tokens_SLE=np.full((1, 1, 2), 70_000, np.int64), length_S=[70_000], top_k=2)
    assert (small.tokens_SLE.dtype, large.tokens_SLE.dtype) == (np.uint16, np.int32)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[[1, 1], [2, 2]]], "counts must agree"),
        ([[[1, 2], [2, 1]]], "multiple of top_k"),
        ([[[4, 4], [4, 4]]], "at most 6"),
        ([[[-1, 3], [1, 1]]], "counts from -1 to 3"),
    ],
)
def test_counts_that_lose_or_invent_rows_are_refused(counts, message):
    with pytest.raises(TraceError, match=message):
        RoutingDemand(tokens_SLE=counts, length_S=[3], top_k=2)


def test_the_digest_follows_counts_and_lengths():
    demand = RoutingDemand(tokens_SLE=[[[2, 0]], [[1, 1]]], length_S=[2, 2], top_k=1)
    longer = RoutingDemand(tokens_SLE=[[[2, 0]], [[1, 1]]], length_S=[3, 2], top_k=1)
    moved = RoutingDemand(tokens_SLE=[[[1, 1]], [[1, 1]]], length_S=[2, 2], top_k=1)
    assert len({demand.digest, longer.digest, moved.digest}) == 3


def test_more_rows_of_a_sequence_than_can_be_counted_are_refused():
    with pytest.raises(TraceError, match="sequence 1 has 2147483648 routed rows a layer; at most 2147483647"):
        RoutingDemand(tokens_SLE=[[[1, 0]], [[2**30, 2**30]]], length_S=[1, 2**31], top_k=1)


def test_more_experts_than_any_model_has_are_refused():
    with pytest.raises(TraceError, match="num_experts=1000000 must be at most 65536"):
        batch_of([1], [1], experts=10**6)
    with pytest.raises(TraceError, match="70000 experts; at most 65536"):
        RoutingDemand(tokens_SLE=np.zeros((1, 1, 70_000), np.uint16), length_S=[1], top_k=1)


def test_a_selection_of_a_demand_is_that_of_its_sequences_in_their_order():
    demand = RoutingDemand(
        tokens_SLE=np.array([[[2, 0]], [[1, 1]], [[0, 4]]], np.uint16), length_S=np.array([2, 3, 4]), top_k=1,
        group_S=np.array([7, 8, 9]), estimated_S=np.array([True, False, False]), name="window",
    )  # fmt: skip
    part = demand.select([2, 0])
    assert part.tokens_SLE.tolist() == [[[0, 4]], [[2, 0]]]
    assert part.length_S.tolist() == [4, 2]
    assert part.group_S.tolist() == [9, 7]
    assert part.estimated_S.tolist() == [False, True]
    assert part.modality_S is None
    assert part.name == "window"
