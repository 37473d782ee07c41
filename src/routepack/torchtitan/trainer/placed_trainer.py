"""TorchTitan's Trainer with experts that may be anywhere: moves them, and gives, takes and saves weights in logical order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.trainer import Trainer

from routepack.core.errors import PlanError, RankLostError
from routepack.core.plans import ExpertPlacement
from routepack.distributed import collectives
from routepack.torchtitan.checkpoints import huggingface
from routepack.torchtitan.model import cpu_device, overrides
from routepack.torchtitan.model.models import TrainedModel, check_names, checked, moe_layer_ids, num_experts_of
from routepack.torchtitan.trainer import initialization
from routepack.torchtitan.trainer.settings import TrainerSettings
from routepack.training import expert_moves


class PlacedTrainer(Trainer):
    """A TorchTitan trainer whose experts move. Every method that takes a placement, and all that touch weights, are collective.

    Every parameter is drawn whole and kept in part, one after another, whatever the parallel degrees: TorchTitan on a CPU
    would give every rank the same shard.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """TorchTitan's, and what it was made from."""

        model: TrainedModel
        settings: TrainerSettings

    placement: ExpertPlacement
    """Where the experts are now."""
    last_move: expert_moves.MoveFigures
    """What the latest move took."""
    windows_done: int
    """Windows that a loop has trained; it counts them itself, checkpoints keep the count."""

    def __init__(self, config: Config) -> None:
        assert config.model_spec is not None
        self.settings = config.settings
        self.moe_layer_ids = moe_layer_ids(config.model_spec)
        self.placement = ExpertPlacement.identity(len(self.moe_layer_ids), num_experts_of(config.model_spec))
        self.last_move = expert_moves.MoveFigures()
        self.staging = expert_moves.StagingMemory(limit_bytes=self.settings.staging_bytes)
        self.windows_done = 0
        self._torn: RankLostError | None = None
        self.prepare_initialization(config)
        with cpu_device.torchtitan_on_cpu():
            super().__init__(config)

    def prepare_initialization(self, config: Config) -> None:
        """Make TorchTitan, which is about to build the model, draw every parameter whole."""
        assert config.model_spec is not None
        initialization.draw_whole(config.model_spec, seed=config.debug.seed or 0)

    def init_distributed(self) -> ParallelDims:
        """TorchTitan's meshes, on the process group that exists or on the one that TorchTitan starts."""
        if dist.is_initialized():
            dims = ParallelDims.from_config(self.config.parallelism, dist.get_world_size())
        else:
            dims = super().init_distributed()
        # Now, as TorchTitan would only when it first needs one, which may be after its device was put back.
        dims.build_mesh()
        return dims

    @property
    def model(self) -> Decoder:
        """The model, as TorchTitan built and sharded it."""
        return cast(Decoder, self.model_parts[0])

    @property
    def sharded(self) -> FSDPModule:
        """The model as FSDP sees it: when to gather, reshard and reduce."""
        return cast(FSDPModule, self.model_parts[0])

    def set_placement(self, placement: ExpertPlacement) -> None:
        """From now on the weights, as they lie, are those of *placement*; :meth:`move_experts` moves them."""
        self.placement = placement
        for layer, slots_P in zip(overrides.placed_layers(self.model), placement.physical_to_logical_LP, strict=True):
            layer.set_placement(torch.from_numpy(slots_P.astype(np.int64)).to(self.device))

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
                overrides.expert_modules(self.model),
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

    def _placement_error(self, placement: ExpertPlacement) -> PlanError | None:
        placed, own = placement.physical_to_logical_LP.shape, self.placement.physical_to_logical_LP.shape
        return None if placed == own else PlanError(f"the placement is of {placed} [layers, experts]; the model has {own}.")

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
