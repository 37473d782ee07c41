"""slime: ``Sample.rollout_routed_experts``, int32 [tokens - 1, L, K] over all decoder layers, dense ones zero.

slime refuses any other number of rows, and has no way to say that a row was lost. When it lays out a microbatch it
appends rows of 0, 1, 2, ... modulo E; a sample taken from there has that in its last row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.assembler import Assembler
from routepack.traces.formats.convention import Convention
from routepack.traces.formats.exporting import rows_of, sequence_records
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.records import Record, RecordedSequence, Segment

FIELD = "rollout_routed_experts"
CONVENTION = Convention(stack="slime", switch="train with --use-rollout-routing-replay")


def load(source: Iterable[Any], model: ModelRouting, *, options: ImportOptions = STRICT) -> Imported:
    """Samples, as objects or dicts, with ``tokens`` and ``rollout_routed_experts``.

    Turns are deltas under ``turns``, a list of ``{routed_experts, routed_experts_start_len}`` as ``meta_info`` has them.
    """
    return load_samples(source, model, CONVENTION, options)


def load_samples(source: Iterable[Any], model: ModelRouting, convention: Convention, options: ImportOptions) -> Imported:
    """Samples of slime's form under *convention*: miles has the same class with another filler."""
    assembler = Assembler(model, convention, options)
    for sample in assembler.records(source, "sample"):
        assembler.add(_sequence(sample))
    return assembler.finish()


def _sequence(sample: Record) -> RecordedSequence:
    token_ids = sample.token_ids("tokens")
    num_tokens = sample.num_tokens(token_ids, "tokens")
    turns = sample.parts("turns", "routes with their start", least=0)
    if turns is None:
        routes = sample.routes(sample.value(FIELD))
        segments = [replace(one, valid_T=_real(one.ids_TLK, num_tokens, sample.model)) for one in routes]
    else:
        segments = [segment for turn in turns for segment in _turn(turn)]
    return sample.sequence(num_tokens, token_ids, segments)


def _turn(turn: Record) -> list[Segment]:
    return turn.routes(turn.value("routed_experts", FIELD), start=turn.whole("routed_experts_start_len", 0))


def _real(ids_TLK: np.ndarray, num_tokens: int, model: ModelRouting) -> np.ndarray | None:
    """The mask of a sample whose last row is slime's filler."""
    if len(ids_TLK) != num_tokens or not ids_TLK.size:
        return None
    if not np.array_equal(ids_TLK[-1].reshape(-1), np.arange(ids_TLK[-1].size) % model.num_experts):
        return None
    return np.arange(num_tokens) < num_tokens - 1


def export(batch: RolloutBatch) -> list[dict[str, Any]]:
    """Samples as :func:`load` takes them. Raises TraceError for a row that was not recorded, but the last."""
    return samples_of(batch, missing=None)


def samples_of(batch: RolloutBatch, *, missing: int | None) -> list[dict[str, Any]]:
    """Samples of slime's form: int32 [tokens - 1, L, K]."""
    samples = []
    for s, sample in sequence_records(batch, tokens="tokens"):
        num_rows = min(int(batch.num_tokens_S[s]) - 1, int(batch.cu_seqlens[s + 1] - batch.cu_seqlens[s]))
        ids = rows_of(batch, s, np.int32, missing=missing) if missing is not None or num_rows else None
        samples.append(sample | {FIELD: None if ids is None else ids[:num_rows]})
    return samples
