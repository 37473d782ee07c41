"""Planned microbatches in a Lightning Trainer: a batch sampler, a data module and a callback.

One window of rollouts is one epoch and one optimizer step: the plan says how many microbatches it takes, and the
Trainer accumulates over exactly those. Experts stay where they are (``IdentityRerouter``), as Lightning cannot move them, so
what a plan gains here comes from packing; for expert placement use :mod:`routepack.torchtitan`.
Letters: :mod:`routepack.core`; n fed tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from routepack.components.rerouter import IdentityRerouter
from routepack.core.arrays import digest_of
from routepack.core.errors import ConfigError, TraceError
from routepack.core.plans import Plan
from routepack.core.rollouts import RolloutBatch
from routepack.distributed.collectives import agree, from_rank
from routepack.microbatches.materialize import NO_TARGET, check_fit, microbatch_of
from routepack.microbatches.trained_tokens import trained_mask
from routepack.planning.background import BackgroundPlanner
from routepack.planning.planner import Planner
from routepack.report.plan_metrics import plan_metrics


class PlannedBatchSampler(Sampler[list[int]]):
    """One rank's microbatches, as lists of sequence numbers: a ``batch_sampler`` for any map-style data set of sequences.

    >>> from routepack import FirstFitPacker, IdentityRerouter, Topology, testing
    >>> demand = testing.synthetic_demand(num_sequences=6, max_length=64)
    >>> planner = Planner(topology=Topology(data_parallel_degree=2, expert_parallel_degree=1),
    ...                   packer=FirstFitPacker(max_tokens=128), rerouter=IdentityRerouter())
    >>> plan = planner.plan(demand)
    >>> sorted(s for rank in range(2) for microbatch in PlannedBatchSampler(plan, rank) for s in microbatch)
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        ranks = plan.topology.data_parallel_degree
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank={rank} is not one of the plan's {ranks} data-parallel ranks.")
        self.plan, self.rank = plan, rank

    def __len__(self) -> int:
        return self.plan.num_microbatches

    def __iter__(self) -> Iterator[list[int]]:
        for microbatch in range(self.plan.num_microbatches):
            yield self.plan.packing.sequences_of(microbatch, self.rank).tolist()


class RolloutDataset(Dataset[dict[str, Tensor]]):
    """A window's sequences; several at a time come end to end, as one microbatch of tensors.

    ``token_ids`` and ``positions`` int64 [n], fed in; ``cu_seqlens`` int64 [S + 1], where documents begin and end;
    ``targets`` int64 [n], ``loss_mask`` float32 [n], 1 where the target is trained; ``routed_experts`` int [n, L, K],
    -1 where the router decides; ``sequences`` int64; ``loss_scale`` float32, see :class:`RoutePackCallback`; and every
    other token field of the batch, at the targets.
    """

    def __init__(self, batch: RolloutBatch, loss_scale: float = 1.0) -> None:
        self.batch, self.loss_scale = batch, loss_scale

    def __len__(self) -> int:
        return self.batch.num_sequences

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])

    def __getitems__(self, sequences: list[int]) -> dict[str, Tensor]:
        """One microbatch of these sequences, in this order."""
        microbatch = microbatch_of(self.batch, np.asarray(sequences, dtype=np.int64))
        fields = {name: torch.from_numpy(value) for name, value in microbatch.fields.items()}
        mask_n = fields.pop("loss_mask", torch.from_numpy(microbatch.target_index_n != NO_TARGET))
        return fields | {
            "token_ids": torch.from_numpy(microbatch.token_ids_n),
            "positions": torch.from_numpy(microbatch.positions_n),
            "cu_seqlens": torch.from_numpy(microbatch.cu_seqlens),
            "targets": torch.from_numpy(microbatch.targets_n),
            "routed_experts": torch.from_numpy(microbatch.routed_experts_nLK),
            "sequences": torch.from_numpy(microbatch.sequences_S),
            "loss_mask": mask_n.float(),
            "loss_scale": torch.tensor(self.loss_scale, dtype=torch.float32),
        }


