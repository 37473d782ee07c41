"""From a config to a Planner: the sections that every command which plans has in common."""

from __future__ import annotations

from omegaconf import DictConfig

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.expert_rerouter import ExpertRerouter
from routepack.components.move_policy import AlwaysMove, MovePolicy
from routepack.components.packer import Packer
from routepack.components.rerouter import Rerouter
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.component import Component, option_types
from routepack.core.config import build, instantiate
from routepack.core.plans import Topology
from routepack.cost.links import FreeLinks, Links
from routepack.cost.models import CostModel, WindowNormalizedCost
from routepack.planning.planner import Planner

COMPONENTS: dict[str, tuple[type[Component], type[Component]]] = {
    "topology": (Topology, Topology),
    "cost_model": (CostModel, WindowNormalizedCost),
    "links": (Links, FreeLinks),
    "collector": (RoutingDemandCollector, RoutingDemandCollector),
    "rerouter": (Rerouter, ExpertRerouter),
    "packer": (Packer, AttentionAwarePacker),
    "move_policy": (MovePolicy, AlwaysMove),
}
"""The sections of a planner's config: what each must be, and what it is where a config does not say."""
PLANNER_KEYS = tuple(option_types(Planner))
TRAINING_ONLY = ("model", "loss", "trainer", "launch", "update", "windows", "task", "rollout", "warmup", "rl")
"""What a config of ``routepack train`` may have and one of ``routepack plan`` may not."""


def build_planner(config: DictConfig) -> Planner:
    """The planner that *config* describes; raises ConfigError naming the option that is wrong."""
    components = {name: build(config, name, base=base, default=usual) for name, (base, usual) in COMPONENTS.items()}
    return instantiate(Planner, {name: config[name] for name in PLANNER_KEYS if name in config} | components, where="")
