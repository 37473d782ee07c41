import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from routepack.solvers.equal_counts import dealt_equally, equalized
from routepack.solvers.greedy import fill_empty, first_fit


def legal(cell_of_S, length_S, cap, num_cells):
    return np.bincount(cell_of_S, length_S).max() <= cap and np.bincount(cell_of_S, minlength=num_cells).min() > 0


@given(st.integers(0, 2**32), st.sampled_from([2, 3, 4]), st.integers(1, 3))
def test_a_legal_packing_stays_legal_and_becomes_equal(seed, ranks, rows):
    rng = np.random.default_rng(seed)
    length_S = rng.integers(1, 30, ranks * int(rng.integers(rows, 8)))
    cell_of_S, used = first_fit(length_S, 60, order_S=np.argsort(-length_S, kind="stable"))
    rows = max(rows, -(-used // ranks))
    if rows * ranks > len(length_S):
        return
    before = fill_empty(cell_of_S, length_S, rows * ranks)
    after = equalized(before, length_S, max_tokens=60, num_ranks=ranks, skew=0)
    if after is None:
        # Only where even dealing anew does not fit.
        assert dealt_equally(length_S, max_tokens=60, num_ranks=ranks, rows=rows, skew=0) is None
        return
    assert legal(after, length_S, 60, rows * ranks)
    assert np.ptp(np.bincount(after % ranks, minlength=ranks)) == 0


def test_an_equal_packing_is_left_as_it_is():
    cell_of_S = np.array([0, 1, 2, 3, 0, 1])
    assert equalized(cell_of_S, np.full(6, 5), max_tokens=10, num_ranks=2, skew=0).tolist() == cell_of_S.tolist()


def test_full_cells_change_places_where_nothing_can_move():
    # Rank 0 holds two cells of two, rank 1 two cells of one, all full: only whole cells can change places.
    cell_of_S = np.array([0, 0, 2, 2, 1, 3])
    after = equalized(cell_of_S, np.array([5, 5, 5, 5, 10, 10]), max_tokens=10, num_ranks=2, skew=0)
    assert sorted(np.bincount(after % 2).tolist()) == [3, 3]


def test_what_cannot_be_dealt_equally_is_none():
    assert equalized(np.array([0, 0, 0, 1]), np.array([1, 1, 1, 10]), max_tokens=10, num_ranks=2, skew=0) is None


def test_extra_sequences_are_dealt_within_the_skew():
    after = dealt_equally(np.arange(1, 8), max_tokens=20, num_ranks=3, rows=1, skew=1)
    assert sorted(np.bincount(after % 3).tolist()) == [2, 2, 3]
    assert dealt_equally(np.arange(1, 8), max_tokens=20, num_ranks=3, rows=1, skew=0) is None
