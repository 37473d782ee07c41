"""Checkpoints that do not depend on where the experts are, and that are whole or absent.

TorchTitan's manager of distributed checkpoints, with three changes. Experts are written in logical order and read into the
slots of whatever placement holds (:mod:`~routepack.training.logical_order`), so ranks, EP degree and
placement may differ between a save and a load, and a checkpoint can be exchanged with TorchTitan's own. The placement is
saved beside them. And a checkpoint is written under another name and renamed once it is complete.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
from torchtitan.tools import filesystem

from routepack.core.errors import CheckpointError, ConfigError
from routepack.core.plans import ExpertPlacement
from routepack.distributed import collectives
from routepack.torchtitan.checkpoints import huggingface
from routepack.torchtitan.model.private import check_checkpoint_hooks
from routepack.training.folders import commit, discard, fresh_folder, remove_leftovers, rename
from routepack.training.logical_order import LogicalLoadPlanner, LogicalRows, LogicalSavePlanner

ROUTEPACK = "routepack"
"""The name of RoutePack's own part among the states of a checkpoint."""


class Placed(Protocol):
    """What a checkpoint needs of the trainer."""

    placement: ExpertPlacement
    windows_done: int
    step: int

    @property
    def expert_parallel_degree(self) -> int:
        """R, the ranks that share one copy of the experts."""
        ...

    def set_placement(self, placement: ExpertPlacement) -> None:
        """From now on the weights, as they lie, are those of *placement*."""
        ...

    def logical_of_parameter(self) -> Mapping[str, np.ndarray]:
        """int64 [P] for each expert parameter: the expert in each slot."""
        ...

    def check_whole(self) -> None:
        """Raise RankLostError if a move was interrupted."""
        ...


