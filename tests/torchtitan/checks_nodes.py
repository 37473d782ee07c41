"""What a rank measures of runs over recorded windows, of weights in Hugging Face's format, and of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import windows
from checks import build_trainer, check, message_of, topology_of
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from routepack.core.config import load
from routepack.core.rollouts import RolloutBatch
from routepack.torchtitan.launch.launch import experiment_of
from routepack.torchtitan.model.models import TinyQwen3MoE, TrainedModel
from routepack.torchtitan.recorded.recorded_run import RecordedRun
from routepack.torchtitan.trainer.memory import estimate_memory
from routepack.torchtitan.trainer.settings import TrainerSettings
from routepack.torchtitan.trainer.trainer import RoutePackTrainer
from routepack.traces.trace_files import concatenate
from routepack.training.losses import CrossEntropyTokenLoss
from routepack.training.progress import WindowProgress


@check
def trains_on_traces(config: str, **changes: Any) -> dict[str, Any]:
    """A run over recorded windows: what it logs, and where it ends."""
    experiment = experiment_of(load([config], [f"{name}={value}" for name, value in changes.items()]))
    run = RecordedRun(experiment=experiment, progress=WindowProgress(enabled=False, log_folder=experiment.out / "tensorboard"))
    summary = run.run()
    run.trainer.close()
    state = run.trainer.logical_state_dict()
    return {
        "losses": [figures["loss"] for figures in run.history],
        "figures": run.history[-1],
        "summary": summary,
        "windows_done": run.trainer.windows_done,
        "step": run.trainer.step,
        "state": {name: value.numpy() for name, value in state.items()},
    }


@check
def fails_on_traces(config: str, **changes: Any) -> str:
    return message_of(lambda: trains_on_traces(config, **changes))


@check
def loads_huggingface(folder: str, ep: int, seed: int | None, **changes: Any) -> dict[str, Any]:
    """The parameters after a load into a trainer of other weights and another placement."""
    trainer = build_trainer(ep, seed=99, **changes)
    if seed is not None:
        trainer.move_experts(windows.random_placement(seed))
    before = {name: value.numpy() for name, value in trainer.logical_state_dict().items()}
    trainer.load_huggingface(folder)
    return {"before": before, "state": {name: value.numpy() for name, value in trainer.logical_state_dict().items()}}


@check
def starts_from_huggingface(folder: str, ep: int) -> dict[str, Any]:
    trainer = build_trainer(ep, seed=99, initial_weights=folder)
    return {"state": {name: value.numpy() for name, value in trainer.logical_state_dict().items()}}


@check
def refuses_huggingface(ep: int, **folders: str) -> dict[str, Any]:
    """What this rank raises at each folder, and whether its weights are as they were."""
    trainer = build_trainer(ep)
    before = trainer.logical_state_dict()
    said = {name: message_of(lambda folder=folder: trainer.load_huggingface(folder)) for name, folder in folders.items()}
    after = trainer.logical_state_dict()
    return said | {"unchanged": all(torch.equal(before[name], after[name]) for name in before)}


@check
def breaks_export(source: str, lacking: str, misshapen: str, foreign: str, truncated: str) -> None:
    """Copies of an export with something wrong."""
    (path,) = Path(source).glob("*.safetensors")
    tensors = load_file(path)
    norm = tensors["model.norm.weight"]
    changed = {
        lacking: {name: value for name, value in tensors.items() if name != "model.norm.weight"},
        misshapen: tensors | {"model.norm.weight": norm[1:].clone()},
        foreign: tensors | {"model.layers.9.mlp.gate.weight": norm.clone()},
        truncated: tensors,
    }
    if dist.get_rank() == 0:
        for folder, state in changed.items():
            Path(folder).mkdir()
            save_file(state, Path(folder) / path.name)
        whole = Path(truncated) / path.name
        whole.write_bytes(whole.read_bytes()[:-100])
    dist.barrier()


@check
def takes_memory(ep: int, tiny: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Bytes that this rank has after a step, beside the estimate."""
    model = TinyQwen3MoE(**(tiny or {}))
    trainer = build_trainer(ep, tiny=tiny, **changes)
    batch = windows.window(0, num_experts=model.num_experts, top_k=model.top_k)
    plan = windows.first_fit_plan(batch, topology_of(trainer))
    trainer.update(batch, plan, CrossEntropyTokenLoss())
    own = [_local(parameter) for parameter in trainer.model.parameters()]
    moments = [
        _local(state)
        for optimizer in trainer.optimizers
        for states in optimizer.state.values()
        for state in states.values()
        if state.numel() > 1
    ]
    settings = TrainerSettings(expert_parallel_degree=ep, **changes)
    return {
        "weights": sum(one.nbytes for one in own),
        "optimizer": sum(one.nbytes for one in moments),
        "rotary": sum(buffer.nbytes for name, buffer in trainer.model.named_buffers() if name.endswith("rope.cache")),
        "estimate": estimate_memory(model, settings, num_ranks=dist.get_world_size(), max_tokens=100),
    }


@check
def peaks(vocab_size: int, num_tokens: int) -> dict[str, int]:
    """The most that a step of one microbatch allocates at a time, beside the estimate of its logits."""
    model = TinyQwen3MoE(vocab_size=vocab_size, dim=16, num_layers=4, moe_hidden_dim=16, max_seq_len=num_tokens)
    settings = TrainerSettings(expert_parallel_degree=1, activation_checkpoint="full")
    trainer = RoutePackTrainer.from_settings(model=model, settings=settings)
    batch = windows.window(0)
    repeats = -(-num_tokens * dist.get_world_size() // int(batch.num_tokens_S.sum()))
    batch = repeated(batch, repeats)
    plan = windows.plan_of(
        batch, topology_of(trainer), trainer.placement, np.arange(batch.num_sequences) % dist.get_world_size()
    )
    trainer.update(batch, plan, CrossEntropyTokenLoss())  # its moments and kept buffers are there from now on
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trainer.update(batch, plan, CrossEntropyTokenLoss())
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    fed_in = max(int((batch.num_tokens_S - 1)[plan.packing.cell_of_S == cell].sum()) for cell in range(plan.packing.num_cells))
    estimate = estimate_memory(model, settings, num_ranks=dist.get_world_size(), max_tokens=fed_in)
    return {"peak": int(np.cumsum(changes).max()), "logits": estimate.logits}


def repeated(batch: RolloutBatch, times: int) -> RolloutBatch:
    return concatenate([batch] * times)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@check
def logprobs_from_huggingface(folder: str, model: TrainedModel, tokens: list[list[int]]) -> list[float]:
    """Log-probabilities by weights of Hugging Face's format, routed natively."""
    trainer = RoutePackTrainer.from_settings(
        model=model, settings=TrainerSettings(expert_parallel_degree=dist.get_world_size(), initial_weights=folder)
    )
    lengths_S = np.array([len(one) for one in tokens])
    layers, experts = trainer.placement.physical_to_logical_LP.shape
    batch = RolloutBatch(
        routed_experts_TLK=np.zeros((0, layers, 1), np.uint8),
        cu_seqlens=np.zeros(len(tokens) + 1, np.int64),
        num_tokens_S=lengths_S,
        num_experts=experts,
        layer_ids_L=np.array(trainer.moe_layer_ids),
        token_fields={"token_ids": np.concatenate(tokens), "loss_mask": np.ones(lengths_S.sum(), bool)},
    )
    cells = np.arange(len(tokens)) % dist.get_world_size()
    plan = windows.plan_of(batch, topology_of(trainer), trainer.placement, cells)
    return trainer.log_probabilities(batch, plan).tolist()
