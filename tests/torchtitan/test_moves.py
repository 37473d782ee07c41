"""Moving experts: every weight and moment arrives bit for bit, in place."""

import re

import numpy as np
import pytest

from routepack.core.plans import ExpertPlacement
from routepack.training import expert_moves

LAYOUTS = [
    ("alone", "moves"),
    ("pair", "moves"),
    ("quad", "moves"),
    *(
        pytest.param(("slow_quad", key), marks=pytest.mark.slow, id=f"slow_quad {key}")
        for key in (
            "moves ep=4",
            "moves ep=1",
            "moves replicated",
            "moves inside experts",
            "moves inside experts ep=1",
            "moves uneven shards",
        )
    ),
]
"""FSDP alone, EP, EP x FSDP, HSDP, and experts cut inside because there are fewer than ranks."""


@pytest.fixture(params=LAYOUTS)
def moved(request):
    """What each rank saw of one move."""
    ranks, key = request.param
    return [result[key] for result in request.getfixturevalue(ranks)]


def test_weights_and_moments_keep_their_bits(moved):
    for rank in moved:
        assert rank["num_tensors"] == 36  # 4 layers x 3 weights x (weight and two moments)
        assert rank["unequal"] == []


def test_experts_that_changed_rank_are_counted(moved):
    assert [rank["moved"] for rank in moved] == [rank["expected_moved"] for rank in moved]


def test_storage_stays_in_place(moved):
    assert all(rank["storages_kept"] for rank in moved)


def test_the_moved_tensors_could_have_shown_a_fault(moved):
    assert all(rank["nonzero_moments"] and rank["distinct_experts"] for rank in moved)


def test_layouts_are_those_of_torchtitan(pair):
    assert pair[0]["moves"]["placements"] == ["(_StridedShard(dim=0, sf=2), Shard(dim=0))"]


@pytest.mark.slow
def test_few_experts_are_cut_inside(slow_quad):
    assert slow_quad[0]["moves inside experts"]["placements"] == ["(Shard(dim=1), Shard(dim=0))"]


def test_slot_sources_undo_the_old_placement():
    rng = np.random.default_rng(0)
    old, new = (ExpertPlacement(physical_to_logical_LP=np.argsort(rng.random((3, 8)), axis=1)) for _ in range(2))
    source_LP = expert_moves.slot_sources(old, new)
    held_LP = np.take_along_axis(old.physical_to_logical_LP, source_LP, axis=1)
    assert np.array_equal(held_LP, new.physical_to_logical_LP)


def test_moves_inside_a_rank_are_not_counted():
    old = ExpertPlacement(physical_to_logical_LP=[[0, 1, 2, 3]])
    new = ExpertPlacement(physical_to_logical_LP=[[1, 0, 2, 3]])
    assert expert_moves.num_experts_moved(old, new, num_ranks=2) == 0
    assert expert_moves.num_experts_moved(old, new, num_ranks=4) == 2


MOVING = [
    ("alone", "moves every step"),
    ("pair", "moves every step"),
    *(
        pytest.param((ranks, f"moves every step{layout}"), marks=pytest.mark.slow, id=f"{ranks}{layout}")
        for ranks, layout in (
            ("slow_pair", " ep=1"),
            ("slow_pair", " in bfloat16"),
            ("slow_pair", ", computes in bfloat16"),
            ("slow_quad_moving", " ep=2"),
            ("slow_quad_moving", " ep=4"),
            ("slow_quad_moving", " replicated"),
            ("slow_pair_invariant", " ep=1"),
            ("slow_pair_invariant", " ep=2"),
            ("slow_pair_invariant", " in bfloat16"),
            ("slow_pair_invariant", " computes in bfloat16"),
            ("slow_pair_invariant", " recomputes"),
            ("slow_pair_invariant", " gathers once"),
            ("slow_quad_invariant", " ep=1"),
            ("slow_quad_invariant", " ep=2"),
            ("slow_quad_invariant", " ep=4"),
            ("slow_replicas_invariant", " ep=1"),
            ("slow_replicas_invariant", " ep=2"),
            ("slow_cut_invariant", " inside experts"),
            ("slow_cut_invariant", " inside experts ep=1"),
            ("slow_cut_invariant", " uneven shards"),
        )
    ),
]
"""As TorchTitan sums where two ranks and two experts a token add up alike; with ``placement_invariant`` everywhere."""


