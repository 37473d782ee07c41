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
from routepack.traces.formats.fields import records_of, value_of, whole_numbers, whole_of
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.payloads import decoded, encoded
from routepack.traces.formats.recorded_sequence import RecordedSequence, Segment
from routepack.traces.formats.travelling import travelling

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
    for number, record in enumerate(records_of(source, "sglang")):
        where = f"sglang, record {number}"
        turns = value_of(record, "turns")
        turns = [record] if turns is None else turns
        if not isinstance(turns, list | tuple) or not turns:
            raise TraceError(f"{where}: turns is a {type(turns).__name__}; a list of responses is needed.")
        parts = [_turn(turn, where, model, assembler) for turn in turns]
        token_ids = _token_ids(record, turns[-1], where)
        segments = [segment for _, segment in parts if segment is not None]
        assembler.add(RecordedSequence(num_tokens=parts[-1][0], segments=segments, **travelling(record, token_ids, where)))
    return assembler.finish()


def _turn(turn: Any, where: str, model: ModelRouting, assembler: Assembler) -> tuple[int, Segment | None]:
    meta = value_of(turn, "meta_info")
    if meta is None:
        raise TraceError(f"{where}: a response has a meta_info; this one has none.")
    num_tokens = whole_of(meta, "prompt_tokens", where) + whole_of(meta, "completion_tokens", where)
    start = whole_of(meta, "routed_experts_start_len", where, whole_of(turn, "routed_experts_start_len", where, 0))
    dtype = value_of(meta, "routed_experts_dtype")
    ids = decoded(
        value_of(meta, "routed_experts"), where, model, assembler.report,
        dtype="int32" if dtype is None else dtype, num_rows=num_tokens - 1 - start,
    )  # fmt: skip
    return num_tokens, None if ids is None else Segment(ids_TLK=ids, start=start)


def _token_ids(record: Any, last: Any, where: str) -> np.ndarray | None:
    whole = value_of(record, "token_ids")
    if whole is not None:
        return whole_numbers(whole, f"{where}: token_ids")
    prompt, output = value_of(last, "input_ids"), value_of(last, "output_ids")
    if prompt is None or output is None:
        return None
    return np.concatenate([whole_numbers(prompt, f"{where}: input_ids"), whole_numbers(output, f"{where}: output_ids")])


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
