from dataclasses import dataclass, field

import numpy as np
import pytest

from routepack.components.expert_rerouter import ExpertRerouter
from routepack.components.rerouter import IdentityRerouter, Rerouter
from routepack.core.errors import ConfigError, PlanError
from routepack.core.plans import Topology
from routepack.testing import check_rerouter

TOPOLOGY = Topology(data_parallel_degree=2, expert_parallel_degree=2)


@dataclass(frozen=True, kw_only=True)
class Always(Rerouter):
    """Whatever it is told."""

    slots: list = field(default_factory=list)

    def assign(self, tokens_LE, num_ranks):
        return self.slots


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1, 1, 3]], "Always: placement of layer 0 is not a permutation"),
        ([[0, 1, 2]], r"shape \(1, 3\)"),
        ([[0, 1, 2, 3], [0]], "Always placed experts in slots that are no array"),
    ],
)
def test_an_illegal_placement_names_the_rerouter_and_the_layer(slots, message):
    with pytest.raises(PlanError, match=message):
        Always(slots=slots).place(np.ones((1, 4), dtype=np.int64), TOPOLOGY)


@pytest.mark.parametrize("rerouter", [IdentityRerouter(), ExpertRerouter()], ids=lambda r: type(r).__name__)
def test_rerouters_hold_the_invariants(rerouter):
    check_rerouter(rerouter, num_windows=20)


@pytest.mark.parametrize("rerouter", [IdentityRerouter(), ExpertRerouter()], ids=lambda r: type(r).__name__)
def test_ranks_that_do_not_divide_the_experts_are_refused(rerouter):
    with pytest.raises(ConfigError, match="expert_parallel_degree=2 does not divide the 5 experts"):
        rerouter.place(np.ones((1, 5), dtype=np.int64), TOPOLOGY)


def test_identity_leaves_every_expert_in_its_slot():
    placed = IdentityRerouter().place(np.ones((2, 4), dtype=np.int64), TOPOLOGY)
    assert placed.physical_to_logical_LP.tolist() == [[0, 1, 2, 3]] * 2


def test_hot_experts_are_parted():
    placed = ExpertRerouter().place(np.array([[9, 8, 1, 0]]), TOPOLOGY)
    assert sorted(map(sorted, placed.physical_to_logical_LP.reshape(2, 2).tolist())) == [[0, 3], [1, 2]]


def test_layers_are_placed_alone():
    placed = ExpertRerouter().place(np.array([[9, 8, 1, 0], [9, 1, 8, 0]]), TOPOLOGY)
    assert placed.rank_of_LE(2)[0, 0] != placed.rank_of_LE(2)[0, 1]
    assert placed.rank_of_LE(2)[1, 0] != placed.rank_of_LE(2)[1, 2]
