"""TorchTitan's Trainer, driven by plans: moves experts, replays routes, and normalises the loss over the whole window."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from routepack.core.errors import PlanError, RoutePackError, TraceError
from routepack.core.plans import Plan
from routepack.core.rollouts import RolloutBatch
from routepack.cost.calibration import Forecaster
from routepack.distributed import collectives
from routepack.microbatches import minibatches
from routepack.microbatches.materialize import Microbatch
from routepack.torchtitan.model import cpu_device, overrides
from routepack.torchtitan.model.models import TrainedModel
from routepack.torchtitan.trainer.microbatch_tensors import ReplayedMicrobatch
from routepack.torchtitan.trainer.placed_trainer import PlacedTrainer
from routepack.torchtitan.trainer.settings import TrainerSettings
from routepack.torchtitan.trainer.torchtitan_config import StepMetrics, config_fields, start_alone
from routepack.torchtitan.trainer.window import Window, by_token, check_tokens, cut, own_batch, trained_tokens
from routepack.training.finite_guard import StepGuard, counted
from routepack.training.losses import TokenLoss
from routepack.training.step_observer import StepObserver, TokenMeans

_REPLAYED = "routepack_microbatch"
"""The key under which a microbatch travels through TorchTitan's train step."""


class RoutePackTrainer(PlacedTrainer):
    """A TorchTitan trainer whose optimizer steps follow a plan. Every method that takes a plan or a placement is collective."""

    @dataclass(kw_only=True, slots=True)
    class Config(PlacedTrainer.Config):
        """The options of its base class."""

    def __init__(self, config: Config) -> None:
        self._microbatch: ReplayedMicrobatch | None = None
        self._loss: TokenLoss | None = None
        self._means, self._guard = TokenMeans(), StepGuard()
        self._microbatches_left = 0
        super().__init__(config)
        self._stock_forward_backward, self.fwd_bwd_fn = self.fwd_bwd_fn, self.forward_backward
        if self.settings.gather == "step":
            self.sharded.set_reshard_after_forward(False)
        self.observer = StepObserver(
            layer_ids=self.moe_layer_ids,
            data_parallel_rank=self._data_parallel_rank(),
            step_log=Path(self.settings.step_log) if self.settings.step_log else None,
            forecaster=Forecaster(configured=self.settings.gather),
        )

    @classmethod
    def from_settings(cls, *, model: TrainedModel, settings: TrainerSettings) -> RoutePackTrainer:
        """Build the trainer on the ranks that a launcher started, or on this process alone.

        Raises ConfigError, before any process group starts, where parallel degrees fit neither the ranks nor the experts.
        """
        config = cls.Config(**config_fields(model, settings))
        start_alone()
        trainer = cls(config)
        if settings.initial_weights:
            trainer.load_huggingface(settings.initial_weights)
        return trainer

    def update(self, batch: Window, plan: Plan, loss: TokenLoss, *, save: bool = True) -> dict[str, float]:
        """One optimizer step on a window: move experts as planned, then M microbatches, then AdamW.

        Every rank passes the same plan and loss, and the same batch or the sequences that it holds. The sum of the losses is
        divided by all tokens of the window that ``loss_mask`` trains, so packing and placement change neither the loss nor the
        gradient. With *save*, a checkpoint that is due is saved; without, the caller calls :meth:`save`.

        Returns:
            ``loss``, ``grad_norm`` (before clipping), ``learning_rate``, ``trained_tokens``, ``num_microbatches``,
            ``experts_moved``, ``move_ms``, and the loss's own metrics averaged over trained tokens; and what
            :meth:`~routepack.training.step_observer.StepObserver.finish` saw. Every rank gets the same figures.

        Raises:
            PlanError: the plan fits neither the batch nor this trainer, or ranks hold different ones.
            TraceError: the batch cannot be trained on, see :func:`routepack.microbatches.materialize.microbatches`.
        """
        (figures,) = self.update_minibatches(batch, plan, loss, num_minibatches=1, save=save)
        return figures

    def update_minibatches(
        self, batch: Window, plan: Plan, loss: TokenLoss, *, num_minibatches: int, save: bool = True
    ) -> list[dict[str, float]]:
        """Several optimizer steps on a window, each on a group of its microbatches, after one move; the figures of each.

        As :meth:`update`, with every step's loss divided by the tokens that its own microbatches train. ConfigError where the
        plan's microbatches cannot be dealt equally, TraceError where a group trains no token.
        """
        microbatches = self._agreed_microbatches(batch, plan, f"update of {num_minibatches} minibatches", loss.needs)
        groups = minibatches.split(plan, num_minibatches)
        trained = [trained_tokens(batch, plan, group) for group in groups]
        moved: dict[str, float] = {"experts_moved": self.move_experts(plan.placement), "move_ms": 1e3 * self.last_move.seconds}
        steps = []
        for group, num_trained in zip(groups, trained, strict=True):
            figures = self._step([microbatches[m] for m in group], loss, num_trained)
            live = self.observer.finish(plan, group, self._step_seconds, self.step)
            if save:
                self.save()
            steps.append({**live, **figures, **moved})
            # The move was one, before the first step.
            moved = dict.fromkeys(moved, 0)
        return steps

    def _step(self, microbatches: list[Microbatch], loss: TokenLoss, num_trained: int) -> dict[str, float]:
        self._loss, self._means, self._guard = loss, TokenMeans(), StepGuard(self.step + 1)
        self.gradient_accumulation_steps = self._microbatches_left = len(microbatches)
        self.gc_handler.run(self.step + 1)
        learning_rate = self.learning_rate
        self.observer.start()
        started = time.perf_counter()
        with counted(self), cpu_device.quiet(), collectives.together(f"step {self.step} was trained"):
            self.train_step(map(self._input, microbatches))
        self._step_seconds = time.perf_counter() - started
        counts: dict[str, float] = {"trained_tokens": num_trained, "num_microbatches": len(microbatches)}
        rates = {**cast(StepMetrics, self.metrics_processor).last, **self._means.over_ranks(num_trained)}
        rates |= {"learning_rate": learning_rate}
        return {name: float(value) for name, value in rates.items()} | counts

    def log_probabilities(self, batch: Window, plan: Plan) -> np.ndarray:
        """float32 [N]: the log-probability of every token given the earlier ones, under replay; 0 for first tokens.

        Moves experts as planned first, so that the update that follows finds them in place. Every rank gets all of them, or
        those of its own tokens where it holds its own sequences.
        """
        microbatches = self._agreed_microbatches(batch, plan, "log_probabilities")
        self.move_experts(plan.placement)
        with cpu_device.quiet(), collectives.together("log-probabilities were computed"):
            results = [self._forward_only(microbatch) for microbatch in microbatches]
        self._reshard()
        return by_token(batch, microbatches, results)

    def set_learning_rate(self, rate: float) -> None:
        """Use *rate* from the next update on. TorchTitan's schedule multiplies it, by 1 once warm-up is over."""
        for scheduler in self.lr_schedulers.schedulers:
            scheduler.base_lrs = [rate] * len(scheduler.base_lrs)
            for group in scheduler.optimizer.param_groups:
                group["lr"] = rate

    @property
    def learning_rate(self) -> float:
        """What the next update uses."""
        return float(next(iter(self.optimizers)).param_groups[0]["lr"])

    def post_dataloading_process(self, input_dict: dict[str, Any], labels: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """TorchTitan's hook before the forward: takes RoutePack's microbatch out and sets its routes for replay."""
        self._microbatch = input_dict.pop(_REPLAYED, None)
        overrides.set_replay(self.model, None if self._microbatch is None else self._microbatch.routed_experts_1nLK)
        return super().post_dataloading_process(input_dict, labels)

    def normalized(self, loss_n: Tensor, loss_mask_n: Tensor, trained_tokens: Tensor) -> Tensor:
        """This microbatch's share of the window's loss: its sum over trained tokens / trained tokens of the whole window."""
        return (loss_n * loss_mask_n).sum() / trained_tokens

    def forward_backward(
        self, inputs: Tensor, labels: Tensor, global_valid_tokens: Tensor, extra_kwargs: dict[str, Any]
    ) -> Tensor:
        """What TorchTitan's train step does with a microbatch: RoutePack's, if it is one of a plan, else TorchTitan's own."""
        microbatch, token_loss = self._microbatch, self._loss
        if microbatch is None or token_loss is None:
            return self._stock_forward_backward(inputs, labels, global_valid_tokens, extra_kwargs)
        self._defer_until_last()
        with self.train_context():
            logprobs_n = self._logprobs(inputs, extra_kwargs, microbatch.targets_n)
            logprobs_n = torch.where(microbatch.loss_mask_n.bool(), logprobs_n, torch.zeros_like(logprobs_n))
            loss_n = token_loss(logprobs_n, microbatch.fields)
            loss = self.normalized(loss_n, microbatch.loss_mask_n, global_valid_tokens)
            loss.backward()
        self._means.add(token_loss.metrics(logprobs_n.detach(), microbatch.fields), microbatch.loss_mask_n)
        self.observer.add(overrides.tokens_per_expert(self.model), microbatch.padding_routes_nLK)
        overrides.set_replay(self.model, None)
        self._guard.after_backward(loss, self.model, last=not self._microbatches_left)
        return loss

    def _defer_until_last(self) -> None:
        """Where parameters are gathered once a window, gradients stay unsharded too until its last microbatch."""
        self._microbatches_left -= 1
        if self.settings.gather == "step":
            self.sharded.set_requires_gradient_sync(self._microbatches_left == 0)
            self.sharded.set_reshard_after_backward(self._microbatches_left == 0)

    def _logprobs(self, inputs: Tensor, extra_kwargs: dict[str, Any], targets_n: Tensor) -> Tensor:
        logits_nV = self.model(inputs, **extra_kwargs)[0].float()
        return -F.cross_entropy(logits_nV, targets_n, reduction="none")

    @torch.no_grad()
    def _forward_only(self, microbatch: Microbatch) -> np.ndarray:
        input_dict, labels = self._input(microbatch)
        input_dict = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in input_dict.items()}
        inputs, _, extra_kwargs = self.post_dataloading_process(input_dict, labels)
        assert self._microbatch is not None
        with self.train_context():
            logprobs_n = self._logprobs(inputs, extra_kwargs, self._microbatch.targets_n)
        overrides.set_replay(self.model, None)
        return logprobs_n.cpu().numpy()

    def _input(self, microbatch: Microbatch) -> tuple[dict[str, Any], Tensor]:
        replayed = ReplayedMicrobatch.of(microbatch, self.device)
        inputs = {
            "input": torch.from_numpy(microbatch.token_ids_n)[None],
            "positions": torch.from_numpy(microbatch.positions_n)[None],
            _REPLAYED: replayed,
        }
        # TorchTitan counts the labels that are not ignored, over all microbatches and ranks: the window's trained tokens.
        labels = torch.where(replayed.loss_mask_n.bool(), replayed.targets_n, IGNORE_INDEX)
        return inputs, labels[None]

    def _agreed_microbatches(self, batch: Window, plan: Plan, call: str, needs: Sequence[str] = ()) -> list[Microbatch]:
        microbatches, error = [], None
        try:
            self._check_plan(own_batch(batch), plan)
            check_tokens(batch, self.config.model_spec, needs)
            microbatches = cut(batch, plan, self._data_parallel_rank(), pad_to_multiple_of=self.settings.pad_to_multiple_of)
        except RoutePackError as caught:
            error = caught
        collectives.agree(plan.content_digest(), "plan", error=error, device=self.device)
        collectives.agree_on_call(call, device=self.device)
        return microbatches

    def _data_parallel_rank(self) -> int:
        return self.parallel_dims.get_mesh("batch").get_local_rank() if self.parallel_dims.dp_enabled else 0

    def _check_plan(self, batch: RolloutBatch, plan: Plan) -> None:
        degrees = (self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard, self.parallel_dims.ep)
        planned = (plan.topology.data_parallel_degree, plan.topology.expert_parallel_degree)
        if planned != degrees or plan.topology.model_parallel_degree != 1:
            raise PlanError(f"the plan is for {planned} [data-parallel, expert-parallel] ranks; this trainer has {degrees}.")
        if error := self._placement_error(plan.placement):
            raise error
        if batch.layer_ids_L.tolist() != self.moe_layer_ids:
            raise TraceError(f"the batch recorded layers {batch.layer_ids_L.tolist()}; the model's are {self.moe_layer_ids}.")
