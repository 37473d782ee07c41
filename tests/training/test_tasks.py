import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.core.errors import ConfigError
from routepack.training.tasks import CountingTask

TASK = CountingTask(alphabet_sizes=[4, 16, 64], max_answer_symbols=60, exact_share=0.25)
END = TASK.end_token_id


def prompt_of(length):
    return next(prompt for seed in range(1000) for prompt in TASK.prompts(20, seed=[seed]) if len(prompt.answer) == length + 1)


def test_the_right_answer_earns_everything():
    for prompt in TASK.prompts(50, seed=[1]):
        assert TASK.grade(prompt, prompt.answer).reward == 1.0


def test_an_answer_runs_from_the_first_symbol_to_the_last_of_its_prompt():
    for prompt in TASK.prompts(50, seed=[2]):
        symbols = prompt.answer[:-1]
        assert symbols[0] == prompt.token_ids[1]
        assert symbols[-1] == prompt.token_ids[2]
        assert (np.diff(symbols) == 1).all()
        assert prompt.answer[-1] == END


@given(st.integers(2, 60), st.data())
def test_the_reward_is_the_share_before_the_first_mistake(length, data):
    prompt = prompt_of(length)
    mistake = data.draw(st.integers(0, length))
    response = prompt.answer.copy()
    response[mistake] = TASK.COLON
    grade = TASK.grade(prompt, response)
    assert grade.reward == pytest.approx(0.75 * mistake / (length + 1))
    assert grade.num_judged == mistake + 1


def test_stopping_early_earns_what_came_before():
    prompt = prompt_of(7)
    assert TASK.grade(prompt, np.append(prompt.answer[:3], END)).reward == pytest.approx(0.75 * 3 / 8)


def test_not_stopping_costs_the_end_token_and_the_whole():
    prompt = prompt_of(7)
    response = np.append(prompt.answer[:-1], [5, 6])
    assert TASK.grade(prompt, response).reward == pytest.approx(0.75 * 7 / 8)


def test_a_response_that_was_cut_off_is_judged_to_its_end():
    prompt = prompt_of(7)
    grade = TASK.grade(prompt, prompt.answer[:4])
    assert grade.reward == pytest.approx(0.75 * 4 / 8)
    assert grade.num_judged == 4


def test_what_follows_the_first_mistake_changes_nothing():
    prompt = prompt_of(9)
    response = prompt.answer.copy()
    response[4] = TASK.COUNT
    changed = response.copy()
    changed[5:] = TASK.COLON
    assert TASK.grade(prompt, response) == TASK.grade(prompt, changed)


def test_same_seed_same_prompts_and_another_seed_others():
    tokens = [[prompt.token_ids.tolist() for prompt in TASK.prompts(20, seed=seed)] for seed in ([3, 1], [3, 1], [3, 2])]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


def test_lengths_are_stratified_from_one_to_the_longest():
    lengths = np.asarray([len(prompt.answer) - 1 for prompt in TASK.prompts(40, seed=[0])])
    assert (np.diff(lengths) >= 0).all()
    assert lengths[0] == 1
    assert lengths[-1] > 50
    assert 5 <= np.median(lengths) <= 10


def test_tokens_stay_below_the_vocabulary_and_prompts_below_their_limit():
    for prompt in TASK.prompts(200, seed=[4]):
        assert max(prompt.token_ids.max(), prompt.answer.max()) < TASK.vocab_size
        assert len(prompt.token_ids) <= TASK.max_prompt_tokens


def careless(probability):
    return CountingTask(alphabet_sizes=[64], max_answer_symbols=40, stutter_probability=probability)


def test_demonstrations_stutter_as_often_as_asked():
    task, rng = careless(0.1), np.random.default_rng(0)
    prompt = max(task.prompts(40, seed=[0]), key=lambda prompt: len(prompt.answer))
    demonstrations = [task.demonstration(prompt, rng) for _ in range(2000)]
    extra = np.asarray([len(demonstration) - len(prompt.answer) for demonstration in demonstrations])
    assert extra.mean() == pytest.approx(0.1 * (len(prompt.answer) - 1), rel=0.05)
    assert extra.max() == task.MAX_STUTTERS
    assert max(map(len, demonstrations)) <= task.max_answer_tokens


def test_a_stuttering_demonstration_is_the_answer_with_symbols_repeated():
    task = careless(0.3)
    for prompt in task.prompts(40, seed=[0]):
        demonstration = task.demonstration(prompt, np.random.default_rng(0))
        assert (np.unique(demonstration[:-1]) == prompt.answer[:-1]).all()
        assert set(np.diff(demonstration[:-1])) <= {0, 1}
        assert demonstration[-1] == END


def test_a_careful_demonstration_is_the_answer():
    for prompt in careless(0.0).prompts(20, seed=[0]):
        assert (careless(0.0).demonstration(prompt, np.random.default_rng(0)) == prompt.answer).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alphabet_sizes": []}, "alphabet_sizes"),
        ({"alphabet_sizes": [4], "max_answer_symbols": 5}, "max_answer_symbols=5"),
        ({"alphabet_sizes": [4], "max_answer_symbols": 4, "stutter_probability": 1.5}, "stutter_probability=1.5"),
    ],
)
def test_impossible_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        CountingTask(**options)
