"""What a step really had to do: live loads of experts and ranks, the step log, and which ``sync`` predicts its seconds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from routepack.core.errors import ConfigError
from routepack.core.plans import Plan
from routepack.cost.calibration import Forecaster
from routepack.cost.models import num_packed_groups, ranks_per_group
from routepack.cost.step_log import StepLoads, StepRecord
from routepack.distributed import collectives
from routepack.report.plan_metrics import load_violations, rank_imbalance

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class StepObserver:
    """Watches the updates of one trainer. Every rank has one; :meth:`finish` is collective."""

    layer_ids: Sequence[int]
    """The model's MoE layers."""
    data_parallel_rank: int
    """This rank's number on the batch mesh."""
    step_log: Path | None = None
    """Rank 0 appends a line of ``routepack.steps/1`` here after every step."""
    forecaster: Forecaster = field(default_factory=Forecaster)

    def __post_init__(self) -> None:
        self._routed_MLE: list[Tensor] = []
        self._padding_MLE: list[Tensor] = []
        if self.step_log is not None and collectives.this_rank() == 0:
            try:
                self.step_log.parent.mkdir(parents=True, exist_ok=True)
                self.step_log.touch()
            except OSError as error:
                raise ConfigError(f"trainer.step_log={self.step_log} cannot be written: {error.strerror}.") from error

    def start(self) -> None:
        """Forget the last step's loads: a step begins."""
        self._routed_MLE, self._padding_MLE = [], []

    def add(self, routed_LE: Tensor, padding_routes_nLK: Tensor) -> None:
        """A microbatch went forward and backward: keep what its tokens chose, on the device.

        Args:
            routed_LE: int64, how many rows each expert got, those of padding included.
            padding_routes_nLK: int, the experts of the n tokens that are padding.
        """
        self._routed_MLE.append(routed_LE)
        self._padding_MLE.append(_counted(padding_routes_nLK, routed_LE))

    def finish(self, plan: Plan, microbatches: np.ndarray, seconds: float, step: int) -> dict[str, float]:
        """A step on these *microbatches* of a plan is over: its figures, the same on every rank. Collective.

        ``step_seconds`` of the slowest rank; ``moe/``: ``load_violations`` over all rows but padding, ``rank_imbalance`` of
        the ranks' rows as they were (:mod:`~routepack.report.plan_metrics`), and ``moe/unmoved_imbalance_*`` as they would
        have been with the same sequences in the same cells and every expert where it started;
        ``predicted_seconds/<sync>`` and ``prediction_error/<sync>``, once enough steps were seen.
        """
        rows, unmoved, tokens_LE = self._gathered(plan)
        seconds = _slowest(seconds)
        loads = StepLoads.of_rows(plan, rows, microbatches)
        predicted = {str(sync): value for sync, value in self.forecaster.predict(loads).items()}
        record = StepRecord(loads=loads, seconds=seconds, step=step, predicted_seconds=predicted)
        self.forecaster.observe(record)
        if self.step_log is not None and collectives.this_rank() == 0:
            with self.step_log.open("a") as log:
                log.write(record.to_json() + "\n")
        figures = {"step_seconds": seconds, **load_violations(tokens_LE, np.asarray(self.layer_ids))}
        figures |= rank_imbalance(rows) | rank_imbalance(unmoved, prefix="moe/unmoved_")
        figures |= {f"predicted_seconds/{sync}": value for sync, value in predicted.items()}
        return figures | {f"prediction_error/{sync}": value for sync, value in self.forecaster.errors().items()}

    def _gathered(self, plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64 [M, G, R, L] twice: rows of every EP rank, as placed and as unmoved; int64 [L, E]: rows without padding."""
        topology = plan.topology
        groups, ranks = num_packed_groups(topology), topology.expert_parallel_degree
        routed_MLE = torch.stack(self._routed_MLE).cpu().numpy()
        tokens_LE = routed_MLE.sum(axis=0) - torch.stack(self._padding_MLE).cpu().numpy().sum(axis=0)
        placed_MLP = np.take_along_axis(routed_MLE, plan.placement.physical_to_logical_LP[None].astype(np.int64), axis=2)
        own = self.data_parallel_rank // ranks_per_group(topology)
        parts = []
        for slots_MLP in (placed_MLP, routed_MLE):
            rows_MRL = slots_MLP.reshape(*slots_MLP.shape[:2], ranks, -1).sum(axis=-1).transpose(0, 2, 1)
            rows_MGRL = np.zeros((len(rows_MRL), groups, *rows_MRL.shape[1:]), dtype=np.int64)
            rows_MGRL[:, own] = rows_MRL
            parts.append(rows_MGRL)
        placed, unmoved, tokens_LE = _summed([*parts, tokens_LE])
        return placed, unmoved, tokens_LE


class TokenMeans:
    """Per-token figures, averaged over all that a step trains."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, figures: Mapping[str, Tensor], loss_mask_n: Tensor) -> None:
        """Figures [n] of a microbatch's tokens; those that are not trained do not count."""
        for name, value_n in figures.items():
            self._sums[name] = self._sums.get(name, 0.0) + (value_n * loss_mask_n).sum()

    def over_ranks(self, trained_tokens: int) -> dict[str, float]:
        """The means over all ranks' tokens. Collective; every rank has the same names."""
        if not self._sums:
            return {}
        names = sorted(self._sums)
        sums = collectives.sum_over_ranks(torch.stack([self._sums[name] for name in names]))
        return dict(zip(names, (sums / trained_tokens).tolist(), strict=True))


def _counted(ids_nLK: Tensor, like_LE: Tensor) -> Tensor:
    """int64 [L, E]: how often each expert is among the ids of each layer."""
    counts_LE = torch.zeros_like(like_LE)
    ids_Ln = ids_nLK.long().transpose(0, 1).flatten(1).to(like_LE.device)
    return counts_LE.scatter_add_(1, ids_Ln, torch.ones_like(ids_Ln))


def _summed(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arrays' sums over ranks, by one collective."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(collectives.backend_device())
    summed = collectives.sum_over_ranks(flat).cpu().numpy()
    cuts = np.cumsum([array.size for array in arrays])[:-1]
    return [part.reshape(array.shape) for part, array in zip(np.split(summed, cuts), arrays, strict=True)]


def _slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=collectives.backend_device())
    return float(collectives.max_over_ranks(value))
