"""A window in, a plan out: collect, place, certify, pack, refine, bound. Letters: :mod:`routepack.types`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from importlib import metadata

import numpy as np

from routepack import alternation, bounds, cost
from routepack.components.collector import RoutingDemandCollector
from routepack.components.packer import FirstFitPacker, Packer, PackingProblem
from routepack.components.rerouter import ExpertRerouter, Rerouter
from routepack.errors import ConfigError
from routepack.types import SYNCS, Certificate, ExpertPlacement, Packing, Plan, RolloutBatch, RoutingDemand, Sync, Topology

FEWEST_PROPOSALS = 500
"""Per sequence, by default, in however large a window."""
REFINE_SHARE = 0.1
"""Share of a time limit kept for pricing, bounds and digests."""


@dataclass(kw_only=True)
class Planner:
    """Plans optimizer-step windows: which experts on which ranks, which sequences in which microbatch.

    The plan is never worse than the baseline (identity placement, first-fit packing), which is always
    computed too. Same window, seed and ``num_proposals`` give the same plan, bit for bit, on any number of
    threads; a ``time_limit_seconds`` does not, and the plan's ``budget`` says which was used.

    Placement and packing are alternated, each on the objective of ``sync``; every pair met is priced, and the
    best kept. Under ``microbatch`` and ``layer`` a pair is priced again with its units dealt so that those of
    one microbatch cost alike.
    """

    topology: Topology
    packer: Packer
    cost_model: cost.CostModel = field(default_factory=cost.WindowNormalizedCost)
    rerouter: Rerouter = field(default_factory=ExpertRerouter)
    collector: RoutingDemandCollector = field(default_factory=RoutingDemandCollector)
    """What counts a RolloutBatch."""
    sync: Sync = "step"
    """What joins the ranks: ``step``, ``microbatch`` or ``layer``."""
    seed: int = 0
    time_limit_seconds: float | None = None
    """Plan for about so long instead of a fixed number of proposals."""
    num_proposals: int | None = None
    """Moves and swaps to try. None: :func:`default_proposals` of the window."""

    def __post_init__(self) -> None:
        if self.sync not in SYNCS:
            raise ConfigError(f"sync={self.sync!r} is unknown: choose {', '.join(SYNCS)}.")
        if self.time_limit_seconds is not None and self.num_proposals is not None:
            raise ConfigError(
                f"time_limit_seconds={self.time_limit_seconds} and num_proposals={self.num_proposals} exclude each other: "
                "set one, or neither for the default number of proposals."
            )
        for name in ("time_limit_seconds", "num_proposals"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r} must be above 0.")

    def plan(self, window: RolloutBatch | RoutingDemand, previous: ExpertPlacement | None = None) -> Plan:
        """The plan for one window.

        Args:
            window: recorded rollouts, or the demand already counted.
            previous: where the experts are now. Ranks are numbered, and slots inside a rank kept, so that as
                few experts as possible move; the value does not depend on it.

        Raises:
            ConfigError: the EP ranks do not divide the experts.
            InfeasibleError: a sequence longer than the cap, or too few sequences for the cells.

        """
        started = time.monotonic()
        demand = self.collector.collect(window) if isinstance(window, RolloutBatch) else window
        self.topology.slots_per_rank(demand.num_experts)
        search = _Search(planner=self, demand=demand, started=started)
        baseline = search.baseline()
        best = min([baseline, *alternation.candidates(search)], key=lambda candidate: candidate.evaluation.key)
        if previous is not None:
            best = best.kept_near(previous, self.topology)
        return search.report(best, baseline)


def default_proposals(demand: RoutingDemand, topology: Topology, sync: Sync = "step") -> int:
    """Proposals that a plan gets where nothing is set: 6000 a sequence, fewer where each costs much.

    About 3 s on two cores for a window of 4,096 sequences, less for smaller ones.
    """
    per_proposal = topology.expert_parallel_degree * demand.num_layers * (1 if sync == "step" else 2)
    return int(min(6000 * demand.num_sequences, max(2.5e9 / per_proposal, FEWEST_PROPOSALS * demand.num_sequences)))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidate:
    placement: ExpertPlacement
    packing: Packing
    evaluation: cost.Evaluation

    def kept_near(self, previous: ExpertPlacement, topology: Topology) -> _Candidate:
        from routepack.solvers.placement import keep_in_place

        slots_LP = keep_in_place(
            self.placement.physical_to_logical_LP, previous.physical_to_logical_LP, topology.expert_parallel_degree
        )
        placement = ExpertPlacement(physical_to_logical_LP=slots_LP)
        return _Candidate(placement=placement, packing=self.packing, evaluation=self.evaluation)


@dataclass(kw_only=True, eq=False)
class _Search:
    """One call of :meth:`Planner.plan`: what its steps share."""

    planner: Planner
    demand: RoutingDemand
    started: float

    def __post_init__(self) -> None:
        planner, demand = self.planner, self.demand
        self.topology, self.packer, self.rerouter = planner.topology, planner.packer, planner.rerouter
        self.rates = planner.cost_model.rates(demand, self.topology)
        self.certificate, self.feasible = self.packer.certify(demand.length_S, self.topology, seed=planner.seed)
        self.num_proposals = planner.num_proposals or default_proposals(demand, self.topology, planner.sync)
        limit = planner.time_limit_seconds
        self.deadline = None if limit is None else self.started + limit * (1 - REFINE_SHARE)

    def baseline(self) -> _Candidate:
        """Identity placement and first-fit packing."""
        placement = ExpertPlacement.identity(self.demand.num_layers, self.demand.num_experts)
        load_SRL = self.load_of(placement)
        packer = FirstFitPacker(max_tokens=self.packer.max_tokens)
        return self.priced(placement, packer.pack(self.problem(load_SRL)), load_SRL)

    def problem(
        self, load_SRL: np.ndarray, *, start: np.ndarray | None = None, seed: int | None = None, **search
    ) -> PackingProblem:
        """What the packer sees; *search*: further fields of the problem that steer its search."""
        return PackingProblem(
            length_S=self.demand.length_S,
            load_SRL=load_SRL,
            rates=self.rates,
            topology=self.topology,
            max_tokens=self.packer.max_tokens,
            num_microbatches=self.certificate.num_microbatches,
            feasible_cell_of_S=self.feasible,
            start_cell_of_S=start,
            sync=self.planner.sync,
            seed=self.planner.seed if seed is None else seed,
            deadline=self.deadline,
            **{"num_proposals": self.num_proposals} | search,
        )

    def load_of(self, placement: ExpertPlacement) -> np.ndarray:
        """int32 [S, R, >= L]."""
        from routepack.solvers.loads import rank_load

        ranks = self.topology.expert_parallel_degree
        return rank_load(self.demand.tokens_SLE, placement.rank_of_LE(ranks), ranks)

    def priced(self, placement: ExpertPlacement, packing: Packing, load_SRL: np.ndarray) -> _Candidate:
        """A candidate with its value under the planner's ``sync``."""
        evaluation = cost.evaluate(
            load_SRL=load_SRL,
            length_S=self.demand.length_S,
            packing=packing,
            topology=self.topology,
            rates=self.rates,
            sync=self.planner.sync,
        )
        return _Candidate(placement=placement, packing=packing, evaluation=evaluation)

    def report(self, best: _Candidate, baseline: _Candidate) -> Plan:
        """The plan, with everything that it says about itself."""
        planner = self.planner
        limits = bounds.plan_bounds(
            self.demand, self.topology, self.rates, max_tokens=self.packer.max_tokens, sync=planner.sync
        )
        rows = min(self.certificate.num_microbatches, best.packing.num_microbatches)
        parts = best.evaluation.parts("planned") | baseline.evaluation.parts("baseline")
        return Plan(
            topology=self.topology,
            placement=best.placement,
            packing=best.packing,
            length_S=self.demand.length_S,
            max_tokens=self.packer.max_tokens,
            sync=planner.sync,
            value=best.evaluation.value,
            bound=limits["attention"] + limits["expert"],
            baseline_value=baseline.evaluation.value,
            certificate=Certificate(
                num_microbatches=rows, lower_bound=self.certificate.lower_bound, method=self.certificate.method
            ),
            baseline_microbatches=baseline.packing.num_microbatches,
            unit=self.rates.unit,
            cost=self.rates.as_dict() | planner.cost_model.as_dict(),
            parts=parts | {f"bound.{name}": value for name, value in limits.items()},
            seed=planner.seed,
            budget=self.budget(),
            plan_seconds=time.monotonic() - self.started,
            demand_digest=self.demand.digest,
            versions=versions(),
        )

    def budget(self) -> dict[str, float | int]:
        """What limited the search."""
        if self.planner.time_limit_seconds is not None:
            return {"time_limit_seconds": float(self.planner.time_limit_seconds)}
        return {"num_proposals": int(self.num_proposals)}


def versions() -> dict[str, str]:
    """Versions of all that a plan depends on."""
    found = {"python": sys.version.split()[0], "numpy": np.__version__, "numba": metadata.version("numba")}
    try:
        found["routepack"] = metadata.version("routepack")
    except metadata.PackageNotFoundError:
        found["routepack"] = "source"
    return found
