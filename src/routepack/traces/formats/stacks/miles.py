"""miles: slime's samples with -1 where nothing was recorded, also as the safetensors that its sessions send.

There, sample i has ``tokens.i`` and ``rollout_routed_experts.i``, and ``_samples_meta`` is JSON that counts the samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.convention import Convention, Reason
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.stacks.slime import FIELD, load_samples, samples_of

CONVENTION = Convention(stack="miles", switch="train with --use-rollout-routing-replay", missing=frozenset({Reason.MINUS}))
META = "_samples_meta"


def load(source: Iterable[Any] | Mapping[str, Any], model: ModelRouting, *, options: ImportOptions = STRICT) -> Imported:
    """Samples, as objects or dicts, or the tensors of a session's reply."""
    if isinstance(source, Mapping) and META in source:
        source = _samples(source)
    return load_samples(source, model, CONVENTION, options)


def _samples(tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        meta = json.loads(np.asarray(tensors[META], dtype=np.uint8).tobytes().decode())
        count = len(meta["samples"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(f"miles: {META} does not list the samples: {type(error).__name__}: {error}.") from error
    return [{"tokens": tensors.get(f"tokens.{i}"), FIELD: tensors.get(f"{FIELD}.{i}")} for i in range(count)]


def export(batch: RolloutBatch) -> list[dict[str, Any]]:
    """Samples as :func:`load` takes them, -1 in rows that were not recorded."""
    return samples_of(batch, missing=-1)