class RolloutDataModule(pl.LightningDataModule):
    """Windows of rollouts, one an epoch, each dealt to the ranks as the Trainer's :class:`RoutePackCallback` plans it.

    Args:
        windows: the windows, epoch after epoch and then over again; or what gives an epoch's window, such as a
            rollout engine. Every rank must get the same. A sequence is planned one window ahead, in the background.
        num_workers: of the data loader.

    """

    def __init__(self, windows: Sequence[RolloutBatch] | Callable[[int], RolloutBatch], *, num_workers: int = 0) -> None:
        super().__init__()
        if not callable(windows) and not len(windows):
            raise ConfigError("windows is empty: give at least one RolloutBatch.")
        self.windows, self.num_workers = windows, num_workers

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """This rank's microbatches of this epoch's window. Plans it: collective."""
        trainer = self.trainer
        assert trainer is not None
        callback = _callback_of(trainer)
        epoch = trainer.current_epoch
        batch = self.window_of(epoch)
        ahead = None if callable(self.windows) or epoch + 1 == trainer.max_epochs else self.window_of(epoch + 1)
        plan = callback.plan_window(trainer, batch, ahead)
        ranks, rank = data_parallel(trainer)
        dataset = RolloutDataset(batch, loss_scale=ranks * plan.num_microbatches / trained_tokens(batch))
        return DataLoader(
            dataset,
            batch_sampler=PlannedBatchSampler(plan, rank),
            collate_fn=_already_collated,
            num_workers=self.num_workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
        )

    def window_of(self, epoch: int) -> RolloutBatch:
        """The window of an epoch."""
        return self.windows(epoch) if callable(self.windows) else self.windows[epoch % len(self.windows)]


class RoutePackCallback(pl.Callback):
    """Plans every window on rank 0, shares the plan, accumulates over its microbatches, and logs what it predicts.

    A module's ``training_step`` returns its masked loss *summed* over the microbatch, times ``batch["loss_scale"]``: after
    Lightning has divided by the microbatches and the strategy has averaged over the ranks, the gradient is that of the
    mean over all trained tokens of the window, however they were packed.

    Args:
        planner: its topology's ``data_parallel_degree`` is the Trainer's; its rerouter is an ``IdentityRerouter``.

    Raises:
        ConfigError: from ``fit``, naming the option of planner or Trainer that does not go together with planned windows.

    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.plan: Plan | None = None
        """Of the current window."""
        self._background: BackgroundPlanner | None = None
        self._ahead: RolloutBatch | None = None
        self._metrics: dict[str, float] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that planner and Trainer go together."""
        if stage == "fit":
            _check(self.planner, trainer, pl_module)

    def plan_window(self, trainer: pl.Trainer, batch: RolloutBatch, ahead: RolloutBatch | None = None) -> Plan:
        """The plan of a window, the same on every rank; *ahead* is planned while this window trains. Collective.

        Raises what planning raised on rank 0, and PlanError on the others; PlanError where ranks hold different windows.
        """
        device = trainer.strategy.root_device
        tagged = () if batch.modality_S is None else (batch.modality_S,)
        agree(digest_of(batch.num_tokens_S, batch.cu_seqlens, *tagged), "window", device=device)
        self.plan = from_rank(0, lambda: self._planned(batch, ahead), "window's plan")
        slots_LP = self.plan.placement.physical_to_logical_LP
        assert (slots_LP == np.arange(slots_LP.shape[1])).all(), "the plan moves experts, which nobody here does"
        return self.plan

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Accumulate over the plan's microbatches; log its figures."""
        if self.plan is None:
            raise ConfigError("RoutePackCallback planned nothing: train on a RolloutDataModule.")
        trainer.accumulate_grad_batches = self.plan.num_microbatches
        for logger in trainer.loggers:
            logger.log_metrics(plan_metrics(self.plan) | self._metrics, step=trainer.global_step)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the planning thread, and leave the Trainer as it was."""
        if stage == "fit":
            trainer.accumulate_grad_batches = 1
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End the planning thread."""
        self._close()

    def _planned(self, batch: RolloutBatch, ahead: RolloutBatch | None) -> Plan:
        if self._background is None:
            self._background = BackgroundPlanner(planner=self.planner)
        if self._ahead is not batch:
            # The first window, one that a callable gave, or another than was foreseen.
            self._background.cancel()
            self._background.submit(batch)
        self._ahead = None
        plan = self._background.result()
        check_fit(plan, batch)
        timing = self._background.timing
        self._metrics = {} if timing is None else timing.metrics()
        if ahead is not None:
            self._background.submit(ahead)
            self._ahead = ahead
        return plan

    def _close(self) -> None:
        if self._background is not None:
            self._background.close()
        self._background = self._ahead = None


