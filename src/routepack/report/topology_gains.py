"""What planning would gain on topologies that one might train on. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.checks import whole
from routepack.core.errors import RoutePackError
from routepack.core.plans import Plan, Sync, Topology
from routepack.core.rollouts import RolloutBatch, RoutingDemand
from routepack.cost.models import CostModel, WindowNormalizedCost
from routepack.planning.planner import Planner
from routepack.planning.search import default_proposals

QUICK_SHARE = 0.1
"""Share of a plan's usual proposals that a look at one topology takes."""
ROUND_TO = 1024
"""Tokens to which the longest sequence is rounded up where no cap is given."""


@dataclass(frozen=True, kw_only=True)
class TopologyGain:
    """What a plan would be worth on one topology, or why there is none."""

    expert_parallel_degree: int
    data_parallel_degree: int
    baseline: float | None = None
    """Predicted step of identity placement and first-fit packing."""
    planned: float | None = None
    bound: float | None = None
    unit: str = ""
    num_microbatches: int | None = None
    baseline_microbatches: int | None = None
    imbalance_before: float | None = None
    """Fullest EP rank over the mean one, mean over microbatches and layers."""
    imbalance_after: float | None = None
    plan_seconds: float | None = None
    reason: str = ""
    """Why this topology cannot be planned."""

    @property
    def gain(self) -> float | None:
        """How much longer the baseline takes than the plan, as a fraction."""
        return None if self.baseline is None or self.planned is None else self.baseline / self.planned - 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers; None for what there is not."""
        return asdict(self) | {"gain": self.gain}


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What to plan with, on every topology alike."""

    max_tokens: int
    """The token cap of a microbatch on one rank."""
    sync: Sync = "step"
    cost_model: CostModel = field(default_factory=WindowNormalizedCost)
    num_proposals: int | None = None
    """None: a tenth of what a plan usually takes. The gain shown is then a little less than a plan's."""
    model_parallel_degree: int = 1
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The options as plain numbers, and the cost model as a plan keeps it."""
        return asdict(self) | {"cost_model": self.cost_model.as_dict()}

    def gains(
        self,
        window: RolloutBatch | RoutingDemand,
        expert_parallel: Sequence[int],
        data_parallel: Sequence[int],
    ) -> Iterator[TopologyGain]:
        """The gain of each pair of degrees, each planned when the iterator comes to it."""
        demand = window if isinstance(window, RoutingDemand) else RoutingDemandCollector().collect(window)
        for ranks in data_parallel:
            for expert_ranks in expert_parallel:
                yield self.gain(demand, expert_ranks, ranks)

    def gain(self, demand: RoutingDemand, expert_parallel: int, data_parallel: int) -> TopologyGain:
        """Plan for one topology; the gain of that, or the reason why it cannot be planned."""
        degrees = {"expert_parallel_degree": expert_parallel, "data_parallel_degree": data_parallel}
        try:
            plan = self._plan(demand, Topology(**degrees, model_parallel_degree=self.model_parallel_degree))
        except RoutePackError as error:
            # An answer, not an accident: which topologies do not go is half of what is asked.
            return TopologyGain(**degrees, reason=str(error))
        return TopologyGain(
            **degrees,
            baseline=plan.baseline_value,
            planned=plan.value,
            bound=plan.bound,
            unit=plan.unit,
            num_microbatches=plan.num_microbatches,
            baseline_microbatches=plan.baseline_microbatches,
            imbalance_before=plan.parts["baseline.imbalance_mean"],
            imbalance_after=plan.parts["planned.imbalance_mean"],
            plan_seconds=plan.plan_seconds,
        )

    def _plan(self, demand: RoutingDemand, topology: Topology) -> Plan:
        quick = max(1, round(QUICK_SHARE * default_proposals(demand, topology, self.sync)))
        return Planner(
            topology=topology,
            packer=AttentionAwarePacker(max_tokens=self.max_tokens),
            cost_model=self.cost_model,
            sync=self.sync,
            seed=self.seed,
            num_proposals=quick if self.num_proposals is None else whole("num_proposals", self.num_proposals, least=1),
        ).plan(demand)


def natural_cap(longest: int) -> int:
    """The smallest multiple of 1024 tokens that holds the longest sequence: a cap, where none is given.

    >>> natural_cap(1402)
    2048
    """
    return -(-longest // ROUND_TO) * ROUND_TO
