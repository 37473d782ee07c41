"""What the multi-rank tests run: each check is a function of this rank and gives what the test looks at.

Checks run one after another in one launch (importing TorchTitan is what takes long), see worker.py. They only
measure; the tests judge.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import windows
from torch.distributed.tensor import DTensor

from routepack import distributed, materialize
from routepack.components.packer import AttentionAwarePacker
from routepack.errors import PlanError, RoutePackError
from routepack.integrations.torchtitan import model, moves, overrides
from routepack.integrations.torchtitan.experts import TritonExperts
from routepack.integrations.torchtitan.launch import build_experiment, load
from routepack.integrations.torchtitan.losses import CrossEntropyTokenLoss, GRPOTokenLoss, TokenLoss
from routepack.integrations.torchtitan.model import TinyQwen3MoE, build_local_model
from routepack.integrations.torchtitan.progress import Progress
from routepack.integrations.torchtitan.rl import RLRun
from routepack.integrations.torchtitan.settings import TrainerSettings
from routepack.integrations.torchtitan.trainer import RoutePackTrainer
from routepack.planner import Planner
from routepack.testing import synthetic_batch
from routepack.types import Plan, RolloutBatch, Topology

NUM_STEPS = 10
CHECKS: dict[str, Callable[..., Any]] = {}


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    CHECKS[function.__name__] = function
    return function


def build_trainer(
    ep: int, *, cls: type[RoutePackTrainer] = RoutePackTrainer, tiny: dict | None = None, **changes: Any
) -> RoutePackTrainer:
    torch.manual_seed(1 + dist.get_rank())  # what the ranks drew before must not matter
    settings = TrainerSettings(expert_parallel_degree=ep, seed=7, **{"dump_folder": tempfile.gettempdir(), **changes})
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
    return distributed.broadcast_plan(planner.plan(batch, previous=trainer.placement) if dist.get_rank() == 0 else None)


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
        model=model.RegisteredModel(name=name, flavor=flavor, experts=experts), settings=settings
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
        fault.setattr(moves, "_moments", lambda parameter, state: iter(()))
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

    def load_full_state(self, state):
        """Nothing."""


@check
def starts_from(ep: int, stock: bool) -> bool:
    """Whether the trainer starts from the values of the local copy."""
    trainer = build_trainer(ep, cls=StockInitTrainer if stock else RoutePackTrainer)
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
    model.load_full_state(local, trainer.logical_state_dict())
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
def resumes(ep: int, folder: str) -> dict[str, Any]:
    """The step after a checkpoint, without and with everything lost and loaded again in between."""
    trainer = build_trainer(ep, checkpoint_interval=2, dump_folder=folder)
    batch, topology = windows.window(0), topology_of(trainer)
    for step in range(2):
        trainer.update(batch, windows.shuffled_plan(batch, topology, step), CrossEntropyTokenLoss())
    saved = trainer.placement.physical_to_logical_LP
    plans = [windows.shuffled_plan(batch, topology, seed) for seed in (8, 9)]
    went_on = [trainer.update(batch, plan, CrossEntropyTokenLoss())["loss"] for plan in plans]
    other = build_trainer(ep, checkpoint_interval=2, dump_folder=folder)
    other.update(batch, plans[0], CrossEntropyTokenLoss())
    other.checkpointer.load(step=2)
    restored = np.array_equal(other.placement.physical_to_logical_LP, saved)
    return {
        "went_on": went_on,
        "resumed": [other.update(batch, plan, CrossEntropyTokenLoss())["loss"] for plan in plans],
        "placement_restored": restored,
    }


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
        "other_topology": lambda: trainer.log_probabilities(
            batch, windows.shuffled_plan(batch, windows.topology(2 * topology.data_parallel_degree, ep), 0)
        ),
    }
    messages = {name: message_of(attempt) for name, attempt in attempts.items()}
    identity = trainer.placement.physical_to_logical_LP == np.arange(windows.NUM_EXPERTS)
    return {**messages, "moved_nothing": str(bool(identity.all()))}


def message_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except RoutePackError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


TINY_RL = Path(__file__).parents[3] / "configs/tiny_rl.yaml"
SMALL_RL = {
    "model.dim": 32, "model.moe_hidden_dim": 16, "model.num_layers": 2, "model.num_experts": 4, "task.max_answer_symbols": 16,
    "warmup.num_steps": 1, "warmup.batch_size": 8, "rl.num_steps": 3, "rollout.prompts_per_step": 4,
    "rollout.rollouts_per_prompt": 2, "rollout.max_new_tokens": 20, "packer.max_tokens": 64, "num_proposals": 2000,
}  # fmt: skip


def rl_run(**changes: Any) -> RLRun:
    options = SMALL_RL | {"topology.data_parallel_degree": dist.get_world_size(), "out": tempfile.mkdtemp()} | changes
    experiment = build_experiment(load([TINY_RL], [f"{name}={value}" for name, value in options.items()]))
    return RLRun(experiment=experiment, progress=Progress(enabled=False, log_folder=experiment.out))


def untimed(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """Figures without those that the clock gives."""
    return [{k: v for k, v in one.items() if "second" not in k and not k.endswith("_ms")} for one in history]


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
        plan = run.experiment.planner.plan(batch, previous=run.trainer.placement) if dist.get_rank() == 0 else None
        plan = distributed.broadcast_plan(plan)
        moved = run.trainer.move_experts(plan.placement)
        old = {"logprobs_old": run.trainer.log_probabilities(batch, plan)}
        run.trainer.set_learning_rate(run.experiment.rl.rate_at(step))
        trained = replace(batch, token_fields={**batch.token_fields, **old})
        figures = run.trainer.update(trained, plan, run.experiment.loss)
        history.append(figures | {"reward": float(batch.sequence_fields["rewards"].mean()), "experts_moved": moved})
        digests.append(plan.digest)
    return {"history": history, "digests": digests, "weights": weights(run)}


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
