"""From a config with ``windows`` to a run over windows that another stack recorded; checked before a process starts."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from routepack.core.config import build, check_keys
from routepack.core.errors import ConfigError
from routepack.torchtitan.experiments.experiment import SET_ELSEWHERE, TRAIN_KEYS, Experiment, WindowUpdates, common_parts
from routepack.torchtitan.recorded.recorded_windows import UpdateSettings, check_routing, check_sequences, check_window
from routepack.training.losses import GRPOTokenLoss


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedExperiment(Experiment):
    """A run over recorded windows."""

    update: UpdateSettings
    patterns: Sequence[str]
    """Files, folders or globs, as the config names them; empty where it does not yet."""

    @property
    def updates(self) -> WindowUpdates:
        """The update section."""
        return self.update

    def check_ready(self) -> None:
        """Raise unless windows are named and fit the model, and what else a run needs is there."""
        spec, max_tokens = self.model.model_spec(), self.planner.packer.max_tokens
        for path in self.windows():
            check_sequences(path, spec, self.loss, self.update, max_tokens=max_tokens)
        super().check_ready()

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

    def check_windows(self) -> str:
        """Read every window as training would, one after another; says how many there are and what they hold.

        Raises TraceError naming the window and the field, sequence, token or row that cannot be trained on.
        """
        counted = [check_window(path, self.model, self.loss, self.update) for path in self.windows()]
        tokens, trained = map(sum, zip(*counted, strict=True))
        return f"{len(counted)} windows of {tokens} tokens, {trained} of them trained: all can be trained on."


def build_recorded_experiment(config: DictConfig) -> RecordedExperiment:
    """Build every component that *config* names, and check windows that it names already.

    Raises ConfigError naming the option that is wrong, TraceError naming a window that does not fit the model.
    """
    check_keys(config, (*TRAIN_KEYS, "update", "windows"), what="a config that trains on recorded windows")
    set_elsewhere = SET_ELSEWHERE | {"num_steps": "windows"}
    experiment = RecordedExperiment(
        **common_parts(config, default_model=None, default_loss=GRPOTokenLoss, set_elsewhere=set_elsewhere),
        update=build(config, "update", base=UpdateSettings),
        patterns=_patterns(config),
    )
    experiment.check_parts()
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
