from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.microbatches.materialize import NO_TARGET, microbatch_of
from routepack.microbatches.trained_tokens import count_trained, trained_mask
from routepack.testing import synthetic_batch

BATCH = synthetic_batch(num_sequences=6, max_length=12)
N = int(BATCH.num_tokens_S.sum())


def masked(mask_N):
    return replace(BATCH, token_fields=BATCH.token_fields | {"loss_mask": mask_N})


@given(st.lists(st.booleans(), min_size=N, max_size=N), st.sets(st.integers(0, 5)))
def test_what_is_counted_is_what_the_microbatches_carry(mask, sequences):
    """The loss sums over the mask at the targets, and is divided by the count."""
    batch, sequences = masked(np.array(mask)), np.array(sorted(sequences), dtype=np.int64)
    microbatch = microbatch_of(batch, sequences)
    assert count_trained(batch, sequences) == microbatch.fields["loss_mask"].sum()
    trained_n = microbatch.target_index_n[microbatch.fields["loss_mask"]]
    assert sorted(trained_n) == [i for s in sequences for i in np.flatnonzero(trained_mask(batch)) if s == sequence_of(i)]
    assert NO_TARGET not in trained_n


def sequence_of(token):
    return np.searchsorted(BATCH.cu_tokens, token, side="right") - 1


def test_first_tokens_are_never_trained_and_without_a_mask_all_others_are():
    fields = {name: value for name, value in BATCH.token_fields.items() if name != "loss_mask"}
    for batch in (replace(BATCH, token_fields=fields), masked(np.ones(N, np.int8))):
        assert np.array_equal(np.flatnonzero(~trained_mask(batch)), BATCH.cu_tokens[:-1])
        assert count_trained(batch) == N - 6


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float32])
def test_the_recorded_mask_is_left_as_it_is(dtype):
    mask_N = np.ones(N, dtype)
    trained_mask(masked(mask_N))
    assert mask_N.all()
