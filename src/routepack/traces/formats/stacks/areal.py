"""AReaL: ``ModelResponse.routed_experts``, int32 [tokens - 1, L * K] as SGLang sent it.

After an interrupt the request is sent again with what was generated so far, SGLang answers with the rows of its whole
context, and AReaL appends those: the array is then several histories, end to end, of which the last is complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from routepack.core.arrays import to_numpy
from routepack.core.errors import ConfigError, TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.assembler import Assembler
from routepack.traces.formats.convention import Convention, Reason
from routepack.traces.formats.exporting import rows_of, sequence_records
from routepack.traces.formats.fields import flat_array, no_tokens, records_of, value_of, whole_numbers
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.payloads import checked_ids, decoded
from routepack.traces.formats.recorded_sequence import RecordedSequence, Segment
from routepack.traces.formats.travelling import travelling

CONVENTION = Convention(
    stack="areal", switch="set return_routed_experts in the inference engine's config",
    missing=frozenset({Reason.ZEROS, Reason.MINUS}),
)  # fmt: skip


def load(source: Iterable[Any], model: ModelRouting, *, options: ImportOptions = STRICT) -> Imported:
    """Responses with ``input_tokens``, ``output_tokens``, ``routed_experts``, and ``output_versions`` where there are any.

    Histories after interrupts are told apart by the versions, or, where there are two, by their number of rows. With
    ``merge=keep_last`` the last one alone is read, however many there are. *model* needs top_k.
    """
    assembler = Assembler(model, CONVENTION, options)
    if model.top_k is None:
        raise ConfigError("areal: rows are flat [layers * top_k]: give model.top_k.")
    for number, record in enumerate(records_of(source, "areal")):
        where = f"areal, response {number}"
        if value_of(record, "input_tokens") is None or value_of(record, "output_tokens") is None:
            raise no_tokens(record, where, "input_tokens and output_tokens")
        prompt = whole_numbers(value_of(record, "input_tokens"), f"{where}: input_tokens")
        output = whole_numbers(value_of(record, "output_tokens"), f"{where}: output_tokens")
        token_ids = np.concatenate([prompt, output])
        value = value_of(record, "routed_experts")
        if value is None:
            segments = []
        else:
            ids = _rows(value, where, model, assembler)
            segments = _histories(ids, len(prompt), len(output), value_of(record, "output_versions"), options, where)
        fields = travelling(record, token_ids, where)
        assembler.add(RecordedSequence(num_tokens=len(token_ids), segments=segments, **fields))
    return assembler.finish()


def _rows(value: Any, where: str, model: ModelRouting, assembler: Assembler) -> np.ndarray:
    ids = decoded(value, where, model, assembler.report) if isinstance(value, str | dict) else None
    if ids is None:
        ids = checked_ids(to_numpy(value, f"{where}: routed_experts"), where, model)
    return ids


def _histories(
    ids_TLK: np.ndarray, prompt: int, output: int, versions: Any, options: ImportOptions, where: str
) -> list[Segment]:
    rows, complete = len(ids_TLK), prompt + output - 1
    if rows <= complete + 1:
        return [Segment(ids_TLK=ids_TLK)]
    if options.merge == "keep_last":
        return [Segment(ids_TLK=ids_TLK[rows - complete :])]
    ends = [] if versions is None else _interrupts(flat_array(versions, f"{where}: output_versions"), output)
    sizes = [prompt + end - 1 for end in ends] + [complete]
    if sum(sizes) != rows:
        sizes = [rows - complete, complete]
    if not prompt - 1 <= sizes[0] <= complete and not options.strict:
        return [Segment(ids_TLK=ids_TLK)]
    if not prompt - 1 <= sizes[0] <= complete:
        raise TraceError(
            f"{where} has {rows} recorded rows for {prompt + output} tokens: histories after interrupts, which neither "
            "versions nor their size tell apart. merge=keep_last reads the last one alone."
        )
    edges = np.cumsum([0, *sizes]).tolist()
    return [Segment(ids_TLK=ids_TLK[first:end]) for first, end in pairwise(edges)]


def _interrupts(versions: np.ndarray, output: int) -> list[int]:
    """How many tokens were generated when the weights changed, for each change."""
    if len(versions) != output:
        return []
    return (np.flatnonzero(np.diff(versions)) + 1).tolist()


def export(batch: RolloutBatch) -> list[dict[str, Any]]:
    """Responses as :func:`load` takes them: int32 [rows, L * K], -1 where nothing was recorded, a prompt of one token."""
    responses = []
    for s, record in sequence_records(batch):
        n = record.pop("num_tokens", int(batch.num_tokens_S[s]))
        token_ids = record.pop("token_ids", np.zeros(n, np.int64))
        ids = rows_of(batch, s, np.int32, missing=-1)
        flat = None if ids is None else ids.reshape(len(ids), batch.num_layers * batch.top_k)
        responses.append(record | {"input_tokens": token_ids[:1], "output_tokens": token_ids[1:], "routed_experts": flat})
    return responses
