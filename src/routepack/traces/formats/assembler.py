"""From sequences with recorded rows, in whatever pieces, to a RolloutBatch. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from routepack.core.checks import MOST, instance
from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch, fed_tokens, id_dtype
from routepack.traces.formats.buffers import GrowingRows
from routepack.traces.formats.convention import CODE, COUNTS_UP, REPEATS, Convention, Reason, tell_tale
from routepack.traces.formats.import_options import Imported, ImportOptions, ImportReport
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.records import Record, RecordedSequence, Segment, merged_fields
from routepack.traces.formats.suspicious_signs import look_for_signs

MOST_ABSENT = 1 << 16
"""Rows that a sequence may lack where it has less than a sixteenth of them; beyond, its routes are left out."""


class Assembler:
    """Takes sequences one by one, so that their sources can be released, and builds the batch."""

    def __init__(self, model: ModelRouting, convention: Convention, options: ImportOptions) -> None:
        instance("model", model, ModelRouting)
        instance("options", options, ImportOptions)
        self.model, self.convention, self.options = model, convention, options
        self.report = ImportReport(stack=convention.stack)
        self._shape: tuple[int, int] = (0, 0)
        self._kept_L: np.ndarray | None = None
        self._layer_ids: list[int] = []
        self._ids = GrowingRows(id_dtype(model.num_experts))
        self._judged = GrowingRows(np.dtype(np.uint8))
        self._packed: np.ndarray | None = None
        self._rows: list[int] = []
        self._done: list[RecordedSequence] = []
        self._waiting: list[RecordedSequence] = []

    def share(self, packed_TLK: np.ndarray, rows_S: Sequence[int], tokens_S: Sequence[int]) -> None:
        """Announce that the sequences to come are the rows of *packed_TLK*, in order: it serves as it is if it can.

        It can where it has the batch's dtype, no column is left out, and no sequence lacks a row or has one too many.
        """
        if packed_TLK.ndim != 3 or packed_TLK.dtype != id_dtype(self.model.num_experts) or not packed_TLK.flags.c_contiguous:
            return
        for rows, tokens in zip(rows_S, tokens_S, strict=True):
            if rows and rows not in (tokens - 1, tokens):
                return
        if not len(packed_TLK):
            return
        self._see(Segment(ids_TLK=packed_TLK))
        if self._kept_L is not None and len(self._kept_L) == packed_TLK.shape[1]:
            self._packed = packed_TLK

    def add(self, sequence: RecordedSequence) -> None:
        """Take one more sequence. Raises TraceError where it is not what the stack promises, unless ``lenient``."""
        for segment in sequence.segments:
            self._see(segment)
        if self._kept_L is None:
            # Nothing yet tells which layers have a router.
            self._waiting.append(sequence)
            return
        self._take_waiting()
        self._take(sequence)

    def records(self, source: Any, noun: str, *, first: int = 0) -> Iterator[Record]:
        """The records of *source*, or *source* itself where it is one, numbered from *first* on.

        *noun* is what the stack calls a record, for errors.
        """
        stack = self.convention.stack
        if isinstance(source, str | bytes | bytearray) or not hasattr(source, "__iter__"):
            raise TraceError(f"{stack}: a {type(source).__name__} is no list of records.")
        for number, raw in enumerate([source] if isinstance(source, Mapping) else source, first):
            yield Record(raw=raw, where=f"{stack}, {noun} {number}", model=self.model, report=self.report)

    def finish(self) -> Imported:
        """The batch and its report. Raises TraceError where nothing at all was recorded."""
        if not self._done and not self._waiting:
            raise TraceError(f"{self.convention.stack}: there are no sequences.")
        if self._kept_L is None:
            # A batch needs some shape; the rows, if there are any, are all masked.
            self._shape = self._shape if any(self._shape) else (1, self.model.top_k or 1)
            self._keep(list(range(self._shape[0])))
        self._take_waiting()
        self._ids.trim()
        batch = self._batch()
        self._summarise(batch)
        look_for_signs(batch, self.report, self._judged.rows & REPEATS > 0)
        self._check_coverage()
        return Imported(batch=batch, report=self.report)

    # Layers

    def _see(self, segment: Segment) -> None:
        """Check a segment's shape, and learn from the first which layers have a router."""
        layers, top_k = segment.ids_TLK.shape[1:]
        if self._shape == (0, 0):
            if not 1 <= top_k <= self.model.num_experts or not layers or (self.model.top_k or top_k) != top_k:
                raise TraceError(
                    f"{self.where}: rows have shape {(layers, top_k)} [layers, top_k]; at least one layer and "
                    f"{self.model.top_k or f'1 to {self.model.num_experts}'} experts a token are needed."
                )
            self._shape = layers, top_k
            columns = self.model.columns(layers)
            if columns is not None or top_k == 1:
                # A zero row of a top-1 model may be a route to expert 0, so that nothing tells its dense layers.
                self._keep(list(range(layers)) if columns is None else columns)
        elif self._shape != (layers, top_k):
            raise TraceError(f"{self.where}: rows have shape {(layers, top_k)}; the ones before had {self._shape}.")
        if self._kept_L is None:
            routed_L = _routed_layers(self._routes(segment))
            if routed_L.any():
                self._keep(np.flatnonzero(routed_L).tolist())
                self.report.dropped_layers = np.flatnonzero(~routed_L).tolist()

    def _keep(self, columns: list[int]) -> None:
        self._kept_L = np.asarray(columns, dtype=np.int64)
        self._layer_ids = self.model.layer_ids(columns, self._shape[0])
        self._ids = GrowingRows(id_dtype(self.model.num_experts), (len(columns), self._shape[1]))

    def _routes(self, segment: Segment) -> np.ndarray:
        """The rows that may be routes: filler, which stands in dense layers too, would give those away as routing."""
        ids_TLK = segment.ids_TLK
        if segment.valid_T is not None and not segment.valid_T.all():
            ids_TLK = ids_TLK[segment.valid_T]
        if self.convention.fills_inside or self.convention.fills_last:
            counts_up_T = (ids_TLK[:, 0] == np.arange(ids_TLK.shape[2])).all(axis=1)
            if counts_up_T.any():
                counts_up_T &= (ids_TLK == np.arange(ids_TLK.shape[2])).all(axis=(1, 2))
                ids_TLK = ids_TLK[~counts_up_T]
        return ids_TLK

    def _check_dropped(self, segment: Segment) -> None:
        if not self.report.dropped_layers:
            return
        ids_TLK = self._routes(segment)
        for layer in self.report.dropped_layers:
            if _holds_more(ids_TLK[:, layer]).any():
                raise TraceError(
                    f"{self.where}: layer {layer} routes here, but was all zero in the sequences before, as a dense layer "
                    "is: name the layers that have a router (moe_layers)."
                )

    # Rows

    def _take_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for sequence in waiting:
            self._take(sequence)

    def _take(self, sequence: RecordedSequence) -> None:
        if not 1 <= sequence.num_tokens <= MOST:
            raise TraceError(f"{self.where} has {sequence.num_tokens} tokens; every sequence has at least one.")
        rows = self._accepted(sequence)
        if rows:
            self._fill(sequence, rows)
        self._rows.append(rows)
        # The rows are copied; holding on to their sources would take their memory for as long as the import lasts.
        self._done.append(replace(sequence, segments=(), doubtful=()))
        if self.options.progress is not None:
            self.options.progress(len(self._done))

    def _accepted(self, sequence: RecordedSequence) -> int:
        """How many rows the sequence gets: none, tokens - 1, or tokens."""
        n = sequence.num_tokens
        spans = [(segment.start, segment.start + len(segment.ids_TLK)) for segment in sequence.segments]
        recorded = max((end for _, end in spans), default=0)
        if not any(end > start for start, end in spans):
            return 0
        if min(start for start, _ in spans) < 0 or recorded > n:
            span = f"rows {min(start for start, _ in spans)} .. {recorded - 1}" if spans[0][0] else f"{recorded} recorded rows"
            self.object_to(
                f"has {span} for {n} tokens: rows must be {max(n - 1, 1)} or {n}. Cut routes together with tokens",
                "more rows than tokens: routes dropped",
            )
            return 0
        covered = 0
        for start, end in spans:
            if start > covered:
                self.object_to(f"has no rows {covered} .. {start - 1} of {n} tokens: a turn starts after them", "rows missing")
            covered = max(covered, end)
        if n - recorded > MOST_ABSENT and n > 16 * recorded:
            # A number of tokens is but a number: it shall not make us fill memory with rows that nobody delivered.
            self.object_to(f"has {recorded} recorded rows for {n} tokens", "hardly any rows: routes dropped")
            return 0
        if recorded < n - 1 and not self.convention.ends_early:
            self.object_to(f"has {recorded} recorded rows for {n} tokens: {n - 1} or {n} are needed", "rows missing")
        return max(recorded, n - 1)

    def _fill(self, sequence: RecordedSequence, rows: int) -> None:
        judged_T = self._judged.reserve(rows)
        if self._packed is not None:
            self._judge(sequence.segments[0], None, judged_T)
            self._settle(sequence, judged_T)
            return
        ids_TLK, covered = self._ids.reserve(rows), 0
        for segment in sequence.segments:
            start, end = segment.start, segment.start + len(segment.ids_TLK)
            _clear(ids_TLK, judged_T, covered, start)
            if start >= covered:
                self._judge(segment, ids_TLK[start:end], judged_T[start:end])
            else:
                self._merge(segment, ids_TLK, judged_T, covered)
            covered = max(covered, end)
        _clear(ids_TLK, judged_T, covered, rows)
        self._settle(sequence, judged_T)

    def _judge(self, segment: Segment, ids_TLK: np.ndarray | None, judged_T: np.ndarray) -> None:
        # The compiled kernel costs half a second to load, which `import routepack` should not.
        from routepack.traces.formats._kernels import judge_rows

        assert self._kept_L is not None, "layers are known once a segment was seen"
        source = _native(segment.ids_TLK)
        self._check_dropped(segment)
        judge_rows(source, self._kept_L, self.model.num_experts, judged_T, ids_TLK)
        if segment.valid_T is not None:
            judged_T[~segment.valid_T] = Reason.MASKED
        self._explain(source, judged_T, segment.start)

    def _merge(self, segment: Segment, ids_TLK: np.ndarray, judged_T: np.ndarray, covered: int) -> None:
        """A turn that recorded rows again: a row that one of the two lacks comes from the other."""
        start, end = segment.start, segment.start + len(segment.ids_TLK)
        again_TLK, again_T = np.empty_like(ids_TLK[start:end]), np.empty_like(judged_T[start:end])
        self._judge(segment, again_TLK, again_T)
        overlap = min(covered, end) - start
        old_TLK, old_T = ids_TLK[start : start + overlap], judged_T[start : start + overlap]
        new_T = again_T[:overlap]
        both_T = (old_T & CODE == Reason.VALID) & (new_T & CODE == Reason.VALID)
        differ = int((both_T & (old_TLK != again_TLK[:overlap]).any(axis=(1, 2))).sum())
        if differ:
            self._differing(differ, start)
        takes_T = new_T & CODE == Reason.VALID
        if self.options.merge != "keep_last":
            takes_T &= old_T & CODE != Reason.VALID
        old_TLK[takes_T] = again_TLK[:overlap][takes_T]
        old_T[takes_T] = new_T[takes_T]
        ids_TLK[start + overlap : end], judged_T[start + overlap : end] = again_TLK[overlap:], again_T[overlap:]

    def _differing(self, rows: int, start: int) -> None:
        if self.options.merge is None:
            self.object_to(
                f"has {rows} rows from row {start} on that a later turn recorded differently: say merge=keep_first (what "
                "sampled the tokens) or merge=keep_last (the newest weights)",
                "rows recorded twice, differently",
            )
        else:
            self.report.problem(f"rows recorded twice, differently: {self.options.merge}")

    def _explain(self, source: np.ndarray, judged_T: np.ndarray, start: int) -> None:
        """Object to rows that are neither routes nor what the stack writes where there are none."""
        code_T = judged_T & CODE
        if not code_T.any():
            return
        counts = np.bincount(code_T, minlength=16)
        if counts[Reason.ZEROS] and self._zeros_may_be_routes and Reason.ZEROS in self.convention.missing:
            self.object_to(
                f"has {counts[Reason.ZEROS]} zero rows, which in this top-1 model may be routes to expert 0, or rows that were "
                "not recorded; nothing tells which",
                "zero rows of a top-1 model: taken as not recorded",
            )
        for reason in (Reason.OUT_OF_RANGE, Reason.NEGATIVE, Reason.DUPLICATE, Reason.ZEROS, Reason.MINUS):
            if (
                not counts[reason]
                or reason in self.convention.missing
                or (reason is Reason.ZEROS and self._zeros_may_be_routes)
            ):
                continue
            row = int(np.flatnonzero(code_T == reason)[0])
            self.object_to(self._bad_row(source, row, row + start, reason, int(counts[reason])), reason.text)

    def _bad_row(self, source: np.ndarray, row: int, position: int, reason: Reason, rows: int) -> str:
        assert self._kept_L is not None, "layers are known once a segment was seen"
        # Python's numbers: in int64 an id of uint64 may read as another.
        ids_LK = source[row][self._kept_L].astype(object)
        wrong_L = (ids_LK < 0).any(axis=1) | (ids_LK >= self.model.num_experts).any(axis=1)
        wrong_L |= (np.diff(np.sort(ids_LK, axis=1), axis=1) == 0).any(axis=1)
        layer = int(wrong_L.argmax())
        hint = ": are these physical ids, or does one mark a shared expert?" if reason is Reason.OUT_OF_RANGE else ""
        return (
            f"has {rows} rows with {reason.text}; row {position}, layer {self._layer_ids[layer]} is {ids_LK[layer].tolist()} "
            f"with num_experts={self.model.num_experts}{hint}"
        )

    def _settle(self, sequence: RecordedSequence, judged_T: np.ndarray) -> None:
        """What depends on where a row stands: made-up rows, filler, and zero rows of a top-1 model."""
        flags_T, code_T = judged_T & ~np.uint8(CODE), judged_T & CODE
        if self._zeros_may_be_routes and Reason.ZEROS not in self.convention.missing:
            code_T[code_T == Reason.ZEROS] = Reason.VALID
        if self.convention.fills_inside and self._tells:
            code_T[(code_T == Reason.VALID) & (flags_T & COUNTS_UP > 0)] = Reason.FILLER
        doubtful = [*sequence.doubtful, sequence.num_tokens - 1] if self.convention.fills_last else sequence.doubtful
        for row in doubtful:
            looks = flags_T[row] & (COUNTS_UP | REPEATS) if row < len(code_T) else 0
            if row < len(code_T) and (looks or code_T[row] == Reason.ZEROS):
                code_T[row] = Reason.MADE_UP
        judged_T[:] = code_T | flags_T

    @property
    def _tells(self) -> bool:
        assert self._kept_L is not None, "layers are known once a segment was seen"
        return tell_tale(self.model.num_experts, self._shape[1], len(self._kept_L))

    @property
    def _zeros_may_be_routes(self) -> bool:
        return self._shape[1] == 1 and not self._tells

    # The batch

    def _batch(self) -> RolloutBatch:
        code_T = self._judged.rows & CODE
        groups = [sequence.group for sequence in self._done]
        token_fields, sequence_fields = merged_fields(self._done, self.report)
        return RolloutBatch(
            routed_experts_TLK=self._ids.rows if self._packed is None else self._packed,
            cu_seqlens=np.concatenate([[0], np.cumsum(self._rows, dtype=np.int64)]),
            num_tokens_S=np.asarray([sequence.num_tokens for sequence in self._done], dtype=np.int64),
            num_experts=self.model.num_experts,
            layer_ids_L=np.asarray(self._layer_ids, dtype=np.int32),
            valid_T=None if not code_T.any() else code_T == Reason.VALID,
            group_S=None if None in groups else np.asarray(groups, dtype=np.int64),
            token_fields=token_fields,
            sequence_fields=sequence_fields,
            source=self.convention.stack,
        )

    def _summarise(self, batch: RolloutBatch) -> None:
        report, counts = self.report, np.bincount(self._judged.rows & CODE, minlength=16)
        report.num_sequences, report.num_tokens = batch.num_sequences, int(batch.num_tokens_S.sum())
        report.num_rows, report.num_valid_rows = len(batch.routed_experts_TLK), int(counts[Reason.VALID])
        report.num_expected_rows = int(fed_tokens(batch).sum())
        report.without_routes = int(((np.diff(batch.cu_seqlens) == 0) & (batch.num_tokens_S > 1)).sum())
        report.copied = self._packed is None
        for reason in list(Reason)[1:]:
            report.mask(reason, int(counts[reason]))

    def _check_coverage(self) -> None:
        report, stack = self.report, self.convention.stack
        if not report.num_valid_rows or (self.options.require and report.without_routes):
            lacking = report.without_routes if report.num_valid_rows else report.num_sequences
            self._complain(
                f"{lacking} of {report.num_sequences} sequences have no recorded routes: {self.convention.switch}, and pass "
                "the field on"
            )
        elif report.num_rows and 1 - report.num_valid_rows / report.num_rows > self.options.max_missing_share:
            share = 1 - report.num_valid_rows / report.num_rows
            reasons = ", ".join(f"{text}: {rows}" for text, rows in report.masked_rows.items())
            self._complain(
                f"{share:.0%} of the recorded rows are no routes ({reasons}); max_missing_share="
                f"{self.options.max_missing_share:g}: were they lost on the way, on one rank of several?"
            )
        if report.without_routes and report.num_valid_rows:
            report.note(f"{report.without_routes} sequences have no routes; planning estimates them from the others ({stack}).")

    def _complain(self, what: str) -> None:
        if self.options.strict:
            raise TraceError(f"{self.convention.stack}: {what}.")
        self.report.suspicious.append(f"{what[0].upper()}{what[1:]}.")

    def object_to(self, what: str, problem: str) -> None:
        """Raise TraceError that the sequence to come *what*, or under ``lenient`` count it as *problem*."""
        if self.options.strict:
            stop = "" if what.endswith("?") else "."
            raise TraceError(f"{self.where} {what}{stop} policy=lenient masks and reports it.")
        self.report.problem(problem)

    @property
    def where(self) -> str:
        """The sequence to come, for errors."""
        return f"{self.convention.stack}, sequence {len(self._done)}"


def _routed_layers(ids_TLK: np.ndarray) -> np.ndarray:
    """bool [L]: where some row is neither zeros nor -1 throughout.

    Most layers show in the first rows, so that few are read to the end.
    """
    routed_L = np.asarray(_holds_more(ids_TLK[:256]).any(axis=(0, 2)))
    for layer in np.flatnonzero(~routed_L):
        routed_L[layer] = _holds_more(ids_TLK[:, layer]).any()
    return routed_L


def _holds_more(ids_K: np.ndarray) -> np.ndarray:
    """Which ids [..., K] are neither 0 nor -1, or differ from the first of their row."""
    return (ids_K > 0) | (ids_K < -1) | (ids_K != ids_K[..., :1])


def _native(ids_TLK: np.ndarray) -> np.ndarray:
    """C-contiguous and of the machine's byte order, as the kernel reads them; copied only where they are not."""
    return np.ascontiguousarray(ids_TLK, dtype=ids_TLK.dtype.newbyteorder("="))


def _clear(ids_TLK: np.ndarray, judged_T: np.ndarray, first: int, end: int) -> None:
    if end > first:
        ids_TLK[first:end] = 0
        judged_T[first:end] = Reason.ABSENT
