"""Training on recorded windows: read, plan in the background, move experts and update, one window after another.

The next window is read and planned while this one is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from routepack.core.arrays import digest_of
from routepack.core.errors import RoutePackError
from routepack.core.plans import ExpertPlacement, Plan
from routepack.core.rollouts import RolloutBatch
from routepack.distributed import collectives
from routepack.report.plan_metrics import plan_metrics
from routepack.torchtitan.experiments.training_run import TrainingRun, means, summary_of_plans
from routepack.torchtitan.recorded.recorded_experiment import RecordedExperiment
from routepack.torchtitan.recorded.recorded_windows import load_training_window
from routepack.training.phase_clock import Clock
from routepack.training.progress import WindowProgress


@dataclass(kw_only=True, eq=False)
class RecordedRun(TrainingRun[RecordedExperiment, WindowProgress]):
    """A run over recorded windows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Rank 0's list: a folder that is being written to may look different from one rank to the next.
        self.windows = collectives.from_rank(0, self.experiment.windows, "list of windows")

    def run(self) -> dict[str, float]:
        """Train every window that the result folder's last checkpoint does not know; the summary, which rank 0 also writes."""
        done = min(self.resume(), len(self.windows))
        self.recall(done)
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
        self.save_summary(summary)
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
        moved = self.move_experts(plan)
        clock.lap("move")
        if experiment.update.recompute_logprobs and "logprobs_old" in experiment.loss.needs:
            fields = {**batch.token_fields, "logprobs_old": self.trainer.log_probabilities(batch, plan)}
            batch = replace(batch, token_fields=fields)
            clock.lap("logprobs")
        steps = self.update(batch, plan)
        clock.lap("update")
        figures = steps[-1] | {"loss": float(np.mean([step["loss"] for step in steps])), "optimizer_steps": len(steps)} | moved
        tokens = int(batch.num_tokens_S.sum())
        return figures | plan_metrics(plan) | timing | clock.figures(tokens) | {"tokens": tokens}, plan, following


def _digest(batch: RolloutBatch | None) -> str:
    """Of what every rank must have read alike: all of it would take as long as training on it."""
    return "" if batch is None else digest_of(batch.num_tokens_S, batch.cu_seqlens, batch.token_fields["token_ids"])


def summarize(history: list[dict[str, float]]) -> dict[str, float]:
    """First and last loss, and means over all windows of what plans gained and took."""
    if not history:
        return {}
    return {
        "num_windows": len(history),
        "loss_first": history[0]["loss"],
        "loss_last": history[-1]["loss"],
        **summary_of_plans(history),
        "seconds_per_window": means(history)["seconds"],
    }
