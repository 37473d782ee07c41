"""prime-rl and verifiers: ``{data, shape, dtype, start}``, uint8 or uint16 as each response's largest id needs.

The engine sends rows from ``start`` on, base64 text, none for a turn's last token. verifiers cuts them among a branch's
message nodes and gives the last of each turn a *copy* of the row before it; prime-rl's samples then hold raw bytes, one
row a token, zeros where a tail was missing. Taken from the turns, the row of a turn's last token comes from the next turn.
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
from routepack.traces.formats.records import Record, RecordedSequence, Segment, whole_numbers

CONVENTION = Convention(
    stack="prime-rl", switch="set enable_return_routed_experts for inference and enable_router_replay for the trainer",
    missing=frozenset({Reason.ZEROS}), ends_early=True, fills_last=True,
)  # fmt: skip


def load(source: Iterable[Any], model: ModelRouting, *, options: ImportOptions = STRICT) -> Imported:
    """Samples or branches, one a sequence.

    A sample has ``token_ids`` and ``routed_experts``. A branch has ``turns``, each a payload with ``start`` (or a mapping
    that holds one as ``routed_experts``), and ``token_ids``; or ``nodes``, each with ``token_ids`` and ``routed_experts``
    (an array, or None) and ``sampled``.
    """
    assembler = Assembler(model, CONVENTION, options)
    for record in assembler.records(source, "sample"):
        nodes = record.parts("nodes", "message nodes")
        assembler.add(_sample(record) if nodes is None else _branch(record, nodes, assembler))
    return assembler.finish()


def _sample(record: Record) -> RecordedSequence:
    token_ids = record.token_ids("token_ids")
    num_tokens = record.num_tokens(token_ids, "token_ids (or nodes)")
    turns = record.parts("turns", "payloads", least=0)
    payloads = [record.value("routed_experts")] if turns is None else [_payload(turn) for turn in turns]
    segments = []
    for payload in payloads:
        segments += record.routes(_as_mapping(record.part(payload)), start=record.part(payload).whole("start", 0))
    return record.sequence(num_tokens, token_ids, segments)


def _payload(turn: Record) -> Any:
    payload = turn.value("routed_experts")
    return turn.raw if payload is None else payload


def _as_mapping(payload: Record) -> Any:
    """prime-rl's samples hold a struct of raw bytes, whatever else an object may be."""
    if isinstance(payload.raw, np.ndarray) or hasattr(payload.raw, "detach"):
        return payload.raw
    fields = {name: payload.value(name) for name in ("data", "shape", "dtype") if payload.value(name) is not None}
    return fields if isinstance(fields.get("data"), bytes | bytearray | str) and "shape" in fields else payload.raw


def _branch(record: Record, nodes: list[Record], assembler: Assembler) -> RecordedSequence:
    tokens = [whole_numbers(node.value("token_ids"), f"{node.where}: token_ids") for node in nodes]
    routes = [node.routes(_as_mapping(node.part(node.value("routed_experts")))) for node in nodes]
    arrays = [segments[0].ids_TLK if segments else None for segments in routes]
    known = [ids for ids in arrays if ids is not None]
    token_ids, segments, doubtful = np.concatenate(tokens), [], []
    if known:
        joined = _joined(arrays, [len(part) for part in tokens], known[0], assembler)
        segments = [] if joined is None else [Segment(ids_TLK=joined[0], valid_T=joined[1])]
        ends = np.cumsum([len(part) for part in tokens]) - 1
        doubtful = [int(end) for end, node in zip(ends, nodes, strict=True) if node.value("sampled") is not False]
    return record.sequence(len(token_ids), token_ids, segments, doubtful)


def _joined(
    arrays: list[np.ndarray | None], lengths: list[int], sample: np.ndarray, assembler: Assembler
) -> tuple[np.ndarray, np.ndarray] | None:
    """The nodes' rows end to end, and which were delivered. The last node may lack its last row.

    None, under ``lenient``, where rows and tokens of a node are not of one cut.
    """
    parts, valid = [], []
    for number, (ids, length) in enumerate(zip(arrays, lengths, strict=True)):
        rows = 0 if ids is None else len(ids)
        last = number == len(arrays) - 1
        if ids is not None and (rows > length or (rows < length and not last)):
            assembler.object_to(
                f"has {rows} recorded rows for {length} tokens in node {number}: cut routes together with tokens",
                "more rows than tokens: routes dropped" if rows > length else "rows missing",
            )
            return None
        if ids is not None and ids.shape[1:] != sample.shape[1:]:
            raise TraceError(f"{assembler.where}: node {number} has rows of shape {ids.shape[1:]}, another {sample.shape[1:]}.")
        absent = 0 if ids is not None and last else length - rows
        parts += [] if ids is None else [ids]
        parts.append(np.zeros((absent, *sample.shape[1:]), sample.dtype))
        valid += [np.ones(rows, bool), np.zeros(absent, bool)]
    # Nodes of one branch may differ in width: uint8 where a turn's ids happened to be small.
    return np.concatenate(parts), np.concatenate(valid)


def export(batch: RolloutBatch) -> list[dict[str, Any]]:
    """Samples as :func:`load` takes them: one row a token, base64, zeros where nothing was recorded."""
    samples = []
    for s, sample in sequence_records(batch):
        dtype = np.uint8 if batch.num_experts <= 256 else np.uint16
        ids = rows_of(batch, s, dtype, missing=0, num_rows=int(batch.num_tokens_S[s]))
        payload = None if ids is None else {"data": encoded(ids), "shape": list(ids.shape), "dtype": ids.dtype.name, "start": 0}
        samples.append(sample | {"routed_experts": payload})
    return samples
