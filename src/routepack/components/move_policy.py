"""Which layers' experts move to where a plan would have them, and which stay. Letters: :mod:`routepack.core`."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar, final

import numpy as np

from routepack.core.component import Component, CountOrZero, Limits, NotNegative, Positive, Speed
from routepack.core.errors import ConfigError, PlanError
from routepack.core.plans import ExpertPlacement, Topology
from routepack.cost.evaluation import Evaluation, by_layer
from routepack.cost.links import node_of_ranks
from routepack.cost.models import CostRates


@dataclass(frozen=True, kw_only=True, eq=False)
class MoveChoice:
    """One window's packing under two placements: with all experts moved on, and with none.

    "None" is where the experts are, or what was chosen already: then *move_seconds_L* is what moving on takes more, or less.
    """

    moved: Evaluation
    kept: Evaluation
    rates: CostRates
    num_layers: int
    move_seconds_L: np.ndarray
    """float64 [L]: what moving each layer takes, beyond not moving it on."""
    limit: float
    """The value that a plan must not exceed: its baseline's."""

    @cached_property
    def gain_L(self) -> np.ndarray:
        """float64 [L]: what moving each layer alone saves: the mean group, or all where ``sync=layer`` joins them."""
        cost_L = [self._layer_costs(evaluation) for evaluation in (self.kept, self.moved)]
        return (cost_L[0] - cost_L[1])[: self.num_layers]

    def _layer_costs(self, evaluation: Evaluation) -> np.ndarray:
        waited = np.max if evaluation.sync == "layer" else np.mean
        cost_L = self.rates.expert * waited(evaluation.peak_MGL, axis=1).sum(axis=0)
        return cost_L if evaluation.links_MGL is None else cost_L + waited(evaluation.links_MGL, axis=1).sum(axis=0)

    def value(self, moved_L: np.ndarray) -> float:
        """The step's value where some layers moved: exact, every layer's terms are those of its own placement."""
        moved = np.ones(self.moved.peak_MGL.shape[-1], dtype=bool)
        moved[: self.num_layers] = moved_L
        links = None
        if self.moved.links_MGL is not None and self.kept.links_MGL is not None:
            links = np.where(moved, self.moved.links_MGL, self.kept.links_MGL)
        peaks = np.where(moved, self.moved.peak_MGL, self.kept.peak_MGL)
        return replace(self.moved, **by_layer(peaks, links, self.rates.expert)).value


@dataclass(frozen=True, kw_only=True)
class MovePolicy(Component):
    """Decides, layer by layer, whether experts move. Subclasses implement :meth:`decide`.

    A layer that does not move keeps its previous placement. Moves are counted by expert, in bytes where
    *parameters_per_expert* is given, and in seconds by the busiest rank of each layer, layer after layer.
    """

    section: ClassVar[str] = "move_policy"

    parameters_per_expert: Annotated[int, Limits(least=0)] = 0
    """3 D F for a gated expert; 0: unknown, so that bytes and seconds are reported as 0."""
    bytes_per_parameter: Positive = 14.0
    """What moves with each: weight (bf16, 2), master weight (4) and two moments (4 each)."""
    shard_degree: CountOrZero = 0
    """Ranks that share what one EP rank holds (FSDP), each moving its part; 0: as many as there are EP groups."""
    inside_bytes_per_second: Speed = math.inf
    """One rank, one way, to ranks of its node."""
    across_bytes_per_second: Speed = math.inf
    """One rank, one way, to other nodes."""

    @abstractmethod
    def decide(self, choice: MoveChoice) -> np.ndarray:
        """bool [L]: True where the layer's experts move. Its value must not exceed ``choice.limit``."""

    @final
    def moves(self, choice: MoveChoice) -> np.ndarray:
        """The decision, checked. Raises PlanError for another shape, or a value above the limit."""
        moved_L = np.asarray(self.decide(choice))
        if moved_L.shape != (choice.num_layers,) or moved_L.dtype != np.bool_:
            raise PlanError(
                f"{type(self).__name__} decided {moved_L.dtype} of shape {moved_L.shape}; bool [{choice.num_layers}] is needed."
            )
        if (value := choice.value(moved_L)) > choice.limit * (1 + 1e-9):
            raise PlanError(f"{type(self).__name__} keeps a placement worth {value!r}, above the baseline's {choice.limit!r}.")
        return moved_L

    @property
    def compares(self) -> bool:
        """Whether :meth:`decide` looks at values, so that the kept placement must be priced."""
        return True

    def worth(self, value: float, move_seconds: float) -> float:
        """What a plan of this value after a move of so many seconds is worth; the lower the better. Here the value alone."""
        return value

    def check_unit(self, unit: str) -> None:
        """Raise ConfigError where values in *unit* cannot be compared with the cost of moving. Here they never are."""
        return

    def expert_bytes(self, topology: Topology) -> float:
        """Bytes that a rank sends for one expert."""
        shards = self.shard_degree or topology.num_groups
        return self.parameters_per_expert * self.bytes_per_parameter / shards

    def seconds_L(self, old: ExpertPlacement, new: ExpertPlacement, topology: Topology) -> np.ndarray:
        """float64 [L]: the busiest rank's sending or receiving, whichever is more, inside its node and then across."""
        ranks, node_GR = topology.expert_parallel_degree, node_of_ranks(topology)
        apart_GRR = node_GR[:, :, None] != node_GR[:, None, :]
        speeds = ((~apart_GRR, self.inside_bytes_per_second), (apart_GRR, self.across_bytes_per_second))
        moved_LRR = moved_between(old, new, ranks)
        seconds_LG = np.zeros((len(moved_LRR), len(node_GR)))
        for over_GRR, speed in speeds:
            over = np.where(over_GRR, moved_LRR[:, None], 0)
            busiest_LG = np.maximum(over.sum(axis=3).max(axis=2), over.sum(axis=2).max(axis=2))
            seconds_LG += busiest_LG * self.expert_bytes(topology) / speed
        return seconds_LG.max(axis=1)


