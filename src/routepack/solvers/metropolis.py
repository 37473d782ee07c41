"""What every annealing kernel draws: random numbers, and the largest change that Metropolis accepts."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, inline="always")
def random_bits(state):
    """xorshift64*: 32 random bits as a whole number; *state*, uint64 [1], goes on to the next."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(32))


@njit(nogil=True, cache=True, inline="always")
def below(state, bound):
    """A random whole number in 0 .. bound - 1."""
    return (random_bits(state) * bound) >> 32


@njit(nogil=True, cache=True, inline="always")
def most_accepted(temperature, state):
    """The largest change of the energy that Metropolis accepts this time: it is drawn before the change is found."""
    return -temperature * np.log((random_bits(state) + 0.5) / 4294967296.0)
