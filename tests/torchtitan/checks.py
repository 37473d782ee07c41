"""What the multi-rank tests run: each check is a function of this rank and gives what the test looks at.

Checks run one after another in one launch (importing TorchTitan is what takes long), see worker.py. They only
measure; the tests judge.
"""

from __future__ import annotations

import resource
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import windows
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.distributed.utils import clip_grad_norm_

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.core.errors import PlanError, RankLostError, RoutePackError
from routepack.core.plans import ExpertPlacement, Plan, Topology
from routepack.core.rollouts import RolloutBatch
from routepack.distributed import collectives
from routepack.microbatches import materialize
from routepack.planning.planner import Planner
from routepack.testing import synthetic_batch
from routepack.torchtitan.launch.launch import build_experiment, load
from routepack.torchtitan.model import models, overrides
from routepack.torchtitan.model.experts import TritonExperts
from routepack.torchtitan.model.models import TinyQwen3MoE, build_local_model
from routepack.torchtitan.moves import invariance
from routepack.torchtitan.rl.rl_run import RLRun
from routepack.torchtitan.trainer import initialization, torchtitan_config
from routepack.torchtitan.trainer.reference_policy import ReferencePolicy
from routepack.torchtitan.trainer.settings import TrainerSettings
from routepack.torchtitan.trainer.trainer import RoutePackTrainer
from routepack.training import expert_moves
from routepack.training.losses import CrossEntropyTokenLoss, GRPOTokenLoss, TokenLoss
from routepack.training.progress import Progress
from routepack.training.tasks import CountingTask, Grade, Prompt

NUM_STEPS = 10
CHECKS: dict[str, Callable[..., Any]] = {}


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    CHECKS[function.__name__] = function
    return function


def build_trainer(
    ep: int, *, cls: type[RoutePackTrainer] = RoutePackTrainer, tiny: dict | None = None, **changes: Any
) -> RoutePackTrainer:
    torch.manual_seed(1 + dist.get_rank())  # what the ranks drew before must not matter
    settings = TrainerSettings(expert_parallel_degree=ep, **{"seed": 7, "dump_folder": tempfile.gettempdir(), **changes})
    return cls.from_settings(model=TinyQwen3MoE(**(tiny or {})), settings=settings)


def topology_of(trainer: RoutePackTrainer) -> Topology:
    return windows.topology(dist.get_world_size(), trainer.parallel_dims.ep)


def loss_of_step(step: int) -> TokenLoss:
    return GRPOTokenLoss(clip_low=0.2, clip_high=0.3) if step % 2 else CrossEntropyTokenLoss()


