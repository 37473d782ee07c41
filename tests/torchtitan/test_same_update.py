"""Packing, placement and parallel degrees must not change the update: same losses, same logical weights."""

import numpy as np
import pytest

TOLERANCE = 1e-5


def distance(run, reference):
    """The largest difference of a loss, and of a logical weight after the last step."""
    assert run["state"].keys() == reference["state"].keys()
    losses = np.abs(np.subtract(run["losses"], reference["losses"])).max()
    return losses, max(np.abs(run["state"][name] - value).max() for name, value in reference["state"].items())


@pytest.fixture(scope="session")
def reference(alone):
    """One rank, no planning."""
    return alone[0]["trains ep=1 first_fit"]


def test_the_reference_learns(reference):
    assert len(reference["losses"]) == 10
    assert reference["losses"][8] < reference["losses"][0] - 0.2


@pytest.mark.parametrize(
    ("ranks", "ep", "plans"),
    [
        ("alone", 1, "planner"),
        ("alone", 1, "shuffled"),
        ("pair", 1, "first_fit"),
        ("pair", 1, "planner"),
        ("pair", 2, "first_fit"),
        ("pair", 2, "planner"),
        ("pair", 2, "shuffled"),
        ("quad", 2, "first_fit"),
        ("quad", 2, "planner"),
        ("quad", 4, "first_fit"),
        ("quad", 4, "planner"),
        pytest.param("slow_quad", 2, "shuffled", marks=pytest.mark.slow),
    ],
)
def test_update_does_not_depend_on_ranks_or_plan(request, reference, ranks, ep, plans):
    run = request.getfixturevalue(ranks)[0][f"trains ep={ep} {plans}"]
    assert max(distance(run, reference)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["trains padded", "trains recomputing", "trains replicated"])
def test_update_does_not_depend_on_padding_recomputation_or_replicas(slow_quad, reference, variant):
    assert max(distance(slow_quad[0][variant], reference)) < TOLERANCE


@pytest.mark.parametrize(("ranks", "ep"), [("pair", 2), ("quad", 2)])
def test_the_planner_moved_experts(request, ranks, ep):
    assert request.getfixturevalue(ranks)[0][f"trains ep={ep} planner"]["experts_moved"] > 0


def test_every_rank_gets_the_same_logical_weights(pair):
    sums = [result["trains ep=2 shuffled"]["state_sum"] for result in pair]
    assert sums[0] == sums[1]


@pytest.mark.parametrize("fault", ["moments left behind", "mapping not applied", "normalized locally"])
def test_a_faulty_trainer_is_caught(pair, reference, fault):
    losses, weights = distance(pair[0][fault], reference)
    assert losses > 100 * TOLERANCE
    assert weights > 100 * TOLERANCE


def test_training_starts_from_the_local_copy(pair):
    assert all(result["starts"] for result in pair)


def test_torchtitans_own_initialization_does_not(pair):
    assert not any(result["stock starts"] for result in pair)
