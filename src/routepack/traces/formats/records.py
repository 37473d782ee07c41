"""Records of any stack, dicts and objects alike, and the sequence that each is. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from routepack.core.arrays import to_numpy
from routepack.core.checks import whole
from routepack.core.errors import TraceError
from routepack.traces.formats.import_options import ImportReport
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.payloads import decoded

TOKEN_FIELDS = {
    "loss_mask": ("loss_mask", "mask", "response_mask"),
    "logprobs": ("logprobs", "log_probs", "rollout_log_probs", "inference_logprobs"),
    "advantages": ("advantages",),
}
"""Fields that travel with the routes where there is one value a token: our name, and the stacks' names."""
SEQUENCE_FIELDS = {"rewards": ("reward", "reward_score")}
"""Fields that travel with the routes where there is one number a sequence."""
GROUPS = ("group_index", "group", "group_id")


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Recorded rows of consecutive tokens of one sequence."""

    ids_TLK: np.ndarray
    """Whole numbers of any width [rows, layers, K]: expert ids as they were delivered, unchecked."""
    start: int = 0
    """The absolute position of the first row's token."""
    valid_T: np.ndarray | None = None
    """bool [rows]: False where the stack's own mask says that nothing was recorded."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedSequence:
    """One sequence as a stack delivers it, before it becomes part of a batch."""

    num_tokens: int
    segments: Sequence[Segment] = ()
    """Turns or deltas, oldest first; none where nothing was recorded."""
    doubtful: Sequence[int] = ()
    """Rows that the stack may have made up: there, zeros, a copy of the row before and 0 .. top_k - 1 are no routes."""
    token_fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    sequence_fields: Mapping[str, Any] = field(default_factory=dict)
    group: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """A record as a stack has it, or a part of one: a mapping or an object with attributes."""

    raw: Any
    where: str
    """Stack and number of the record, for errors."""
    model: ModelRouting
    report: ImportReport

    def value(self, *names: str) -> Any:
        """The first of *names* that the record has; None where it has none."""
        # A plain dict first: to ask whether something is a Mapping costs more than all the rest.
        is_mapping = type(self.raw) is dict or isinstance(self.raw, Mapping)
        for name in names:
            value = self.raw.get(name) if is_mapping else getattr(self.raw, name, None)
            if value is not None:
                return value
        return None

    def part(self, raw: Any) -> Record:
        """*raw*, something inside this record, as a record."""
        return replace(self, raw=raw)

    def parts(self, name: str, what: str, *, least: int = 1) -> list[Record] | None:
        """The records in the list *name*; None where there is no such list.

        Raises TraceError unless it holds *least* or more of *what*.
        """
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) < least:
            raise TraceError(f"{self.where}: {name} is a {type(value).__name__}; a list of {what} is needed.")
        return [self.part(one) for one in value]

    def whole(self, name: str, default: int | None = None) -> int:
        """The count or offset *name*; *default* where there is none."""
        value = self.value(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise TraceError(f"{self.where}: there is no {name}; a whole number is needed.")
        if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
            value = value.item()
        return whole(f"{self.where}: {name}", value, least=0, error=TraceError)

    def token_ids(self, *names: str) -> np.ndarray | None:
        """The token ids under *names*, such as prompt and response, int64 [n], one after another; None where none is there."""
        parts = {name: self.value(name) for name in names}
        given = [whole_numbers(value, f"{self.where}: {name}") for name, value in parts.items() if value is not None]
        return np.concatenate(given) if given else None

    def num_tokens(self, token_ids: np.ndarray | None, names: str) -> int:
        """How many tokens the record has: as many as its ids, or its ``num_tokens``.

        *names*: the fields that the stack keeps tokens in, for the error where there are none.
        """
        if token_ids is not None:
            return len(token_ids)
        if self.value("num_tokens") is None:
            raise self.no_tokens(f"{names}, or num_tokens")
        return self.whole("num_tokens")

    def no_tokens(self, names: str) -> TraceError:
        """The error for a record that has none of *names*: it may be another stack's."""
        raw = self.raw
        fields = list(raw) if isinstance(raw, Mapping) else sorted(vars(raw)) if hasattr(raw, "__dict__") else []
        has = ", ".join(map(str, fields[:12])) or "no fields"
        return TraceError(
            f"{self.where}: no tokens were found: a record has {names}; this one has {has}. Is it another stack's?"
        )

    def routes(self, payload: Any, *, start: int = 0, **form: Any) -> list[Segment]:
        """The rows of *payload*, from token *start* on; none for None. *form*: as :func:`decoded` takes it."""
        ids_TLK = decoded(payload, self.where, self.model, self.report, **form)
        return [] if ids_TLK is None else [Segment(ids_TLK=ids_TLK, start=start)]

    def sequence(
        self, num_tokens: int, token_ids: np.ndarray | None, segments: Sequence[Segment], doubtful: Sequence[int] = ()
    ) -> RecordedSequence:
        """The sequence of those tokens and rows, with the loss mask, log-probabilities, advantages, reward and group."""
        token_fields = {} if token_ids is None else {"token_ids": token_ids}
        for name, names in TOKEN_FIELDS.items():
            value = self.value(*names)
            # Masks and log-probabilities of the response alone have no place among the tokens without its length.
            if token_ids is not None and isinstance(value, Sequence | np.ndarray) and len(value) == len(token_ids):
                token_fields[name] = flat_array(value, f"{self.where}: {name}")
        numbers = {name: self.value(*names) for name, names in SEQUENCE_FIELDS.items()}
        group = self.value(*GROUPS)
        return RecordedSequence(
            num_tokens=num_tokens,
            segments=segments,
            doubtful=doubtful,
            token_fields=token_fields,
            sequence_fields={k: float(n) for k, n in numbers.items() if isinstance(n, int | float) and not isinstance(n, bool)},
            group=None if group is None else whole(f"{self.where}: group", group, least=0, error=TraceError),
        )


def whole_numbers(value: Any, name: str) -> np.ndarray:
    """A flat array of whole numbers as int64 [n]."""
    array = flat_array(value, name)
    if array.size and (array.dtype.kind not in "iu" or int(array.max()) >= 2**63):
        raise TraceError(f"{name} has dtype {array.dtype}; whole numbers are needed.")
    return array.astype(np.int64, copy=False)


def flat_array(value: Any, name: str) -> np.ndarray:
    """Numbers as a numpy array [n]."""
    array = to_numpy(value, name)
    if array.ndim != 1 or array.dtype.kind not in "iufb":
        raise TraceError(f"{name} has shape {array.shape} and dtype {array.dtype}; a flat list of numbers is needed.")
    return array


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
