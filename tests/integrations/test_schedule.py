"""The neutral schedule behind every hook: legal for any stack, and what it refuses."""

from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import routepack as rp
from routepack.core.errors import InfeasibleError, TraceError
from routepack.integrations.schedule import DUMMY, Hook, schedule
from routepack.testing import synthetic_batch, synthetic_demand

quick = rp.Planner(
    topology=rp.Topology(data_parallel_degree=1, expert_parallel_degree=1),
    packer=rp.AttentionAwarePacker(max_tokens=1),
    rerouter=rp.IdentityRerouter(),
    num_proposals=300,
)
deal = partial(schedule, planner=quick)


def check(planned, lengths, cap):
    cells = planned.cells()
    assert len(cells) == planned.num_microbatches * planned.data_parallel_degree
    assert sorted(s for cell in cells for s in cell if s != DUMMY) == list(range(len(lengths)))
    assert all(cell and sum(lengths[s] for s in cell if s != DUMMY) <= cap for cell in cells)
    assert planned.rank(0) == cells[:: planned.data_parallel_degree]


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    cap=st.integers(1, 30),
    ranks=st.integers(1, 5),
    least=st.integers(1, 3),
    multiple=st.integers(1, 3),
    dummies=st.booleans(),
)
def test_cells_are_full_within_the_cap_and_as_many_on_every_rank(lengths, cap, ranks, least, multiple, dummies):
    asked = {"min_microbatches": least, "microbatch_multiple": multiple, "dummies": dummies}
    try:
        planned = deal(lengths, data_parallel_degree=ranks, max_tokens=cap, **asked)
    except InfeasibleError:
        assert max(lengths) > cap or not dummies
        return
    check(planned, lengths, cap)
    assert planned.num_microbatches >= least
    assert planned.num_microbatches % multiple == 0
    assert dummies or DUMMY not in planned.order.tolist()


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=4, max_size=24),
    ranks=st.integers(1, 4),
    kinds=st.lists(st.integers(0, 2), min_size=24, max_size=24),
)
def test_a_step_is_of_one_modality_on_all_ranks(lengths, ranks, kinds):
    kinds = kinds[: len(lengths)]
    planned = deal(lengths, data_parallel_degree=ranks, max_tokens=25, modalities=kinds, dummies=True)
    check(planned, lengths, 25)
    for microbatch in range(planned.num_microbatches):
        here = [s for rank in range(ranks) for s in planned.cell(microbatch, rank) if s != DUMMY]
        assert len({kinds[s] for s in here}) == 1


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=24), ranks=st.integers(1, 4))
def test_equal_numbers_are_dealt_where_asked_for(lengths, ranks):
    assume(len(lengths) % ranks == 0)
    planned = deal(lengths, data_parallel_degree=ranks, max_tokens=60, equal_sequences=True)
    check(planned, lengths, 60)
    assert {sum(map(len, planned.rank(rank))) for rank in range(ranks)} == {len(lengths) // ranks}


def test_routes_decide_where_lengths_do_not():
    """Eight sequences of one length; half go to the experts of EP rank 0, half to those of rank 1."""
    hot = np.array([[[9, 0]], [[9, 0]], [[9, 0]], [[9, 0]], [[0, 9]], [[0, 9]], [[0, 9]], [[0, 9]]])
    demand = rp.RoutingDemand(tokens_SLE=hot, length_S=np.full(8, 9), top_k=1)
    planner = rp.Planner(
        topology=rp.Topology(data_parallel_degree=4, expert_parallel_degree=2),
        packer=rp.AttentionAwarePacker(max_tokens=1),
        rerouter=rp.IdentityRerouter(),
        sync="microbatch",
    )
    planned = schedule([9] * 8, demand=demand, data_parallel_degree=4, max_tokens=18, planner=planner)
    for group in (planned.cells()[:2], planned.cells()[2:]):
        assert sorted(s // 4 for cell in group for s in cell) == [0, 0, 1, 1]
    assert planned.by_routing
    assert planned.placement is not None


def test_no_placement_is_made_up_from_lengths():
    planned = deal([3, 4], data_parallel_degree=1, max_tokens=8)
    assert (planned.by_routing, planned.placement) == (False, None)


def test_lengths_alone_need_no_expert_parallelism_to_divide_anything():
    from dataclasses import replace

    planner = replace(quick, topology=rp.Topology(data_parallel_degree=8, expert_parallel_degree=8))
    assert schedule([3, 4, 5], data_parallel_degree=3, max_tokens=8, planner=planner).num_microbatches == 1


def test_padded_lengths_may_exceed_those_of_the_demand_by_the_padding():
    demand = synthetic_demand(num_sequences=8, max_length=32)
    padded = -(-demand.length_S // 8) * 8
    planned = deal(padded, demand=demand, data_parallel_degree=2, max_tokens=64, padded_to=8)
    check(planned, padded, 64)
    with pytest.raises(TraceError, match="in the demand and"):
        deal(padded, demand=demand, data_parallel_degree=2, max_tokens=64)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([], "lengths has shape"), ([[1]], "lengths has shape"), ([1.5], "whole numbers"), ([3, 0], "0 tokens")],
)
def test_lengths_that_are_none_are_refused(lengths, message):
    with pytest.raises(TraceError, match=message):
        deal(lengths, data_parallel_degree=1, max_tokens=8)


def test_a_sequence_above_the_cap_is_named_with_or_without_dummies():
    for dummies in (False, True):
        with pytest.raises(InfeasibleError, match=r"sequence 1 \(9 tokens\)"):
            deal([3, 9], data_parallel_degree=1, max_tokens=8, dummies=dummies)


def test_too_few_sequences_are_refused_without_dummies():
    with pytest.raises(InfeasibleError, match="gather more sequences"):
        deal([3, 4], data_parallel_degree=4, max_tokens=8)


def test_dummies_keep_what_was_estimated():
    batch = synthetic_batch(num_sequences=3, max_length=16)
    demand = rp.RoutingDemandCollector().collect(batch)
    from dataclasses import replace

    demand = replace(demand, estimated_S=np.array([False, True, False]))
    planned = deal(demand.length_S, demand=demand, data_parallel_degree=4, max_tokens=16, dummies=True)
    check(planned, demand.length_S, 16)


class OneStep(Hook):
    def __call__(self, lengths):
        self._begin(len(lengths))
        return self._schedule(lengths, data_parallel_degree=1, max_tokens=4096)


def test_what_was_expected_is_used_once():
    batch, hook = synthetic_batch(num_sequences=6, max_length=32), OneStep(planner=quick)
    hook.expect(batch)
    assert hook(batch.num_tokens_S).by_routing
    assert not hook(batch.num_tokens_S).by_routing


def test_other_sequences_than_expected_are_refused():
    hook = OneStep(planner=quick)
    hook.expect(synthetic_demand(num_sequences=6, max_length=32))
    with pytest.raises(TraceError, match="expect 6 sequences and is called with 2"):
        hook([3, 4])


def test_a_hook_says_that_it_packs_by_length_alone(caplog):
    with caplog.at_level("INFO", logger="routepack.integrations.schedule"):
        OneStep(planner=quick)([3, 4])
    assert "by length alone" in caplog.text
