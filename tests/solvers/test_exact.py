"""The optimum of tiny windows against every packing with every placement, counted plainly."""

import itertools

import numpy as np
import pytest

from routepack.components.modalities import aligned
from routepack.core.plans import SYNCS, Packing, Topology
from routepack.cost.evaluation import evaluate
from routepack.cost.models import CostRates
from routepack.solvers import exact
from routepack.solvers.packing_state import Weights
from routepack.solvers.rank_loads import rank_load

SHAPES = [(1, 2, 2), (2, 2, 2), (1, 4, 2), (2, 2, 1), (1, 4, 4), (4, 1, 1), (1, 4, 1)]  # M, W, R


def window(seed, shape, *, sequences=6, layers=2, experts=4, cap=60):
    rng = np.random.default_rng(seed)
    rows, data, ranks = shape
    length_S = rng.integers(1, 30, sequences)
    tokens_SLE = np.stack([rng.multinomial(n, rng.dirichlet(np.full(experts, 0.4)), size=layers) for n in length_S])
    rates = CostRates(expert=float(rng.choice([0.1, 1.0])), linear_I=[1.0, 0.1], quadratic_I=[0.0, 0.02])
    topology = Topology(data_parallel_degree=data, expert_parallel_degree=ranks)
    return length_S, tokens_SLE, rates, topology, rows, cap


def tiny(made, sync, **changes):
    length_S, tokens_SLE, rates, topology, rows, cap = made
    options = {
        "length_S": length_S,
        "tokens_SLE": tokens_SLE,
        "weights": Weights.of(rates.cost_SI(length_S), rates.expert, int(tokens_SLE.sum())),
        "max_tokens": cap,
        "num_microbatches": rows,
        "num_groups": topology.num_groups,
        "cells_per_unit": topology.expert_parallel_degree,
        "num_ranks": topology.expert_parallel_degree,
        "sync": sync,
    }
    return exact.TinyWindow(**options | changes)


def value(made, sync, cell_of_S, rank_of_LE):
    length_S, tokens_SLE, rates, topology, rows, _ = made
    return evaluate(
        load_SRL=rank_load(tokens_SLE, rank_of_LE, topology.expert_parallel_degree),
        length_S=length_S,
        packing=Packing(cell_of_S=cell_of_S, num_microbatches=rows, data_parallel_degree=topology.data_parallel_degree),
        topology=topology,
        rates=rates,
        sync=sync,
    ).value


def least_value(made, sync, allowed=None):
    length_S, tokens_SLE, rates, topology, rows, cap = made
    ranks, groups = topology.expert_parallel_degree, topology.num_groups
    num_cells, layers = rows * topology.data_parallel_degree, tokens_SLE.shape[1]
    options = exact.placements(tokens_SLE.shape[2], ranks)
    held = options[:, None, :] == np.arange(ranks)[:, None]
    cells = np.array(list(itertools.product(range(num_cells), repeat=len(length_S))))
    onto = cells[:, None, :] == np.arange(num_cells)[:, None]
    legal = ((onto @ length_S) <= cap).all(axis=1) & onto.any(axis=2).all(axis=1)
    if allowed is not None:
        legal &= [allowed(cell_of_S) for cell_of_S in cells]
    onto = onto[legal].astype(float)
    work = (onto @ rates.cost_SI(length_S)).reshape(len(onto), rows, groups, ranks, -1)
    peaks = []  # of each layer: [placements, packings, M, G]
    for layer in range(layers):
        load = np.einsum("nce,pre->pncr", onto @ tokens_SLE[:, layer], held)
        peaks.append(load.reshape(len(options), len(onto), rows, groups, ranks, ranks).sum(axis=4).max(axis=4))
    best = np.inf
    for chosen in itertools.product(range(len(options)), repeat=layers):
        each = [peaks[layer][p] for layer, p in enumerate(chosen)]
        if sync == "layer":
            expert = sum(peak.max(axis=2) for peak in each)
            values = (work.max(axis=(2, 3)).sum(axis=-1) + rates.expert * expert).sum(axis=1)
        else:
            cost = work.max(axis=3).sum(axis=-1) + rates.expert * sum(each)
            values = cost.sum(axis=1).max(axis=1) if sync == "step" else cost.max(axis=2).sum(axis=1)
        best = min(best, values.min())
    return best


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_the_plan_found_is_the_best_of_all(seed, shape, sync):
    made = window(seed, shape)
    cell_of_S, rank_of_LE, proven = tiny(made, sync).solve()
    assert proven
    assert np.bincount(cell_of_S, made[0]).max() <= made[-1]
    assert value(made, sync, cell_of_S, rank_of_LE) == pytest.approx(least_value(made, sync), rel=1e-9)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 2), (1, 4, 2), (2, 2, 1), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("skew", [0, 1])
def test_the_plan_found_is_the_best_of_those_with_equal_numbers(skew, shape, sync):
    made = window(7, shape, sequences=5 + shape[1] % 4 // 2 if skew else 4, cap=80)

    def allowed(cell_of_S):
        return np.ptp(np.bincount(cell_of_S % shape[1], minlength=shape[1])) <= skew

    cell_of_S, rank_of_LE, proven = tiny(made, sync, skew=skew).solve()
    assert proven
    assert allowed(cell_of_S)
    assert value(made, sync, cell_of_S, rank_of_LE) == pytest.approx(least_value(made, sync, allowed), rel=1e-9)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 2, 1), (3, 1, 1), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_plan_found_is_the_best_of_those_that_do_not_mix_modalities(seed, shape, sync):
    made = window(seed, shape, cap=90)
    modality_S = np.array([0, 1, 1, 0, 1, 0])

    def allowed(cell_of_S):
        return aligned(cell_of_S, modality_S, shape[1])

    cell_of_S, rank_of_LE, _ = tiny(made, sync, modality_S=modality_S).solve()
    assert allowed(cell_of_S)
    assert value(made, sync, cell_of_S, rank_of_LE) == pytest.approx(least_value(made, sync, allowed), rel=1e-9)


def test_what_was_cut_short_is_not_called_proven(monkeypatch):
    made = tiny(window(3, (1, 4, 2), layers=5, experts=8, sequences=7), "step")
    assert made.solve()[2]
    monkeypatch.setattr(exact, "FEW_CHOICES", 1)
    monkeypatch.setattr(exact, "MAX_CHOICES", 1)
    assert not made.solve()[2]


def test_what_does_not_fit_has_no_plan():
    assert tiny(window(0, (1, 2, 2)), "step", max_tokens=1).solve() is None


@pytest.mark.parametrize(
    "changes", [{"num_microbatches": 5}, {"tokens_SLE": np.zeros((11, 1, 4))}, {"tokens_SLE": np.zeros((6, 1, 12))}]
)
def test_larger_windows_are_left_to_the_search(changes):
    assert not tiny(window(0, (1, 2, 2)), "step", **changes).is_tiny


@pytest.mark.parametrize(("experts", "ranks"), [(4, 1), (4, 2), (6, 3), (8, 4), (8, 2), (4, 4)])
def test_placements_are_all_different_and_counted(experts, ranks):
    rank_of_PE = exact.placements(experts, ranks)
    assert len({tuple(row) for row in rank_of_PE}) == len(rank_of_PE) == exact.num_placements(experts, ranks)
    assert all((np.bincount(row, minlength=ranks) == experts // ranks).all() for row in rank_of_PE)
