"""The state of one search for a plan: its window, its limits, its prices, and the pairs that it has priced.

Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from types import NoneType
from typing import Annotated, ClassVar

import numpy as np

from routepack.components.expert_rerouter import ExpertRerouter
from routepack.components.move_policy import AlwaysMove, MovePolicy
from routepack.components.packer import FirstFitPacker, Packer, PackingProblem
from routepack.components.placement_search import PlacementSearch
from routepack.components.rerouter import IdentityRerouter, Rerouter
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.checks import instance
from routepack.core.component import Component, Limits, as_config, import_path
from routepack.core.errors import ConfigError, InfeasibleError
from routepack.core.plans import ExpertPlacement, Packing, Plan, PlannedBy, Sync, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost import bounds, evaluation, models
from routepack.cost.links import FreeLinks, Links, nodes_per_group, traffic_of

FEWEST_PROPOSALS = 500
"""Per sequence, by default, in however large a window."""
LEAST_RESERVE, MOST_RESERVE = 0.02, 0.45
"""Shares of a time limit between which what is kept for pricing, bounds and digests lies."""
NO_MOVES: Mapping[str, float] = {}


@dataclass(kw_only=True)
class PlannerSettings(Component):
    """What a planner is made of and how far it searches; :class:`~routepack.Planner` plans with it."""

    section: ClassVar[str] = ""

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
    seed: Annotated[int, Limits(least=0, most=2**40)] = 0
    """Each chain and phase of a search draws from a seed of its own, derived from this one."""
    time_limit_seconds: Annotated[float, Limits(least=1e-3, most=86_400.0)] | None = None
    """Plan for about so long instead of a fixed number of proposals, though never shorter than counting, certifying and pricing
    take: a limit below that searches as little as there is and is overrun. Kernels that are not compiled or loaded yet are
    first, and their time does not count: the plan's ``kernel_seconds``."""
    num_proposals: Annotated[int, Limits(least=1, most=10**13)] | None = None
    """Moves and swaps to try. None: :func:`default_proposals` of the window."""

    def check_options(self) -> None:
        """Raise ConfigError where two budgets are given."""
        if self.time_limit_seconds is not None and self.num_proposals is not None:
            raise ConfigError(
                f"time_limit_seconds={self.time_limit_seconds} and num_proposals={self.num_proposals} exclude each other: "
                "set one, or neither for the default number of proposals."
            )


def default_proposals(demand: RoutingDemand, topology: Topology, sync: Sync = "step") -> int:
    """Proposals that a plan gets where nothing is set: 6000 a sequence, fewer where each costs much.

    About 3 s on two cores for a window of 4,096 sequences, less for smaller ones.
    """
    per_proposal = topology.expert_parallel_degree * demand.num_layers * (1 if sync == "step" else 2)
    return int(min(6000 * demand.num_sequences, max(4e9 / per_proposal, FEWEST_PROPOSALS * demand.num_sequences)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A placement and a packing, priced, and what made them."""

    placement: ExpertPlacement
    packing: Packing
    rerouter: Rerouter
    packer: Packer
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
        self.placement_search = self.rerouter.search()
        what = f"what {type(self.rerouter).__name__}.search gave"
        instance(what, self.placement_search, (PlacementSearch, NoneType))
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
        rerouter = IdentityRerouter()
        placement = rerouter.place(self.demand.tokens_LE, self.topology)
        load_SRL = self.load_of(placement)
        rules = {"min_microbatches": self.packer.min_microbatches, "microbatch_multiple": self.packer.microbatch_multiple}
        packer = FirstFitPacker(max_tokens=self.packer.max_tokens, **rules)
        packing = packer.pack(self.problem(load_SRL))
        return self.priced(placement, packing, load_SRL, rerouter=rerouter, packer=packer)

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
        self,
        load_SRL: np.ndarray,
        *,
        start: np.ndarray | None = None,
        seed: int | None = None,
        num_proposals: int | None = None,
        temperatures: tuple[float, float] | None = None,
    ) -> PackingProblem:
        """What the packer sees; what is None is the search's own."""
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
            num_proposals=self.num_proposals if num_proposals is None else num_proposals,
            temperatures=temperatures,
        )

    def load_of(self, placement: ExpertPlacement) -> np.ndarray:
        """int32 [S, R, >= L]."""
        from routepack.solvers.rank_loads import rank_load

        ranks = self.topology.expert_parallel_degree
        return rank_load(self.demand.tokens_SLE, placement.rank_of_LE(ranks), ranks)

    def priced(
        self,
        placement: ExpertPlacement,
        packing: Packing,
        load_SRL: np.ndarray,
        *,
        rerouter: Rerouter | None = None,
        packer: Packer | None = None,
    ) -> Candidate:
        """A candidate with its value under the planner's ``sync``. None: made by the planner's own rerouter or packer."""
        priced = evaluation.evaluate(
            load_SRL=load_SRL,
            length_S=self.demand.length_S,
            packing=packing,
            topology=self.topology,
            rates=self.rates,
            sync=self.planner.sync,
        )
        return Candidate(
            placement=placement,
            packing=packing,
            rerouter=rerouter or self.rerouter,
            packer=packer or self.packer,
            evaluation=priced,
        )

    def changed(self, candidate: Candidate, placement: ExpertPlacement, packing: Packing) -> Candidate:
        """A candidate whose experts or sequences were moved a little, priced anew; the same components count as its makers."""
        makers = {"rerouter": candidate.rerouter, "packer": candidate.packer}
        return self.priced(placement, packing, self.load_of(placement), **makers)

    def report(self, best: Candidate, baseline: Candidate, own_value: float, moves: Mapping[str, float] = NO_MOVES) -> Plan:
        """The plan, with everything that it says about itself. *own_value*: of the best that the planner's own parts made."""
        why = f"its plans reach {own_value:.4f}, this one {best.evaluation.value:.4f} ({self.rates.unit})"
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
            packer=_made_by(best.packer, self.packer, why, certified=np.array_equal(best.packing.cell_of_S, self.feasible)),
            rerouter=_made_by(best.rerouter, self.rerouter, why),
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


def _made_by(made: Component, own: Component, why: str, *, certified: bool = False) -> PlannedBy:
    options = as_config(made)
    name, own_name = options.pop("_target_"), import_path(type(own))
    if name != own_name:
        return PlannedBy(name=name, options=options, instead_of=own_name, why=why)
    return PlannedBy(name=name, options=options, why="it is the packing that certifies M" if certified else "")


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
