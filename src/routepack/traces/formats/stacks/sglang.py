"""SGLang: ``meta_info["routed_experts"]`` of a /generate response, base64 text of a flat int32 array.

A response covers rows ``routed_experts_start_len`` .. tokens - 1 of its whole context, the prompt's and earlier turns'
included; newer versions also send uint8 and uint16, named in ``routed_experts_dtype``, and -1 where nothing was recorded,
which older ones leave at zero. A draft (MTP) model's routers can overwrite layer 0's column unseen: leave them unhooked.
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
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.payloads import encoded
from routepack.traces.formats.records import Record, RecordedSequence, Segment

CONVENTION = Convention(
    stack="sglang",
    switch="start the engine with --enable-return-routed-experts and ask for return_routed_experts in every request",
    missing=frozenset({Reason.ZEROS, Reason.MINUS}),
)


def load(source: Iterable[Any], model: ModelRouting, *, options: ImportOptions = STRICT) -> Imported:
    """Responses, one a sequence; a sequence of several turns is a mapping with its responses under ``turns``.

    Tokens are ``meta_info``'s ``prompt_tokens`` + ``completion_tokens``; their ids, where wanted, are ``input_ids`` and
    ``output_ids``, or ``token_ids`` of the whole sequence. Flat arrays need *model*'s num_layers and top_k.
    """
    assembler = Assembler(model, CONVENTION, options)
    for record in assembler.records(source, "record"):
        assembler.add(_sequence(record))
    return assembler.finish()


def _sequence(record: Record) -> RecordedSequence:
    turns = record.parts("turns", "responses") or [record]
    responses = [_response(turn) for turn in turns]
    token_ids, last = record.token_ids("token_ids"), turns[-1]
    if token_ids is None and last.value("input_ids") is not None and last.value("output_ids") is not None:
        token_ids = last.token_ids("input_ids", "output_ids")
    segments = [segment for _, routes in responses for segment in routes]
    return record.sequence(responses[-1][0], token_ids, segments)


def _response(turn: Record) -> tuple[int, list[Segment]]:
    """The tokens of a response's whole context, and the rows that it brought."""
    meta = turn.part(turn.value("meta_info"))
    if meta.raw is None:
        raise TraceError(f"{turn.where}: a response has a meta_info; this one has none.")
    num_tokens = meta.whole("prompt_tokens") + meta.whole("completion_tokens")
    start = meta.whole("routed_experts_start_len", turn.whole("routed_experts_start_len", 0))
    dtype = meta.value("routed_experts_dtype")
    form = {"dtype": "int32" if dtype is None else dtype, "num_rows": num_tokens - 1 - start}
    return num_tokens, turn.routes(meta.value("routed_experts"), start=start, **form)


def export(batch: RolloutBatch, *, prompt_tokens: int = 1) -> list[dict[str, Any]]:
    """Responses as :func:`load` takes them: flat int32, -1 where nothing was recorded."""
    responses = []
    for s, record in sequence_records(batch):
        record.pop("num_tokens", None)
        prompt = min(prompt_tokens, int(batch.num_tokens_S[s]))
        meta = {"prompt_tokens": prompt, "completion_tokens": int(batch.num_tokens_S[s]) - prompt}
        ids = rows_of(batch, s, np.int32, missing=-1)
        responses.append(record | {"meta_info": meta if ids is None else meta | {"routed_experts": encoded(ids)}})
    return responses
