"""Exporting to a stack's form and importing again gives the same valid ids."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.traces import formats
from routepack.traces.formats import ImportOptions, ModelRouting

EXPORTS = [
    ("vllm", {}), ("sglang", {}), ("verl", {}), ("verl", {"dense": True}), ("slime", {}), ("miles", {}), ("nemo-rl", {}),
    ("nemo-rl", {"messages": True}), ("prime-rl", {}), ("verifiers", {}), ("areal", {}), ("skyrl", {}),
    ("skyrl", {"packed": True}),
    ("megatron", {}), ("arrays", {}), ("arrays", {"records": True}),
]  # fmt: skip
NO_HOLES = ("slime", "megatron")
"""Stacks that have no way to say that a row was not recorded."""


@st.composite
def batches(draw, holes=True, empty=True):
    experts = draw(st.sampled_from([5, 64, 128, 256, 257, 32_769]))
    layers, top_k = draw(st.integers(3, 5)), draw(st.integers(2, 3))
    tokens = draw(st.lists(st.integers(2, 9), min_size=1, max_size=5))
    missing = draw(st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = np.asarray(tokens) - missing
    # Some sequences have no routes at all; not the first, since a window without any is refused.
    rows[1:] *= np.asarray(draw(st.lists(st.integers(int(not empty), 1), min_size=len(tokens), max_size=len(tokens))))[1:]
    # Distinct in a row and never 0, 1, ..: what a form means by filler must not come up by chance.
    ids = (rng.integers(2, experts - 1, (rows.sum(), layers, 1)) + np.arange(top_k)) % experts
    valid = rng.random(rows.sum()) < 0.8 if holes and draw(st.booleans()) else None
    if valid is not None:
        valid[0] = True
    return RolloutBatch(
        routed_experts_TLK=ids.astype(np.int32), cu_seqlens=np.concatenate([[0], np.cumsum(rows)]), num_tokens_S=tokens,
        num_experts=experts, valid_T=valid, token_fields={"token_ids": np.arange(sum(tokens))},
    )  # fmt: skip


def valid_rows(batch, last=False):
    """(sequence, row) to ids of what counts, the last token's row aside: not every form has a place for it."""
    rows = {}
    for s in range(batch.num_sequences):
        first, end = batch.cu_seqlens[s : s + 2]
        for row in range(min(end - first, batch.num_tokens_S[s] - (not last))):
            if batch.valid_T is None or batch.valid_T[first + row]:
                rows[s, row] = batch.routed_experts_TLK[first + row].tolist()
    return rows


@pytest.mark.parametrize(("stack", "form"), EXPORTS, ids=str)
@given(st.data())
def test_what_is_exported_comes_back(stack, form, data):
    batch = data.draw(batches(holes=stack not in NO_HOLES, empty=stack != "megatron"))
    module = formats.stack_module(stack)
    model = ModelRouting(
        num_experts=batch.num_experts, top_k=batch.top_k, num_layers=batch.num_layers, moe_layers=range(batch.num_layers)
    )
    back = module.load(module.export(batch, **form), model, options=ImportOptions(max_missing_share=1.0)).batch
    # Megatron's lines know rows, not tokens.
    assert valid_rows(back, last=stack == "megatron") == valid_rows(batch, last=stack == "megatron")
    if stack != "megatron":
        assert back.num_tokens_S.tolist() == batch.num_tokens_S.tolist()


@pytest.mark.parametrize("stack", NO_HOLES)
def test_a_hole_that_a_form_cannot_say_is_an_error(stack):
    ids = np.tile(np.array([2, 3]), (4, 3, 1))
    batch = RolloutBatch(
        routed_experts_TLK=ids, cu_seqlens=[0, 4], num_tokens_S=[5], num_experts=8, valid_T=[True, False, True, True]
    )
    with pytest.raises(TraceError, match="sequence 0, row 1 was not recorded, which this form cannot say"):
        formats.stack_module(stack).export(batch)


def test_fields_travel_with_the_routes():
    from routepack.testing import synthetic_batch

    batch = synthetic_batch(num_sequences=6, max_length=20)
    back = formats.load("prime-rl", formats.stack_module("prime-rl").export(batch), ModelRouting(num_experts=16)).batch
    for name in ("token_ids", "loss_mask", "logprobs", "advantages"):
        np.testing.assert_array_equal(back.token_fields[name], batch.token_fields[name])
    np.testing.assert_allclose(back.sequence_fields["rewards"], batch.sequence_fields["rewards"])
    assert back.group_S.tolist() == batch.group_S.tolist()
