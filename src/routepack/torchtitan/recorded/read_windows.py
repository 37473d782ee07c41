"""What ``routepack check`` reads of recorded windows: all of each, one after another, so that one is in memory at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from routepack.core.errors import RoutePackError, TraceError
from routepack.microbatches import materialize
from routepack.torchtitan.recorded.recorded_config import TraceExperiment, load_training_window
from routepack.torchtitan.trainer.microbatch_tensors import num_trained_tokens


def check_windows(experiment: TraceExperiment) -> str:
    """Read every window as training would; says how many there are and what they hold.

    Raises TraceError naming the window and the field, sequence, token or row that cannot be trained on.
    """
    paths, tokens, trained = experiment.windows(), 0, 0
    for path in paths:
        counted = check_window(path, experiment)
        tokens, trained = tokens + counted[0], trained + counted[1]
    return f"{len(paths)} windows of {tokens} tokens, {trained} of them trained: all can be trained on."


def check_window(path: Path, experiment: TraceExperiment) -> tuple[int, int]:
    """The tokens of a window, and those that it trains. Raises TraceError naming the window."""
    batch = load_training_window(path, experiment.model, experiment.loss, experiment.update)
    try:
        trained = num_trained_tokens(batch)
        for sequence in range(batch.num_sequences):
            materialize.microbatch_of(batch, np.array([sequence]))
    except RoutePackError as error:
        raise TraceError(f"{path}: {error}") from error
    return int(batch.num_tokens_S.sum()), trained
