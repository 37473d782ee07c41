"""Training on recorded windows: read, plan in the background, move experts and update, one window after another.

The next window is read and planned while this one is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from routepack.core.arrays import digest_of
from routepack.core.errors import RoutePackError
from routepack.core.files import read_history, write_json
from routepack.core.plans import ExpertPlacement, Plan
from routepack.core.rollouts import RolloutBatch
from routepack.distributed import collectives
from routepack.report.plan_metrics import plan_metrics
from routepack.torchtitan.recorded.recorded_config import TraceExperiment, load_training_window
from routepack.torchtitan.trainer.trainer import RoutePackTrainer
from routepack.training.phase_clock import Clock
from routepack.training.progress import WindowProgress
from routepack.training.shared_planner import SharedPlanner


@dataclass(kw_only=True, eq=False)
class TraceRun:
    """One run over recorded windows. Every rank makes one and calls :meth:`run`; all of it is collective."""

    experiment: TraceExperiment
    progress: WindowProgress
    history: list[dict[str, float]] = field(default_factory=list)
    """The figures of each window."""

    def __post_init__(self) -> None:
        experiment = self.experiment
        # Rank 0's list: a folder that is being written to may look different from one rank to the next.
        self.windows = collectives.from_rank(0, experiment.windows, "list of windows")
        self.trainer = RoutePackTrainer.from_settings(model=experiment.model, settings=experiment.trainer)
        collector = replace(experiment.planner.collector, num_experts=self.trainer.placement.num_experts)
        self.planning = SharedPlanner(
            planner=replace(experiment.planner, collector=collector),
            ready_seconds=experiment.update.plan_ready_seconds,
            device=self.trainer.device,
        )

    def run(self) -> dict[str, Any]:
        """Train every window that the result folder's last checkpoint does not know; the summary, which rank 0 also writes."""
        done = self.resume()
        self.progress.start(len(self.windows), resumed=done)
        with self.planning:
            following = self.read(done, self.trainer.placement) if done < len(self.windows) else None
            for number in range(done, len(self.windows)):
                assert following is not None
                figures, plan, following = self.train(number, following)
                self.history.append(figures)
                self.progress.window_step(number, figures, plan)
                self.window_done(last=number == len(self.windows) - 1)
        summary = summarize(self.history)
        if collectives.this_rank() == 0:
            write_json(self.experiment.out / "summary.json", {**summary, "steps": self.history}, indent=1)
        self.progress.finish(self.experiment.out)
        return summary

    def read(self, number: int, previous: ExpertPlacement) -> RolloutBatch:
        """A window, on every rank; rank 0 begins to plan it. *previous*: where the experts will be until then."""
        experiment, batch, error = self.experiment, None, None
        try:
            path = self.windows[number]
            batch = load_training_window(path, experiment.model, experiment.loss, experiment.update)
        except RoutePackError as caught:
            error = caught
        collectives.agree(_digest(batch), "window", error=error, device=self.trainer.device)
        assert batch is not None
        self.planning.submit(batch, previous)
        return batch

    def train(self, number: int, batch: RolloutBatch) -> tuple[dict[str, float], Plan, RolloutBatch | None]:
        """Train a window: its figures, its plan, and the window after it."""
        experiment, clock, following = self.experiment, Clock(), None
        plan, timing = self.planning.result()
        clock.lap("plan")
        if number + 1 < len(self.windows):
            following = self.read(number + 1, plan.placement)
        clock.lap("read")
        experts_moved = self.trainer.move_experts(plan.placement)
        move = self.trainer.last_move
        clock.lap("move")
        if experiment.update.recompute_logprobs and "logprobs_old" in experiment.loss.needs:
            fields = {**batch.token_fields, "logprobs_old": self.trainer.log_probabilities(batch, plan)}
            batch = replace(batch, token_fields=fields)
            clock.lap("logprobs")
        steps: list[dict[str, float]] = []
        for _ in range(experiment.update.updates_per_window):
            parts = experiment.update.minibatches_per_window
            steps += self.trainer.update_minibatches(batch, plan, experiment.loss, num_minibatches=parts, save=False)
        clock.lap("update")
        figures = steps[-1] | {"loss": float(np.mean([step["loss"] for step in steps])), "optimizer_steps": len(steps)}
        figures |= {"experts_moved": experts_moved, "move_ms": 1e3 * move.seconds, "moved_bytes": move.bytes_sent}
        tokens = int(batch.num_tokens_S.sum())
        return figures | plan_metrics(plan) | timing | clock.figures(tokens) | {"tokens": tokens}, plan, following

    def resume(self) -> int:
        """Load the last checkpoint if there is one; the windows that it has been through."""
        self.trainer.resume()
        done = min(self.trainer.windows_done, len(self.windows))
        self.history = collectives.from_rank(0, self._logged, "figures of earlier windows")[:done]
        return done

    def _logged(self) -> list[dict[str, float]]:
        return read_history(self.history_path)

    def window_done(self, *, last: bool) -> None:
        """Count a window, save a checkpoint if one is due, and beside it the figures so far."""
        self.trainer.windows_done += 1
        if self.trainer.save(last=last) and collectives.this_rank() == 0:
            write_json(self.history_path, self.history)

    @property
    def history_path(self) -> Path:
        """Every window's figures, as of the last checkpoint."""
        return self.experiment.out / "history.json"


def _digest(batch: RolloutBatch | None) -> str:
    """Of what every rank must have read alike: all of it would take as long as training on it."""
    return "" if batch is None else digest_of(batch.num_tokens_S, batch.cu_seqlens, batch.token_fields["token_ids"])


def summarize(history: list[dict[str, float]]) -> dict[str, Any]:
    """First and last loss, and means over all windows of what plans gained and took."""
    if not history:
        return {}
    mean = {name: float(np.mean([figures[name] for figures in history])) for name in history[0]}
    return {
        "num_windows": len(history),
        "loss_first": history[0]["loss"],
        "loss_last": history[-1]["loss"],
        "imbalance_baseline": mean["plan/baseline.imbalance_mean"],
        "imbalance_planned": mean["plan/planned.imbalance_mean"],
        **{name: mean[f"plan/{name}"] for name in ("value", "baseline_value", "bound")},
        **{name: float(np.median([one[f"plan/{name}"] for one in history])) for name in ("background_ms", "exposed_ms")},
        "seconds_per_window": mean["seconds"],
        "tokens_per_second": mean["tokens_per_second"],
    }
