"""What a plan costs: rates of a cost model, and the evaluation of a placement and a packing under them.

Letters: :mod:`routepack.core`; I attention stages. A unit is one microbatch of one EP group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from routepack.core.checks import MOST, instance, real
from routepack.core.errors import ConfigError
from routepack.core.plans import Packing, Sync, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.links import traffic_of


def ranks_per_group(topology: Topology) -> int:
    """DP ranks whose tokens meet in one EP group: R / model_parallel_degree, at least one.

    >>> ranks_per_group(Topology(data_parallel_degree=4, expert_parallel_degree=4, model_parallel_degree=2))
    2
    """
    return max(1, topology.expert_parallel_degree // topology.model_parallel_degree)


def num_packed_groups(topology: Topology) -> int:
    """EP groups as packing sees them: W / :func:`ranks_per_group`; G wherever R > 1."""
    return topology.data_parallel_degree // ranks_per_group(topology)


@dataclass(frozen=True, kw_only=True, eq=False)
class CostRates:
    """What a routed row, a token and a token pair cost; the only thing solvers see of a cost model.

    In attention stage i a sequence of t tokens costs ``linear_I[i] * t + quadratic_I[i] * pairs``. Pairs are
    t^2, or with a window of w tokens 2 w t - w^2 once t exceeds w. Documents never attend to each other.
    """

    expert: float
    """Per routed row of the fullest EP rank of a unit, in one layer."""
    linear_I: np.ndarray
    """float64 [I]: per token."""
    quadratic_I: np.ndarray
    """float64 [I]: per pair; zero for linear attention."""
    window_I: np.ndarray = None  # pyrefly: ignore[bad-assignment]
    """int64 [I]: tokens that a token can look back on; 0, or None for all stages: every earlier one."""
    unit: str = "relative"
    inside: float = 0.0
    """Per routed row that the busiest rank of a unit sends, or receives if more, to other ranks of its node, in one layer."""
    across: float = 0.0
    """The same to other nodes. Both come from :mod:`routepack.cost.links`."""

    def __post_init__(self) -> None:
        for name in ("expert", "inside", "across"):
            object.__setattr__(self, name, real(f"cost rate {name}", getattr(self, name), least=0.0))
        instance("cost rates' unit", self.unit, str)
        object.__setattr__(self, "linear_I", _rates("linear_I", self.linear_I))
        object.__setattr__(self, "quadratic_I", _rates("quadratic_I", self.quadratic_I))
        window = np.zeros(len(self.linear_I)) if self.window_I is None else self.window_I
        object.__setattr__(self, "window_I", _rates("window_I", window, np.int64))
        if not len(self.linear_I) == len(self.quadratic_I) == len(self.window_I):
            raise ConfigError(f"cost rates {self.as_dict()} must be one per attention stage.")

    def cost_SI(self, length_S: np.ndarray) -> np.ndarray:
        """float64 [S, I]: dense and attention work of each sequence in each attention stage."""
        length_SI = np.asarray(length_S, dtype=np.float64)[:, None]
        pairs_SI = np.where(
            (self.window_I == 0) | (length_SI <= self.window_I),
            length_SI**2,
            2.0 * self.window_I * length_SI - self.window_I.astype(np.float64) ** 2,
        )
        return self.linear_I * length_SI + self.quadratic_I * pairs_SI

    def as_dict(self) -> dict[str, Any]:
        """The rates as plain numbers and lists, as a plan keeps them."""
        return {
            "expert": float(self.expert),
            "linear": self.linear_I.tolist(),
            "quadratic": self.quadratic_I.tolist(),
            "window": self.window_I.tolist(),
            "inside": float(self.inside),
            "across": float(self.across),
        }

    @property
    def links_cost(self) -> bool:
        """Whether it matters which rank sends to which."""
        return self.inside > 0 or self.across > 0


def _rates(name: str, value: Any, dtype: type = np.float64) -> np.ndarray:
    """*value* as an array [I] of its own that nobody can write to. Raises ConfigError where it is none of rates."""
    try:
        rate_I = np.atleast_1d(np.array(value, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cost rates {name} are no numbers: {error}.") from error
    wrong = rate_I.ndim != 1 or not rate_I.size or not np.isfinite(rate_I).all() or rate_I.min() < 0
    if wrong or (dtype == np.int64 and ((rate_I != np.rint(rate_I)) | (rate_I > MOST)).any()):
        kind = f"whole numbers of at most {MOST}" if dtype == np.int64 else "finite numbers"
        raise ConfigError(f"cost rates {name}={rate_I.tolist()} must be {kind}, none negative, one for each attention stage.")
    rate_I = rate_I.astype(dtype)
    rate_I.flags.writeable = False
    return rate_I


@dataclass(frozen=True, kw_only=True)
class CostModel(ABC):
    """Prices a window: a keyword-only dataclass whose fields are its config."""

    unit: ClassVar[str] = "relative"
    """``seconds``, or ``relative`` to a perfectly even window."""

    @abstractmethod
    def rates(self, demand: RoutingDemand, topology: Topology) -> CostRates:
        """The rates for this window on this topology."""

    @staticmethod
    def for_model(name: str, *, device: str = "h200") -> CostModel:
        """A :class:`~routepack.cost.flops.FlopsCost` for a known model on a known device.

        Raises ConfigError naming the known ones. Rates are counted, not measured: only their ratios are
        worth much until :class:`FlopsCost` is given efficiencies measured on the device.
        """
        from routepack.cost.flops import flops_cost

        return flops_cost(name, device=device)

    def as_dict(self) -> dict[str, Any]:
        """The class and its options, as a plan keeps them."""
        return {"model": type(self).__name__, "options": asdict(self)}


@dataclass(frozen=True, kw_only=True)
class WindowNormalizedCost(CostModel):
    """Each term scaled so that a perfectly even window costs its share of the step; the shares add up to 1.

    The value of a plan is then its ratio to the ideal (arXiv 2608.12146).
    """

    expert_share: float = 0.5
    """Share of the step that an even window spends in experts."""
    linear_share: float = 0.375
    """Share in what grows with tokens: projections, norms, shared experts, head."""
    quadratic_share: float = 0.125
    """Share in what grows with token pairs: attention itself."""

    def __post_init__(self) -> None:
        names = ("expert_share", "linear_share", "quadratic_share")
        shares = tuple(real(f"cost_model.{name}", getattr(self, name)) for name in names)
        if min(shares) < 0 or abs(sum(shares) - 1.0) > 1e-6:
            raise ConfigError(f"cost_model shares {shares} (expert, linear, quadratic) must be at least 0 and add up to 1.")

    def rates(self, demand: RoutingDemand, topology: Topology) -> CostRates:
        """Rates from the window's own totals: every DP rank, and every EP rank of every group, gets its even part."""
        ranks = topology.data_parallel_degree
        expert_ranks = num_packed_groups(topology) * topology.expert_parallel_degree
        length_S = demand.length_S.astype(np.float64)
        routed = float(demand.tokens_LE.sum())
        return CostRates(
            expert=self.expert_share * expert_ranks / routed if routed else 0.0,
            linear_I=np.array([self.linear_share * ranks / length_S.sum()]),
            quadratic_I=np.array([self.quadratic_share * ranks / (length_S**2).sum()]),
        )


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
