import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from routepack.microbatches.truncate import truncate
from routepack.testing import synthetic_batch


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
