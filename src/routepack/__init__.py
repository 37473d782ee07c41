"""RoutePack: expert placement and attention-aware packing for MoE reinforcement learning.

Everything public is here; each name loads its module when first used, so that importing RoutePack
costs neither torch nor a trainer.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routepack import formats, solvers, testing
    from routepack.background import BackgroundPlanner, PlanTiming
    from routepack.communication import FreeLinks, Links, LinkSpeeds, WindowNormalizedLinks, copies_across
    from routepack.components.baselines import (
        EPLBRerouter,
        KarmarkarKarpPacker,
        LPTRerouter,
        ModifiedFirstFitPacker,
        TokenLPTPacker,
        UnequalKarmarkarKarpPacker,
    )
    from routepack.components.collector import RoutingDemandCollector
    from routepack.components.hierarchical import HierarchicalRerouter
    from routepack.components.moe import PermutedExperts, PermutedMoE
    from routepack.components.move_policy import AlwaysMove, MoveIfItPays, MovePolicy
    from routepack.components.packer import AttentionAwarePacker, FirstFitPacker, Packer, PackingProblem
    from routepack.components.population import PopulationPacker
    from routepack.components.rerouter import ExpertRerouter, IdentityRerouter, Rerouter
    from routepack.cost import CostModel, CostRates, WindowNormalizedCost
    from routepack.errors import ConfigError, InfeasibleError, PlanError, RoutePackError, TraceError
    from routepack.flops import FlopsCost
    from routepack.inspection import inspect_routing
    from routepack.metrics import plan_metrics
    from routepack.outlook import Outlook
    from routepack.planner import Planner
    from routepack.report import write_report
    from routepack.trace import load_demand, load_plan, load_trace, load_window, save_demand, save_plan, save_trace
    from routepack.types import Certificate, ExpertPlacement, Packing, PackingRules, Plan, RolloutBatch, RoutingDemand, Topology
    from routepack.verification import verify

__version__ = "0.1.0.dev0"

_NAMES = {
    "components.baselines": (
        "EPLBRerouter",
        "KarmarkarKarpPacker",
        "LPTRerouter",
        "ModifiedFirstFitPacker",
        "TokenLPTPacker",
        "UnequalKarmarkarKarpPacker",
    ),
    "background": ("BackgroundPlanner", "PlanTiming"),
    "communication": ("FreeLinks", "LinkSpeeds", "Links", "WindowNormalizedLinks", "copies_across"),
    "components.collector": ("RoutingDemandCollector",),
    "components.hierarchical": ("HierarchicalRerouter",),
    "components.moe": ("PermutedExperts", "PermutedMoE"),
    "components.move_policy": ("AlwaysMove", "MoveIfItPays", "MovePolicy"),
    "components.packer": ("AttentionAwarePacker", "FirstFitPacker", "Packer", "PackingProblem"),
    "components.population": ("PopulationPacker",),
    "components.rerouter": ("ExpertRerouter", "IdentityRerouter", "Rerouter"),
    "cost": ("CostModel", "CostRates", "WindowNormalizedCost"),
    "errors": ("ConfigError", "InfeasibleError", "PlanError", "RoutePackError", "TraceError"),
    "flops": ("FlopsCost",),
    "inspection": ("inspect_routing",),
    "metrics": ("plan_metrics",),
    "outlook": ("Outlook",),
    "planner": ("Planner",),
    "report": ("write_report",),
    "trace": ("load_demand", "load_plan", "load_trace", "load_window", "save_demand", "save_plan", "save_trace"),
    "types": ("Certificate", "ExpertPlacement", "Packing", "PackingRules", "Plan", "RolloutBatch", "RoutingDemand", "Topology"),
    "verification": ("verify",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("formats", "solvers", "testing")

__all__ = [
    "AlwaysMove",
    "AttentionAwarePacker",
    "BackgroundPlanner",
    "Certificate",
    "ConfigError",
    "CostModel",
    "CostRates",
    "EPLBRerouter",
    "ExpertPlacement",
    "ExpertRerouter",
    "FirstFitPacker",
    "FlopsCost",
    "FreeLinks",
    "HierarchicalRerouter",
    "IdentityRerouter",
    "InfeasibleError",
    "KarmarkarKarpPacker",
    "LPTRerouter",
    "LinkSpeeds",
    "Links",
    "ModifiedFirstFitPacker",
    "MoveIfItPays",
    "MovePolicy",
    "Outlook",
    "Packer",
    "Packing",
    "PackingProblem",
    "PackingRules",
    "PermutedExperts",
    "PermutedMoE",
    "Plan",
    "PlanError",
    "PlanTiming",
    "Planner",
    "PopulationPacker",
    "Rerouter",
    "RolloutBatch",
    "RoutePackError",
    "RoutingDemand",
    "RoutingDemandCollector",
    "TokenLPTPacker",
    "Topology",
    "TraceError",
    "UnequalKarmarkarKarpPacker",
    "WindowNormalizedCost",
    "WindowNormalizedLinks",
    "copies_across",
    "formats",
    "inspect_routing",
    "load_demand",
    "load_plan",
    "load_trace",
    "load_window",
    "plan_metrics",
    "save_demand",
    "save_plan",
    "save_trace",
    "solvers",
    "testing",
    "verify",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"routepack.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'routepack' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"routepack.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
