"""vLLM: ``CompletionOutput.routed_experts`` (``enable_return_routed_experts``), uint8 up to 256 experts, else uint16.

Rows cover every token fed in, the prompt's included, so tokens - 1. Rows that the engine lost, under preemption or
speculative decoding, are zeros. ``prompt_routed_experts``, where an engine version delivers it apart, comes first.
A draft (MTP) model's routers must not be in the layer axis: vLLM numbers them from 0 too, and their ids would stand
in layer 0's column with nothing to tell them by.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.assembler import Assembler
from routepack.traces.formats.convention import Convention, Reason
from routepack.traces.formats.exporting import rows_of, sequence_records
from routepack.traces.formats.fields import joined_tokens, num_tokens_of, records_of, value_of, whole_of
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.payloads import decoded
from routepack.traces.formats.recorded_sequence import RecordedSequence, Segment
from routepack.traces.formats.travelling import travelling

CONVENTION = Convention(
    stack="vllm", switch="start the engine with enable_return_routed_experts=True", missing=frozenset({Reason.ZEROS})
)


def load(source: Iterable[Any], model: ModelRouting, *, options: ImportOptions = STRICT) -> Imported:
    """Records with ``routed_experts`` and the tokens, one a sequence.

    Tokens are ``prompt_token_ids`` + ``token_ids``, or ``num_tokens``. Routes are an array, a list, or a mapping with
    ``data``, ``shape`` and ``dtype``; with ``start``, or as a list of such mappings under ``deltas``, they are deltas of
    a stream, merged by absolute position.
    """
    assembler = Assembler(model, CONVENTION, options)
    for number, record in enumerate(records_of(source, "vllm")):
        assembler.add(_sequence(record, f"vllm, record {number}", model, assembler))
    return assembler.finish()


def _sequence(record: Any, where: str, model: ModelRouting, assembler: Assembler) -> RecordedSequence:
    num_tokens, fields = tokens_of(record, where)
    parts = value_of(record, "deltas")
    if parts is None:
        parts = [record] if value_of(record, "routed_experts") is not None else []
    if not isinstance(parts, list | tuple):
        raise TraceError(f"{where}: deltas is a {type(parts).__name__}; a list of routes with their start is needed.")
    prompt = decoded(value_of(record, "prompt_routed_experts"), where, model, assembler.report)
    segments = [] if prompt is None else [Segment(ids_TLK=prompt)]
    for part in parts:
        payload = value_of(part, "routed_experts")
        ids = decoded(part if payload is None else payload, where, model, assembler.report)
        default = 0 if prompt is None else len(prompt)
        begin = whole_of(part, "start", where, whole_of(payload, "start", where, default) if payload is not None else default)
        if ids is not None:
            segments.append(Segment(ids_TLK=ids, start=begin))
    return RecordedSequence(num_tokens=num_tokens, segments=segments, **fields)


def tokens_of(record: Any, where: str) -> tuple[int, dict[str, Any]]:
    """How many tokens a record has, and what travels with them."""
    parts = {"prompt_token_ids": value_of(record, "prompt_token_ids"), "token_ids": value_of(record, "token_ids", "tokens")}
    token_ids = joined_tokens(parts, where)
    num_tokens = num_tokens_of(record, token_ids, where, "prompt_token_ids and token_ids")
    return num_tokens, travelling(record, token_ids, where)


def export(batch: RolloutBatch) -> list[dict[str, Any]]:
    """Records as :func:`load` takes them: uint8 or uint16 arrays, zeros where nothing was recorded."""
    dtype = np.uint8 if batch.num_experts <= 256 else np.uint16
    return [record | {"routed_experts": rows_of(batch, s, dtype, missing=0)} for s, record in sequence_records(batch)]
