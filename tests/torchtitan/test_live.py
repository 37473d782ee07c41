"""Live collection on a TorchTitan model, against the routers that record themselves."""

import numpy as np
import pytest
import torch

from routepack.integrations.live import LiveRoutes
from routepack.torchtitan.model.models import TinyQwen3MoE, build_local_model
from routepack.torchtitan.model.overrides import ReplayRouter, recorded_routes, routes_of
from routepack.torchtitan.rl.sampling import LocalPolicy, random_numbers

TINY = TinyQwen3MoE(vocab_size=12, dim=32, moe_hidden_dim=32, num_layers=3, num_experts=8, max_seq_len=40)
LENGTHS = [7, 1, 12]


@pytest.fixture(scope="module")
def model():
    return build_local_model(TINY, seed=3)


def live_of(model):
    return LiveRoutes(model, ReplayRouter, num_experts=8, top_k=2)


@pytest.mark.parametrize("padding", [0, 4])
def test_routes_of_a_packed_microbatch_are_those_that_the_routers_recorded(model, padding):
    lengths = [*LENGTHS, padding] if padding else LENGTHS
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, TINY.vocab_size, (1, sum(lengths))))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad(), recorded_routes(model), live_of(model) as live:
        with live.microbatch(LENGTHS, sequences=[2, 0, 1]):
            model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
        expected = np.split(routes_of(model)[0, : sum(LENGTHS)].numpy(), np.cumsum(LENGTHS)[:-1])
        batch = live.batch(num_tokens_S=[1 + 1, 12, 7])
    for sequence, rows in zip([2, 0, 1], expected, strict=True):
        np.testing.assert_array_equal(batch.routed_experts_of(sequence), rows)
    assert batch.layer_ids_L.tolist() == [0, 1, 2]


def test_routes_of_sampling_are_those_of_the_rollout():
    """The policy feeds one token at a time, and its cache the rest."""
    policy = LocalPolicy(TINY, seed=1)
    forward = policy._model.forward
    with live_of(policy._model) as live:

        def watched(tokens, *args, **kwargs):
            with live.microbatch([tokens.shape[1]] * len(tokens)):
                return forward(tokens, *args, **kwargs)

        policy._model.forward = watched
        rollout = policy.sample([np.asarray([3, 4, 5])], random_numbers([0], 8, seed=[5]))[0]
        batch = live.batch(num_tokens_S=[len(rollout.token_ids)])
    assert len(batch.routed_experts_TLK) > 3
    np.testing.assert_array_equal(np.sort(batch.routed_experts_TLK), rollout.routed_experts)
