import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.torchtitan.rl.rollout_windows import demonstration_window, even_demand, graded_window, group_advantages
from routepack.training.rollout import Rollout
from routepack.training.tasks import CountingTask

TASK = CountingTask(alphabet_sizes=[16], max_answer_symbols=12, exact_share=0.0, stutter_probability=0.3)


def test_advantages_are_standardized_within_their_group_by_hand():
    advantages = group_advantages(np.asarray([1.0, 0.2, 0.6, 0.5, 0.5, 0.8]), np.asarray([7, 7, 7, 2, 2, 2]), epsilon=0.0)
    first = np.asarray([1.0, 0.2, 0.6])
    second = np.asarray([0.5, 0.5, 0.8])
    np.testing.assert_allclose(advantages[:3], (first - 0.6) / first.std(), atol=1e-12)
    np.testing.assert_allclose(advantages[3:], (second - 0.6) / second.std(), atol=1e-12)


@given(st.lists(st.floats(0, 1), min_size=4, max_size=24), st.integers(1, 4))
def test_advantages_of_a_group_add_up_to_zero_and_follow_the_rewards(rewards, num_groups):
    rewards_S = np.asarray(rewards)
    group_S = np.arange(len(rewards_S)) % num_groups
    advantages_S = group_advantages(rewards_S, group_S, epsilon=1e-4)
    for group in range(num_groups):
        own = advantages_S[group_S == group]
        assert abs(own.sum()) < 1e-6
        assert (np.diff(own[np.argsort(rewards_S[group_S == group], kind="stable")]) >= 0).all()


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_equal_rewards_teach_nothing_even_without_epsilon(reward):
    assert (group_advantages(np.full(3, reward), np.zeros(3, int), epsilon=0.0) == 0).all()


def test_epsilon_tempers_tiny_differences():
    advantages = group_advantages(np.asarray([0.5, 0.5001]), np.zeros(2, int), epsilon=1.0)
    assert np.abs(advantages).max() < 1e-4


def rollout_of(prompt, response):
    tokens = np.concatenate([prompt.token_ids, response])
    return Rollout(
        token_ids=tokens,
        num_prompt_tokens=len(prompt.token_ids),
        logprobs=np.zeros(len(tokens), np.float32),
        routed_experts=np.tile(np.asarray([0, 1], np.uint8), (len(tokens) - 1, 2, 1)),
    )


@pytest.fixture(scope="module")
def window():
    prompts = TASK.prompts(2, seed=[0])
    right, wrong = prompts[1].answer, prompts[1].answer.copy()
    wrong[1] = TASK.COLON
    rollouts = [rollout_of(prompts[0], np.asarray([0])), rollout_of(prompts[0], prompts[0].answer)]
    rollouts += [rollout_of(prompts[1], right), rollout_of(prompts[1], wrong)]
    batch = graded_window(rollouts, prompts, TASK, num_experts=4, layer_ids=[0, 1], advantage_epsilon=0.0)
    return batch, rollouts


def test_rollouts_are_graded_against_their_own_prompt(window):
    batch, rollouts = window
    length = len(rollouts[2].response)
    np.testing.assert_allclose(batch.sequence_fields["rewards"], [0.0, 1.0, 1.0, 1 / length], atol=1e-7)
    assert batch.group_S.tolist() == [0, 0, 1, 1]


def test_every_token_carries_its_sequences_advantage(window):
    batch, _ = window
    for s, expected in enumerate([-1, 1, 1, -1]):
        own = batch.token_fields["advantages"][batch.cu_tokens[s] : batch.cu_tokens[s + 1]]
        np.testing.assert_allclose(own, expected, atol=1e-6)


def test_trained_are_the_response_tokens_up_to_the_first_mistake(window):
    batch, rollouts = window
    masks = np.split(batch.token_fields["loss_mask"], batch.cu_tokens[1:-1])
    prompt = rollouts[2].num_prompt_tokens
    assert masks[2].tolist() == [False] * prompt + [True] * len(rollouts[2].response)
    assert np.flatnonzero(masks[3]).tolist() == [prompt, prompt + 1]


def test_demonstrations_train_their_whole_response_and_record_no_route():
    prompts = TASK.prompts(6, seed=[1])
    batch = demonstration_window(prompts, TASK, num_experts=4, layer_ids=[0, 1, 2], top_k=2, seed=[2])
    assert len(batch.routed_experts_TLK) == 0
    assert batch.token_fields["loss_mask"].sum() == batch.num_tokens_S.sum() - sum(len(p.token_ids) for p in prompts)
    assert (batch.token_fields["token_ids"][batch.cu_tokens[1:] - 1] == TASK.end_token_id).all()


def test_even_demand_is_even_to_within_a_row():
    batch = demonstration_window(TASK.prompts(9, seed=[3]), TASK, num_experts=5, layer_ids=[0, 1], top_k=2, seed=[2])
    demand = even_demand(batch)
    assert (demand.tokens_SLE.sum(axis=2) == 2 * batch.num_tokens_S[:, None]).all()
    assert np.ptp(demand.tokens_LE, axis=1).max() <= 1
