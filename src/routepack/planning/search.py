"""The state of one search for a plan: its window, its limits, its prices, and the pairs that it has priced.

Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, cast

import numpy as np

from routepack.components.expert_rerouter import ExpertRerouter
from routepack.components.move_policy import AlwaysMove, MovePolicy
from routepack.components.packer import FirstFitPacker, Packer, PackingProblem
from routepack.components.rerouter import Rerouter
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.checks import instance, real, whole
from routepack.core.errors import ConfigError, InfeasibleError
from routepack.core.plans import SYNCS, ExpertPlacement, Packing, Plan, Sync, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost import bounds, evaluation, models
from routepack.cost.links import FreeLinks, Links, nodes_per_group, traffic_of

FEWEST_PROPOSALS = 500
"""Per sequence, by default, in however large a window."""
LEAST_RESERVE, MOST_RESERVE = 0.02, 0.45
"""Shares of a time limit between which what is kept for pricing, bounds and digests lies."""
NO_MOVES: Mapping[str, float] = {}


@dataclass(kw_only=True)
class PlannerSettings:
    """What a planner is made of and how far it searches; :class:`~routepack.Planner` plans with it."""

    topology: Topology
    packer: Packer
    cost_model: models.CostModel = field(default_factory=models.WindowNormalizedCost)
    rerouter: Rerouter = field(default_factory=ExpertRerouter)
    links: Links = field(default_factory=FreeLinks)
    """What the all-to-all costs inside and across nodes."""
    move_policy: MovePolicy = field(default_factory=AlwaysMove)
    """Which layers' experts move from where they are, when :meth:`plan` is told."""
    collector: RoutingDemandCollector = field(default_factory=RoutingDemandCollector)
    """What counts a RolloutBatch."""
    sync: Sync = "step"
    """What joins the ranks: ``step``, ``microbatch`` or ``layer``."""
    seed: int = 0
    time_limit_seconds: float | None = None
    """Plan for about so long instead of a fixed number of proposals, though never shorter than counting, certifying and pricing
    take: a limit below that searches as little as there is and is overrun. Kernels that are not compiled or loaded yet are
    first, and their time does not count: the plan's ``kernel_seconds``."""
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
        # Each chain and phase has a seed of its own, up to 2^22 for one of these: all stay below 2^63.
        whole("seed", self.seed, least=0, most=2**40)
        if self.num_proposals is not None:
            whole("num_proposals", self.num_proposals, least=1, most=10**13)
        if self.time_limit_seconds is not None:
            real("time_limit_seconds", self.time_limit_seconds, least=1e-3, most=86_400.0)
        for name, kind in _COMPONENTS.items():
            instance(name, getattr(self, name), kind)


_COMPONENTS = {
    "topology": Topology,
    "packer": Packer,
    "cost_model": models.CostModel,
    "rerouter": Rerouter,
    "collector": RoutingDemandCollector,
    "links": Links,
    "move_policy": MovePolicy,
}


