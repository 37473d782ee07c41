import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.solvers.differencing import largest_differencing


def sums(costs, parts, **options):
    return sorted(np.bincount(largest_differencing(np.array(costs), parts, **options), costs, parts).tolist())


@pytest.mark.parametrize(
    ("costs", "parts", "expected"),
    [
        # Karmarkar and Karp's own kind of example: 8 7 6 5 4 ends two apart, though 15 and 15 is possible.
        ([8, 7, 6, 5, 4], 2, [14, 16]),
        ([8, 7, 6, 5, 4], 3, [8, 11, 11]),
        ([4, 5, 6, 7, 8, 9], 2, [19, 20]),
        ([5, 5, 4, 3, 3], 2, [9, 11]),
        ([3], 4, [0, 0, 0, 3]),
        ([6, 1], 1, [7]),
    ],
)
def test_known_examples(costs, parts, expected):
    assert sums(costs, parts) == expected


def plainly(costs, parts, run):
    """The method as it is told: lists of parts, the two of the largest spread joined crosswise."""
    order = sorted(range(len(costs)), key=lambda s: (-costs[s], s))
    partials = []
    for first in range(0, len(order), run):
        held = sorted((costs[s] for s in order[first : first + run]), reverse=True)
        partials.append((len(partials), held + [0] * (parts - len(held))))
    turn = len(partials)
    while len(partials) > 1:
        partials.sort(key=lambda partial: (partial[1][-1] - partial[1][0], partial[0]))
        (_, one), (_, other) = partials[:2]
        joined = sorted((a + b for a, b in zip(one, reversed(other), strict=True)), reverse=True)
        partials = [*partials[2:], (turn, joined)]
        turn += 1
    return sorted(partials[0][1])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 7), st.booleans())
def test_sums_equal_those_of_the_plainest_implementation(costs, parts, equal):
    assert sums(costs, parts, equal_counts=equal) == plainly(costs, parts, parts if equal else 1)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 9))
def test_equal_counts_differ_by_at_most_one(costs, parts):
    counts = np.bincount(largest_differencing(np.array(costs), parts, equal_counts=True), minlength=parts)
    assert counts.max() - counts.min() <= 1


def test_differencing_beats_dealing_longest_first_by_far_on_many_even_numbers():
    costs = np.random.default_rng(0).uniform(0.5, 1.0, 400)
    from routepack.solvers.greedy import longest_first

    spread = {
        name: np.ptp(np.bincount(part_of_S, costs, 4))
        for name, part_of_S in (("kk", largest_differencing(costs, 4)), ("lpt", longest_first(costs, 4)))
    }
    assert spread["kk"] < spread["lpt"] / 10
