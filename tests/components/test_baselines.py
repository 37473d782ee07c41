import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack.components import baselines
from routepack.components.baselines import (
    EPLBRerouter,
    KarmarkarKarpPacker,
    LPTRerouter,
    ModifiedFirstFitPacker,
    TokenLPTPacker,
    UnequalKarmarkarKarpPacker,
)
from routepack.components.packer import PackingProblem
from routepack.core.errors import ConfigError
from routepack.core.plans import Topology
from routepack.cost.models import CostRates
from routepack.testing import check_packer, check_rerouter

PACKERS = [TokenLPTPacker, ModifiedFirstFitPacker, KarmarkarKarpPacker, UnequalKarmarkarKarpPacker]


def packed(packer, length_S, *, data=2):
    length_S = np.array(length_S)
    topology = Topology(data_parallel_degree=data, expert_parallel_degree=1)
    certificate, feasible = packer.certify(length_S, topology)
    return packer.pack(
        PackingProblem(
            length_S=length_S,
            load_SRL=np.zeros((len(length_S), 1, 16), dtype=np.int32),
            rates=CostRates(expert=0.1, linear_I=[1.0], quadratic_I=[0.01]),
            topology=topology,
            max_tokens=packer.max_tokens,
            num_microbatches=certificate.num_microbatches,
            feasible_cell_of_S=feasible,
        )
    )


def counts_of_ranks(packing):
    return np.bincount(packing.cell_of_S % packing.data_parallel_degree)


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize(
    "rules",
    [{}, {"min_microbatches": 2, "microbatch_multiple": 2}, {"equal_sequences": True, "sequence_skew": 1}],
    ids=["plain", "multiples", "equal"],
)
def test_packers_hold_the_invariants(kind, rules):
    check_packer(kind(max_tokens=512, **rules), num_windows=40)


@pytest.mark.parametrize("rerouter", [LPTRerouter(), EPLBRerouter(), EPLBRerouter(num_groups=4)], ids=str)
def test_rerouters_hold_the_invariants(rerouter):
    check_rerouter(rerouter, num_windows=20)


def test_every_baseline_that_planning_prices_is_tested_here():
    assert set(baselines.PACKERS) - set(PACKERS) == {baselines.FirstFitPacker}


@given(st.lists(st.integers(1, 50), min_size=8, max_size=60), st.sampled_from([2, 4]))
def test_differencing_gives_ranks_equally_many(lengths, data):
    packing = packed(KarmarkarKarpPacker(max_tokens=10**6), lengths, data=data)
    assert np.ptp(counts_of_ranks(packing)) <= 1


def test_without_equal_counts_one_long_sequence_stands_alone():
    packing = packed(UnequalKarmarkarKarpPacker(max_tokens=1000), [900, *[10] * 20])
    assert counts_of_ranks(packing).min() == 1
    assert np.ptp(counts_of_ranks(packed(KarmarkarKarpPacker(max_tokens=1000), [900, *[10] * 19]))) == 0


def test_differencing_takes_a_microbatch_more_rather_than_overfill_one():
    # A rank of three fives has 15 tokens: two microbatches of 8 by the sum, three by the cap.
    assert packed(KarmarkarKarpPacker(max_tokens=8), [5] * 6).num_microbatches == 3


def test_token_lpt_evens_out_tokens_better_than_first_fit():
    length_S = np.random.default_rng(0).integers(10, 400, 64)
    fullest = {
        kind: np.bincount(packed(kind(max_tokens=1024), length_S, data=4).cell_of_S, length_S).max()
        for kind in (TokenLPTPacker, baselines.FirstFitPacker)
    }
    assert fullest[TokenLPTPacker] < fullest[baselines.FirstFitPacker]


loads = st.lists(st.integers(0, 100), min_size=16, max_size=16)


@given(loads, st.sampled_from([1, 2, 4, 8, 16]))
def test_flat_eplb_gives_every_rank_equally_many_and_equals_lpt(tokens, ranks):
    tokens_LE = np.array([tokens])
    slots_LP = EPLBRerouter().assign(tokens_LE, ranks)
    assert sorted(slots_LP[0].tolist()) == list(range(16))
    assert slots_LP.tolist() == LPTRerouter().assign(tokens_LE, ranks).tolist()


@given(loads, st.sampled_from([2, 4]))
def test_hierarchical_eplb_keeps_a_group_on_one_node(tokens, nodes):
    slots_P = EPLBRerouter(num_groups=8, num_nodes=nodes).assign(np.array([tokens]), 8)[0]
    node_of_E = np.empty(16, dtype=int)
    node_of_E[slots_P] = np.arange(16) // (16 // nodes)
    assert (node_of_E.reshape(8, 2) == node_of_E.reshape(8, 2)[:, :1]).all()


def test_eplb_by_hand():
    # Hottest first into the lighter pack with a place left: 9 | 8, then 7 beside 8, and the 1 where a place is.
    slots_P = EPLBRerouter().assign(np.array([[9, 8, 7, 1]]), 2)[0]
    assert sorted(map(sorted, slots_P.reshape(2, 2).tolist())) == [[0, 3], [1, 2]]


@given(loads)
@settings(max_examples=30)
def test_lpt_is_within_four_thirds_where_counts_do_not_bind(tokens):
    # Graham's bound is for free counts; with equal counts the hottest rank is never above the mean plus the hottest expert.
    slots_P = LPTRerouter().assign(np.array([tokens]), 4)[0]
    load_R = np.array(tokens)[slots_P].reshape(4, 4).sum(axis=1)
    assert load_R.max() <= sum(tokens) / 4 + max(tokens)


@pytest.mark.parametrize("options", [{"num_groups": 0}, {"num_nodes": -1}])
def test_counts_below_one_are_refused(options):
    with pytest.raises(ConfigError, match=r"rerouter\.num_\w+=\S+ must be a whole number of at least 1"):
        EPLBRerouter(**options)


def test_groups_that_do_not_divide_the_experts_are_refused():
    with pytest.raises(ConfigError, match="num_groups=3 does not divide the 16 experts"):
        EPLBRerouter(num_groups=3, num_nodes=1).assign(np.ones((1, 16), dtype=np.int64), 4)


def test_a_rank_with_one_long_sequence_is_fed_so_that_it_fills_its_microbatches():
    packing = packed(UnequalKarmarkarKarpPacker(max_tokens=1000), [1000, *[100] * 15])
    assert packing.num_microbatches == 2
    assert counts_of_ranks(packing).min() == 2
