"""TorchTitan's Trainer, driven by plans: moves experts, replays routes, and normalises the loss over the whole window."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.trainer import Trainer

from routepack.core.errors import PlanError, RankLostError, RoutePackError, TraceError
from routepack.core.plans import ExpertPlacement, Plan
from routepack.core.rollouts import RolloutBatch
from routepack.cost.calibration import Forecaster
from routepack.distributed import collectives
from routepack.microbatches import minibatches
from routepack.microbatches.materialize import Microbatch
from routepack.torchtitan.checkpoints import huggingface
from routepack.torchtitan.model import cpu_device, overrides
from routepack.torchtitan.model.models import TrainedModel, check_names, checked, moe_layer_ids, num_experts_of
from routepack.torchtitan.moves import expert_moves
from routepack.torchtitan.trainer import initialization
from routepack.torchtitan.trainer.microbatch_tensors import ReplayedMicrobatch
from routepack.torchtitan.trainer.settings import TrainerSettings
from routepack.torchtitan.trainer.step_observer import StepObserver, TokenMeans
from routepack.torchtitan.trainer.torchtitan_config import StepMetrics, config_fields, start_alone
from routepack.torchtitan.trainer.window import Window, by_token, check_tokens, cut, own_batch, trained_tokens
from routepack.training.finite_guard import StepGuard, counted
from routepack.training.losses import TokenLoss

_REPLAYED = "routepack_microbatch"
"""The key under which a microbatch travels through TorchTitan's train step."""