def data_parallel(trainer: pl.Trainer) -> tuple[int, int]:
    """How many ranks get microbatches of their own, and which of them this one is."""
    strategy = trainer.strategy
    if not isinstance(strategy, ParallelStrategy):
        return 1, 0
    dealt = strategy.distributed_sampler_kwargs
    return int(dealt["num_replicas"]), int(dealt["rank"])


def trained_tokens(batch: RolloutBatch) -> float:
    """The total of ``loss_mask``, which may hold weights, over the trained tokens; without a mask, their number.

    Raises TraceError where there is none.
    """
    trained_N = trained_mask(batch)
    total = float(np.sum(batch.token_fields.get("loss_mask", trained_N)[trained_N], dtype=np.float64))
    if not total > 0:
        raise TraceError("the window has no trained token: its loss_mask is 0 at every target.")
    return total


def _check(planner: Planner, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    ranks, given = trainer.world_size, cast(Any, trainer)
    if isinstance(trainer.strategy, ParallelStrategy) and trainer.strategy.cluster_environment is not None:
        ranks, _ = data_parallel(trainer)
    degree = planner.topology.data_parallel_degree
    wrong = {
        f"topology.data_parallel_degree={degree} is not the Trainer's {ranks}": degree != ranks,
        f"rerouter={type(planner.rerouter).__name__}() would move experts, which Lightning does not: use IdentityRerouter(), "
        "or the TorchTitan trainer": not isinstance(planner.rerouter, IdentityRerouter),
        "Trainer(reload_dataloaders_every_n_epochs) must be 1: an epoch is a window, with a plan of its own": (
            given.reload_dataloaders_every_n_epochs != 1
        ),
        "Trainer(accumulate_grad_batches) must stay 1: the plan says over how many microbatches to accumulate": (
            trainer.accumulate_grad_batches != 1
        ),
        "Trainer(limit_train_batches) must stay 1.0, and overfit_batches and fast_dev_run off: a step needs its whole window": (
            trainer.limit_train_batches != 1.0 or bool(given.overfit_batches) or bool(given.fast_dev_run)
        ),
        "the module optimizes by hand (automatic_optimization=False): accumulate callback.plan.num_microbatches there, "
        "without this callback": not pl_module.automatic_optimization,
        f"{type(trainer.strategy).__name__} accumulates gradients itself: use DDP or FSDP": (
            trainer.strategy.handles_gradient_accumulation
        ),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"{message}.")


def _callback_of(trainer: pl.Trainer) -> RoutePackCallback:
    found = [callback for callback in trainer.callbacks if isinstance(callback, RoutePackCallback)]  # pyrefly: ignore
    if len(found) != 1:
        raise ConfigError(f"RolloutDataModule needs one RoutePackCallback in Trainer(callbacks=[...]); there are {len(found)}.")
    return found[0]


def _already_collated(microbatch: Any) -> Any:
    return microbatch
