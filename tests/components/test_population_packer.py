from dataclasses import replace

import numpy as np
import pytest

from routepack.components.packer import FirstFitPacker, PackingProblem
from routepack.components.population_packer import PopulationPacker
from routepack.core.plans import SYNCS, Topology
from routepack.cost.evaluation import evaluate
from routepack.cost.models import CostRates
from routepack.planning.planner import Planner
from routepack.planning.verification import verify
from routepack.solvers import start_packings
from routepack.testing import check_packer, synthetic_demand

TOPOLOGY = Topology(data_parallel_degree=4, expert_parallel_degree=2)


def problem(packer, *, sync="step", seed=0):
    rng = np.random.default_rng(3)
    length_S = rng.integers(5, 100, 80)
    certificate, feasible = packer.certify(length_S, TOPOLOGY)
    return PackingProblem(
        length_S=length_S,
        load_SRL=rng.integers(0, 50, (len(length_S), 2, 16)).astype(np.int32) * length_S[:, None, None],
        rates=CostRates(expert=0.01, linear_I=[1.0], quadratic_I=[0.01]),
        topology=TOPOLOGY,
        max_tokens=packer.max_tokens,
        num_microbatches=certificate.num_microbatches,
        feasible_cell_of_S=feasible,
        sync=sync,
        seed=seed,
        num_proposals=40_000,
    )


def value(given, packing):
    sizes = {"length_S": given.length_S, "topology": TOPOLOGY, "rates": given.rates, "sync": given.sync}
    return evaluate(load_SRL=given.load_SRL, packing=packing, **sizes).value


def test_the_population_packer_holds_the_invariants():
    check_packer(PopulationPacker(max_tokens=512), num_windows=30)


@pytest.mark.parametrize("sync", SYNCS)
def test_it_packs_better_than_first_fit(sync):
    given = problem(PopulationPacker(max_tokens=400), sync=sync)
    found = value(given, PopulationPacker(max_tokens=400).pack(given))
    assert found < 0.9 * value(given, FirstFitPacker(max_tokens=400).pack(given))


def test_the_same_seed_gives_the_same_packing_on_any_number_of_threads():
    packed = [PopulationPacker(max_tokens=400, threads=n) for n in (1, 2, 5)]
    cells = [packer.pack(problem(packer)).cell_of_S.tolist() for packer in packed]
    assert cells[0] == cells[1] == cells[2]


def test_more_chains_than_one_start_apart():
    given = problem(PopulationPacker(max_tokens=400))
    limits = {"num_cells": given.num_cells, "max_tokens": 400, "cells_per_unit": 2, "seed": 0}
    made = start_packings.diverse(
        6, length_S=given.length_S, load_SRL=given.load_SRL, feasible_cell_of_S=given.feasible_cell_of_S, **limits
    )
    assert len({cells.tobytes() for cells in made}) == 6
    assert all(np.bincount(cells, given.length_S).max() <= 400 for cells in made)
    assert all(len(np.unique(cells)) == given.num_cells for cells in made)


def test_plans_with_it_are_accepted_by_the_independent_checker():
    demand = synthetic_demand(num_sequences=96, max_length=256)
    plan = Planner(topology=TOPOLOGY, packer=PopulationPacker(max_tokens=512), num_proposals=50_000).plan(demand)
    assert verify(plan, demand) == []
    assert plan.value < plan.baseline_value


def test_another_seed_gives_another_packing():
    packer = PopulationPacker(max_tokens=400)
    given = problem(packer)
    assert packer.pack(given).cell_of_S.tolist() != packer.pack(replace(given, seed=9)).cell_of_S.tolist()
