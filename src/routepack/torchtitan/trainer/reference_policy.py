"""A frozen copy of a trainer's weights, sharded like them and moved like them: what later policies are compared with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from routepack.core.plans import Plan
from routepack.core.rollouts import RolloutBatch
from routepack.torchtitan.model import overrides
from routepack.torchtitan.trainer.trainer import RoutePackTrainer
from routepack.training import expert_moves


class ReferencePolicy:
    """The weights that a trainer has now, kept; log-probabilities under them with any later plan. All of it is collective.

    It costs one more copy of this rank's shards. The copy's experts move with the plan, so reference log-probabilities, old
    ones and the update share one placement, packing and replay.
    """

    def __init__(self, trainer: RoutePackTrainer) -> None:
        trainer.check_whole()
        self.trainer, self.placement = trainer, trainer.placement
        self._shards = [shard.clone() for shard in _shards(trainer)]

    def log_probabilities(self, batch: RolloutBatch, plan: Plan) -> np.ndarray:
        """float32 [N], as :meth:`RoutePackTrainer.log_probabilities`, under the kept weights; the trainer's stay as they are.

        Moves the trainer's experts as planned first, then the copy's own.
        """
        trainer = self.trainer
        trainer.move_experts(plan.placement)
        self._swap()
        try:
            expert_moves.move_experts(
                overrides.expert_modules(trainer.model),
                (),
                self.placement,
                plan.placement,
                num_ranks=trainer.expert_parallel_degree,
                staging=trainer.staging,
            )
            self.placement = plan.placement
            return trainer.log_probabilities(batch, plan)
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for shard, kept in zip(_shards(self.trainer), self._shards, strict=True):
            held = shard.clone()
            shard.copy_(kept)
            kept.copy_(held)


def _shards(trainer: RoutePackTrainer) -> list[Tensor]:
    parameters = (parameter.detach() for parameter in trainer.model.parameters())
    return [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters]
