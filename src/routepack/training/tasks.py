"""Tasks whose answers a program can grade: prompts, demonstrations and rewards between 0 and 1."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from routepack.core.component import Component, Count, Share
from routepack.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """What the policy is asked, and the answer it should give."""

    token_ids: np.ndarray
    """int64 [prompt tokens]."""
    answer: np.ndarray
    """int64 [answer tokens]: the right answer, its end token included."""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """What a response is worth."""

    reward: float
    """0 to 1."""
    num_judged: int
    """The first response tokens that the reward depends on; those after them changed nothing and need no training."""


@dataclass(frozen=True, kw_only=True)
class Task(Component):
    """A source of prompts that grades what comes back. Token 0 ends a response."""

    section: ClassVar[str] = "task"
    end_token_id = 0

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens that prompts and answers are made of."""

    @property
    @abstractmethod
    def max_prompt_tokens(self) -> int:
        """No prompt is longer."""

    @property
    @abstractmethod
    def max_answer_tokens(self) -> int:
        """No answer and no demonstration is longer, end token included."""

    @abstractmethod
    def prompts(self, num_prompts: int, *, seed: Sequence[int]) -> list[Prompt]:
        """Draw prompts; one *seed* always gives the same ones."""

    @abstractmethod
    def demonstration(self, prompt: Prompt, rng: np.random.Generator) -> np.ndarray:
        """int64: a response for the supervised warm-up to imitate, its end token included; need not be a good one."""

    @abstractmethod
    def grade(self, prompt: Prompt, response: np.ndarray) -> Grade:
        """Grade *response*, int64 tokens after the prompt, with an end token unless it was cut off."""


@dataclass(frozen=True, kw_only=True)
class CountingTask(Task):
    """Count from one symbol to another in one of several alphabets, then stop: ``COUNT c g :`` asks for ``c d e f g END``.

    Answers are log-uniform in length, from one symbol to a hundred, and each alphabet has symbols of its own, so
    sequences are very unequal and experts specialise. Part of the reward is the share of the answer, end token included,
    that is right before the first mistake; the rest needs the whole answer, so that stopping in time pays in long counts too.

    >>> task = CountingTask(alphabet_sizes=(5,), max_answer_symbols=5)
    >>> prompt = Prompt(token_ids=np.asarray([1, 4, 6, 2]), answer=np.asarray([4, 5, 6, 0]))
    >>> task.grade(prompt, np.asarray([4, 5, 7, 0]))
    Grade(reward=0.25, num_judged=3)
    >>> task.grade(prompt, np.asarray([4, 5, 6, 0]))
    Grade(reward=1.0, num_judged=4)
    """

    COUNT = 1
    COLON = 2
    FIRST_SYMBOL = 3
    MAX_STUTTERS = 8

    alphabet_sizes: tuple[Count, ...]
    """Symbols of each alphabet."""
    max_answer_symbols: Count = 96
    """The longest count."""
    exact_share: Share = 0.5
    """The part of the reward that only the whole answer earns."""
    stutter_probability: Share = 0.08
    """Demonstrations are careless: they say a symbol twice with this probability, but at most ``MAX_STUTTERS`` times."""

    def check_options(self) -> None:
        """Raise ConfigError where no alphabet is large enough for the longest count."""
        if self.max_answer_symbols > max(self.alphabet_sizes, default=0):
            raise ConfigError(
                f"task.max_answer_symbols={self.max_answer_symbols} is more than the largest of "
                f"task.alphabet_sizes={list(self.alphabet_sizes)}: lower it, or give a larger alphabet."
            )

    @property
    def vocab_size(self) -> int:
        """End, count, colon and the symbols of all alphabets."""
        return self.FIRST_SYMBOL + sum(self.alphabet_sizes)

    @property
    def max_prompt_tokens(self) -> int:
        """``COUNT first last :``."""
        return 4

    @property
    def max_answer_tokens(self) -> int:
        """A stuttered longest count and its end token."""
        return self.max_answer_symbols + self.MAX_STUTTERS + 1

    def prompts(self, num_prompts: int, *, seed: Sequence[int]) -> list[Prompt]:
        """Stratified in length: one prompt from each of *num_prompts* equal shares of the log-uniform distribution.

        So mean rewards of different draws compare.
        """
        rng = np.random.default_rng(list(seed))
        quantiles = (np.arange(num_prompts) + rng.random(num_prompts)) / num_prompts
        lengths = np.minimum((self.max_answer_symbols + 1) ** quantiles, self.max_answer_symbols).astype(int)
        return [self._prompt(int(length), rng) for length in lengths]

    def demonstration(self, prompt: Prompt, rng: np.random.Generator) -> np.ndarray:
        """The answer, with symbols said twice here and there."""
        symbols = prompt.answer[:-1]
        stutters = rng.random(len(symbols)) < self.stutter_probability
        stutters &= np.cumsum(stutters) <= self.MAX_STUTTERS
        return np.append(np.repeat(symbols, 1 + stutters), self.end_token_id)

    def grade(self, prompt: Prompt, response: np.ndarray) -> Grade:
        """By the share of the answer before the first mistake; judged up to and including that mistake."""
        compared = min(len(prompt.answer), len(response))
        wrong = np.flatnonzero(prompt.answer[:compared] != response[:compared])
        num_right = int(wrong[0]) if len(wrong) else compared
        graded = num_right / len(prompt.answer)
        reward = (1.0 - self.exact_share) * graded + self.exact_share * (num_right == len(prompt.answer))
        return Grade(reward=reward, num_judged=min(num_right + 1, len(response)))

    def _prompt(self, length: int, rng: np.random.Generator) -> Prompt:
        # Half of the counts use the smallest alphabet that holds them, so that small alphabets are not left to short counts.
        starts = self.FIRST_SYMBOL + np.concatenate([[0], np.cumsum(self.alphabet_sizes)])
        fitting = [index for index, size in enumerate(self.alphabet_sizes) if size >= length]
        smallest = min(fitting, key=lambda index: self.alphabet_sizes[index])
        alphabet = smallest if rng.random() < 0.5 else int(rng.choice(fitting))
        first = int(starts[alphabet] + rng.integers(self.alphabet_sizes[alphabet] - length + 1))
        symbols = np.arange(first, first + length)
        return Prompt(
            token_ids=np.asarray([self.COUNT, symbols[0], symbols[-1], self.COLON]),
            answer=np.append(symbols, self.end_token_id),
        )
