import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.solvers.population import canonical_cells, effective_size, systematic_parents

WEIGHTS = st.lists(st.floats(-20, 0), min_size=2, max_size=12).map(np.array)


@given(WEIGHTS, st.floats(0, 0.999))
def test_every_chain_is_copied_its_share_rounded_up_or_down(log_weight_P, offset):
    copies = np.bincount(systematic_parents(log_weight_P, offset), minlength=len(log_weight_P))
    share = np.exp(log_weight_P) / np.exp(log_weight_P).sum() * len(log_weight_P)
    assert copies.sum() == len(log_weight_P)
    assert (np.abs(copies - share) < 1 + 1e-9).all()


def test_effective_size_counts_the_chains_that_have_weight():
    assert effective_size(np.zeros(5)) == pytest.approx(5)
    assert effective_size(np.array([0.0, 0.0, -np.inf])) == pytest.approx(2)


@given(st.integers(0, 2**32))
def test_renumbered_units_and_cells_are_the_same_packing(seed):
    rng = np.random.default_rng(seed)
    cell_of_S = rng.permutation(np.concatenate([np.arange(6), rng.integers(0, 6, 6)]))
    renumbered = np.concatenate([2 * unit + rng.permutation(2) for unit in rng.permutation(3)])[cell_of_S]
    assert (canonical_cells(cell_of_S, 2) == canonical_cells(renumbered, 2)).all()


def test_other_packings_stay_apart():
    assert (canonical_cells(np.array([0, 1, 2, 3]), 2) != canonical_cells(np.array([0, 2, 1, 3]), 2)).any()