def moved_between(old: ExpertPlacement, new: ExpertPlacement, num_ranks: int) -> np.ndarray:
    """int64 [L, R, R]: experts that go from rank to rank; 0 on the diagonal."""
    moved_LRR = np.zeros((old.num_layers, num_ranks, num_ranks), dtype=np.int64)
    layer_LE = np.broadcast_to(np.arange(old.num_layers)[:, None], (old.num_layers, old.num_experts))
    np.add.at(moved_LRR, (layer_LE, old.rank_of_LE(num_ranks), new.rank_of_LE(num_ranks)), 1)
    moved_LRR[:, np.arange(num_ranks), np.arange(num_ranks)] = 0
    return moved_LRR


@dataclass(frozen=True, kw_only=True)
class AlwaysMove(MovePolicy):
    """Every layer takes the plan's placement, whatever moving costs: the default."""

    @property
    def compares(self) -> bool:
        """It does not."""
        return False

    def decide(self, choice: MoveChoice) -> np.ndarray:
        """All layers."""
        return np.ones(choice.num_layers, dtype=bool)


@dataclass(frozen=True, kw_only=True)
class MoveIfItPays(MovePolicy):
    """Moves the layers whose move takes less time than it saves over the windows that it is expected to last.

    Minimises ``moves_last_steps`` x step + seconds of moving over all layers together, with the exact value of every
    choice it looks at: layers are flipped one by one until none helps, from all moved, none moved, and those that pay
    alone. Under ``sync=layer``, where layers add up, that is the best there is. The value never exceeds the baseline's,
    even where a move that this takes does not pay.
    """

    moves_last_steps: Annotated[int, Limits(least=1)] = 1
    """Windows over which a move must pay; above 1 where the next windows are expected to route alike."""
    step_seconds: NotNegative = 0.0
    """Seconds of a step of value 1, for a cost model whose unit is relative. 0: values are seconds already."""

    def check_options(self) -> None:
        """Raise ConfigError where what a move costs is not known."""
        if self.parameters_per_expert < 1:
            raise ConfigError("move_policy.parameters_per_expert is not set: give 3 x dim x hidden dim for a gated expert.")
        if self.inside_bytes_per_second == self.across_bytes_per_second == math.inf:
            raise ConfigError(
                "move_policy.inside_bytes_per_second and across_bytes_per_second are not set: a move over them would be free."
            )

    def check_unit(self, unit: str) -> None:
        """A relative value needs ``step_seconds``; one in seconds must not have it."""
        if (unit == "seconds") == (self.step_seconds > 0):
            raise ConfigError(
                f"move_policy.step_seconds={self.step_seconds} beside a cost model in {unit}: set it to the seconds of an even "
                "step where values are relative, leave it 0 where they are seconds."
            )

    def worth(self, value: float, move_seconds: float) -> float:
        """Seconds of the steps that the move lasts, and of the move."""
        return self.moves_last_steps * value * (self.step_seconds or 1.0) + move_seconds

    def _objective(self, choice: MoveChoice, moved_L: np.ndarray) -> float:
        value = choice.value(moved_L)
        return self.worth(value, float(choice.move_seconds_L[moved_L].sum())) if value <= choice.limit else float("inf")

    def decide(self, choice: MoveChoice) -> np.ndarray:
        """The best of three starts, each flipped layer by layer."""
        pays_L = self.moves_last_steps * choice.gain_L * (self.step_seconds or 1.0) > choice.move_seconds_L
        # A layer that is where it should be moves nothing either way.
        starts = (np.ones_like(pays_L), np.zeros_like(pays_L), pays_L)
        found = [self._flipped(choice, moved_L) for moved_L in starts]
        return min(found, key=lambda moved_L: self._objective(choice, moved_L))

    def _flipped(self, choice: MoveChoice, moved_L: np.ndarray) -> np.ndarray:
        moved_L, best, improved = moved_L.copy(), self._objective(choice, moved_L), True
        while improved:
            improved = False
            for layer in range(choice.num_layers):
                moved_L[layer] ^= True
                now = self._objective(choice, moved_L)
                if now < best:
                    best, improved = now, True
                else:
                    moved_L[layer] ^= True
        return moved_L
