"""AReaL: ``ModelResponse.routed_experts``, int32 [tokens - 1, L * K] as SGLang sent it.

After an interrupt the request is sent again with what was generated so far, SGLang answers with the rows of its whole
context, and AReaL appends those: the array is then several histories, end to end, of which the last is complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from routepack.core.errors import ConfigError, TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.assembler import Assembler
from routepack.traces.formats.convention import Convention, Reason
from routepack.traces.formats.exporting import rows_of, sequence_records
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.records import Record, RecordedSequence, Segment, flat_array, whole_numbers

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
    for record in assembler.records(source, "response"):
        assembler.add(_sequence(record, options))
    return assembler.finish()


def _sequence(record: Record, options: ImportOptions) -> RecordedSequence:
    if record.value("input_tokens") is None or record.value("output_tokens") is None:
        raise record.no_tokens("input_tokens and output_tokens")
    prompt = whole_numbers(record.value("input_tokens"), f"{record.where}: input_tokens")
    output = whole_numbers(record.value("output_tokens"), f"{record.where}: output_tokens")
    versions, segments = record.value("output_versions"), []
    for whole in record.routes(record.value("routed_experts")):
        segments = _histories(whole.ids_TLK, len(prompt), len(output), versions, options, record.where)
    return record.sequence(len(prompt) + len(output), np.concatenate([prompt, output]), segments)


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
