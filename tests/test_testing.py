from dataclasses import dataclass, field

import numpy as np
import pytest

from routepack.components.expert_rerouter import ExpertRerouter
from routepack.components.packer import Packer
from routepack.components.placement_search import PlacementSearch
from routepack.core.errors import PlanError
from routepack.testing import check_packer, check_rerouter, synthetic_batch, synthetic_demand


def test_synthetic_routing_is_skewed_and_lengths_unequal():
    demand = synthetic_demand(num_sequences=200)
    assert (demand.tokens_LE.max(axis=1) / demand.tokens_LE.mean(axis=1)).min() > 1.5
    assert demand.length_S.max() > 3 * np.median(demand.length_S)


def test_synthetic_rows_name_distinct_experts():
    ids = np.sort(synthetic_batch(top_k=4).routed_experts_TLK, axis=-1)
    assert (np.diff(ids.astype(int), axis=-1) > 0).all()


def test_synthetic_batches_repeat_for_a_seed_and_differ_between_seeds():
    first, again, other = (synthetic_batch(seed=seed).routed_experts_TLK for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_first_tokens_are_no_targets():
    batch = synthetic_batch()
    assert not batch.token_fields["loss_mask"][batch.cu_tokens[:-1]].any()


@dataclass(frozen=True, kw_only=True)
class CapBlind(Packer):
    """Deals sequences round, whatever their length."""

    def assign(self, problem):
        return np.arange(len(problem.length_S)) % problem.num_cells


@dataclass(frozen=True, kw_only=True)
class Forgetful(Packer):
    """Draws from something other than the problem's seed."""

    calls: list = field(default_factory=list)

    def assign(self, problem):
        self.calls.append(1)
        width = problem.topology.data_parallel_degree
        cells = problem.feasible_cell_of_S
        return cells // width * width + (cells + len(self.calls)) % width


@dataclass(frozen=True, kw_only=True)
class Meddling(Packer):
    """Writes into its input."""

    def assign(self, problem):
        problem.load_SRL[:] = 0
        return problem.feasible_cell_of_S


@pytest.mark.parametrize(("packer", "message"), [(CapBlind, "is the cap"), (Forgetful, "differently"), (Meddling, "changed")])
def test_check_packer_finds_what_is_wrong(packer, message):
    with pytest.raises(PlanError, match=message):
        check_packer(packer(max_tokens=512))


@dataclass(frozen=True, kw_only=True)
class Worsens(PlacementSearch):
    """Refines into something worse."""

    def refine(self, slots_LP, units):
        return np.argsort(units.demand.tokens_LE, axis=1)


@dataclass(frozen=True, kw_only=True)
class Unsettled(ExpertRerouter):
    """Places well, and searches for something worse."""

    def search(self):
        return Worsens()


def test_check_rerouter_finds_a_refinement_that_waits_longer():
    with pytest.raises(PlanError, match="waits longer"):
        check_rerouter(Unsettled(), num_windows=5)