def train(trainer: RoutePackTrainer, plans: str, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    losses, moved = [], 0
    for step in range(num_steps):
        batch = windows.window(step)
        figures = trainer.update(batch, PLANS[plans](trainer, batch, step), loss_of_step(step))
        losses.append(figures["loss"])
        moved += figures["experts_moved"]
    state = trainer.logical_state_dict()
    return {
        "losses": losses,
        "experts_moved": moved,
        "state": {name: value.numpy() for name, value in state.items()} if dist.get_rank() == 0 else {},
        "state_sum": float(sum(value.double().abs().sum() for value in state.values())),
    }


def planned(trainer: RoutePackTrainer, batch: RolloutBatch, step: int) -> Plan:
    """Rank 0's plan by the real planner."""
    planner = Planner(
        topology=topology_of(trainer), packer=AttentionAwarePacker(max_tokens=windows.MAX_TOKENS), seed=step, num_proposals=2000
    )
    return collectives.from_rank(0, lambda: planner.plan(batch, previous=trainer.placement), "plan")


PLANS: dict[str, Callable[[RoutePackTrainer, RolloutBatch, int], Plan]] = {
    "first_fit": lambda trainer, batch, step: windows.first_fit_plan(batch, topology_of(trainer)),
    "shuffled": lambda trainer, batch, step: windows.shuffled_plan(batch, topology_of(trainer), step),
    "planner": planned,
}


@check
def trains(ep: int, plans: str, num_steps: int = NUM_STEPS, **changes: Any) -> dict[str, Any]:
    return train(build_trainer(ep, **changes), plans, num_steps)


@check
def trains_stock_experts_in_float32(ep: int, plans: str) -> dict[str, Any]:
    """TorchTitan's own experts, without their rounding to bfloat16, which would hide smaller differences."""
    with pytest.MonkeyPatch.context() as exact:
        exact.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
        return train(build_trainer(ep, tiny={"experts": ""}), plans)


@check
def trains_debug_model(ep: int, experts: str, name: str, flavor: str, num_steps: int = 3) -> list[float]:
    """Losses of a model of TorchTitan's own registry, under a plan that moves its experts."""
    settings = TrainerSettings(expert_parallel_degree=ep, seed=7, dump_folder=tempfile.gettempdir())
    trainer = RoutePackTrainer.from_settings(
        model=models.RegisteredModel(name=name, flavor=flavor, experts=experts), settings=settings
    )
    num_layers, num_experts = trainer.placement.physical_to_logical_LP.shape
    top_k, losses = overrides.replay_routers(trainer.model)[0].top_k, []
    for step in range(num_steps):
        batch = synthetic_batch(
            num_sequences=6, num_layers=num_layers, num_experts=num_experts, top_k=top_k,
            max_length=24, vocab_size=256, seed=step,
        )  # fmt: skip
        # The model's first layer is dense.
        batch = replace(batch, layer_ids_L=np.array(trainer.moe_layer_ids))
        losses.append(trainer.update(batch, planned(trainer, batch, step), CrossEntropyTokenLoss())["loss"])
    return losses


@check
def trains_stock_debug_model_in_float32(**model: Any) -> list[float]:
    """The same with TorchTitan's own experts, without their rounding to bfloat16."""
    with pytest.MonkeyPatch.context() as exact:
        exact.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
        return trains_debug_model(experts="", **model)


class InterpretedExperts(TritonExperts):
    """The Triton path on a CPU, as Triton's interpreter runs it."""

    @dataclass(kw_only=True, slots=True)
    class Config(TritonExperts.Config):
        """As its base's."""

        implementation: Literal["auto", "triton", "eager"] = "triton"


class ScorelessExperts(TritonExperts):
    """Forgets the scores where all experts are on one rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(TritonExperts.Config):
        """As its base's."""

    def forward_tokens(self, x_TD, topk_scores_TK, topk_expert_ids_TK):
        return super().forward_tokens(x_TD, torch.ones_like(topk_scores_TK), topk_expert_ids_TK)


@check
def keeps(ep: int, experts: str) -> dict[str, Any]:
    """The names, shapes and placements of the experts' parameters."""
    trainer = build_trainer(ep, tiny={"experts": experts})
    layer = overrides.placed_layers(trainer.model)[0]
    return {name: (tuple(p.shape), str(p.placements)) for name, p in layer.inner_experts.named_parameters()}


@check
def trains_with_moments_left_behind(ep: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as fault:
        fault.setattr(expert_moves, "state_tensors", lambda state, prefix="": iter(()))
        return train(build_trainer(ep), "shuffled")


@check
def trains_without_the_mapping(ep: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as fault:
        fault.setattr(overrides.PlacedRoutedExperts, "set_placement", lambda self, slots: None)
        return train(build_trainer(ep), "shuffled")


class LocallyNormalizingTrainer(RoutePackTrainer):
    """Divides the first microbatch of rank 0 by its own tokens (and the number of cells), as a careless trainer would."""

    normalized_step = 0

    def normalized(self, loss_n, loss_mask_n, trained_tokens):
        if dist.get_rank() == 0 and self.normalized_step < self.step:
            self.normalized_step = self.step
            trained_tokens = loss_mask_n.sum() * self.gradient_accumulation_steps * dist.get_world_size()
        return super().normalized(loss_n, loss_mask_n, trained_tokens)


@check
def trains_with_local_normalization(ep: int) -> dict[str, Any]:
    return train(build_trainer(ep, cls=LocallyNormalizingTrainer), "shuffled")


class StockInitTrainer(RoutePackTrainer):
    """Keeps TorchTitan's own initialisation."""

    def prepare_initialization(self, config):
        """Nothing."""


@check
def starts_from(ep: int, stock: bool, **changes: Any) -> bool:
    """Whether the trainer starts from the values of the local copy."""
    trainer = build_trainer(ep, cls=StockInitTrainer if stock else RoutePackTrainer, **changes)
    local = dict(build_local_model(TinyQwen3MoE(), seed=7).named_parameters())
    return all(torch.equal(value, local[name]) for name, value in trainer.logical_state_dict().items())


def logical_tensors(trainer: RoutePackTrainer) -> dict[str, torch.Tensor]:
    """Full expert weights and moments in logical order, by DTensor's own gathering."""
    tensors = {}
    for layer, placed in enumerate(overrides.placed_layers(trainer.model)):
        order = torch.from_numpy(trainer.placement.logical_to_physical_LE[layer].astype(np.int64))
        for name, parameter in placed.inner_experts.named_parameters():
            tensors[f"{layer}.{name}"] = parameter.full_tensor().detach()[order].clone()
            for optimizer in trainer.optimizers:
                for moment in ("exp_avg", "exp_avg_sq"):
                    tensors[f"{layer}.{name}.{moment}"] = optimizer.state[parameter][moment].full_tensor()[order].clone()
    return tensors


@check
def moves_experts(ep: int, num_experts: int = windows.NUM_EXPERTS, **changes: Any) -> dict[str, Any]:
    tiny = {"num_experts": num_experts, "top_k": min(2, num_experts - 1)}
    trainer = build_trainer(ep, tiny=tiny, **changes)
    batch = windows.window(0, num_experts=num_experts, top_k=tiny["top_k"])
    topology = topology_of(trainer)
    trainer.update(batch, windows.first_fit_plan(batch, topology), CrossEntropyTokenLoss())
    trainer.move_experts(windows.random_placement(1, num_experts))
    before, shards = logical_tensors(trainer), local_weights(trainer)
    moved = trainer.move_experts(windows.random_placement(2, num_experts))
    after = logical_tensors(trainer)
    storages_kept = [shard.data_ptr() for shard in shards] == [shard.data_ptr() for shard in local_weights(trainer)]
    ranks = [windows.random_placement(seed, num_experts).rank_of_LE(ep) for seed in (1, 2)]
    return {
        "num_tensors": len(before),
        "unequal": [name for name in before if not torch.equal(before[name], after[name])],
        "moved": moved,
        "expected_moved": int((ranks[0] != ranks[1]).sum()),
        "storages_kept": storages_kept,
        "nonzero_moments": all(bool(value.abs().sum() > 0) for value in before.values()),
        "distinct_experts": all(len(value.flatten(1).unique(dim=0)) == num_experts for value in before.values()),
        "placements": sorted({str(p.placements) for p in parameters_of_experts(trainer)}),
    }


def parameters_of_experts(trainer: RoutePackTrainer) -> list[DTensor]:
    return [p for placed in overrides.placed_layers(trainer.model) for p in placed.inner_experts.parameters()]


def local_weights(trainer: RoutePackTrainer) -> list[torch.Tensor]:
    return [parameter.to_local() for parameter in parameters_of_experts(trainer)]


@check
def replays(ep: int, **changes: Any) -> dict[str, Any]:
    """Loss and gate gradient of a native window, of its replay, of a part of it, and of other routes; weights stand still."""
    trainer = build_trainer(ep, learning_rate=0.0, **changes)
    batch = windows.unrecorded(windows.window(3))
    plan = windows.shuffled_plan(batch, topology_of(trainer), 3, num_microbatches=1)
    with overrides.recorded_routes(trainer.model):
        native = figures(trainer, batch, plan)
        recorded = gathered_routes(trainer, batch, plan)
    other = windows.skewed_routes(
        np.random.default_rng(0), len(recorded.routed_experts_TLK), windows.NUM_EXPERTS, windows.TOP_K
    )
    half_T = np.arange(len(recorded.routed_experts_TLK)) % 2 == 0
    others_half_masked = np.where(half_T[:, None, None], recorded.routed_experts_TLK, 0)
    return {
        "native": native,
        "replayed": figures(trainer, recorded, plan),
        "half": figures(trainer, windows.with_routes(batch, others_half_masked, recorded.cu_seqlens, half_T), plan),
        "other": figures(trainer, windows.with_routes(batch, other, recorded.cu_seqlens), plan),
    }


def figures(trainer: RoutePackTrainer, batch: RolloutBatch, plan: Plan) -> dict[str, Any]:
    loss = trainer.update(batch, plan, CrossEntropyTokenLoss())["loss"]
    gates = [router.gate.weight.grad.full_tensor().numpy().copy() for router in overrides.replay_routers(trainer.model)]
    return {"loss": loss, "gate_gradients": np.stack(gates)}


def gathered_routes(trainer: RoutePackTrainer, batch: RolloutBatch, plan: Plan) -> RolloutBatch:
    """The batch with the ids that every rank's routers recorded in their one microbatch."""
    routes_nLK = overrides.routes_of(trainer.model)[0].numpy()
    cell = materialize.microbatches(plan, batch, dist.get_rank())[0]
    mine = {int(s): routes_nLK[a:b] for s, a, b in zip(cell.sequences_S, cell.cu_seqlens, cell.cu_seqlens[1:], strict=False)}
    everyones: list[dict[int, np.ndarray]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, mine)
    by_sequence = {s: rows for routes in everyones for s, rows in routes.items()}
    rows = [by_sequence[s] for s in range(batch.num_sequences)]
    return windows.with_routes(batch, np.concatenate(rows).astype(np.uint8), np.cumsum([0, *map(len, rows)]))


@check
def gives_log_probabilities(ep: int, **changes: Any) -> dict[str, Any]:
    trainer = build_trainer(ep, **changes)
    batch = windows.window(5)
    topology = topology_of(trainer)
    trainer.update(batch, windows.shuffled_plan(batch, topology, 5), CrossEntropyTokenLoss())
    plan = windows.shuffled_plan(batch, topology, 6)
    updated = {"trainer": trainer.log_probabilities(batch, plan), "local": local_log_probabilities(trainer, batch)}
    other = build_local_model(TinyQwen3MoE(), seed=12)
    trainer.load_full_state({name: parameter.detach() for name, parameter in other.named_parameters()})
    loaded = {"trainer": trainer.log_probabilities(batch, plan), "local": local_log_probabilities(trainer, batch)}
    loaded_distance = distance_of(trainer, other)
    trainer.update(batch, plan, CrossEntropyTokenLoss())
    return {"updated": updated, "loaded": loaded, "loaded_distance": loaded_distance, "step": distance_of(trainer, other)}


def distance_of(trainer: RoutePackTrainer, other: torch.nn.Module) -> float:
    """The largest difference of a parameter."""
    parameters = dict(other.named_parameters())
    return max(float((value - parameters[name]).abs().max()) for name, value in trainer.logical_state_dict().items())


def local_log_probabilities(trainer: RoutePackTrainer, batch: RolloutBatch) -> np.ndarray:
    """One sequence at a time through an unsharded copy, written without the trainer's own microbatches."""
    local = build_local_model(TinyQwen3MoE(), seed=11)
    models.load_full_state(local, trainer.logical_state_dict())
    logprobs = np.zeros(int(batch.num_tokens_S.sum()), dtype=np.float32)
    for sequence in range(batch.num_sequences):
        start, end = batch.cu_tokens[sequence : sequence + 2]
        tokens = torch.from_numpy(batch.token_fields["token_ids"][start:end])
        rows = batch.routed_experts_of(sequence).astype(np.int64)
        rows[~batch.valid_T[batch.cu_seqlens[sequence] : batch.cu_seqlens[sequence + 1]]] = -1
        overrides.set_replay(local, torch.from_numpy(rows[: len(tokens) - 1])[None])
        positions = torch.arange(len(tokens) - 1)[None]
        with torch.no_grad():
            logits = local(tokens[None, :-1], positions=positions, attention_masks=local.get_attention_masks(positions))[0]
        logprobs[start + 1 : end] = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
    return logprobs


@check
def moves_every_step(ep: int, num_steps: int = 20, fault: str = "", **changes: Any) -> dict[str, Any]:
    """Twenty steps with all experts moved before each, and without any move, else the same: tensors that differ at the end."""
    tiny = {name: changes.pop(name) for name in ("num_experts", "top_k", "num_layers") if name in changes}
    changes = {"max_norm": 1e9, **changes}
    with pytest.MonkeyPatch.context() as broken:
        if fault == "moments left behind":
            broken.setattr(expert_moves, "state_tensors", lambda state, prefix="": iter(()))
        if fault == "mapping not applied":
            broken.setattr(overrides.PlacedRoutedExperts, "set_placement", lambda self, slots: None)
        moved = trained(build_trainer(ep, tiny=tiny, **changes), num_steps, tiny, moving=True)
    still = trained(build_trainer(ep, tiny=tiny, **changes), num_steps, tiny, moving=False)
    apart = {
        name: float(np.abs(value - moved["tensors"][name]).max())
        for name, value in still["tensors"].items()
        if not np.array_equal(value, moved["tensors"][name])
    }
    return {
        "apart": apart,
        "largest": max(apart.values(), default=0.0),
        "losses": [still["losses"], moved["losses"]],
        "norms": still["norms"],
        "moved": moved["moved"],
        "num_tensors": len(moved["tensors"]),
        "placements": still["placements"],
    }


@check
def clips(ep: int, **changes: Any) -> dict[str, list[float]]:
    """Norms of the same gradients at twelve placements, as ordered sums and as TorchTitan give them; what a step leaves."""
    trainer = build_trainer(ep, placement_invariant=True, max_norm=0.05, **changes)
    batch = windows.window(0)
    trainer.update(batch, windows.shuffled_plan(batch, topology_of(trainer), 0), CrossEntropyTokenLoss())
    left = float(invariance.clip(trainer.model, np.inf))
    norms: dict[str, list[float]] = {"ordered": [], "torchtitan": [], "clipped": [], "step": [left]}
    for seed in range(12):
        trainer.move_experts(windows.random_placement(seed))
        random, slots = torch.Generator().manual_seed(3), trainer.logical_of_parameter()
        for name, parameter in trainer._named_parameters():
            full = torch.randn(parameter.shape, generator=random)
            parameter.grad = torch.zeros_like(parameter)
            expert_moves.take_shard(parameter.grad, full[torch.from_numpy(slots[name])] if name in slots else full)
        parameters = list(trainer.model.parameters())
        theirs = clip_grad_norm_(parameters, np.inf, foreach=True, ep_enabled=trainer.parallel_dims.ep_enabled)
        norms["torchtitan"].append(float(theirs))
        norms["ordered"].append(float(invariance.clip(trainer.model, 2.0)))
        norms["clipped"].append(float(invariance.clip(trainer.model, np.inf)))
    return norms


def trained(trainer: RoutePackTrainer, num_steps: int, tiny: dict[str, int], *, moving: bool) -> dict[str, Any]:
    num_experts, top_k = tiny.get("num_experts", windows.NUM_EXPERTS), tiny.get("top_k", windows.TOP_K)
    losses, norms, moved = [], [], 0
    for step in range(num_steps):
        batch = windows.window(step, num_experts=num_experts, top_k=top_k)
        plan = windows.shuffled_plan(batch, topology_of(trainer), step)
        if not moving:
            plan = replace(plan, placement=ExpertPlacement.identity(batch.num_layers, num_experts))
        figures = trainer.update(batch, plan, loss_of_step(step))
        losses.append(figures["loss"])
        norms.append(figures["grad_norm"])
        moved += figures["experts_moved"]
    placements = sorted({str(parameter.placements) for parameter in parameters_of_experts(trainer)})
    return {"tensors": everything(trainer), "losses": losses, "norms": norms, "moved": moved, "placements": placements}


@check
def moves_further_state(ep: int) -> dict[str, Any]:
    """Optimizer state of other shapes than the weights: one number, or one row, for each expert, sharded or not."""
    trainer = build_trainer(ep)
    batch = windows.window(0)
    trainer.update(batch, windows.first_fit_plan(batch, topology_of(trainer)), CrossEntropyTokenLoss())
    optimizer, parameters = next(iter(trainer.optimizers)), parameters_of_experts(trainer)
    for parameter in parameters:
        rows = expert_moves.ShardLayout.of(parameter).rows_of_rank[dist.get_rank()]
        sharded = [DTensor.from_local(value, parameter.device_mesh, parameter.placements) for value in of_slots(rows)[1:]]
        optimizer.state[parameter]["age"] = of_slots(rows)[0]
        optimizer.state[parameter]["factors"] = {"rows": sharded[0], "counts": sharded[1]}
    trainer.move_experts(windows.random_placement(3))
    slots_LP = trainer.placement.physical_to_logical_LP
    right = []
    for number, parameter in enumerate(parameters):
        rows = slots_LP[number // 3][expert_moves.ShardLayout.of(parameter).rows_of_rank[dist.get_rank()]]
        state, expected = optimizer.state[parameter], of_slots(rows)
        right.append(torch.equal(state["age"], expected[0]))
        right += [torch.equal(state["factors"][k].to_local(), e) for k, e in zip(("rows", "counts"), expected[1:], strict=True)]
    optimizer.state[parameters[0]]["shared"] = torch.zeros(5)
    refused = message_of(lambda: trainer.move_experts(windows.random_placement(4)))
    same = np.array_equal(trainer.placement.physical_to_logical_LP, slots_LP)
    return {"right": right, "refused": refused, "kept_placement": same}


def of_slots(slots: np.ndarray) -> list[torch.Tensor]:
    """What stands for each slot's state: a number, a row, and a whole number."""
    numbers = torch.from_numpy(slots.astype(np.int64))
    return [numbers.double(), numbers[:, None].bfloat16() * torch.ones(1, 7, dtype=torch.bfloat16), numbers.clone()]


@check
def stages_little(ep: int, staging_bytes: int) -> dict[str, Any]:
    """The most memory that a move allocates beyond what it had, as torch's own allocator counts it, and what it moved."""
    trainer = build_trainer(ep, staging_bytes=staging_bytes, tiny={"dim": 128, "moe_hidden_dim": 128})
    batch = windows.window(0)
    trainer.update(batch, windows.first_fit_plan(batch, topology_of(trainer)), CrossEntropyTokenLoss())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trainer.move_experts(windows.random_placement(3))
    sizes = [event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage > 0]
    return {"allocated": sorted(sizes), "staged": trainer.last_move.staged_bytes, "sent": trainer.last_move.bytes_sent}


@check
def saves(ep: int, folder: str, fault: str = "", **changes: Any) -> dict[str, Any]:
    """Trains four steps with a move each and saves after the second; what the next two gave, and all logical tensors."""
    cls = SlotSavingTrainer if fault == "slots" else RoutePackTrainer
    trainer = with_checkpoints(ep, folder, cls=cls, **changes)
    batch, topology = windows.window(0), topology_of(trainer)
    for step in range(2):
        trainer.update(batch, windows.shuffled_plan(batch, topology, step), CrossEntropyTokenLoss())
    placement, saved = trainer.placement.physical_to_logical_LP, everything(trainer)
    went_on = go_on(trainer)
    trainer.checkpointer.maybe_wait_for_saving()
    return {"saved": saved, "placement": placement, "went_on": went_on}


class SlotSavingTrainer(RoutePackTrainer):
    """Takes every slot for the expert of the same number where it saves."""

    def logical_of_parameter(self):
        return {name: np.arange(len(logical_P)) for name, logical_P in super().logical_of_parameter().items()}


@check
def draws_one_at_a_time(ep: int) -> int:
    """The most full parameters that were in memory at once while the trainer was built."""
    alive, most, empty_like = weakref.WeakSet(), 0, initialization._empty_like

    def counted(parameter: torch.Tensor) -> torch.Tensor:
        nonlocal most
        full = empty_like(parameter)
        alive.add(full)
        most = max(most, len(alive))
        return full

    with pytest.MonkeyPatch.context() as counting:
        counting.setattr(initialization, "_empty_like", counted)
        build_trainer(ep)
    return most


@check
def loads(ep: int, folder: str, stock: bool = False, **changes: Any) -> dict[str, Any]:
    """What another trainer, with other weights at other places, has after loading the last step; and its next two steps."""
    trainer = with_checkpoints(ep, folder, stock=stock, **{"seed": 8, **changes})
    if not stock:
        batch = windows.window(1)
        trainer.update(batch, windows.shuffled_plan(batch, topology_of(trainer), 5), CrossEntropyTokenLoss())
    step = trainer.resume()
    placement, loaded = trainer.placement.physical_to_logical_LP, everything(trainer)
    return {"step": step, "loaded": loaded, "placement": placement, "went_on": go_on(trainer)}


def with_checkpoints(ep: int, folder: str, *, stock: bool = False, **changes: Any) -> RoutePackTrainer:
    """A trainer that saves every other step, or one with TorchTitan's own checkpoints, which know no placement."""
    with pytest.MonkeyPatch.context() as manager:
        if stock:
            manager.setattr(torchtitan_config, "PlacedCheckpointManager", CheckpointManager)
        return build_trainer(ep, checkpoint_interval=2, dump_folder=folder, **changes)


@check
def saves_as_torchtitan(ep: int, folder: str) -> dict[str, Any]:
    """Two steps, experts in the slots of their numbers, saved by TorchTitan's own manager."""
    trainer = with_checkpoints(ep, folder, stock=True)
    batch = windows.window(0)
    for _ in range(2):
        trainer.update(batch, windows.first_fit_plan(batch, topology_of(trainer)), CrossEntropyTokenLoss())
    return {"saved": everything(trainer)}


def go_on(trainer: RoutePackTrainer) -> dict[str, Any]:
    """Two more steps, not saved."""
    batch, topology = windows.window(0), topology_of(trainer)
    plans = [windows.shuffled_plan(batch, topology, seed) for seed in (8, 9)]
    losses = [trainer.update(batch, plan, CrossEntropyTokenLoss(), save=False)["loss"] for plan in plans]
    return {"losses": losses, "tensors": everything(trainer)}


def everything(trainer: RoutePackTrainer) -> dict[str, np.ndarray]:
    """All parameters and moments in full, experts in logical order, by DTensor's own gathering."""
    tensors, orders = {}, {}
    for layer, placed in enumerate(overrides.placed_layers(trainer.model)):
        order = torch.from_numpy(trainer.placement.logical_to_physical_LE[layer].astype(np.int64))
        orders.update({id(parameter): order for parameter in placed.inner_experts.parameters()})
    for name, parameter in trainer.model.named_parameters():
        parts = {name: parameter}
        for optimizer in trainer.optimizers:
            state = optimizer.state.get(parameter, {})
            parts.update({f"{name}/{key}": value for key, value in state.items() if value.numel() > 1})
        for key, value in parts.items():
            full = value.full_tensor().detach()
            full = full[orders[id(parameter)]] if id(parameter) in orders else full
            tensors[key] = full.float().numpy().copy()
    return tensors


@check
def tears(ep: int, folder: str) -> dict[str, str]:
    """What a trainer says to everything after a move in which the others were lost in the third round."""
    trainer, begin, rounds = with_checkpoints(ep, folder, staging_bytes=2**16), collectives.begin_messages, 0
    batch, plan = windows.window(0), windows.shuffled_plan(windows.window(0), topology_of(trainer), 0)

    def lost(*messages: Any) -> Callable[[], None]:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            raise RankLostError("rank 0 lost another rank.")
        return begin(*messages)

    with pytest.MonkeyPatch.context() as torn:
        torn.setattr(collectives, "begin_messages", lost)
        said = {"the move": message_of(lambda: trainer.update(batch, plan, CrossEntropyTokenLoss()))}
    attempts = {
        "update": lambda: trainer.update(batch, plan, CrossEntropyTokenLoss()),
        "log_probabilities": lambda: trainer.log_probabilities(batch, plan),
        "move_experts": lambda: trainer.move_experts(trainer.placement),
        "save": lambda: trainer.save(last=True),
        "logical_state_dict": trainer.logical_state_dict,
        "export_huggingface": lambda: trainer.export_huggingface(Path(folder) / "exported"),
        "reference": lambda: ReferencePolicy(trainer),
    }
    return said | {name: message_of(attempt) for name, attempt in attempts.items()}


@check
def resists(ep: int, folder: str, **changes: Any) -> dict[str, Any]:
    """What is said where a placement does not fit, rank 1's disk is full, or a checkpoint is damaged or of another model."""
    trainer, checkpoints = with_checkpoints(ep, folder, **changes), Path(folder) / "checkpoint"
    batch, topology, said = windows.window(0), topology_of(trainer), {}
    for name, shape in {"layers": (3, 16), "experts": (4, 8)}.items():
        said[name] = message_of(lambda shape=shape: trainer.move_experts(ExpertPlacement.identity(*shape)))

    def train_and_save() -> str:
        def two_steps() -> None:
            for seed in range(2):
                trainer.update(batch, windows.shuffled_plan(batch, topology, seed), CrossEntropyTokenLoss())
            trainer.checkpointer.maybe_wait_for_saving()

        message = message_of(two_steps)
        dist.barrier()
        return message

    said["saved"] = train_and_save()
    with small_files(2**16 if dist.get_rank() == 1 else None):
        said["full"] = train_and_save()
    kept = named(checkpoints)
    said["saved again"] = train_and_save()
    kept_later = named(checkpoints)
    dist.barrier()
    if dist.get_rank() == 0:
        (checkpoints / "step-7").mkdir()
        (checkpoints / "step-8").mkdir()
        (checkpoints / "step-8" / ".metadata").write_bytes((checkpoints / "step-6" / ".metadata").read_bytes()[:300])
    dist.barrier()
    said["damaged"] = message_of(lambda: trainer.resume())
    dist.barrier()
    if dist.get_rank() == 0:
        (checkpoints / "step-8" / ".metadata").unlink()
    dist.barrier()
    resumed = with_checkpoints(ep, folder, **changes).resume()
    for name, tiny in {"fewer experts": {"num_experts": 8}, "fewer layers": {"num_layers": 3}, "wider": {"dim": 128}}.items():
        other = with_checkpoints(ep, folder, tiny=tiny, **changes)
        said[name] = message_of(other.resume)
    return {"said": said, "kept": kept, "kept_later": kept_later, "resumed": resumed}


def named(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.glob("step-*"))


@contextmanager
def small_files(most_bytes: int | None) -> Iterator[None]:
    """Let this process write no file beyond so many bytes, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@check
def exports(ep: int, folder: str, seed: int | None, **changes: Any) -> list[str]:
    """Writes the weights in Hugging Face's format after moving the experts, or before."""
    trainer = build_trainer(ep, **changes)
    if seed is not None:
        trainer.move_experts(windows.random_placement(seed))
    trainer.export_huggingface(folder, dtype=torch.float32)
    return sorted(path.name for path in Path(folder).iterdir())


@check
def refuses(ep: int) -> dict[str, str]:
    """The error that this rank raises where ranks disagree or one of them cannot go on."""
    trainer = build_trainer(ep)
    batch, topology, rank = windows.window(0), topology_of(trainer), dist.get_rank()
    duplicate = batch.routed_experts_TLK.copy()
    duplicate[:, 0, 1] = duplicate[:, 0, 0]
    broken = windows.with_routes(batch, duplicate if rank == 0 else batch.routed_experts_TLK, batch.cu_seqlens)
    same = windows.shuffled_plan(batch, topology, 0)
    attempts = {
        "other_plan": lambda: trainer.update(batch, windows.shuffled_plan(batch, topology, rank), CrossEntropyTokenLoss()),
        "broken_batch_on_rank_0": lambda: trainer.update(broken, same, CrossEntropyTokenLoss()),
        "other_placement": lambda: trainer.move_experts(windows.random_placement(rank)),
        "other_minibatches": lambda: trainer.update_minibatches(batch, same, CrossEntropyTokenLoss(), num_minibatches=1 + rank),
        "other_call": lambda: (trainer.log_probabilities if rank else partial(trainer.update, loss=CrossEntropyTokenLoss()))(
            batch, same
        ),
        "no_memory_on_rank_1": lambda: move_without_memory(trainer),
        "other_topology": lambda: trainer.log_probabilities(
            batch, windows.shuffled_plan(batch, windows.topology(2 * topology.data_parallel_degree, ep), 0)
        ),
    }
    messages = {name: message_of(attempt) for name, attempt in attempts.items()}
    identity = trainer.placement.physical_to_logical_LP == np.arange(windows.NUM_EXPERTS)
    return {**messages, "moved_nothing": str(bool(identity.all()))}


def move_without_memory(trainer: RoutePackTrainer) -> None:
    original, trainer.staging = expert_moves._allocated, expert_moves.StagingMemory()
    with pytest.MonkeyPatch.context() as memory:
        if dist.get_rank() == 1:
            memory.setattr(expert_moves, "_allocated", lambda num_bytes, device: original(2**60, device))
        trainer.move_experts(windows.random_placement(5))


def message_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except RoutePackError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


TINY_RL = Path(__file__).parents[2] / "configs/tiny_rl.yaml"
SMALL_RL = {
    "model.dim": 32, "model.moe_hidden_dim": 16, "model.num_layers": 2, "model.num_experts": 4, "task.max_answer_symbols": 16,
    "warmup.num_steps": 1, "warmup.batch_size": 8, "rl.num_steps": 3, "rollout.prompts_per_step": 4,
    "rollout.rollouts_per_prompt": 2, "rollout.max_new_tokens": 20, "packer.max_tokens": 64, "num_proposals": 2000,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OddTask(CountingTask):
    """Rewards that differ between any two responses of a model that has learnt nothing yet."""

    def grade(self, prompt: Prompt, response: np.ndarray) -> Grade:
        return Grade(reward=float(np.mean(response % 2)), num_judged=len(response))


def rl_run(**changes: Any) -> RLRun:
    options = SMALL_RL | {"topology.data_parallel_degree": dist.get_world_size(), "out": tempfile.mkdtemp()} | changes
    experiment = build_experiment(load([TINY_RL], [f"{name}={value}" for name, value in options.items()]))
    task = {one.name: getattr(experiment.task, one.name) for one in fields(experiment.task)}
    experiment = replace(experiment, task=OddTask(**task))
    return RLRun(experiment=experiment, progress=Progress(enabled=False, log_folder=experiment.out))


def untimed(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """Figures without those that the clock gives."""
    clock = ("second", "prediction_error", "_ms")
    return [{name: value for name, value in one.items() if not any(part in name for part in clock)} for one in history]


def weights(run: RLRun) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in run.trainer.logical_state_dict().items()}


def planning_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("routepack-")]


@check
def reinforces(**changes: Any) -> dict[str, Any]:
    run, plans = rl_run(**changes), []
    result = run.planning.result
    run.planning.result = lambda: plans.append(result()) or plans[-1]
    summary = run.run()
    return {
        "history": untimed(run.history),
        "timings": [timing for _, timing in plans],
        "digests": [plan.digest for plan, _ in plans],
        "budgets": [plan.budget for plan, _ in plans],
        "weights": weights(run),
        "summary": summary,
        "threads": planning_threads(),
    }


@check
def reinforces_on_the_spot(**changes: Any) -> dict[str, Any]:
    """The loop without any background: sample a window whole, plan it, then train on it."""
    run, digests, history = rl_run(**changes), [], []
    run.planning.add = lambda sequence, rollout: None
    run.planning.finish = lambda rollouts, previous: None
    for step in range(run.experiment.warmup.num_steps):
        run.warm_up(step)
    for step in range(run.experiment.rl.num_steps):
        batch, _ = run.sample(step, step, run.trainer.placement)
        plan = collectives.from_rank(0, partial(run.experiment.planner.plan, batch, previous=run.trainer.placement), "plan")
        moved = run.trainer.move_experts(plan.placement)
        old = {"logprobs_old": run.trainer.log_probabilities(batch, plan)}
        run.trainer.set_learning_rate(run.experiment.rl.rate_at(step))
        trained = replace(batch, token_fields={**batch.token_fields, **old})
        figures = run.trainer.update(trained, plan, run.experiment.loss)
        history.append(figures | {"reward": float(batch.sequence_fields["rewards"].mean()), "experts_moved": moved})
        digests.append(plan.digest)
    return {"history": untimed(history), "digests": digests, "weights": weights(run)}


class FailingPlanner(Planner):
    """Plans one window."""

    planned = False

    def plan(self, window, previous=None):
        """Fails at the second."""
        if self.planned:
            raise ZeroDivisionError("no second plan")
        self.planned = True
        return super().plan(window, previous)


@check
def fails_to_plan(**changes: Any) -> dict[str, Any]:
    """What each rank raises where a window of the loop cannot be planned, and what is left running."""
    run = rl_run(**{"warmup.num_steps": 0} | changes)
    planner = run.planning.planner
    run.planning._background.planner = FailingPlanner(**{one.name: getattr(planner, one.name) for one in fields(planner)})
    with pytest.raises((PlanError, ZeroDivisionError)) as caught:
        run.run()
    dist.barrier()
    return {"error": f"{type(caught.value).__name__}: {caught.value}", "threads": planning_threads()}
