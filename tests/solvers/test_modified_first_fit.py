import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from routepack.solvers.fewest_microbatches import certify_rows
from routepack.solvers.greedy import first_fit
from routepack.solvers.modified_first_fit import modified_first_fit


def first_fit_decreasing(length_S, cap):
    return first_fit(length_S, cap, order_S=np.argsort(-length_S, kind="stable"))[1]


# Lengths that FFD packs badly: a little over a half, a quarter or a sixth of the cap, and what fits beside them.
awkward = st.sampled_from([(51, 27, 26, 23), (52, 29, 19, 15), (61, 39, 31, 21, 17), (34, 33, 51, 16)]).flatmap(
    lambda values: st.lists(st.sampled_from(values), min_size=1, max_size=24)
)


@given(st.one_of(awkward, st.lists(st.integers(1, 100), min_size=1, max_size=24)))
def test_bins_stay_within_71_60_of_the_fewest_and_one(lengths):
    length_S = np.array(lengths)
    cell_of_S, used = modified_first_fit(length_S, 100)
    assert np.bincount(cell_of_S, length_S, used).max() <= 100
    certificate, _ = certify_rows(length_S, 100, 1)
    assert certificate.certified
    assert used <= 71 / 60 * certificate.num_microbatches + 1


def test_first_fit_s_worst_case_takes_fewer_bins():
    # Johnson and Garey's worst case for FFD, 11/9: 6n of 1/2 + e, 6n of 1/4 + 2e, 6n of 1/4 + e, 12n of 1/4 - 2e.
    length_S = np.array([505] * 6 + [260] * 6 + [255] * 6 + [240] * 12)
    assert first_fit_decreasing(length_S, 1000) == 11
    assert modified_first_fit(length_S, 1000)[1] == 10


def test_small_sequences_go_in_pairs_beside_large_ones():
    # By hand: 31 leaves 29 of 60 free; 12 and 11 are small, and the longest that fits beside 11 is 17.
    cell_of_S, used = modified_first_fit(np.array([31, 11, 12, 17, 19]), 60)
    assert used == 2
    assert cell_of_S.tolist() == [0, 0, 1, 0, 1]
