"""The RL loop: sample, plan, move experts, recompute log-probabilities and update, all under one plan a window.

Rollouts are counted as they end, and rank 0 plans in the background. With ``rl.async_level`` 1 the next window is sampled
before this one's update, and planned during it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from routepack.components.rerouter import IdentityRerouter
from routepack.core.plans import ExpertPlacement, Plan
from routepack.core.rollouts import RolloutBatch
from routepack.distributed import collectives
from routepack.planning.plan_files import save_plan
from routepack.report.plan_metrics import plan_metrics
from routepack.torchtitan.experiments.training_run import TrainingRun, means, summary_of_plans
from routepack.torchtitan.rl.rl_experiment import RLExperiment
from routepack.torchtitan.rl.rollout_windows import demonstration_window, even_demand, graded_window
from routepack.torchtitan.rl.sampling import LocalPolicy, random_numbers
from routepack.traces.trace_files import save_trace
from routepack.training.losses import CrossEntropyTokenLoss
from routepack.training.phase_clock import Clock
from routepack.training.progress import Progress
from routepack.training.rollout import gather_rollouts

DEMONSTRATED, PROMPTED, SAMPLED, WARMUP_PROMPTED = range(4)
"""What a stream of random numbers is for: the second number of its seed, after the experiment's."""


