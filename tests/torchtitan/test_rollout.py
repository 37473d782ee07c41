"""Sampling from the unsharded copy, compared with a full forward of the same model over the finished sequences."""

import numpy as np
import pytest
import torch

from routepack.core.errors import ConfigError
from routepack.torchtitan.model.models import TinyQwen3MoE, build_local_model
from routepack.torchtitan.model.overrides import recorded_routes, routes_of
from routepack.torchtitan.rl.sampling import LocalPolicy, random_numbers, sampled_tokens

MODEL = TinyQwen3MoE(vocab_size=12, dim=32, moe_hidden_dim=32, num_layers=3, num_experts=8, max_seq_len=40)
PROMPTS = [np.asarray(tokens) for tokens in ([3], [4, 5, 6], [7, 8], [3, 4, 5, 6, 7], [9, 9, 9], [10, 1])]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def policy():
    return LocalPolicy(MODEL, seed=1)


@pytest.fixture(scope="module")
def rollouts(policy):
    return policy.sample(PROMPTS, random_numbers(range(6), NEW_TOKENS, seed=[5]))


@pytest.fixture(scope="module")
def full_model():
    return build_local_model(MODEL, seed=1).eval()


def forward(model, token_ids):
    """Log-probabilities of tokens 1.. and sorted routes of the tokens fed in, by one forward without a cache."""
    tokens = torch.from_numpy(token_ids)[None]
    positions = torch.arange(tokens.shape[1] - 1)[None]
    with torch.no_grad(), recorded_routes(model):
        logits = model(tokens[:, :-1], positions, model.get_attention_masks(positions))[0]
        routes = routes_of(model)[0].sort(dim=-1).values
    return logits.log_softmax(dim=-1).gather(1, tokens[0, 1:, None])[:, 0].numpy(), routes.numpy()


def test_recorded_routes_are_those_of_a_full_forward(rollouts, full_model):
    for rollout in rollouts:
        _, routes = forward(full_model, rollout.token_ids)
        np.testing.assert_array_equal(rollout.routed_experts, routes)


def test_recorded_logprobs_are_those_of_a_full_forward(rollouts, full_model):
    for rollout in rollouts:
        logprobs, _ = forward(full_model, rollout.token_ids)
        sampled = rollout.logprobs[rollout.num_prompt_tokens :]
        np.testing.assert_allclose(sampled, logprobs[rollout.num_prompt_tokens - 1 :], atol=2e-6)


def test_prompt_tokens_have_no_logprob(rollouts):
    assert all((rollout.logprobs[: rollout.num_prompt_tokens] == 0).all() for rollout in rollouts)


def test_a_rollout_starts_with_its_prompt_and_has_a_row_for_every_token_fed_in(rollouts):
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        assert (rollout.token_ids[: len(prompt)] == prompt).all()
        assert rollout.routed_experts.shape == (len(rollout.token_ids) - 1, 3, 2)
        assert rollout.routed_experts.dtype == np.uint8


def test_a_response_ends_at_its_first_end_token_or_at_the_limit(rollouts):
    ended = [rollout.response[-1] == 0 for rollout in rollouts]
    assert any(ended), "no sequence of this fixture ends early: the test shows nothing"
    assert not all(ended), "no sequence of this fixture is cut off: the test shows nothing"
    for rollout, at_end in zip(rollouts, ended, strict=True):
        assert (rollout.response[:-1] != 0).all()
        assert at_end or len(rollout.response) == NEW_TOKENS


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_samples_do_not_depend_on_how_many_ranks_share_them(policy, rollouts, num_ranks):
    for rank in range(num_ranks):
        sequences = range(rank, len(PROMPTS), num_ranks)
        own = policy.sample([PROMPTS[s] for s in sequences], random_numbers(sequences, NEW_TOKENS, seed=[5]))
        for s, rollout in zip(sequences, own, strict=True):
            np.testing.assert_array_equal(rollout.token_ids, rollouts[s].token_ids)
            np.testing.assert_array_equal(rollout.routed_experts, rollouts[s].routed_experts)


def test_another_seed_gives_other_samples(policy, rollouts):
    others = policy.sample(PROMPTS, random_numbers(range(6), NEW_TOKENS, seed=[6]))
    pairs = zip(rollouts, others, strict=True)
    assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in pairs)


def test_loaded_weights_are_sampled_from(policy):
    other = build_local_model(MODEL, seed=9)
    loaded = LocalPolicy(MODEL, seed=1)
    loaded.load(dict(other.named_parameters()))
    rollout = loaded.sample(PROMPTS[:1], random_numbers([0], NEW_TOKENS, seed=[5]))[0]
    logprobs, _ = forward(other.eval(), rollout.token_ids)
    np.testing.assert_allclose(rollout.logprobs[1:], logprobs, atol=2e-6)


def test_temperature_zero_takes_the_likeliest_token(policy, full_model):
    rollout = policy.sample(PROMPTS[1:2], random_numbers([0], 5, seed=[0]), temperature=0.0)[0]
    positions = torch.arange(3)[None]
    with torch.no_grad():
        logits = full_model(torch.from_numpy(PROMPTS[1])[None], positions, full_model.get_attention_masks(positions))
    assert rollout.response[0] == int(logits[0, -1].argmax())


def test_tokens_are_drawn_with_their_probabilities():
    probabilities = torch.tensor([0.1, 0.0, 0.6, 0.3])
    random_S = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    tokens_S = sampled_tokens(probabilities.log().expand(10_000, 4), random_S, 1.0)
    shares = torch.bincount(tokens_S, minlength=4) / 10_000
    torch.testing.assert_close(shares, probabilities, atol=2e-3, rtol=0)
    assert shares[1] == 0


def test_more_tokens_than_the_model_has_positions_are_refused(policy):
    with pytest.raises(ConfigError, match=r"max_new_tokens=50 .* model.max_seq_len=40"):
        policy.sample(PROMPTS, random_numbers(range(6), 50, seed=[0]))


def test_nothing_to_sample_is_nothing(policy):
    assert policy.sample([], np.zeros((0, 4))) == []
