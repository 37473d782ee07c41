"""RoutePack beside every baseline, on random small windows: never more microbatches, and in as many never worth more.

A baseline that takes a microbatch more than needed can be worth less on paper; M is fixed before balancing.
"""

import itertools

import numpy as np
import pytest

from routepack.components import baselines
from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.rerouter import IdentityRerouter
from routepack.core.errors import InfeasibleError
from routepack.core.plans import SYNCS, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.models import WindowNormalizedCost
from routepack.planning import baseline_plans
from routepack.planning.planner import Planner
from routepack.planning.search import Search

REROUTERS = [IdentityRerouter(), baselines.LPTRerouter(), baselines.EPLBRerouter()]


def random_window(seed):
    """Few sequences, skewed experts, lengths and shares of all kinds, a cap that binds or does not."""
    rng = np.random.default_rng(seed)
    data, ranks = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4)][rng.integers(6)]
    sequences = int(rng.integers(data, 6 * data + 12))
    length_S = np.ceil(200 * rng.random(sequences) ** rng.choice([0.3, 1, 3])).astype(np.int64)
    popularity_LE = rng.dirichlet(np.full(8, rng.choice([0.2, 1.0, 10.0])), size=2)
    own_SLE = popularity_LE * rng.gamma(1.0, size=(sequences, 2, 8)) + 1e-9
    own_SLE /= own_SLE.sum(axis=2, keepdims=True)
    tokens_SLE = np.stack([[rng.multinomial(n, row) for row in own] for n, own in zip(length_S, own_SLE, strict=True)])
    shares = rng.dirichlet(np.ones(3))
    cost_model = WindowNormalizedCost(expert_share=shares[0], linear_share=shares[1], quadratic_share=1 - shares[0] - shares[1])
    topology = Topology(data_parallel_degree=data, expert_parallel_degree=ranks)
    demand = RoutingDemand(tokens_SLE=tokens_SLE, length_S=length_S, top_k=1)
    cap = int(length_S.max() * rng.choice([1.0, 1.3, 3.0]))
    return demand, {"topology": topology, "cost_model": cost_model, "sync": SYNCS[rng.integers(3)], "seed": seed}, cap


def compare(seeds):
    """(windows compared, the worst of ours over the best baseline's that takes no more microbatches)."""
    compared, worst = 0, 0.0
    for seed in seeds:
        demand, options, cap = random_window(seed)
        try:
            ours = Planner(**options, packer=AttentionAwarePacker(max_tokens=cap), num_proposals=500).plan(demand)
        except InfeasibleError:
            continue
        compared += 1
        for rerouter, kind in itertools.product(REROUTERS, baselines.PACKERS):
            theirs = Planner(**options, rerouter=rerouter, packer=kind(max_tokens=cap)).plan(demand)
            assert ours.num_microbatches <= theirs.num_microbatches
            if ours.num_microbatches == theirs.num_microbatches:
                worst = max(worst, ours.value / theirs.value)
    return compared, worst


def test_routepack_is_never_behind_a_baseline():
    compared, worst = compare(range(25))
    assert compared > 15
    assert worst <= 1.0 + 1e-12


@pytest.mark.slow
def test_routepack_is_never_behind_a_baseline_on_a_thousand_windows():
    compared, worst, first = 0, 0.0, 40
    while compared < 1000:
        more, worse = compare(range(first, first + 100))
        compared, worst, first = compared + more, max(worst, worse), first + 100
        assert worst <= 1.0 + 1e-12


def test_without_the_baselines_among_its_candidates_the_search_alone_falls_behind(monkeypatch):
    # The search is cut to a proposal or two, so that this does not depend on how good it is.
    monkeypatch.setattr(baseline_plans, "candidates", lambda search, known: ())
    monkeypatch.setattr("routepack.solvers.anneal.anneal", lambda *arguments, **options: None)
    assert compare(range(25))[1] > 1.0


def test_a_baseline_is_only_passed_over_where_it_cannot_be_ahead():
    skipped = 0
    for seed in range(30):
        demand, options, cap = random_window(seed)
        try:
            search = Search(planner=Planner(**options, packer=AttentionAwarePacker(max_tokens=cap)), demand=demand, started=0.0)
        except InfeasibleError:
            continue
        values = sorted(candidate.evaluation.value for candidate in baseline_plans.candidates(search, np.inf))
        for known in values:
            priced = [candidate.evaluation.value for candidate in baseline_plans.candidates(search, known)]
            assert [value for value in values if value < known] == sorted(value for value in priced if value < known)
            skipped += len(values) - len(priced)
    assert skipped > 50