@dataclass(kw_only=True, eq=False)
class RoutePackState(Stateful):
    """What RoutePack adds to a checkpoint."""

    trainer: Placed

    def state_dict(self) -> dict[str, Any]:
        """The placement, the EP degree that it was made for, and the windows that were trained."""
        return {
            "physical_to_logical_LP": torch.from_numpy(self.trainer.placement.physical_to_logical_LP.astype(np.int64)),
            "expert_parallel_degree": torch.tensor(self.trainer.expert_parallel_degree),
            "windows_done": torch.tensor(self.trainer.windows_done),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the count of windows; the placement was taken before any weight was read."""
        self.trainer.windows_done = int(state_dict["windows_done"])

    def take_placement(self, folder: str) -> None:
        """Take the placement of a checkpoint if its EP degree is this trainer's, else expert e in slot e."""
        own = self.state_dict()
        dcp.load({ROUTEPACK: own}, checkpoint_id=folder)
        placement = ExpertPlacement.identity(self.trainer.placement.num_layers, self.trainer.placement.num_experts)
        if int(own["expert_parallel_degree"]) == self.trainer.expert_parallel_degree:
            placement = ExpertPlacement(physical_to_logical_LP=own["physical_to_logical_LP"])
        self.trainer.set_placement(placement)


class PlacedCheckpointManager(CheckpointManager):
    """TorchTitan's checkpoints: in logical order, with the placement, each whole or absent."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """As TorchTitan's; ``async_with_pinned_mem`` and remote folders are refused."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.async_mode == "async_with_pinned_mem":
                raise ConfigError(
                    "checkpoint.async_mode='async_with_pinned_mem' copies weights while the next step runs, and experts may "
                    "move meanwhile: choose 'async', which copies them first, or 'disabled'."
                )
            if filesystem.is_remote(self.folder):
                raise ConfigError(f"checkpoint.folder={self.folder} cannot be renamed in one go: name a mounted folder.")

    def __init__(self, config: Config, **parts: Any) -> None:
        check_checkpoint_hooks()
        super().__init__(config, **parts)
        self.last_saved_step = 0
        if self.enable:
            self.trainer = cast(Placed, self.states["train_state"])
            self.states[ROUTEPACK] = RoutePackState(trainer=self.trainer)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | None:
        """Write a checkpoint under another name, and give it its own once every rank's part is on disk."""
        final = Path(checkpoint_id)
        with _named(f"the checkpoint {final} was saved"):
            unfinished = fresh_folder(final)
            logical = self.trainer.logical_of_parameter()
            if to_hf:
                assert self.sd_adapter is not None, "TorchTitan has looked for it"
                huggingface.write(unfinished, state_dict, self.sd_adapter, logical)
                return commit(unfinished, final)
            planner = LogicalSavePlanner(LogicalRows(logical_of_parameter=logical))
            if async_mode == AsyncMode.ASYNC:
                written = dcp.async_save(state_dict, checkpoint_id=unfinished, planner=planner, process_group=self.pg)
                return _then_committed(cast(Future, written), unfinished, final)
            dcp.save(state_dict, checkpoint_id=unfinished, planner=planner)
            return commit(unfinished, final)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load a checkpoint that was saved at any number of ranks, EP degree and placement, or by TorchTitan itself.

        Raises CheckpointError where it does not fit the model; the trainer cannot be used then.
        """
        placement = self.trainer.placement.physical_to_logical_LP
        if from_hf and (placement != np.arange(placement.shape[1])).any():
            raise CheckpointError("weights of Hugging Face are loaded before the first move: load them into a new trainer.")
        with _named(f"the checkpoint {checkpoint_id} was loaded"):
            if from_hf:
                super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
                return
            if ROUTEPACK in state_dict:
                self._take_own(state_dict, checkpoint_id)
            rows = LogicalRows(logical_of_parameter=self.trainer.logical_of_parameter())
            dcp.load(state_dict, checkpoint_id=checkpoint_id, planner=LogicalLoadPlanner(rows))
            self.states[MODEL].load_state_dict(state_dict)

    def _take_own(self, state_dict: dict[str, Any], checkpoint_id: str) -> None:
        saved = _metadata(checkpoint_id).state_dict_metadata
        if any(name.startswith(f"{ROUTEPACK}.") for name in saved):
            state_dict[ROUTEPACK].take_placement(checkpoint_id)
        else:  # TorchTitan's own: in logical order, without a placement
            del state_dict[ROUTEPACK]

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self.trainer.check_whole()
        saved = super()._save(curr_step, last_step)
        self.last_saved_step = curr_step if saved else self.last_saved_step
        if saved and last_step:
            # TorchTitan does so after every save but the last.
            self._purge_stale_checkpoints()
        return saved

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        """Once in each interval: a caller may have nothing to save at the very step where one ends."""
        if self.load_only or curr_step == self.last_saved_step:
            return False
        first = self.enable_first_step_checkpoint and curr_step == 1
        return first or last_step or curr_step // self.interval > self.last_saved_step // self.interval

    def _load(self, step: int = -1) -> bool:
        self.maybe_wait_for_saving()
        collectives.meet("checkpoints were looked for")
        remove_leftovers(Path(self.folder))
        loaded = super()._load(step)
        self.last_saved_step = self.trainer.step if loaded else 0
        return loaded

    def _find_load_step(self, folder: str = "") -> int:
        """The last complete checkpoint's step, as rank 0 sees it; -1 where there is none."""
        return collectives.from_rank(0, lambda: max(self._complete_steps(folder), default=-1), "choice of a checkpoint")

    def _complete_steps(self, folder: str = "") -> list[int]:
        matches = {path: re.fullmatch(r"step-(\d+)", path.name) for path in Path(folder or self.folder).glob("step-*")}
        complete = (".metadata", "model.safetensors.index.json")
        return sorted(int(m[1]) for path, m in matches.items() if m and any((path / name).is_file() for name in complete))

    def _purge_stale_checkpoints(self) -> None:
        if not self.keep_latest_k or collectives.this_rank():
            return
        for step in self._complete_steps()[: -self.keep_latest_k]:
            # What is being deleted must not look like a checkpoint any more.
            self.purge_queue.put(str(discard(Path(self.folder) / f"step-{step}")))

    def _wait_for_saving(self) -> None:
        try:
            with _named("the last checkpoint was saved"):
                super()._wait_for_saving()
        finally:
            # A save that failed says so once, and does not keep later ones from being made.
            self.save_future = None

    def _close(self) -> None:
        in_writing = self.save_future is not None
        self.maybe_wait_for_saving()
        if in_writing:
            # It is complete now, so one more of the older ones can go.
            self._purge_stale_checkpoints()
        super()._close()


def _metadata(folder: str) -> Metadata:
    try:
        return FileSystemReader(folder).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{folder} cannot be read ({type(error).__name__}: {error}): delete it, and the run resumes from the one before."
        ) from error


@contextmanager
def _named(what: str) -> Generator[None]:
    """Say in RoutePack's errors what failed: another rank, or the reading and writing."""
    try:
        with collectives.together(what):
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"rank {rank} failed while {what}: {type(cause).__name__}: {cause} Complete checkpoints are as they were."
        ) from error


def _then_committed(written: Future, unfinished: Path, final: Path) -> Future:
    """A future that is done once what is being written has its final name."""
    committed: Future = Future()

    def finish(done: Future) -> None:
        error = done.exception()
        if error is None and collectives.this_rank() == 0:
            # Rank 0 is done when all are: it has gathered what they wrote.
            try:
                rename(unfinished, final)
            except OSError as failed:
                error = failed
        if error is None:
            committed.set_result(None)
        else:
            committed.set_exception(error)

    written.add_done_callback(finish)
    return committed
