"""What a plan costs: rates of a cost model, and the evaluation of a placement and a packing under them.

Letters: :mod:`routepack.core`; I attention stages. A unit is one microbatch of one EP group.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from routepack.core.checks import MOST, instance, real
from routepack.core.component import Component, Positive
from routepack.core.errors import ConfigError
from routepack.core.plans import Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.known_models import DEVICE_PEAK_FLOPS, MODELS


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
class CostModel(Component):
    """Prices a window: a keyword-only dataclass whose fields are its config."""

    section: ClassVar[str] = "cost_model"
    unit: ClassVar[str] = "relative"
    """``seconds``, or ``relative`` to a perfectly even window."""

    @abstractmethod
    def rates(self, demand: RoutingDemand, topology: Topology) -> CostRates:
        """The rates for this window on this topology."""

    @staticmethod
    def for_model(name: str, *, device: str = "h200", recompute: bool = False) -> FlopsCost:
        """A :class:`FlopsCost` for a known model on a known device; *recompute*: as FlopsCost's.

        Raises ConfigError naming the known ones. Rates are counted, not measured: only their ratios are
        worth much until :class:`FlopsCost` is given efficiencies measured on the device.
        """
        if name not in MODELS:
            raise ConfigError(f"model {name!r} is not known: choose {', '.join(MODELS)}, or give FlopsCost its dimensions.")
        if device not in DEVICE_PEAK_FLOPS:
            raise ConfigError(f"device {device!r} is not known: choose {', '.join(DEVICE_PEAK_FLOPS)}, or set peak_flops.")
        return FlopsCost(**MODELS[name], peak_flops=DEVICE_PEAK_FLOPS[device], recompute=recompute)

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

    def check_options(self) -> None:
        """Raise ConfigError unless the shares are none negative and add up to 1."""
        shares = (self.expert_share, self.linear_share, self.quadratic_share)
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


@dataclass(frozen=True, kw_only=True)
class FlopsCost(CostModel):
    """Seconds of a training step, from FLOPs per token, per token pair and per routed row.

    Multiply-adds count two. A matrix product costs its forward three times in training (once forward, twice
    backward), attention 3.5 times (its backward recomputes the scores). Sequences are causal: t^2 / 2 pairs.
    """

    unit: ClassVar[str] = "seconds"

    dim: int
    """D."""
    moe_hidden_dim: int
    """F, of one routed expert (three projections: gate, up, down)."""
    num_heads: int
    qk_head_dim: int
    """Width of a query or key head, rotary part included."""
    v_head_dim: int
    attention_params: int
    """Weights of one layer's attention projections."""
    num_full_layers: int
    """Layers with attention over the whole sequence."""
    num_sliding_layers: int = 0
    """Layers with attention over ``sliding_window`` tokens."""
    num_linear_layers: int = 0
    """Layers with linear attention."""
    sliding_window: int = 0
    dense_params_per_token: int = 0
    """Other weights that every token meets, all layers together: shared experts, dense MLPs, routers, output head."""
    peak_flops: Positive
    """FLOP/s of the device in the training dtype, dense."""
    dense_efficiency: Positive = 0.6
    """Share of the peak that projections reach."""
    attention_efficiency: Positive = 0.5
    """Share of the peak that attention reaches."""
    expert_efficiency: Positive = 0.5
    """Share of the peak that grouped expert products reach."""
    recompute: bool = False
    """Whether activations are recomputed, which adds one forward."""

    def check_options(self) -> None:
        """Raise ConfigError where the model has no layer, or sliding layers without a window."""
        if self.num_full_layers + self.num_sliding_layers + self.num_linear_layers < 1:
            raise ConfigError("cost_model needs a layer: num_full_layers, num_sliding_layers or num_linear_layers above 0.")
        if self.num_sliding_layers and self.sliding_window < 1:
            raise ConfigError(f"cost_model.sliding_window={self.sliding_window} must be above 0 for sliding layers.")

    def rates(self, demand: RoutingDemand, topology: Topology) -> CostRates:
        """Seconds per token, pair and row on one rank; a DP rank's m model-parallel ranks share its tokens."""
        shared = topology.model_parallel_degree
        again = 1.0 if self.recompute else 0.0
        per_weight = 2.0 * (3.0 + again) / (self.peak_flops * self.dense_efficiency * shared)
        pair = self.num_heads * (self.qk_head_dim + self.v_head_dim)
        per_pair = pair * (3.5 + again) / (self.peak_flops * self.attention_efficiency * shared)
        stages = [
            (layers, quadratic, window)
            for layers, quadratic, window in (
                (self.num_full_layers, 1.0, 0),
                (self.num_sliding_layers, 1.0, self.sliding_window),
                (self.num_linear_layers, 0.0, 0),
            )
            if layers
        ]
        other = self.dense_params_per_token / sum(layers for layers, _, _ in stages)
        row = 2.0 * 3.0 * self.dim * self.moe_hidden_dim * (3.0 + again) / (self.peak_flops * self.expert_efficiency)
        return CostRates(
            expert=row / (shared if topology.expert_parallel_degree == 1 else 1),
            linear_I=np.array([layers * (self.attention_params + other) * per_weight for layers, _, _ in stages]),
            quadratic_I=np.array([layers * quadratic * per_pair for layers, quadratic, _ in stages]),
            window_I=np.array([window for _, _, window in stages]),
            unit=self.unit,
        )
