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
from routepack.traces.formats.fields import num_tokens_of, records_of, value_of, whole_numbers, whole_of
from routepack.traces.formats.import_options import STRICT, Imported, ImportOptions
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.payloads import decoded, encoded
from routepack.traces.formats.recorded_sequence import RecordedSequence, Segment
from routepack.traces.formats.travelling import travelling

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
    for number, record in enumerate(records_of(source, "prime-rl")):
        where = f"prime-rl, sample {number}"
        if value_of(record, "nodes") is not None:
            assembler.add(_branch(record, where, model, assembler))
        else:
            assembler.add(_sample(record, where, model, assembler))
    return assembler.finish()


def _sample(record: Any, where: str, model: ModelRouting, assembler: Assembler) -> RecordedSequence:
    tokens = value_of(record, "token_ids")
    token_ids = None if tokens is None else whole_numbers(tokens, f"{where}: token_ids")
    num_tokens = num_tokens_of(record, token_ids, where, "token_ids (or nodes)")
    turns = value_of(record, "turns")
    if turns is not None and not isinstance(turns, list | tuple):
        raise TraceError(f"{where}: turns is a {type(turns).__name__}; a list of payloads is needed.")
    payloads = [value_of(record, "routed_experts")] if turns is None else [_payload(turn) for turn in turns]
    segments = []
    for payload in payloads:
        ids = decoded(_as_mapping(payload), where, model, assembler.report)
        if ids is not None:
            segments.append(Segment(ids_TLK=ids, start=whole_of(payload, "start", where, 0)))
    return RecordedSequence(num_tokens=num_tokens, segments=segments, **travelling(record, token_ids, where))


def _payload(turn: Any) -> Any:
    payload = value_of(turn, "routed_experts")
    return turn if payload is None else payload


def _as_mapping(payload: Any) -> Any:
    """prime-rl's samples hold a struct of raw bytes, whatever else an object may be."""
    if isinstance(payload, np.ndarray) or hasattr(payload, "detach"):
        return payload
    if isinstance(value_of(payload, "data"), bytes | bytearray | str) and value_of(payload, "shape") is not None:
        names = ("data", "shape", "dtype")
        return {name: value_of(payload, name) for name in names if value_of(payload, name) is not None}
    return payload


def _branch(record: Any, where: str, model: ModelRouting, assembler: Assembler) -> RecordedSequence:
    nodes = value_of(record, "nodes")
    if not isinstance(nodes, list | tuple) or not nodes:
        raise TraceError(f"{where}: nodes is a {type(nodes).__name__}; a list of message nodes is needed.")
    tokens = [whole_numbers(value_of(node, "token_ids"), f"{where}: token_ids") for node in nodes]
    arrays = [decoded(_as_mapping(value_of(node, "routed_experts")), where, model, assembler.report) for node in nodes]
    known = [ids for ids in arrays if ids is not None]
    token_ids, segments, doubtful = np.concatenate(tokens), [], []
    if known:
        joined = _joined(arrays, [len(part) for part in tokens], known[0], assembler)
        segments = [] if joined is None else [Segment(ids_TLK=joined[0], valid_T=joined[1])]
        ends = np.cumsum([len(part) for part in tokens]) - 1
        doubtful = [int(end) for end, node in zip(ends, nodes, strict=True) if value_of(node, "sampled") is not False]
    fields = travelling(record, token_ids, where)
    return RecordedSequence(num_tokens=len(token_ids), segments=segments, doubtful=doubtful, **fields)


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
