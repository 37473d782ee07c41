"""The numbers of a report: what each rank does before and after planning, and what it waits for.

Letters: :mod:`routepack.core`; D devices (DP ranks x model-parallel ranks), U units (microbatches of an EP group).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from routepack.components.packer import FirstFitPacker, PackingProblem
from routepack.core.plans import ExpertPlacement, Packing, Plan
from routepack.core.rollouts import RoutingDemand
from routepack.cost.bounds import placement_bound
from routepack.cost.evaluation import evaluate, sums_by
from routepack.cost.models import CostRates, num_packed_groups, ranks_per_group
from routepack.solvers.rank_loads import rank_load

WORST = 8
"""Sequences, and layers, that are named."""
WORK = ("attention", "dense", "experts", "links")


def rates_of(plan: Plan) -> CostRates:
    """The rates that priced a plan; those of links are left out, which its ``parts`` tell."""
    cost = plan.cost
    return CostRates(
        expert=cost["expert"],
        linear_I=np.asarray(cost["linear"]),
        quadratic_I=np.asarray(cost["quadratic"]),
        window_I=np.asarray(cost.get("window") or np.zeros(len(np.atleast_1d(cost["linear"])))),
        unit=plan.unit,
    )


def time_of(plan: Plan) -> dict[str, dict[str, float]]:
    """Where the predicted step goes, for ``baseline``, ``planned`` and ``bound``; each adds up to its value.

    Work is what an even share of the window costs, equal in all three. The rest is waiting: for the rank with most attention
    and dense work, for the fullest EP rank, and for other EP groups.
    """
    rates, lengths = rates_of(plan), plan.length_S.astype(np.float64)
    ranks = plan.topology.data_parallel_degree
    dense = float(np.outer(lengths, rates.linear_I).sum()) / ranks
    attention = float(rates.cost_SI(plan.length_S).sum()) / ranks - dense
    experts = max(0.0, plan.parts["bound.force_balanced"] - attention - dense)
    values = {"baseline": plan.baseline_value, "planned": plan.value, "bound": plan.bound}
    found = {}
    for name, value in values.items():
        part = {key: plan.parts.get(f"{name}.{key}", 0.0) for key in ("attention", "expert", "communication")}
        found[name] = {
            "attention": attention,
            "dense": dense,
            "experts": experts,
            "links": part["communication"],
            "waiting_attention": max(0.0, part["attention"] - attention - dense),
            "waiting_experts": max(0.0, part["expert"] - experts),
            "waiting_groups": max(0.0, value - sum(part.values())),
        }
    return found


def baseline_packing(plan: Plan, demand: RoutingDemand | None = None) -> Packing | None:
    """First-fit packing of the plan's window, under its cap and rules: the baseline it is compared with.

    None where the plan alone does not determine it, because only the demand knows which modality each sequence has.
    """
    rules = {name: getattr(plan.rules, name) for name in ("min_microbatches", "microbatch_multiple")}
    problem = PackingProblem(
        length_S=plan.length_S,
        load_SRL=np.zeros((len(plan.length_S), 1, 1), dtype=np.int32),
        rates=rates_of(plan),
        topology=plan.topology,
        max_tokens=plan.max_tokens,
        num_microbatches=plan.num_microbatches,
        feasible_cell_of_S=plan.packing.cell_of_S,
        modality_S=None if demand is None else demand.modality_S,
    )
    packing = FirstFitPacker(max_tokens=plan.max_tokens, **rules).pack(problem)
    nothing_SRL = np.zeros((len(plan.length_S), plan.topology.expert_parallel_degree, 1), dtype=np.int32)
    figures = {"length_S": plan.length_S, "topology": plan.topology, "rates": rates_of(plan), "sync": plan.sync}
    attention, _ = evaluate(load_SRL=nothing_SRL, packing=packing, **figures).terms
    return packing if np.isclose(attention, plan.parts["baseline.attention"], rtol=1e-6) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """What the ranks do under one placement and packing."""

    busy_DM: np.ndarray
    """float64: predicted work of each device in each microbatch; experts included where a trace tells them."""
    peak_over_mean_L: np.ndarray | None = None
    """float64: the fullest EP rank's rows over the mean rank's, summed over units; None without a trace."""
    worst_over_mean_L: np.ndarray | None = None
    """float64: the fullest EP rank's rows over the mean rank's in the worst unit; None without a trace."""

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """(summed, worst unit) of each layer; [] without a trace."""
        if self.peak_over_mean_L is None or self.worst_over_mean_L is None:
            return []
        return list(zip(self.peak_over_mean_L.tolist(), self.worst_over_mean_L.tolist(), strict=True))


def side_of(plan: Plan, packing: Packing, placement: ExpertPlacement, demand: RoutingDemand | None) -> Side:
    """What the ranks do under *packing* and *placement*; without a demand, of attention and dense work alone."""
    rates, topology = rates_of(plan), plan.topology
    ranks, shared, experts_on = topology.data_parallel_degree, topology.model_parallel_degree, topology.expert_parallel_degree
    work_C = np.bincount(packing.cell_of_S, rates.cost_SI(plan.length_S).sum(axis=1), packing.num_cells)
    work_MW = work_C.reshape(packing.num_microbatches, ranks)
    if demand is None:
        return Side(busy_DM=work_MW.T)
    load_SRL = rank_load(demand.tokens_SLE, placement.rank_of_LE(experts_on), experts_on)[:, :, : demand.num_layers]
    units = packing.num_microbatches * num_packed_groups(topology)
    load_URL = sums_by(packing.cell_of_S // ranks_per_group(topology), load_SRL, units)
    experts_MGR = rates.expert * load_URL.sum(axis=2).reshape(packing.num_microbatches, -1, experts_on)
    experts_MD = experts_MGR.reshape(packing.num_microbatches, -1)
    # Without expert parallelism every DP rank is a group of its own, however many devices share it.
    work_MD = work_MW if experts_on == 1 else np.repeat(work_MW, shared, axis=1)
    peak_UL, mean_UL = load_URL.max(axis=1), load_URL.mean(axis=1)
    ratio_UL = np.where(mean_UL > 0, peak_UL / np.where(mean_UL > 0, mean_UL, 1.0), 1.0)
    return Side(
        busy_DM=(work_MD + experts_MD).T,
        peak_over_mean_L=peak_UL.sum(axis=0) / np.maximum(mean_UL.sum(axis=0), 1e-300),
        worst_over_mean_L=ratio_UL.max(axis=0),
    )


def worst_layers(plan: Plan, demand: RoutingDemand, before: Side, after: Side) -> list[dict[str, Any]]:
    """The layers that stay most uneven under the plan, and their hottest experts."""
    assert before.peak_over_mean_L is not None
    assert after.peak_over_mean_L is not None
    tokens_LE, ranks = demand.tokens_LE, plan.topology.expert_parallel_degree
    rows_L = np.maximum(tokens_LE.sum(axis=1), 1)
    floor_L = placement_bound(tokens_LE, ranks) * ranks / rows_L
    order = np.lexsort((-before.peak_over_mean_L, -after.peak_over_mean_L.round(4)))[:WORST]
    return [
        {
            "layer": int(demand.layer_ids_L[layer]),
            "expert": int(tokens_LE[layer].argmax()),
            "share": float(tokens_LE[layer].max() / rows_L[layer]),
            "over_mean": float(tokens_LE[layer].max() * demand.num_experts / rows_L[layer]),
            "before": float(before.peak_over_mean_L[layer]),
            "after": float(after.peak_over_mean_L[layer]),
            "floor": float(floor_L[layer]),
        }
        for layer in order
    ]


def worst_sequences(plan: Plan, demand: RoutingDemand | None) -> list[dict[str, Any]]:
    """The sequences with most attention and dense work; one above an even share of a cell fills it alone."""
    cost_S = rates_of(plan).cost_SI(plan.length_S).sum(axis=1)
    even = cost_S.sum() / plan.packing.num_cells
    held_C = np.bincount(plan.packing.cell_of_S, minlength=plan.packing.num_cells)
    found = []
    for s in np.argsort(-cost_S, kind="stable")[:WORST].tolist():
        cell = int(plan.packing.cell_of_S[s])
        found.append(
            {
                "sequence": s,
                "group": None if demand is None or demand.group_S is None else int(demand.group_S[s]),
                "tokens": int(plan.length_S[s]),
                "share_of_cell": float(cost_S[s] / even) if even else 0.0,
                "microbatch": cell // plan.topology.data_parallel_degree,
                "rank": cell % plan.topology.data_parallel_degree,
                "beside": int(held_C[cell]) - 1,
                "estimated": bool(demand is not None and demand.estimated_S is not None and demand.estimated_S[s]),
            }
        )
    return found
