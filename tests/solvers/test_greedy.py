import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from routepack.solvers.greedy import fill_empty, first_fit, longest_first

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40).map(np.array)


@given(LENGTHS, st.booleans())
def test_first_fit_keeps_the_cap_and_opens_a_cell_only_when_none_has_room(length_S, tightest):
    cell_of_S, used = first_fit(length_S, 50, tightest=tightest)
    for s, cell in enumerate(cell_of_S):
        tokens_C = np.bincount(cell_of_S[:s], length_S[:s], used)
        room = np.flatnonzero((tokens_C + length_S[s] <= 50) & (tokens_C > 0))
        expected = room[0] if len(room) else np.count_nonzero(tokens_C)
        if tightest and len(room):
            expected = room[tokens_C[room].argmax()]
        assert cell == expected


def test_longest_first_goes_to_the_least_loaded_cell():
    assert longest_first(np.array([5, 4, 3, 3]), 2).tolist() == [0, 1, 1, 0]


def test_longest_first_marks_what_fits_nowhere():
    length_S = np.array([6, 6, 6])
    assert longest_first(length_S, 2, length_S=length_S, max_tokens=10).tolist() == [0, 1, -1]


@given(LENGTHS, st.integers(1, 20))
def test_filling_empty_cells_moves_only_into_them(length_S, extra):
    cell_of_S, used = first_fit(length_S, 50)
    filled = fill_empty(cell_of_S, length_S, used + extra)
    moved = filled != cell_of_S
    assert (filled[moved] >= used).all()
    assert np.bincount(filled, minlength=used + extra).max() >= 1
    assert len(set(filled.tolist())) == min(used + extra, len(length_S))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 9), st.integers(20, 60))
def test_longest_first_takes_the_cheapest_cell_with_room(lengths, num_cells, cap):
    costs = [(7 * length) % 11 + 1 for length in lengths]
    cost, tokens, expected = [0] * num_cells, [0] * num_cells, [-1] * len(lengths)
    for s in sorted(range(len(lengths)), key=lambda s: (-costs[s], s)):
        open_cells = [c for c in range(num_cells) if tokens[c] + lengths[s] <= cap]
        if open_cells:
            expected[s] = min(open_cells, key=lambda c: (cost[c], c))
            cost[expected[s]] += costs[s]
            tokens[expected[s]] += lengths[s]
    found = longest_first(np.array(costs), num_cells, length_S=np.array(lengths), max_tokens=cap)
    assert found.tolist() == expected
