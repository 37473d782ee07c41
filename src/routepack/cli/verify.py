"""``routepack verify``: a plan file, checked against the trace it was made for."""

import typer

from routepack.cli.arguments import PlanFile, TraceFile
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import PlanError
from routepack.core.rollouts import RoutingDemand
from routepack.planning.verification import verify as problems_of
from routepack.traces.trace_files import load_plan, load_window


def verify(plan: PlanFile, trace: TraceFile) -> None:
    """Check a plan against the trace it was made for, with code that shares nothing with the planner."""
    made, window = load_plan(plan), load_window(trace)
    demand = window if isinstance(window, RoutingDemand) else RoutingDemandCollector().collect(window)
    if problems := problems_of(made, demand):
        raise PlanError(f"{plan} is rejected for {trace}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    typer.echo(
        f"{plan}: accepted. {demand.num_sequences} sequences in {made.num_microbatches} x "
        f"{made.topology.data_parallel_degree} cells, value {made.value:.4f}, bound {made.bound:.4f}."
    )