@pytest.mark.parametrize("layout", MOVING)
def test_twenty_steps_with_a_move_at_each_end_at_the_same_bits_as_without(request, layout):
    ranks, key = layout
    for result in request.getfixturevalue(ranks):
        run = result[key]
        assert run["num_tensors"] == 129  # every parameter and both of its moments
        assert run["apart"] == {}
        assert run["losses"][0] == run["losses"][1]
        assert "invariant" not in ranks or min(run["norms"]) > 0.05  # what gradients were clipped to


@pytest.mark.slow
def test_sums_over_four_shards_depend_on_where_an_expert_lies_by_rounding(slow_quad_moving):
    # FSDP alone over four ranks: gloo adds the ranks' gradients in an order that depends on the place in the buffer.
    assert 0 < slow_quad_moving[0]["moves every step ep=1"]["largest"] < 1e-5


CLIPPED = [
    ("pair", "clips"),
    *(
        pytest.param(("slow_quad_moving", f"clips{layout}"), marks=pytest.mark.slow, id=f"slow_quad_moving{layout}")
        for layout in ("", " ep=1", " replicated")
    ),
]


@pytest.mark.parametrize("layout", CLIPPED)
def test_a_norm_in_logical_order_has_the_same_bits_wherever_experts_are_and_torchtitans_has_not(request, layout):
    ranks, key = layout
    for result in request.getfixturevalue(ranks):
        norms = result[key]
        assert len(set(norms["ordered"])) == 1
        assert len(set(norms["torchtitan"])) > 1
        assert norms["ordered"] == pytest.approx(norms["torchtitan"], rel=1e-6)
        assert norms["clipped"] == pytest.approx([2.0] * 12, rel=1e-5)
        assert norms["step"] == pytest.approx([0.05], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["moments left behind", "mapping not applied"])
def test_a_faulty_move_shows_after_six_steps(slow_pair, fault):
    assert slow_pair[0][fault]["largest"] > 1e-3


@pytest.mark.slow
def test_more_than_two_experts_a_token_are_summed_in_another_order(slow_pair):
    # TorchTitan's combine sums a token's experts by slot. Two are the same in either order; more are within rounding.
    assert 0 < slow_pair[0]["four experts a token"]["largest"] < 1e-3


def test_optimizer_state_of_any_shape_with_a_row_for_each_expert_moves(pair):
    for result in pair:
        assert len(result["moves further state"]["right"]) == 36
        assert all(result["moves further state"]["right"])


def test_state_that_cannot_follow_the_experts_is_refused_before_anything_moves(pair):
    for result in pair:
        assert "PlanError: the optimizer keeps shared of shape (5,)" in result["moves further state"]["refused"]
        assert result["moves further state"]["kept_placement"]


def test_torn_weights_are_neither_used_nor_saved(pair):
    for result in pair:
        said = dict(result["tears"])
        assert re.search(r"while the experts of MoE layer 0 \(of 4\) moved, .* Their weights are torn", said.pop("the move"))
        assert said
        assert all(message.startswith("RankLostError: an earlier move did not end") for message in said.values()), said


def test_a_move_takes_no_more_memory_than_it_is_allowed(pair):
    for result in pair:
        figures = result["stages little"]
        *others, largest = figures["allocated"]
        assert largest == figures["staged"] <= 2**16
        assert sum(others) < 2**14
        assert figures["sent"] > 50 * 2**16
