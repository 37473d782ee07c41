"""A training run over windows that another stack recorded: from a config to everything it is made of, checked beforehand.

A config with ``windows`` is one of these. Each window is a ``routepack.trace/1`` file, or a folder of them, with the token
fields that the loss reads. Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtitan.protocols.model_spec import ModelSpec

from routepack.core.config import build, check_keys
from routepack.core.errors import ConfigError, TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.torchtitan.model.models import TrainedModel, moe_layer_ids, num_experts_of, top_k_of
from routepack.torchtitan.rl.rl_config import (
    SET_ELSEWHERE,
    TRAIN_KEYS,
    Experiment,
    WindowUpdates,
    check_minibatches,
    check_model,
    common_parts,
)
from routepack.torchtitan.trainer.trainable_tokens import TokenCheck
from routepack.traces.trace_files import load_shard, load_trace
from routepack.training.losses import GRPOTokenLoss, TokenLoss

TRACE_SET_ELSEWHERE = SET_ELSEWHERE | {"num_steps": "windows"}
"""As SET_ELSEWHERE, where windows are recorded."""


@dataclass(frozen=True, kw_only=True)
class UpdateSettings(WindowUpdates):
    """What is done with each window. Learning rate and its warm-up belong to the trainer section."""

    section: ClassVar[str] = "update"

    recompute_logprobs: bool = False
    """Where the loss reads ``logprobs_old``: compute them under the window's plan and replay, by the weights that it finds.
    Else they are the trace's ``logprobs_old`` or, without it, its ``logprobs``: those of the policy that sampled."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceExperiment(Experiment):
    """A run over recorded windows."""

    update: UpdateSettings
    patterns: Sequence[str]
    """Files, folders or globs, as the config names them; empty where it does not yet."""

    def check_ready(self) -> None:
        """Raise unless windows are named and fit the model, and what else a run needs is there."""
        spec = self.model.model_spec()
        for path in self.windows():
            self.check_sequences(path, spec)
        super().check_ready()

    def check_sequences(self, path: Path, spec: ModelSpec) -> None:
        """Raise TraceError where a window lacks a field, or a sequence is too long. No token or route is read."""
        limit = self.planner.packer.max_tokens
        for file in files_of(path):
            batch = load_trace(file)
            complete(file, batch, self.loss, self.update)
            TokenCheck(spec=spec, window=str(file)).check_lengths(batch, np.arange(batch.num_sequences))
            if (longest := int(batch.num_tokens_S.max(initial=0))) > limit:
                s = int(batch.num_tokens_S.argmax())
                raise TraceError(
                    f"{file}: sequence {s} has {longest} tokens; packer.max_tokens={limit} is what a microbatch holds: "
                    "raise it, or leave longer sequences out."
                )

    def windows(self) -> list[Path]:
        """The windows in order: patterns as they are named, what a glob finds by name.

        Raises ConfigError where there is none, TraceError where one is no trace of this model's routing.
        """
        if not self.patterns:
            raise ConfigError("windows is not set: name trace files, folders or globs, as in windows='rollouts/*.safetensors'.")
        found = [Path(path) for pattern in self.patterns for path in _found(pattern)]
        spec = self.model.model_spec()
        for path in found:
            check_routing(path, spec)
        return found


def build_trace_experiment(config: DictConfig) -> TraceExperiment:
    """Build every component that *config* names, and check windows that it names already.

    Raises ConfigError naming the option that is wrong, TraceError naming a window that does not fit the model.
    """
    check_keys(config, (*TRAIN_KEYS, "update", "windows"), what="a config that trains on recorded windows")
    experiment = TraceExperiment(
        **common_parts(config, default_model=None, default_loss=GRPOTokenLoss, set_elsewhere=TRACE_SET_ELSEWHERE),
        update=build(config, "update", base=UpdateSettings),
        patterns=_patterns(config),
    )
    check_model(experiment)
    check_minibatches(experiment, experiment.update)
    if experiment.patterns:
        experiment.windows()
    return experiment


def _patterns(config: DictConfig) -> list[str]:
    if OmegaConf.is_missing(config, "windows") or config["windows"] is None:
        return []
    given = config["windows"]
    patterns = list(given) if isinstance(given, ListConfig) else [given]
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ConfigError(f"windows={given!r} must name trace files, folders or globs: a text or a list of texts.")
    return patterns


def _found(pattern: str) -> list[str]:
    paths = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
    if not paths:
        raise ConfigError(f"windows={pattern} finds no file.")
    return paths


def files_of(path: Path) -> list[Path]:
    """The files of a window."""
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def check_routing(path: Path, spec: ModelSpec) -> None:
    """Raise TraceError unless the window at *path* has this model's MoE layers, experts and top-k. No recorded id is read."""
    layers = moe_layer_ids(spec)
    for file in files_of(path):
        header = load_shard(file)
        wanted = {"MoE layers": len(layers), "experts": num_experts_of(spec), "experts a token (top_k)": top_k_of(spec)}
        given = dict(zip(wanted, (header.num_layers, header.num_experts, header.top_k), strict=True))
        for what, number in wanted.items():
            if given[what] != number:
                raise TraceError(
                    f"{file} was recorded with {given[what]} {what}; model {spec.name} {spec.flavor} has {number}: train the "
                    "model that sampled it."
                )
        if header.layer_ids_L.tolist() != layers:
            raise TraceError(f"{file} recorded layers {header.layer_ids_L.tolist()}; the model's MoE layers are {layers}.")


def load_training_window(path: Path, model: TrainedModel, loss: TokenLoss, update: UpdateSettings) -> RolloutBatch:
    """The window at *path*, with every token field that the loss reads but recomputed ones.

    Raises TraceError naming the field, the token id or the sequence that does not fit.
    """
    batch = load_trace(path)
    sampled = {} if "logprobs_old" in batch.token_fields else {"logprobs_old": "logprobs"}
    batch = complete(path, batch, loss, update)
    needs = [name for name in loss.needs if name not in computed_by(update)]
    TokenCheck(spec=model.model_spec(), needs=needs, window=str(path), recorded_as=sampled).check(batch)
    return batch


def computed_by(update: UpdateSettings) -> set[str]:
    """The token fields that are computed anew for every window."""
    return {"logprobs_old"} if update.recompute_logprobs else set()


def complete(path: Path, batch: RolloutBatch, loss: TokenLoss, update: UpdateSettings) -> RolloutBatch:
    """The batch with every token field that the loss reads but recomputed ones. Raises TraceError where one is missing."""
    fields = dict(batch.token_fields)
    if "logprobs_old" in loss.needs and not update.recompute_logprobs and "logprobs" in fields:
        fields.setdefault("logprobs_old", fields["logprobs"])
    for name in ("token_ids", "loss_mask", *loss.needs):
        if name not in fields and name not in computed_by(update):
            raise TraceError(f"{path} has token fields {sorted(batch.token_fields)} but no {name}: {_remedy(name)}.")
    return replace(batch, token_fields=fields)


def _remedy(name: str) -> str:
    if name == "logprobs_old":
        return "record logprobs, or set update.recompute_logprobs=true"
    return "routepack convert keeps it where the stack recorded it; RolloutBatch.token_fields takes your own"
