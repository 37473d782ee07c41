"""What every training run does with a window once there is one: plan it beside training, move experts, update, keep figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from routepack.core.files import read_history, write_json
from routepack.core.plans import Plan
from routepack.core.rollouts import RolloutBatch
from routepack.cost.calibration import Forecaster
from routepack.distributed import collectives
from routepack.torchtitan.experiments.experiment import Experiment
from routepack.torchtitan.trainer.trainer import RoutePackTrainer
from routepack.training.progress import Display
from routepack.training.shared_planner import SharedPlanner

ExperimentT = TypeVar("ExperimentT", bound=Experiment)
DisplayT = TypeVar("DisplayT", bound=Display)


@dataclass(kw_only=True, eq=False)
class TrainingRun(ABC, Generic[ExperimentT, DisplayT]):
    """One run of an experiment. Every rank makes one and calls :meth:`run`; all of it is collective."""

    experiment: ExperimentT
    progress: DisplayT
    history: list[dict[str, float]] = field(default_factory=list)
    """The figures of each window."""

    def __post_init__(self) -> None:
        planner = self.experiment.planner
        self.trainer = RoutePackTrainer.from_settings(model=self.experiment.model, settings=self.experiment.trainer)
        self.trainer.observer.forecaster = Forecaster(configured=planner.sync)
        collector = replace(planner.collector, num_experts=self.trainer.placement.num_experts)
        self.planning = SharedPlanner(
            planner=replace(planner, collector=collector),
            ready_seconds=self.experiment.updates.plan_ready_seconds,
            device=self.trainer.device,
        )

    @abstractmethod
    def run(self) -> dict[str, float]:
        """Train every window that the result folder's last checkpoint does not know; the summary, which rank 0 also writes."""

    def move_experts(self, plan: Plan) -> dict[str, float]:
        """Put the experts where *plan* wants them; the move's figures."""
        experts = self.trainer.move_experts(plan.placement)
        move = self.trainer.last_move
        return {"experts_moved": experts, "move_ms": 1e3 * move.seconds, "moved_bytes": move.bytes_sent}

    def update(self, batch: RolloutBatch, plan: Plan) -> list[dict[str, float]]:
        """Train a window as often as the config says; the figures of every optimizer step."""
        updates, steps = self.experiment.updates, []
        for _ in range(updates.updates_per_window):
            parts = updates.minibatches_per_window
            steps += self.trainer.update_minibatches(batch, plan, self.experiment.loss, num_minibatches=parts, save=False)
        return steps

    def resume(self) -> int:
        """Load the last checkpoint if there is one; the windows that it has been through, those of a warm-up too."""
        self.trainer.resume()
        return self.trainer.windows_done

    def recall(self, num_windows: int) -> None:
        """Take up the figures of the first *num_windows* windows, which an earlier run trained."""
        self.history = collectives.from_rank(0, lambda: read_history(self.history_path), "history")[:num_windows]

    def window_done(self, *, last: bool = False) -> None:
        """Count a window, save a checkpoint if one is due, and beside it the figures so far."""
        self.trainer.windows_done += 1
        if self.trainer.save(last=last) and collectives.this_rank() == 0:
            write_json(self.history_path, self.history)

    def save_summary(self, summary: Mapping[str, float]) -> None:
        """Write the summary and every window's figures, on rank 0."""
        if collectives.this_rank() == 0:
            write_json(self.experiment.out / "summary.json", {**summary, "steps": self.history}, indent=1)

    @property
    def history_path(self) -> Path:
        """Every window's figures, as of the last checkpoint."""
        return self.experiment.out / "history.json"


def means(history: list[dict[str, float]]) -> dict[str, float]:
    """The mean of every figure over all windows."""
    return {name: float(np.mean([figures[name] for figures in history])) for name in history[0]}


def summary_of_plans(history: list[dict[str, float]]) -> dict[str, float]:
    """What plans gained, means over all windows, and what planning took: medians, as the first plan also loads kernels."""
    mean = means(history)
    return {
        "imbalance_baseline": mean["plan/baseline.imbalance_mean"],
        "imbalance_planned": mean["plan/planned.imbalance_mean"],
        **{name: mean[f"plan/{name}"] for name in ("value", "baseline_value", "bound")},
        **{name: float(np.median([one[f"plan/{name}"] for one in history])) for name in ("background_ms", "exposed_ms")},
        "tokens_per_second": mean["tokens_per_second"],
    }
