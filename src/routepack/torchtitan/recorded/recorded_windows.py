"""Windows that another stack recorded: what training reads of them, and all that can be checked before it does.

Each is a ``routepack.trace/1`` file, or a folder of them, with the token fields that the loss reads. Letters:
:mod:`routepack.core`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from torchtitan.protocols.model_spec import ModelSpec

from routepack.core.errors import RoutePackError, TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.microbatches import materialize
from routepack.torchtitan.experiments.experiment import WindowUpdates
from routepack.torchtitan.model.models import TrainedModel, moe_layer_ids, num_experts_of, top_k_of
from routepack.torchtitan.trainer.microbatch_tensors import num_trained_tokens
from routepack.torchtitan.trainer.trainable_tokens import TokenCheck
from routepack.traces.trace_files import load_shard, load_trace
from routepack.training.losses import TokenLoss


@dataclass(frozen=True, kw_only=True)
class UpdateSettings(WindowUpdates):
    """What is done with each window. Learning rate and its warm-up belong to the trainer section."""

    section: ClassVar[str] = "update"

    recompute_logprobs: bool = False
    """Where the loss reads ``logprobs_old``: compute them under the window's plan and replay, by the weights that it finds.
    Else they are the trace's ``logprobs_old`` or, without it, its ``logprobs``: those of the policy that sampled."""

    @property
    def computed_fields(self) -> set[str]:
        """The token fields that are computed anew for every window."""
        return {"logprobs_old"} if self.recompute_logprobs else set()


def files_of(path: Path) -> list[Path]:
    """The files of a window."""
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def check_routing(path: Path, spec: ModelSpec) -> None:
    """Raise TraceError unless the window at *path* has this model's MoE layers, experts and top-k. No recorded id is read."""
    layers = moe_layer_ids(spec)
    wanted = {"MoE layers": len(layers), "experts": num_experts_of(spec), "experts a token (top_k)": top_k_of(spec)}
    for file in files_of(path):
        header = load_shard(file)
        given = (header.num_layers, header.num_experts, header.top_k)
        for (what, number), recorded in zip(wanted.items(), given, strict=True):
            if recorded != number:
                raise TraceError(
                    f"{file} was recorded with {recorded} {what}; model {spec.name} {spec.flavor} has {number}: train the "
                    "model that sampled it."
                )
        if header.layer_ids_L.tolist() != layers:
            raise TraceError(f"{file} recorded layers {header.layer_ids_L.tolist()}; the model's MoE layers are {layers}.")


def check_sequences(path: Path, spec: ModelSpec, loss: TokenLoss, update: UpdateSettings, *, max_tokens: int) -> None:
    """Raise TraceError where a window lacks a field, or a sequence is too long. No token or route is read."""
    for file in files_of(path):
        batch = load_trace(file)
        complete(file, batch, loss, update)
        TokenCheck(spec=spec, window=str(file)).check_lengths(batch, np.arange(batch.num_sequences))
        if (longest := int(batch.num_tokens_S.max(initial=0))) > max_tokens:
            s = int(batch.num_tokens_S.argmax())
            raise TraceError(
                f"{file}: sequence {s} has {longest} tokens; packer.max_tokens={max_tokens} is what a microbatch holds: "
                "raise it, or leave longer sequences out."
            )


def check_window(path: Path, model: TrainedModel, loss: TokenLoss, update: UpdateSettings) -> tuple[int, int]:
    """Read a window as training would; the tokens that it has and those that it trains.

    Raises TraceError naming the window and the field, sequence, token or row that cannot be trained on.
    """
    batch = load_training_window(path, model, loss, update)
    try:
        trained = num_trained_tokens(batch)
        for sequence in range(batch.num_sequences):
            materialize.microbatch_of(batch, np.array([sequence]))
    except RoutePackError as error:
        raise TraceError(f"{path}: {error}") from error
    return int(batch.num_tokens_S.sum()), trained


def load_training_window(path: Path, model: TrainedModel, loss: TokenLoss, update: UpdateSettings) -> RolloutBatch:
    """The window at *path*, with every token field that the loss reads but recomputed ones.

    Raises TraceError naming the field, the token id or the sequence that does not fit.
    """
    batch = load_trace(path)
    sampled = {} if "logprobs_old" in batch.token_fields else {"logprobs_old": "logprobs"}
    batch = complete(path, batch, loss, update)
    needs = [name for name in loss.needs if name not in update.computed_fields]
    TokenCheck(spec=model.model_spec(), needs=needs, window=str(path), recorded_as=sampled).check(batch)
    return batch


def complete(path: Path, batch: RolloutBatch, loss: TokenLoss, update: UpdateSettings) -> RolloutBatch:
    """The batch with every token field that the loss reads but recomputed ones. Raises TraceError where one is missing."""
    fields = dict(batch.token_fields)
    if "logprobs_old" in loss.needs and not update.recompute_logprobs and "logprobs" in fields:
        fields.setdefault("logprobs_old", fields["logprobs"])
    for name in ("token_ids", "loss_mask", *loss.needs):
        if name not in fields and name not in update.computed_fields:
            remedy = "routepack convert keeps it where the stack recorded it; RolloutBatch.token_fields takes your own"
            if name == "logprobs_old":
                remedy = "record logprobs, or set update.recompute_logprobs=true"
            raise TraceError(f"{path} has token fields {sorted(batch.token_fields)} but no {name}: {remedy}.")
    return replace(batch, token_fields=fields)
