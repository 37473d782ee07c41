import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.cost.bounds import placement_bound
from routepack.solvers import placement_swaps
from routepack.solvers.placement import balanced_ranks, keep_in_place, slots_of_ranks
from routepack.solvers.placement_swaps import anneal_ranks, refine_ranks


def rank_loads(tokens_LE, rank_of_LE, ranks):
    return np.stack([np.where(rank_of_LE == r, tokens_LE, 0).sum(axis=1) for r in range(ranks)], axis=1)


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4, 8]))
def test_balanced_ranks_hold_equally_many_experts(seed, ranks):
    tokens_LE = np.random.default_rng(seed).integers(0, 1000, (3, 16))
    rank_of_LE = balanced_ranks(tokens_LE, ranks)
    assert (np.stack([(rank_of_LE == r).sum(axis=1) for r in range(ranks)]) == 16 // ranks).all()


def test_balanced_ranks_come_close_to_the_bound():
    tokens_LE = (np.random.default_rng(0).lognormal(0, 0.9, (8, 128)) * 1000).astype(np.int64)
    fullest_L = rank_loads(tokens_LE, balanced_ranks(tokens_LE, 8), 8).max(axis=1)
    assert (fullest_L / placement_bound(tokens_LE, 8)).max() < 1.001


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 6]))
def test_refining_never_raises_what_the_units_wait_for(seed, ranks, joined):
    rng = np.random.default_rng(seed)
    load_LEU = rng.integers(0, 1000, (2, 8, 6)).astype(np.int32)
    before = balanced_ranks(load_LEU.sum(axis=2), ranks)
    after = refine_ranks(load_LEU, before, ranks, joined_units=joined)

    def waited(rank_of_LE):
        peaks_UL = np.stack([rank_loads(load_LEU[:, :, u], rank_of_LE, ranks).max(axis=1) for u in range(6)])
        return peaks_UL.reshape(6 // joined, joined, -1).max(axis=1).sum()

    assert waited(after) <= waited(before)
    assert (np.sort(after, axis=1) == np.sort(before, axis=1)).all()


def test_refining_sees_units_that_the_window_total_hides():
    # Both placements are even over the window; only one is even in each unit.
    load_LEU = np.array([[[8, 0], [8, 0], [0, 8], [0, 8]]], dtype=np.int32)
    uneven = np.array([[0, 0, 1, 1]])
    assert refine_ranks(load_LEU, uneven, 2)[0, :2].tolist() in ([0, 1], [1, 0])


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4, 8]))
def test_kept_placement_holds_the_same_experts_together(seed, ranks):
    rng = np.random.default_rng(seed)
    new, old = rng.permutation(8)[None], rng.permutation(8)[None]
    kept = keep_in_place(new, old, ranks)
    together = {frozenset(held) for held in new.reshape(ranks, -1).tolist()}
    assert {frozenset(held) for held in kept.reshape(ranks, -1).tolist()} == together


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_renumbered_ranks_move_nothing(ranks):
    old = np.random.default_rng(0).permutation(8)[None]
    renumbered = old.reshape(ranks, -1)[::-1, ::-1].reshape(1, -1)
    assert (keep_in_place(renumbered, old, ranks) == old).all()


def test_slots_list_the_experts_of_each_rank():
    assert slots_of_ranks(np.array([[1, 0, 1, 0]])).tolist() == [[1, 3, 0, 2]]


def waited(load_EU, rank_of_E, ranks, joined):
    peaks_U = np.stack([load_EU[rank_of_E == r].sum(axis=0) for r in range(ranks)]).max(axis=0)
    return int(peaks_U.reshape(-1, joined).max(axis=1).sum())


@pytest.mark.parametrize("joined", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_incremental_change_of_a_layer_equals_a_recomputation_exactly(ranks, joined):
    load_EU = np.random.default_rng(0).integers(0, 1000, (16, 6)).astype(np.int32)
    rank_of_E = (np.arange(16) % ranks).astype(np.int32)
    before = waited(load_EU, rank_of_E, ranks, joined)
    # 100,000 swaps, all of them taken.
    pairs = 100_000 // placement_swaps.SWAPS_PER_PAIR
    change = placement_swaps.anneal_layer(load_EU, rank_of_E, ranks, joined, pairs, 1e18, np.array([7], dtype=np.uint64))
    assert (np.bincount(rank_of_E) == 16 // ranks).all()
    assert waited(load_EU, rank_of_E, ranks, joined) == before + change


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]))
def test_one_sweep_of_two_ranks_takes_the_best_swap_of_all(seed, joined):
    # Units enough for several chunks, after each of which a swap can be given up.
    load_EU = np.random.default_rng(seed).integers(0, 1000, (8, 100)).astype(np.int32)
    rank_of_E = (np.arange(8) % 2).astype(np.int32)
    swapped = [rank_of_E.copy() for _ in range(16)]
    for ranks_E, (e, f) in zip(swapped, ((e, f) for e in range(0, 8, 2) for f in range(1, 8, 2)), strict=True):
        ranks_E[[e, f]] = ranks_E[[f, e]]
    best = min(waited(load_EU, ranks_E, 2, joined) for ranks_E in [rank_of_E, *swapped])
    placement_swaps.refine_layer(load_EU, rank_of_E, 2, joined, 1)
    assert waited(load_EU, rank_of_E, 2, joined) == best


def test_annealing_reaches_what_best_swaps_do_not():
    load_LEU = np.random.default_rng(0).lognormal(5, 1, (6, 32, 12)).astype(np.int32)
    start = balanced_ranks(load_LEU.sum(axis=2), 4)
    annealed = start
    for turn, temperature in enumerate(np.geomspace(300, 3, 20)):
        annealed = anneal_ranks(load_LEU, annealed, 4, temperature=temperature, swaps_per_layer=4000, seed=turn)
    totals = [
        sum(waited(load_LEU[layer], ranks_LE[layer], 4, 1) for layer in range(6))
        for ranks_LE in (annealed, refine_ranks(load_LEU, start, 4, sweeps=100))
    ]
    assert totals[0] < totals[1]


@pytest.mark.parametrize("threads", [1, 3])
def test_annealed_ranks_do_not_depend_on_threads(threads):
    load_LEU = np.random.default_rng(0).integers(0, 1000, (5, 16, 6)).astype(np.int32)
    start = balanced_ranks(load_LEU.sum(axis=2), 4)
    options = {"temperature": 100.0, "swaps_per_layer": 2000, "seed": 3}
    reference = anneal_ranks(load_LEU, start, 4, threads=2, **options)
    assert (anneal_ranks(load_LEU, start, 4, threads=threads, **options) == reference).all()
    assert (anneal_ranks(load_LEU, start, 4, **options | {"seed": 4}) != reference).any()
