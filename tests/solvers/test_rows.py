import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from routepack.solvers.rows import certify_rows, l2_bound


def fewest_bins(lengths, cap):
    """By trying every assignment."""
    for bins in range(1, len(lengths) + 1):
        for cells in itertools.product(range(bins), repeat=len(lengths)):
            if np.bincount(cells, lengths, bins).max() <= cap:
                return bins
    raise AssertionError


@given(st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_l2_never_exceeds_the_fewest_bins(lengths):
    assert l2_bound(np.array(lengths), 10) <= fewest_bins(lengths, 10)


def test_l2_sees_that_sequences_over_half_the_cap_need_a_cell_each():
    # Total / cap is 7; a public packer trusted that and overfilled its cells (verl issue 7553).
    assert l2_bound(np.array([7] * 8), 8) == 8


def test_l2_counts_what_does_not_fit_beside_large_sequences():
    assert l2_bound(np.array([6, 6, 3, 3, 3]), 8) == 4


@given(st.lists(st.integers(1, 100), min_size=4, max_size=60), st.integers(1, 4), st.integers(100, 200))
def test_certified_rows_come_with_a_legal_packing(lengths, ranks, cap):
    length_S = np.array(lengths)
    certificate, cell_of_S = certify_rows(length_S, cap, ranks)
    num_cells = certificate.num_microbatches * ranks
    assert certificate.lower_bound <= certificate.num_microbatches
    assert np.bincount(cell_of_S, length_S, num_cells).max() <= cap
    if num_cells <= len(length_S):
        assert np.bincount(cell_of_S, minlength=num_cells).min() >= 1


def test_rows_are_certified_on_a_realistic_window():
    length_S = np.random.default_rng(0).lognormal(6, 1, 4000).clip(10, 8192).astype(int)
    assert certify_rows(length_S, 8192, 16)[0].certified
