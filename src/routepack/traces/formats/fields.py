"""Reading records: a stack's dicts and objects alike, and the fields that travel with the routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from routepack.core.arrays import to_numpy
from routepack.core.checks import whole
from routepack.core.errors import TraceError
from routepack.traces.formats.import_options import ImportReport
from routepack.traces.formats.recorded_sequence import RecordedSequence


def value_of(record: Any, *names: str) -> Any:
    """The first of *names* that *record*, a mapping or an object, has; None where it has none."""
    for name in names:
        # A plain dict first: to ask whether something is a Mapping costs more than all the rest.
        is_mapping = type(record) is dict or isinstance(record, Mapping)
        value = record.get(name) if is_mapping else getattr(record, name, None)
        if value is not None:
            return value
    return None


def whole_of(record: Any, name: str, where: str, default: int | None = None) -> int:
    """A count or an offset of *record*; *default* where it has none."""
    value = value_of(record, name)
    if value is None and default is not None:
        return default
    if value is None:
        raise TraceError(f"{where}: there is no {name}; a whole number is needed.")
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    return whole(f"{where}: {name}", value, least=0, error=TraceError)


def num_tokens_of(record: Any, token_ids: np.ndarray | None, where: str, names: str) -> int:
    """How many tokens *record* has: as many as its ids, or its ``num_tokens``. *names*: where the stack keeps them."""
    if token_ids is not None:
        return len(token_ids)
    if value_of(record, "num_tokens") is None:
        raise no_tokens(record, where, f"{names}, or num_tokens")
    return whole_of(record, "num_tokens", where)


def no_tokens(record: Any, where: str, names: str) -> TraceError:
    """The error for a record that has none of *names*: it may be another stack's."""
    fields = list(record) if isinstance(record, Mapping) else sorted(vars(record)) if hasattr(record, "__dict__") else []
    has = ", ".join(map(str, fields[:12])) or "no fields"
    return TraceError(f"{where}: no tokens were found: a record has {names}; this one has {has}. Is it another stack's?")


def whole_numbers(value: Any, name: str) -> np.ndarray:
    """A flat array of whole numbers as int64 [n]."""
    array = flat_array(value, name)
    if array.size and (array.dtype.kind not in "iu" or int(array.max()) >= 2**63):
        raise TraceError(f"{name} has dtype {array.dtype}; whole numbers are needed.")
    return array.astype(np.int64, copy=False)


def joined_tokens(parts: Mapping[str, Any], where: str) -> np.ndarray | None:
    """Token ids that came in *parts*, int64 [n], one after another; None where every part is None."""
    given = [whole_numbers(value, f"{where}: {name}") for name, value in parts.items() if value is not None]
    return np.concatenate(given) if given else None


def flat_array(value: Any, name: str) -> np.ndarray:
    """Numbers as a numpy array [n]."""
    array = to_numpy(value, name)
    if array.ndim != 1 or array.dtype.kind not in "iufb":
        raise TraceError(f"{name} has shape {array.shape} and dtype {array.dtype}; a flat list of numbers is needed.")
    return array


def records_of(source: Any, stack: str) -> Sequence[Any] | Any:
    """*source* as something to iterate over records; a single record counts as one."""
    if isinstance(source, str | bytes | bytearray) or not hasattr(source, "__iter__"):
        raise TraceError(f"{stack}: a {type(source).__name__} is no list of records.")
    return [source] if isinstance(source, Mapping) else source


def merged_fields(sequences: Sequence[RecordedSequence], report: ImportReport) -> tuple[dict, dict]:
    """Token and sequence fields that all sequences have; what only some have is left out, with a note."""
    token_fields, sequence_fields = {}, {}
    for name in _names(sequences, "token_fields", report):
        values = [sequence.token_fields[name] for sequence in sequences]
        for s, (value, sequence) in enumerate(zip(values, sequences, strict=True)):
            if len(value) != sequence.num_tokens:
                raise TraceError(f"sequence {s}: {name} has {len(value)} entries for {sequence.num_tokens} tokens.")
        token_fields[name] = np.concatenate(values)
    for name in _names(sequences, "sequence_fields", report):
        sequence_fields[name] = flat_array([sequence.sequence_fields[name] for sequence in sequences], name)
    return token_fields, sequence_fields


def _names(sequences: Sequence[RecordedSequence], kind: str, report: ImportReport) -> list[str]:
    names = dict.fromkeys(name for sequence in sequences for name in getattr(sequence, kind))
    everywhere = [name for name in names if all(name in getattr(sequence, kind) for sequence in sequences)]
    for name in names:
        if name not in everywhere:
            report.note(f"Field {name} is left out: only some sequences have it.")
    return everywhere