def default_proposals(demand: RoutingDemand, topology: Topology, sync: Sync = "step") -> int:
    """Proposals that a plan gets where nothing is set: 6000 a sequence, fewer where each costs much.

    About 3 s on two cores for a window of 4,096 sequences, less for smaller ones.
    """
    per_proposal = topology.expert_parallel_degree * demand.num_layers * (1 if sync == "step" else 2)
    return int(min(6000 * demand.num_sequences, max(4e9 / per_proposal, FEWEST_PROPOSALS * demand.num_sequences)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A placement and a packing, priced."""

    placement: ExpertPlacement
    packing: Packing
    evaluation: evaluation.Evaluation


@dataclass(kw_only=True, eq=False)
class Search:
    """One call of :meth:`routepack.Planner.plan`: what its phases share."""

    planner: PlannerSettings
    demand: RoutingDemand
    started: float
    kernel_seconds: float = 0.0
    """How long that waited for kernels, on no clock of the search."""

    def __post_init__(self) -> None:
        planner, demand = self.planner, self.demand
        self.topology, self.packer, self.rerouter = planner.topology, planner.packer, planner.rerouter
        _check_countable(demand)
        rates = planner.cost_model.rates(demand, self.topology)
        instance(f"what {type(planner.cost_model).__name__}.rates gave", rates, models.CostRates)
        planner.move_policy.check_unit(rates.unit)
        inside, across = planner.links.checked_prices(demand, self.topology, rates.unit)
        self.rates = replace(rates, inside=inside, across=across)
        self.certificate, self.feasible = self.packer.certify(
            demand.length_S, self.topology, seed=planner.seed, modality_S=demand.modality_S
        )
        self.num_proposals = planner.num_proposals or default_proposals(demand, self.topology, planner.sync)
        limit = planner.time_limit_seconds
        self.deadline = None if limit is None else self.clock_started + limit

    @property
    def clock_started(self) -> float:
        """``time.monotonic()`` from which a time limit counts."""
        return self.started + self.kernel_seconds

    def keep_time(self) -> None:
        """Leave three times the time for the end that the beginning took: the same is priced, and more."""
        limit = self.planner.time_limit_seconds
        if self.deadline is not None and limit is not None:
            beginning = time.monotonic() - self.clock_started
            self.deadline -= min(limit * MOST_RESERVE, max(limit * LEAST_RESERVE, 3 * beginning))

    def baseline(self) -> Candidate:
        """Identity placement and first-fit packing."""
        placement = ExpertPlacement.identity(self.demand.num_layers, self.demand.num_experts)
        load_SRL = self.load_of(placement)
        rules = {"min_microbatches": self.packer.min_microbatches, "microbatch_multiple": self.packer.microbatch_multiple}
        packer = FirstFitPacker(max_tokens=self.packer.max_tokens, **rules)
        return self.priced(placement, packer.pack(self.problem(load_SRL)), load_SRL)

    def allowed(self, candidate: Candidate) -> bool:
        """Whether the ranks' numbers of sequences are as the packer's rules want them."""
        return self.keeps_counts(candidate.packing.cell_of_S)

    def keeps_counts(self, cell_of_S: np.ndarray) -> bool:
        """The same of sequences' cells alone."""
        return self.packer.rules.counts_allowed(cell_of_S, self.topology.data_parallel_degree)

    def legal(self) -> Iterator[Candidate]:
        """Where the packer has a rule on the ranks' numbers of sequences: what it certified, which keeps that in any case."""
        if self.packer.rules.equal_sequences:
            placement = self.rerouter.place(self.demand.tokens_LE, self.topology)
            packing = Packing(
                cell_of_S=self.feasible,
                num_microbatches=self.certificate.num_microbatches,
                data_parallel_degree=self.topology.data_parallel_degree,
            )
            yield self.priced(placement, packing, self.load_of(placement))

    def problem(
        self, load_SRL: np.ndarray, *, start: np.ndarray | None = None, seed: int | None = None, **search: Any
    ) -> PackingProblem:
        """What the packer sees; *search*: further fields of the problem that steer its search."""
        load_SRL = load_SRL.view()
        # A packer that writes to what it is priced by must fail, not be believed.
        load_SRL.flags.writeable = False
        return PackingProblem(
            length_S=self.demand.length_S,
            load_SRL=load_SRL,
            rates=self.rates,
            topology=self.topology,
            max_tokens=self.packer.max_tokens,
            num_microbatches=self.certificate.num_microbatches,
            feasible_cell_of_S=self.feasible,
            start_cell_of_S=start,
            modality_S=self.demand.modality_S,
            sync=self.planner.sync,
            seed=self.planner.seed if seed is None else seed,
            deadline=self.deadline,
            **cast(dict[str, Any], {"num_proposals": self.num_proposals} | search),
        )

    def load_of(self, placement: ExpertPlacement) -> np.ndarray:
        """int32 [S, R, >= L]."""
        from routepack.solvers.rank_loads import rank_load

        ranks = self.topology.expert_parallel_degree
        return rank_load(self.demand.tokens_SLE, placement.rank_of_LE(ranks), ranks)

    def priced(self, placement: ExpertPlacement, packing: Packing, load_SRL: np.ndarray) -> Candidate:
        """A candidate with its value under the planner's ``sync``."""
        priced = evaluation.evaluate(
            load_SRL=load_SRL,
            length_S=self.demand.length_S,
            packing=packing,
            topology=self.topology,
            rates=self.rates,
            sync=self.planner.sync,
        )
        return Candidate(placement=placement, packing=packing, evaluation=priced)

    def report(self, best: Candidate, baseline: Candidate, moves: Mapping[str, float] = NO_MOVES) -> Plan:
        """The plan, with everything that it says about itself."""
        planner = self.planner
        limits = bounds.plan_bounds(
            self.demand, self.topology, self.rates, max_tokens=self.packer.max_tokens, sync=planner.sync
        )
        rows = best.packing.num_microbatches
        parts = best.evaluation.parts("planned") | baseline.evaluation.parts("baseline")
        if not isinstance(planner.links, FreeLinks):
            parts |= self.traffic(best, "planned") | self.traffic(baseline, "baseline")
            parts["planned.nodes_per_group"] = nodes_per_group(self.topology)
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
            certificate=replace(self.certificate, num_microbatches=rows, possible=min(rows, self.certificate.possible)),
            baseline_microbatches=baseline.packing.num_microbatches,
            rules=self.packer.rules,
            unit=self.rates.unit,
            cost=self.rates.as_dict() | planner.cost_model.as_dict() | {"links": planner.links.as_dict()},
            parts={**parts, **moves} | {f"bound.{name}": value for name, value in limits.items()},
            seed=planner.seed,
            budget=self.budget(),
            plan_seconds=time.monotonic() - self.started,
            kernel_seconds=self.kernel_seconds,
            demand_digest=self.demand.digest,
            versions=versions(),
        )

    def traffic(self, candidate: Candidate, name: str) -> dict[str, float]:
        """What goes over links, for a plan's ``parts``."""
        packing = candidate.packing
        load_CRL = evaluation.sums_by(packing.cell_of_S, self.load_of(candidate.placement), packing.num_cells)
        return traffic_of(load_CRL, self.topology).parts(name, self.planner.links.bytes_per_row)

    def budget(self) -> dict[str, float | int]:
        """What limited the search."""
        if self.planner.time_limit_seconds is not None:
            return {"time_limit_seconds": float(self.planner.time_limit_seconds)}
        return {"num_proposals": int(self.num_proposals)}


def _check_countable(demand: RoutingDemand) -> None:
    """Raise InfeasibleError where a unit, which is the window at most, may route more rows than solvers count in 32 bits."""
    rows = int(demand.tokens_LE[0].sum())
    if rows >= 2**31:
        raise InfeasibleError(
            f"the window routes {rows} rows in a layer, and planning counts up to {2**31 - 1}: plan it in several windows."
        )


def versions() -> dict[str, str]:
    """Versions of all that a plan depends on."""
    found = {"python": sys.version.split()[0], "numpy": np.__version__, "numba": metadata.version("numba")}
    try:
        found["routepack"] = metadata.version("routepack")
    except metadata.PackageNotFoundError:
        found["routepack"] = "source"
    return found
