"""slime: ``Sample.rollout_routed_experts``, int32 [tokens - 1, L, K] over all decoder layers, dense ones zero.

slime refuses any other number of rows, and has no way to say that a row was lost. When it lays out a microbatch it
appends rows of 0, 1, 2, ... modulo E; a sample taken from there has that in its last row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.assembler import Assembler
from routepack.traces.formats.convention import Convention
from routepack.traces.formats.exporting import rows_of, sequence_records
from routepack.traces.formats.fields import num_tokens_of, records_of, value_of, whole_numbers, whole_of
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.payloads import decoded
from routepack.traces.formats.recorded_sequence import RecordedSequence, Segment
from routepack.traces.formats.travelling import travelling

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
    for number, sample in enumerate(records_of(source, convention.stack)):
        where = f"{convention.stack}, sample {number}"
        tokens = value_of(sample, "tokens")
        token_ids = None if tokens is None else whole_numbers(tokens, f"{where}: tokens")
        num_tokens = num_tokens_of(sample, token_ids, where, "tokens")
        segments = _segments(sample, where, model, assembler, num_tokens)
        assembler.add(RecordedSequence(num_tokens=num_tokens, segments=segments, **travelling(sample, token_ids, where)))
    return assembler.finish()


def _segments(sample: Any, where: str, model: ModelRouting, assembler: Assembler, num_tokens: int) -> list[Segment]:
    turns = value_of(sample, "turns")
    if turns is None:
        ids = decoded(value_of(sample, FIELD), where, model, assembler.report)
        return [] if ids is None else [Segment(ids_TLK=ids, valid_T=_real(ids, num_tokens, model))]
    if not isinstance(turns, list | tuple):
        raise TraceError(f"{where}: turns is a {type(turns).__name__}; a list of routes with their start is needed.")
    segments = []
    for turn in turns:
        ids = decoded(value_of(turn, "routed_experts", FIELD), where, model, assembler.report)
        if ids is not None:
            segments.append(Segment(ids_TLK=ids, start=whole_of(turn, "routed_experts_start_len", where, 0)))
    return segments


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
