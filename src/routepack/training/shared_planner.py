"""Rank 0 plans in the background for every rank: rollouts in as they end, the plan out on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from routepack.core.plans import ExpertPlacement, Plan
from routepack.core.rollouts import RolloutBatch
from routepack.distributed import collectives
from routepack.planning.background import BackgroundPlanner
from routepack.planning.planner import Planner
from routepack.training.rollout import Rollout


@dataclass(kw_only=True, eq=False)
class SharedPlanner:
    """One window after another, planned in a thread of rank 0 while the ranks go on.

    :meth:`add`, :meth:`finish` and :meth:`submit` do nothing on other ranks; :meth:`result` is collective. What planning raises
    on rank 0, every rank raises there.
    """

    planner: Planner
    """Its collector knows the number of experts."""
    ready_seconds: float | None = None
    """As :class:`~routepack.BackgroundPlanner`'s."""
    device: torch.device | str = "cpu"
    _arrived: list[int] = field(default_factory=list, init=False, repr=False)
    """The numbers of the sequences added, in that order."""

    def __post_init__(self) -> None:
        self._background = BackgroundPlanner(planner=self.planner, ready_seconds=self.ready_seconds)
        self._plans = collectives.this_rank() == 0

    def add(self, sequence: int, rollout: Rollout) -> None:
        """Count a rollout, number *sequence* of the next window, while others are still sampled."""
        if self._plans:
            self._arrived.append(sequence)
            self._background.add(rollout.routed_experts, num_tokens=len(rollout.token_ids))

    def finish(self, rollouts: Sequence[Rollout], previous: ExpertPlacement) -> None:
        """The window is whole: count what was not added, and plan. *previous*: where its experts will be until then."""
        if not self._plans:
            return
        for sequence in sorted(set(range(len(rollouts))) - set(self._arrived)):
            self.add(sequence, rollouts[sequence])
        order_S, self._arrived = np.argsort(self._arrived), []
        self._background.finish(previous, order_S=order_S.tolist())

    def submit(self, window: RolloutBatch, previous: ExpertPlacement) -> None:
        """Plan a window that is whole already. *previous*: where its experts will be until then."""
        if self._plans:
            self._background.submit(window, previous)

    def result(self) -> tuple[Plan, dict[str, float]]:
        """The window's plan, and what it took of the trainer's time (``plan/exposed_ms`` and others), on every rank."""
        plan, timing = collectives.from_rank(0, self._result, "plan")
        collectives.agree(plan.content_digest(), "plan", device=self.device)
        return plan, timing

    def _result(self) -> tuple[Plan, dict[str, float]]:
        plan = self._background.result()
        assert self._background.timing is not None
        return plan, self._background.timing.metrics()

    def close(self) -> None:
        """End the threads; waits for a plan being made."""
        self._background.close()

    def __enter__(self) -> SharedPlanner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
