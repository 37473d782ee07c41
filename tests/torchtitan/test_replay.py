"""Routing replay inside the trainer: recorded ids give the recording forward again, bit for bit."""

import numpy as np
import pytest

RUNS = [
    ("alone", "replays"),
    ("alone", "replays selective"),
    ("alone", "replays full"),
    ("pair", "replays"),
    pytest.param(("slow_quad", "replays"), marks=pytest.mark.slow),
    pytest.param(("slow_quad", "replays selective"), marks=pytest.mark.slow),
]


@pytest.fixture(params=RUNS)
def run(request):
    """Figures of a native window, its replay, half of it, and other routes, at the same weights."""
    ranks, key = request.param
    return request.getfixturevalue(ranks)[0][key]


def test_replay_gives_the_recorded_loss_exactly(run):
    assert run["replayed"]["loss"] == run["native"]["loss"]


def test_replay_gives_the_recorded_gate_gradient_exactly(run):
    assert np.array_equal(run["replayed"]["gate_gradients"], run["native"]["gate_gradients"])


def test_every_gate_learns_under_replay_of_other_routes(run):
    assert (np.abs(run["other"]["gate_gradients"]).max(axis=(1, 2)) > 0).all()


def test_other_routes_change_the_loss(run):
    assert abs(run["other"]["loss"] - run["native"]["loss"]) > 1e-4


def test_rows_without_a_record_route_natively(run):
    assert run["half"]["loss"] == run["native"]["loss"]
