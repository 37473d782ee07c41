"""From a config to a Planner: the sections that every command which plans has in common."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.expert_rerouter import ExpertRerouter
from routepack.components.move_policy import AlwaysMove, MovePolicy
from routepack.components.packer import Packer
from routepack.components.rerouter import Rerouter
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.config import build, instantiate
from routepack.core.plans import Topology
from routepack.cost.links import FreeLinks, Links
from routepack.cost.models import CostModel, WindowNormalizedCost
from routepack.planning.planner import Planner


@dataclass(kw_only=True)
class PlanOptions:
    """The options of a plan that belong to no component."""

    sync: str = "step"
    """What joins the ranks: ``step``, ``microbatch`` or ``layer``."""
    seed: int = 0
    time_limit_seconds: float | None = None
    """Search for this long; how far it gets then depends on the machine's load."""
    num_proposals: int | None = None
    """Search this far; the same seed then gives the same plan on any machine."""


PLAN_OPTIONS = tuple(PlanOptions.__dataclass_fields__)
COMPONENTS = ("topology", "cost_model", "links", "collector", "rerouter", "packer", "move_policy")
PLANNER_KEYS = (*COMPONENTS, *PLAN_OPTIONS)
TRAINING_ONLY = ("model", "loss", "trainer", "launch", "update", "windows", "task", "rollout", "warmup", "rl")
"""What a config of ``routepack train`` may have and one of ``routepack plan`` may not."""


def build_planner(config: DictConfig) -> Planner:
    """The planner that *config* describes; raises ConfigError naming the option that is wrong."""
    return Planner(
        topology=build(config, "topology", base=Topology),
        cost_model=build(config, "cost_model", base=CostModel, default=WindowNormalizedCost),
        links=build(config, "links", base=Links, default=FreeLinks),
        collector=build(config, "collector", base=RoutingDemandCollector),
        rerouter=build(config, "rerouter", base=Rerouter, default=ExpertRerouter),
        packer=build(config, "packer", base=Packer, default=AttentionAwarePacker),
        move_policy=build(config, "move_policy", base=MovePolicy, default=AlwaysMove),
        **_options(config),
    )


def _options(config: DictConfig) -> dict[str, Any]:
    given = {key: config[key] for key in PLAN_OPTIONS if key in config}
    return asdict(instantiate(PlanOptions, given, where=""))
