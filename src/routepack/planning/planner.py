"""A window in, a plan out: collect, place, certify, pack, refine, bound. Letters: :mod:`routepack.core`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from routepack.core.checks import instance
from routepack.core.errors import ConfigError
from routepack.core.plans import ExpertPlacement, Plan
from routepack.core.rollouts import RolloutBatch, RoutingDemand
from routepack.planning import alternation, baseline_plans
from routepack.planning.kernel_warm_up import ready_kernels
from routepack.planning.layers_to_move import moved_on
from routepack.planning.near_nodes import brought_near
from routepack.planning.search import PlannerSettings, Search


@dataclass(kw_only=True)
class Planner(PlannerSettings):
    """Plans optimizer-step windows: which experts on which ranks, which sequences in which microbatch.

    The plan is never worse than the baseline (identity placement, first-fit packing), which is always computed too,
    wherever that takes no more microbatches. With a packer that ``improves`` on packings (AttentionAwarePacker), nor is it
    worse than those of :mod:`routepack.components.baselines`; what another packer packs is what is compared.
    Same window, seed and ``num_proposals`` give the same plan, bit for bit, on any number of threads; a
    ``time_limit_seconds`` does not, and the plan's ``budget`` says which was used.

    Placement and packing are alternated, each on the objective of ``sync``; every pair met is priced, and the
    best kept. Under ``microbatch`` and ``layer`` a pair is priced again with its units dealt so that those of
    one microbatch cost alike.
    """

    def plan(self, window: RolloutBatch | RoutingDemand, previous: ExpertPlacement | None = None) -> Plan:
        """The plan for one window.

        Args:
            window: recorded rollouts, or the demand already counted.
            previous: where the experts are now. Ranks are numbered, and slots inside a rank kept, so that as
                few experts as possible move; then ``move_policy`` decides which layers do.

        Raises:
            ConfigError: the EP ranks do not divide the experts.
            InfeasibleError: a sequence longer than the cap, or too few sequences for the cells.

        """
        started = time.monotonic()
        instance("window", window, (RolloutBatch, RoutingDemand))
        if isinstance(previous, Plan):
            raise ConfigError("previous is a Plan; give its placement: previous=plan.placement.")
        if previous is not None:
            instance("previous", previous, ExpertPlacement)
        demand = self.collector.collect(window) if isinstance(window, RolloutBatch) else window
        self.topology.slots_per_rank(demand.num_experts)
        compiled = 0.0
        if self.time_limit_seconds is not None:
            quick = replace(self, time_limit_seconds=None, num_proposals=1)
            compiled = ready_kernels(self, demand, quick.plan)
        search = Search(planner=self, demand=demand, started=started, kernel_seconds=compiled)
        baseline = search.baseline()
        search.keep_time()
        found = [candidate for candidate in alternation.candidates(search) if search.allowed(candidate)]
        found += search.legal()
        most = min(candidate.packing.num_microbatches for candidate in found)
        known = min(candidate.evaluation.value for candidate in found)
        # One microbatch more may lower the peaks on paper; each costs what no cost model here counts.
        others = [
            other for other in [baseline, *baseline_plans.candidates(search, known)] if other.packing.num_microbatches <= most
        ]
        found += [other for other in others if search.allowed(other)]
        best = min(found, key=lambda candidate: candidate.evaluation.key)
        best = brought_near(search, best)
        if previous is None:
            return search.report(best, baseline, known)
        best, moves = moved_on(search, best, baseline, previous)
        return search.report(best, baseline, known, moves)
