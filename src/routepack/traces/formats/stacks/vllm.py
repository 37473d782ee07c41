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

from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.assembler import Assembler
from routepack.traces.formats.convention import Convention, Reason
from routepack.traces.formats.exporting import rows_of, sequence_records
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.records import Record, RecordedSequence

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
    for record in assembler.records(source, "record"):
        assembler.add(_sequence(record))
    return assembler.finish()


def _sequence(record: Record) -> RecordedSequence:
    deltas = record.parts("deltas", "routes with their start", least=0)
    if deltas is None:
        deltas = [record] if record.value("routed_experts") is not None else []
    segments = record.routes(record.value("prompt_routed_experts"))
    after_prompt = len(segments[0].ids_TLK) if segments else 0
    for delta in deltas:
        payload = delta.value("routed_experts")
        payload = delta.raw if payload is None else payload
        start = delta.whole("start", record.part(payload).whole("start", after_prompt))
        segments += record.routes(payload, start=start)
    names = ("prompt_token_ids", "token_ids" if record.value("token_ids") is not None else "tokens")
    token_ids = record.token_ids(*names)
    return record.sequence(record.num_tokens(token_ids, "prompt_token_ids and token_ids"), token_ids, segments)


def export(batch: RolloutBatch) -> list[dict[str, Any]]:
    """Records as :func:`load` takes them: uint8 or uint16 arrays, zeros where nothing was recorded."""
    dtype = np.uint8 if batch.num_experts <= 256 else np.uint16
    return [record | {"routed_experts": rows_of(batch, s, dtype, missing=0)} for s, record in sequence_records(batch)]
