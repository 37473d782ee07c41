"""The public names of routepack: listed here once, read by lazy_loader at run time and by type checkers."""

from . import solvers as solvers
from . import testing as testing
from .components.attention_aware_packer import AttentionAwarePacker as AttentionAwarePacker
from .components.baselines import (
    EPLBRerouter as EPLBRerouter,
)
from .components.baselines import (
    KarmarkarKarpPacker as KarmarkarKarpPacker,
)
from .components.baselines import (
    LPTRerouter as LPTRerouter,
)
from .components.baselines import (
    ModifiedFirstFitPacker as ModifiedFirstFitPacker,
)
from .components.baselines import (
    TokenLPTPacker as TokenLPTPacker,
)
from .components.baselines import (
    UnequalKarmarkarKarpPacker as UnequalKarmarkarKarpPacker,
)
from .components.expert_rerouter import ExpertRerouter as ExpertRerouter
from .components.hierarchical_rerouter import HierarchicalRerouter as HierarchicalRerouter
from .components.move_policy import (
    AlwaysMove as AlwaysMove,
)
from .components.move_policy import (
    MoveIfItPays as MoveIfItPays,
)
from .components.move_policy import (
    MovePolicy as MovePolicy,
)
from .components.packer import (
    FirstFitPacker as FirstFitPacker,
)
from .components.packer import (
    Packer as Packer,
)
from .components.packer import (
    PackingProblem as PackingProblem,
)
from .components.population_packer import PopulationPacker as PopulationPacker
from .components.rerouter import (
    IdentityRerouter as IdentityRerouter,
)
from .components.rerouter import (
    Rerouter as Rerouter,
)
from .components.routing_demand_collector import RoutingDemandCollector as RoutingDemandCollector
from .core.errors import (
    ConfigError as ConfigError,
)
from .core.errors import (
    InfeasibleError as InfeasibleError,
)
from .core.errors import (
    PlanError as PlanError,
)
from .core.errors import (
    RoutePackError as RoutePackError,
)
from .core.errors import (
    TraceError as TraceError,
)
from .core.plans import (
    Certificate as Certificate,
)
from .core.plans import (
    ExpertPlacement as ExpertPlacement,
)
from .core.plans import (
    Packing as Packing,
)
from .core.plans import (
    PackingRules as PackingRules,
)
from .core.plans import (
    Plan as Plan,
)
from .core.plans import (
    Topology as Topology,
)
from .core.rollouts import (
    RolloutBatch as RolloutBatch,
)
from .core.rollouts import (
    RoutingDemand as RoutingDemand,
)
from .cost.calibration import MeasuredCost as MeasuredCost
from .cost.links import (
    FreeLinks as FreeLinks,
)
from .cost.links import (
    Links as Links,
)
from .cost.links import (
    LinkSpeeds as LinkSpeeds,
)
from .cost.links import (
    WindowNormalizedLinks as WindowNormalizedLinks,
)
from .cost.links import (
    copies_across as copies_across,
)
from .cost.models import (
    CostModel as CostModel,
)
from .cost.models import (
    CostRates as CostRates,
)
from .cost.models import (
    FlopsCost as FlopsCost,
)
from .cost.models import (
    WindowNormalizedCost as WindowNormalizedCost,
)
from .planning.background import (
    BackgroundPlanner as BackgroundPlanner,
)
from .planning.background import (
    PlanTiming as PlanTiming,
)
from .planning.planner import Planner as Planner
from .planning.verification import verify as verify
from .report.plan_metrics import plan_metrics as plan_metrics
from .report.plan_page import write_report as write_report
from .report.topology_gains import Outlook as Outlook
from .report.trace_statistics import inspect_routing as inspect_routing
from .traces import formats as formats
from .traces.trace_files import (
    load_demand as load_demand,
)
from .traces.trace_files import (
    load_plan as load_plan,
)
from .traces.trace_files import (
    load_trace as load_trace,
)
from .traces.trace_files import (
    load_window as load_window,
)
from .traces.trace_files import (
    save_demand as save_demand,
)
from .traces.trace_files import (
    save_plan as save_plan,
)
from .traces.trace_files import (
    save_trace as save_trace,
)
from .triton_kernels import (
    PermutedExperts as PermutedExperts,
)
from .triton_kernels import (
    PermutedMoE as PermutedMoE,
)

__version__: str
