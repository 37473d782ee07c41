"""A placement and a packing, priced: what each unit waits for. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from routepack.core.plans import Packing, Sync, Topology
from routepack.cost.links import traffic_of
from routepack.cost.models import CostRates, num_packed_groups, ranks_per_group


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """A placement and a packing, priced. Shapes: M microbatches, G groups, L layers."""

    attention_MG: np.ndarray
    """float64: sum over stages of the costliest DP rank of each unit."""
    expert_MG: np.ndarray
    """float64: sum over layers of the fullest EP rank of each unit."""
    joined_attention_M: np.ndarray
    """float64: the same with every DP rank of the microbatch waiting for every other."""
    joined_expert_M: np.ndarray
    imbalance_MGL: np.ndarray
    """float64: fullest EP rank over the mean of its group, in each unit and layer; 1 where nothing is routed."""
    peak_MGL: np.ndarray
    """int64: rows of the fullest EP rank of each unit and layer; the layer axis may be zero-padded."""
    sync: Sync
    links_MGL: np.ndarray | None = None
    """float64: what the busiest links cost in each unit and layer; None where they are free."""
    communication_MG: np.ndarray | float = 0.0
    """float64: sum over layers of the busiest link of each unit; 0 where links are free."""
    joined_communication_M: np.ndarray | float = 0.0

    @cached_property
    def cost_MG(self) -> np.ndarray:
        """float64 [M, G]: J of each unit."""
        return self.attention_MG + self.expert_MG + self.communication_MG

    @cached_property
    def cost_G(self) -> np.ndarray:
        """float64 [G]: U of each EP group over the window."""
        return self.cost_MG.sum(axis=0)

    @cached_property
    def terms(self) -> tuple[float, float]:
        """(attention, expert) of the mean group, or of all ranks where ``sync=layer`` joins them; the rest is waiting."""
        if self.sync == "layer":
            return float(self.joined_attention_M.sum()), float(self.joined_expert_M.sum())
        groups = self.cost_MG.shape[1]
        return float(self.attention_MG.sum()) / groups, float(self.expert_MG.sum()) / groups

    @cached_property
    def communication(self) -> float:
        """What links cost the mean group, or all ranks where ``sync=layer`` joins them."""
        if self.sync == "layer":
            return float(np.sum(self.joined_communication_M))
        return float(np.sum(self.communication_MG)) / self.cost_MG.shape[1]

    @property
    def value(self) -> float:
        """The predicted step under ``sync``."""
        if self.sync == "step":
            return float(self.cost_G.max())
        if self.sync == "microbatch":
            return float(self.cost_MG.max(axis=1).sum())
        return sum(self.terms) + self.communication

    @property
    def key(self) -> tuple[float, float, float]:
        """What planning minimises, lexicographically: (value, sum of U_g, largest J)."""
        return self.value, float(self.cost_G.sum()), float(self.cost_MG.max())

    def parts(self, name: str) -> dict[str, float]:
        """Named figures for a plan's ``parts``."""
        attention, expert = self.terms
        imbalance = self.imbalance_MGL
        return {
            f"{name}.attention": attention,
            f"{name}.expert": expert,
            **({f"{name}.communication": self.communication} if np.ndim(self.communication_MG) else {}),
            f"{name}.waiting": max(0.0, self.value - attention - expert - self.communication),
            f"{name}.largest_unit": float(self.cost_MG.max()),
            f"{name}.imbalance_mean": float(imbalance.mean()),
            f"{name}.imbalance_p95": float(np.percentile(imbalance, 95)),
            f"{name}.imbalance_max": float(imbalance.max()),
        }


def evaluate(
    *, load_SRL: np.ndarray, length_S: np.ndarray, packing: Packing, topology: Topology, rates: CostRates, sync: Sync
) -> Evaluation:
    """Price a packing, given what each sequence sends to each EP rank under a placement.

    Args:
        load_SRL: int32 [S, R, >= L], as :func:`routepack.solvers.rank_loads.rank_load` gives it; zero padding is harmless.
        length_S: int64 [S].
        packing: cells of the sequences.
        topology: which cells meet.
        rates: prices.
        sync: what joins the ranks.

    """
    microbatches, groups, width = packing.num_microbatches, num_packed_groups(topology), ranks_per_group(topology)
    load_URL = sums_by(packing.cell_of_S // width, load_SRL, microbatches * groups)
    stages = len(rates.linear_I)
    cost_CI = np.zeros((packing.num_cells, stages))
    np.add.at(cost_CI, packing.cell_of_S, rates.cost_SI(length_S))
    peak_UL, mean_UL = load_URL.max(axis=1), load_URL.mean(axis=1)
    routed_L = mean_UL.sum(axis=0) > 0
    imbalance_UL = np.where(mean_UL > 0, peak_UL / np.where(mean_UL > 0, mean_UL, 1.0), 1.0)[:, routed_L]
    cost_MGWI = cost_CI.reshape(microbatches, groups, width, stages)
    peak_MGL = peak_UL.reshape(microbatches, groups, -1)
    links_MGL = None
    if rates.links_cost:
        load_CRL = sums_by(packing.cell_of_S, load_SRL, packing.num_cells)
        links_MGL = link_cost(load_CRL, topology, rates).reshape(peak_MGL.shape)
    return Evaluation(
        attention_MG=cost_MGWI.max(axis=2).sum(axis=-1),
        joined_attention_M=cost_MGWI.max(axis=(1, 2)).sum(axis=-1),
        imbalance_MGL=imbalance_UL.reshape(microbatches, groups, -1) if routed_L.any() else np.ones((microbatches, groups, 1)),
        sync=sync,
        **by_layer(peak_MGL, links_MGL, rates.expert),
    )


def by_layer(peak_MGL: np.ndarray, links_MGL: np.ndarray | None, expert: float) -> dict[str, Any]:
    """The terms of an :class:`Evaluation` that add up over layers: *expert* x fullest rank, and links where they cost."""
    terms = {
        "peak_MGL": peak_MGL,
        "links_MGL": links_MGL,
        "expert_MG": expert * peak_MGL.sum(axis=-1, dtype=np.int64),
        "joined_expert_M": expert * peak_MGL.max(axis=1).sum(axis=-1, dtype=np.int64),
    }
    if links_MGL is not None:
        terms["communication_MG"] = links_MGL.sum(axis=-1)
        terms["joined_communication_M"] = links_MGL.max(axis=1).sum(axis=-1)
    return terms


def link_cost(load_CRL: np.ndarray, topology: Topology, rates: CostRates) -> np.ndarray:
    """float64 [U, L]: what the links of every unit cost in every layer, given the rows of each cell to each EP rank."""
    traffic = traffic_of(load_CRL, topology)
    return rates.inside * traffic.inside_UL + rates.across * traffic.across_UL


def sums_by(unit_of_S: np.ndarray, load_SRL: np.ndarray, num_units: int) -> np.ndarray:
    """int64 [units, R, L]: sums over the sequences of each unit."""
    from routepack.solvers.rank_loads import summed_by_unit

    return summed_by_unit(load_SRL, unit_of_S, num_units)
