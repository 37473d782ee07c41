"""NeMo-RL: int8 (up to 128 experts) or int16 ``routed_experts`` [B, S, L, K], and ``nrlre1:`` strings over HTTP.

tokens - 1 rows are routes. The last token's row and padding are 0 .. top_k - 1, which are therefore never counted; a row
that vLLM did not deliver is -1 throughout. Where turns were joined, the last row of each may be such filler too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.assembler import Assembler
from routepack.traces.formats.convention import Convention, Reason
from routepack.traces.formats.exporting import rows_of, sequence_records
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.payloads import envelope
from routepack.traces.formats.records import Record, RecordedSequence, Segment, whole_numbers
from routepack.traces.formats.tensors import lengths_of, padded_ids, padded_tokens

CONVENTION = Convention(
    stack="nemo-rl", switch="set policy.router_replay.enabled=true",
    missing=frozenset({Reason.MINUS}), ends_early=True, fills_inside=True,
)  # fmt: skip


def load(source: Mapping[str, Any] | Iterable[Any], model: ModelRouting, *, options: ImportOptions = STRICT) -> Imported:
    """A batch's tensors, or HTTP messages one a sequence.

    Tensors: ``routed_experts`` [B, S, L, K], ``input_lengths`` [B], perhaps ``input_ids`` [B, S]. Messages:
    ``prompt_token_ids``, ``generation_token_ids`` and ``routed_experts`` as an envelope or nested lists; a sequence of
    several turns is a mapping with its messages under ``turns``, each covering its whole context.
    """
    assembler = Assembler(model, CONVENTION, options)
    if isinstance(source, Mapping) and "input_lengths" in source:
        _add_padded(assembler, source)
    else:
        for record in assembler.records(source, "message"):
            assembler.add(_sequence(record))
    return assembler.finish()


def _add_padded(assembler: Assembler, source: Mapping[str, Any]) -> None:
    ids = padded_ids(source.get("routed_experts"), "nemo-rl")
    lengths = lengths_of(source["input_lengths"], ids.shape[0], ids.shape[1], "nemo-rl")
    token_ids = padded_tokens(source.get("input_ids"), ids.shape[:2], "nemo-rl")
    for b, n in enumerate(lengths.tolist()):
        fields = {} if token_ids is None else {"token_ids": whole_numbers(token_ids[b, :n], "nemo-rl: input_ids")}
        segments = [Segment(ids_TLK=ids[b, : n - 1])] if n > 1 else []
        assembler.add(RecordedSequence(num_tokens=n, segments=segments, token_fields=fields))


def _sequence(record: Record) -> RecordedSequence:
    turns = record.parts("turns", "messages") or [record]
    token_ids, num_tokens, segments = None, 0, []
    for turn in turns:
        token_ids = turn.token_ids("prompt_token_ids", "generation_token_ids")
        token_ids = turn.token_ids("token_ids") if token_ids is None else token_ids
        num_tokens = turn.num_tokens(token_ids, "prompt_token_ids and generation_token_ids (or token_ids)")
        for one in turn.routes(turn.value("routed_experts"), start=turn.whole("start", 0)):
            # The turn's last token was not fed in during it; its row, if there is one, is filler.
            ends_with_filler = one.start + len(one.ids_TLK) == num_tokens
            segments.append(replace(one, ids_TLK=one.ids_TLK[:-1]) if ends_with_filler else one)
    return record.sequence(num_tokens, token_ids, segments)


def export(batch: RolloutBatch, *, messages: bool = False) -> dict[str, Any] | list[dict[str, Any]]:
    """A batch's tensors as numpy arrays, or messages with envelopes; -1 where nothing was recorded."""
    dtype = np.int8 if batch.num_experts <= 128 else np.int16 if batch.num_experts <= 32_768 else np.int32
    if messages:
        return [record | {"routed_experts": _message(batch, s, dtype)} for s, record in sequence_records(batch)]
    width = int(batch.num_tokens_S.max())
    padded = np.empty((batch.num_sequences, width, batch.num_layers, batch.top_k), dtype)
    padded[:] = np.arange(batch.top_k)
    for s, n in enumerate(batch.num_tokens_S.tolist()):
        ids = rows_of(batch, s, dtype, missing=-1)
        padded[s, : n - 1] = -1
        if ids is not None:
            padded[s, : min(n - 1, len(ids))] = ids[: n - 1]
    return {"routed_experts": padded, "input_lengths": batch.num_tokens_S}


def _message(batch: RolloutBatch, s: int, dtype: Any) -> str | None:
    ids, n = rows_of(batch, s, dtype, missing=-1), int(batch.num_tokens_S[s])
    if ids is None:
        return None
    filled = np.concatenate([ids[: n - 1], np.broadcast_to(np.arange(batch.top_k, dtype=dtype), (1, *ids.shape[1:]))])
    return envelope(filled)