@dataclass(kw_only=True, eq=False)
class RLRun(TrainingRun[RLExperiment, Progress]):
    """A run that samples its own windows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        experiment = self.experiment
        self.policy = LocalPolicy(experiment.model, seed=experiment.seed)
        self.rank, self.num_ranks = collectives.this_rank(), collectives.num_ranks()
        self.num_experts = self.trainer.placement.num_experts
        self.layer_ids = self.trainer.moe_layer_ids
        # Nothing is recorded while warming up, so experts stay where they are and only lengths are planned.
        self.warmup_planner = replace(experiment.planner, rerouter=IdentityRerouter())
        self.following: tuple[RolloutBatch, int] | None = None

    def run(self) -> dict[str, float]:
        """Warm up, then reinforce; the summary, which rank 0 also writes beside the last window's trace and plan.

        Where the result folder has a checkpoint, goes on after the last window that it knows.
        """
        windows_done, warmup_steps, rl_steps = self.resume(), self.experiment.warmup.num_steps, self.experiment.rl.num_steps
        warmed_up = min(windows_done, warmup_steps)
        self.recall(windows_done - warmed_up)
        self.progress.start(warmup_steps, rl_steps, resumed=windows_done)
        for step in range(warmed_up, warmup_steps):
            self.progress.warmup_step(step, self.warm_up(step))
            self.window_done()
        plan = None
        with self.planning:
            for step in range(windows_done - warmed_up, rl_steps):
                figures, batch, plan = self.reinforce(step)
                self.history.append(figures)
                self.progress.rl_step(step, figures, plan)
                last = step == rl_steps - 1
                self.window_done(last=last)
                if last and self.rank == 0:
                    save_trace(batch, self.experiment.out / "trace.safetensors")
                    save_plan(plan, self.experiment.out / "plan.safetensors")
        summary = summarize(self.history)
        self.save_summary(summary)
        self.progress.finish(summary, self.experiment.out, plan)
        return summary

    def warm_up(self, step: int) -> dict[str, float]:
        """One supervised step on demonstrations."""
        experiment, settings = self.experiment, self.experiment.warmup
        started = time.monotonic()
        prompts = experiment.task.prompts(settings.batch_size, seed=[experiment.seed, WARMUP_PROMPTED, step])
        batch = demonstration_window(
            prompts,
            experiment.task,
            num_experts=self.num_experts,
            layer_ids=self.layer_ids,
            top_k=self.policy.top_k,
            seed=[experiment.seed, DEMONSTRATED, step],
        )
        plan = collectives.from_rank(0, lambda: self.warmup_planner.plan(even_demand(batch)), "plan")
        self.trainer.set_learning_rate(settings.rate_at(step))
        figures = self.trainer.update(batch, plan, CrossEntropyTokenLoss(), save=False)
        return figures | {"seconds": time.monotonic() - started}

    def reinforce(self, step: int) -> tuple[dict[str, float], RolloutBatch, Plan]:
        """One RL step: its figures, the same on every rank but for times; its window; its plan."""
        experiment, clock = self.experiment, Clock()
        batch, sampled_at = self.following or self.sample(step, step, self.trainer.placement)
        self.following = None
        clock.lap("sample")
        plan, timing = self.planning.result()
        clock.lap("plan")
        if experiment.rl.async_level and step + 1 < experiment.rl.num_steps:
            # The experts will be where this plan puts them when the next window is trained.
            self.following = self.sample(step + 1, step, plan.placement)
            clock.lap("sample")
        moved = self.move_experts(plan)
        clock.lap("move")
        logprobs_old = self.old_logprobs(batch, plan)
        clock.lap("logprobs")
        trained = replace(batch, token_fields={**batch.token_fields, "logprobs_old": logprobs_old})
        self.trainer.set_learning_rate(experiment.rl.rate_at(step))
        figures = self.update(trained, plan)[-1]
        clock.lap("update")
        figures |= window_figures(trained) | plan_metrics(plan) | timing | clock.figures(int(batch.num_tokens_S.sum()))
        if not experiment.rl.async_level:
            figures |= {"logprob_difference_max": logprob_difference(trained)}
        return figures | moved | {"off_policy_steps": step - sampled_at}, trained, plan

    def old_logprobs(self, batch: RolloutBatch, plan: Plan) -> np.ndarray:
        """float32 [N]: under the weights that sampled. Where those are still the trainer's, it recomputes them under replay."""
        if self.experiment.rl.async_level:
            return batch.token_fields["logprobs"]
        return self.trainer.log_probabilities(batch, plan)

    def sample(self, step: int, trained_steps: int, previous: ExpertPlacement) -> tuple[RolloutBatch, int]:
        """The window of RL step *step*, graded, and *trained_steps*, those that the weights have been through.

        Each rank samples its share, then every rank has all. Rank 0 counts its own as they end, and leaves planning.
        """
        experiment, settings = self.experiment, self.experiment.rollout
        self.policy.load(self.trainer.logical_state_dict())
        prompts = experiment.task.prompts(settings.prompts_per_step, seed=[experiment.seed, PROMPTED, step])
        # Neighbours answer the same prompt and are about as long, so dealing them round evens out the ranks.
        sequences = np.arange(self.rank, settings.num_sequences, self.num_ranks)
        own = self.policy.sample(
            [prompts[s // settings.rollouts_per_prompt].token_ids for s in sequences],
            random_numbers(sequences.tolist(), settings.max_new_tokens, seed=[experiment.seed, SAMPLED, step]),
            temperature=settings.temperature,
            end_token_id=experiment.task.end_token_id,
            on_end=lambda s, rollout: self.planning.add(int(sequences[s]), rollout),
        )
        rollouts = gather_rollouts(own, sequences)
        self.planning.finish(rollouts, previous)
        batch = graded_window(
            rollouts,
            prompts,
            experiment.task,
            num_experts=self.num_experts,
            layer_ids=self.layer_ids,
            advantage_epsilon=experiment.rl.advantage_epsilon,
            weights_version=f"rl-step-{trained_steps}",
        )
        return batch, trained_steps


def window_figures(batch: RolloutBatch) -> dict[str, float]:
    """``reward`` and lengths."""
    return {
        "reward": float(batch.sequence_fields["rewards"].mean()),
        "tokens": int(batch.num_tokens_S.sum()),
        "length_mean": float(batch.num_tokens_S.mean()),
        "length_max": int(batch.num_tokens_S.max()),
    }


def logprob_difference(batch: RolloutBatch) -> float:
    """The most by which the trainer's log-probabilities under replay differ from the sampler's."""
    sampled_N = batch.token_fields["logprobs"] != 0
    apart_N = np.abs(batch.token_fields["logprobs_old"] - batch.token_fields["logprobs"])[sampled_N]
    return float(apart_N.max(initial=0.0))


def summarize(history: list[dict[str, float]]) -> dict[str, float]:
    """First and last rewards (each over up to five steps), and means over all steps of what plans gained and took."""
    if not history:
        return {}
    edge, mean = min(5, len(history)), means(history)
    rewards = [figures["reward"] for figures in history]
    return {
        "num_steps": len(history),
        "reward_first": float(np.mean(rewards[:edge])),
        "reward_last": float(np.mean(rewards[-edge:])),
        "rewards_averaged_over": edge,
        **summary_of_plans(history),
        "value_over_bound": float(np.mean([one["plan/value"] / one["plan/bound"] for one in history])),
        "plan_ms": float(np.median([one["plan/plan_ms"] for one in history])),
        "seconds_per_step": mean["seconds"],
        "experts_moved_per_step": mean["experts_moved"],
        **{name: max(one[name] for one in history) for name in ("off_policy_steps", "logprob_difference_max") if name in mean},
    }
