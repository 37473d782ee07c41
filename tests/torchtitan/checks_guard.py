"""What the multi-rank tests run about windows that cannot be trained on; see checks.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import windows
from checks import build_trainer, check, logical_tensors, message_of, named, topology_of, with_checkpoints

from routepack.core.rollouts import RolloutBatch
from routepack.training.losses import CrossEntropyTokenLoss, GRPOTokenLoss


def changed(batch: RolloutBatch, name: str, token: int, value: Any) -> RolloutBatch:
    field = batch.token_fields[name].copy()
    field[token] = value
    return replace(batch, token_fields={**batch.token_fields, name: field})


def a_trained_token(batch: RolloutBatch) -> int:
    """The last token of sequence 3."""
    return int(batch.cu_tokens[4]) - 1


@check
def refuses_tokens(ep: int) -> dict[str, str]:
    """What is said of windows that rank 1 sees with a value that nobody can train on."""
    trainer = build_trainer(ep)
    batch = windows.window(0)
    plan, token, own = windows.shuffled_plan(batch, topology_of(trainer), 0), a_trained_token(batch), dist.get_rank() == 1
    changes = {
        "inf": ("logprobs_old", -np.inf),
        "nan": ("advantages", np.nan),
        "negative": ("token_ids", -1),
        "beyond": ("token_ids", windows.VOCAB_SIZE),
    }
    said = {}
    for name, (field, value) in changes.items():
        window = changed(batch, field, token, value) if own else batch
        said[name] = message_of(lambda window=window: trainer.update(window, plan, GRPOTokenLoss()))
    bare = replace(batch, token_fields={k: v for k, v in batch.token_fields.items() if k != "advantages"})
    said["missing"] = message_of(lambda: trainer.update(bare if own else batch, plan, GRPOTokenLoss()))
    unread = changed(batch, "advantages", token, np.nan)
    said["unread"] = message_of(lambda: trainer.update(unread, plan, CrossEntropyTokenLoss()))
    return said


class Exploding(CrossEntropyTokenLoss):
    """Not finite at one token of one microbatch of one rank."""

    factor = 1.0

    def __call__(self, logprobs, fields):
        scale = torch.ones_like(logprobs)
        scale[-1] = self.factor
        return super().__call__(logprobs, fields) * scale


@check
def guards(ep: int, folder: str, **changes: Any) -> dict[str, Any]:
    """Weights, moments, step and checkpoints around steps that are not finite on rank 1."""
    trainer = with_checkpoints(ep, folder, **changes)
    batch = windows.window(0)
    plan, said, unequal = windows.shuffled_plan(batch, topology_of(trainer), 0), {}, {}
    for _ in range(2):
        trainer.update(batch, plan, CrossEntropyTokenLoss())
    before = whole_state(trainer)
    for name, factor in {"nan": float("nan"), "inf": float("inf"), "overflow": 1e30}.items():
        Exploding.factor = factor if dist.get_rank() == 1 else 1.0
        said[name] = message_of(lambda: trainer.update(batch, plan, Exploding()))
        after = whole_state(trainer)
        unequal[name] = [key for key, value in before.items() if not torch.equal(value, after[key])]
    step, kept = trainer.step, named(Path(folder) / "checkpoint")
    loss = trainer.update(batch, plan, CrossEntropyTokenLoss())["loss"]
    return {"said": said, "unequal": unequal, "step": step, "kept": kept, "loss": loss, "num": len(before)}


def whole_state(trainer: Any) -> dict[str, torch.Tensor]:
    return {**{name: value.clone() for name, value in trainer.logical_state_dict().items()}, **logical_tensors(trainer)}


@check
def keeps_checkpoints(ep: int, folder: str, **changes: Any) -> dict[str, list[str]]:
    """The folders that are there after each of four steps, each saved, and once the trainer is closed."""
    trainer = build_trainer(ep, dump_folder=folder, checkpoints_kept=2, checkpoint_interval=1, **changes)
    batch, kept = windows.window(0), {}
    plan = windows.shuffled_plan(batch, topology_of(trainer), 0)
    for step in range(1, 5):
        trainer.update(batch, plan, CrossEntropyTokenLoss(), save=False)
        # Nothing is the last in the background.
        trainer.save(last=step == 4 and not changes)
        dist.barrier()
        kept[f"step {step}"] = named(Path(folder) / "checkpoint")
        dist.barrier()
    trainer.close()
    dist.barrier()
    kept["closed"] = sorted(path.name for path in (Path(folder) / "checkpoint").iterdir())
    return kept