class RoutePackTrainer(Trainer):
    """A TorchTitan trainer whose optimizer steps follow a plan. Every method that takes a plan or a placement is collective.

    Every parameter is drawn whole and kept in part, one after another, whatever the parallel degrees: TorchTitan on a CPU
    would give every rank the same shard.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """TorchTitan's, and what RoutePack adds."""

        model: TrainedModel
        """What model_spec was made from."""
        pad_to_multiple_of: int = 1
        """As TrainerSettings.pad_to_multiple_of."""
        gathers_once: bool = False
        """Whether TrainerSettings.gather is ``step``."""
        step_log: str = ""
        """As TrainerSettings.step_log."""
        staging_bytes: int = expert_moves.STAGING_BYTES
        """As TrainerSettings.staging_bytes."""

    placement: ExpertPlacement
    """Where the experts are now."""
    last_move: expert_moves.MoveFigures
    """What the latest move took."""
    windows_done: int
    """Windows that a loop has trained; it counts them itself, checkpoints keep the count."""

    def __init__(self, config: Config) -> None:
        assert config.model_spec is not None
        self.pad_to_multiple_of = config.pad_to_multiple_of
        self.moe_layer_ids = moe_layer_ids(config.model_spec)
        self.placement = ExpertPlacement.identity(len(self.moe_layer_ids), num_experts_of(config.model_spec))
        self._microbatch: ReplayedMicrobatch | None = None
        self._loss: TokenLoss | None = None
        self._means, self._guard = TokenMeans(), StepGuard()
        self.last_move = expert_moves.MoveFigures()
        self.staging = expert_moves.StagingMemory(limit_bytes=config.staging_bytes)
        self.windows_done = 0
        self._torn: RankLostError | None = None
        self.prepare_initialization(config)
        self._microbatches_left = 0
        with cpu_device.torchtitan_on_cpu():
            super().__init__(config)
        self._stock_forward_backward, self.fwd_bwd_fn = self.fwd_bwd_fn, self.forward_backward
        if config.gathers_once:
            self.sharded.set_reshard_after_forward(False)
        self.observer = StepObserver(
            layer_ids=self.moe_layer_ids,
            data_parallel_rank=self._data_parallel_rank(),
            step_log=Path(config.step_log) if config.step_log else None,
            forecaster=Forecaster(configured="step" if config.gathers_once else "layer"),
        )

    def prepare_initialization(self, config: Config) -> None:
        """Make TorchTitan, which is about to build the model, draw every parameter whole."""
        assert config.model_spec is not None
        initialization.draw_whole(config.model_spec, seed=config.debug.seed or 0)

    @classmethod
    def from_settings(cls, *, model: TrainedModel, settings: TrainerSettings) -> RoutePackTrainer:
        """Build the trainer on the ranks that a launcher started, or on this process alone.

        Raises ConfigError, before any process group starts, where parallel degrees fit neither the ranks nor the experts.
        """
        config = cls.Config(
            model=model,
            pad_to_multiple_of=settings.pad_to_multiple_of,
            gathers_once=settings.gather == "step",
            step_log=settings.step_log,
            staging_bytes=settings.staging_bytes,
            **config_fields(model, settings),
        )
        start_alone()
        trainer = cls(config)
        if settings.initial_weights:
            trainer.load_huggingface(settings.initial_weights)
        return trainer

    @property
    def model(self) -> Decoder:
        """The model, sharded."""
        return cast(Decoder, self.model_parts[0])

    @property
    def sharded(self) -> FSDPModule:
        """The same model as what FSDP made of it."""
        return cast(FSDPModule, self.model_parts[0])

    def init_distributed(self) -> ParallelDims:
        """TorchTitan's meshes, on the process group that exists or on the one that TorchTitan starts."""
        if dist.is_initialized():
            dims = ParallelDims.from_config(self.config.parallelism, dist.get_world_size())
        else:
            dims = super().init_distributed()
        # Now, as TorchTitan would only when it first needs one, which may be after its device was put back.
        dims.build_mesh()
        return dims

    def update(self, batch: Window, plan: Plan, loss: TokenLoss, *, save: bool = True) -> dict[str, float]:
        """One optimizer step on a window: move experts as planned, then M microbatches, then AdamW.

        Every rank passes the same plan and loss, and the same batch or the sequences that it holds. The sum of the losses is
        divided by all tokens of the window that ``loss_mask`` trains, so packing and placement change neither the loss nor the
        gradient. With *save*, a checkpoint that is due is saved; without, the caller calls :meth:`save`.

        Returns:
            ``loss``, ``grad_norm`` (before clipping), ``learning_rate``, ``trained_tokens``, ``num_microbatches``,
            ``experts_moved``, ``move_ms``, and the loss's own metrics averaged over trained tokens; and what
            :meth:`~routepack.torchtitan.trainer.step_observer.StepObserver.finish` saw. The same on every rank.

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

        Moves experts as planned first, so that the update that follows finds them in place. The same on every rank;
        of its own tokens alone where a rank holds its own sequences.
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

    def move_experts(self, placement: ExpertPlacement) -> int:
        """Put the experts where *placement* says, weights and optimizer state; call it between optimizer steps.

        All or nothing: ranks agree before the first byte moves. :attr:`last_move` has the figures.

        Returns:
            How many experts, over all layers, changed their EP rank.

        Raises:
            PlanError: the placement has other layers or experts than the model, ranks hold different ones, or one cannot
                move. Every rank keeps the placement that it had.
            RankLostError: a rank was lost during the move. The experts are torn: this trainer refuses to go on.
        """
        self.check_whole()
        self._reshard()
        try:
            self.last_move = expert_moves.move_experts(
                overrides.placed_layers(self.model),
                self.optimizers,
                self.placement,
                placement,
                num_ranks=self.parallel_dims.ep,
                staging=self.staging,
                error=self._placement_error(placement),
            )
        except RankLostError as error:
            self._torn = error
            raise
        self.set_placement(placement)
        return self.last_move.num_experts

    def _reshard(self) -> None:
        # FSDP leaves the last layers gathered after a forward, for a backward pass that may not come: a load or a move that
        # follows would be missed.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def check_whole(self) -> None:
        """Raise RankLostError if a move was interrupted and the experts are torn."""
        if self._torn is not None:
            raise RankLostError(f"an earlier move did not end, this trainer cannot go on: {self._torn}")

    def logical_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters by name, experts in logical order, on every rank, one at a time. Collective at every step."""
        self.check_whole()
        logical_LE = self._slots(self.placement.logical_to_physical_LE)
        for name, parameter in self._named_parameters():
            full = _full(parameter)
            yield name, full[logical_LE[name]] if name in logical_LE else full

    def logical_state_dict(self) -> dict[str, Tensor]:
        """All of :meth:`logical_parameters`: for ``model.load_full_state``. Collective."""
        return dict(self.logical_parameters())

    def load_full_state(self, state: Mapping[str, Tensor]) -> None:
        """Take full parameters in logical order, as :meth:`logical_state_dict` gives them; optimizer state stays.

        Every rank passes the same. Raises ConfigError where names or shapes differ.
        """
        check_names(self.parameter_shapes(), {name: value.shape for name, value in state.items()})
        self.load_parameters(state.items())

    @torch.no_grad()
    def load_parameters(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Take full parameters in logical order, one at a time, so that one of them is in memory; optimizer state stays.

        Every rank passes the same, in any order. Raises ConfigError at a name or shape that the model lacks, and at the end
        where a parameter is missing; what came before has been taken.
        """
        own = dict(self._named_parameters())
        physical_LP = self._slots(self.placement.physical_to_logical_LP)
        for name, full in checked(parameters, self.parameter_shapes()):
            full = full.to(self.device)
            full = full[physical_LP[name]] if name in physical_LP else full
            expert_moves.take_shard(own[name], full)

    def parameter_shapes(self) -> dict[str, torch.Size]:
        """The full shape of every parameter, by name."""
        return {name: parameter.shape for name, parameter in self._named_parameters()}

    @property
    def expert_parallel_degree(self) -> int:
        """R, the ranks that share one copy of the experts."""
        return self.parallel_dims.ep

    def logical_of_parameter(self) -> dict[str, np.ndarray]:
        """int64 [P] for each expert parameter by name: the expert in each slot."""
        slots = self._slots(self.placement.physical_to_logical_LP)
        return {name: logical_P.cpu().numpy() for name, logical_P in slots.items()}

    def resume(self) -> int:
        """Load the last complete checkpoint if there is one; gives the number of steps that were trained. Collective.

        Ranks, EP degree and placement may differ from those it was saved with; the placement is restored at its EP degree.
        """
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        return self.step

    def save(self, *, last: bool = False) -> bool:
        """Save a checkpoint if one is due, or if none was saved of the *last* step; whether one was. Collective."""
        return self.checkpointer.save(self.step, last_step=last)

    def export_huggingface(self, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the weights in Hugging Face's format into a new *folder*, experts in logical order. Collective.

        Raises ConfigError where the model has no such names, CheckpointError where the folder cannot be written.
        """
        self.check_whole()
        huggingface.export(Path(folder), self.model_parts, self.config, self.logical_of_parameter(), dtype=dtype)

    def load_huggingface(self, folder: str | Path) -> None:
        """Take weights in Hugging Face's format, wherever the experts are; optimizer state stays. Collective.

        Raises CheckpointError where files, names or shapes are not this model's.
        """
        self._reshard()
        huggingface.load(Path(folder), self.model_parts, self.config, self.logical_of_parameter())

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
        self.observer.add(self.model, microbatch)
        overrides.set_replay(self.model, None)
        self._guard.after_backward(loss, self.model, last=not self._microbatches_left)
        return loss

    def _defer_until_last(self) -> None:
        """Where parameters are gathered once a window, gradients stay unsharded too until its last microbatch."""
        self._microbatches_left -= 1
        if cast(RoutePackTrainer.Config, self.config).gathers_once:
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
            microbatches = cut(batch, plan, self._data_parallel_rank(), pad_to_multiple_of=self.pad_to_multiple_of)
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

    def _placement_error(self, placement: ExpertPlacement) -> PlanError | None:
        placed, own = placement.physical_to_logical_LP.shape, self.placement.physical_to_logical_LP.shape
        return None if placed == own else PlanError(f"the placement is of {placed} [layers, experts]; the model has {own}.")

    def set_placement(self, placement: ExpertPlacement) -> None:
        """From now on the weights, as they lie, are those of *placement*; :meth:`move_experts` moves them."""
        self.placement = placement
        for layer, slots_P in zip(overrides.placed_layers(self.model), placement.physical_to_logical_LP, strict=True):
            layer.set_placement(torch.from_numpy(slots_P.astype(np.int64)).to(self.device))

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((canonical_fqn(name), parameter) for name, parameter in self.model.named_parameters())

    def _slots(self, slots_LE: np.ndarray) -> dict[str, Tensor]:
        """For each expert parameter's name its layer's row of *slots_LE*."""
        rows = {}
        for layer, slots_E in zip(overrides.placed_layers(self.model), slots_LE, strict=True):
            index = torch.from_numpy(slots_E.astype(np.int64)).to(self.device)
            rows.update({id(parameter): index for parameter in layer.inner_experts.parameters()})
        return {name: rows[id(parameter)] for name, parameter in self._named_parameters() if id(parameter) in rows}


def _full(parameter: Tensor) -> Tensor:
    with collectives.together("parameters were gathered"):
        return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
