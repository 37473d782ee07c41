"""How an import is to go, and what it gives: a batch, and a report of what was masked and what looks wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from routepack.core.component import Component, Share
from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.convention import Reason


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Component):
    """What to do about routing that is not what the stack promises."""

    section: ClassVar[str] = ""

    policy: Literal["strict", "lenient"] = "strict"
    """``strict``: an error that names sequence, rows and tokens. ``lenient``: mask it, count it, report it."""
    merge: Literal["keep_first", "keep_last"] | None = None
    """Where turns recorded the same rows differently: ``keep_first`` (what sampled them) or ``keep_last`` (the newest
    weights). None: they must be equal; ``lenient`` then keeps the first."""
    require: bool = False
    """Whether every sequence must have routes; otherwise only one need, and planning estimates the others."""
    max_missing_share: Share = 0.5
    """Of the rows of sequences that have routes, the largest share that may be masked; above it is an error (``strict``)
    or a sign in the report (``lenient``)."""
    progress: Callable[[int], None] | None = None
    """Called with the number of sequences read so far, after each."""

    @property
    def strict(self) -> bool:
        """Whether bad routing is an error."""
        return self.policy == "strict"


STRICT = ImportOptions()
"""The default: whatever is not as promised is an error."""


@dataclass(kw_only=True)
class ImportReport:
    """What came in, what of it counts, and what looks wrong."""

    stack: str
    num_sequences: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    num_valid_rows: int = 0
    num_expected_rows: int = 0
    """Rows that complete recording has: tokens - 1 a sequence, and the last token's where it was recorded, too."""
    without_routes: int = 0
    """Sequences of two tokens or more for which nothing was recorded; of one token there need be no row."""
    masked_rows: dict[str, int] = field(default_factory=dict)
    """Rows that count for nothing, by reason."""
    problems: dict[str, int] = field(default_factory=dict)
    """Under ``lenient``: sequences that were not what the stack promises, by problem."""
    dropped_layers: list[int] = field(default_factory=list)
    """Columns that held nothing but zeros: dense layers, if all is well."""
    copied: bool = True
    """Whether ids were copied once; False: the batch shares the source's memory."""
    longest_repeat: int = 1
    """The longest run of equal valid rows inside one sequence."""
    suspicious: list[str] = field(default_factory=list)
    """Signs that the recording is not what it seems, in whole sentences."""
    notes: list[str] = field(default_factory=list)

    @property
    def coverage(self) -> float:
        """The share of expected rows that are valid: 1 where, and only where, none was lost."""
        return self.num_valid_rows / self.num_expected_rows if self.num_expected_rows else 1.0

    def figures(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return asdict(self) | {"coverage": self.coverage}

    def lines(self) -> list[tuple[str, str]]:
        """A summary for people: label and text."""
        without = f", {self.without_routes:,} without routes" if self.without_routes else ""
        lines = [
            ("sequences", f"{self.num_sequences:,}{without}"),
            ("tokens", f"{self.num_tokens:,}"),
            ("valid rows", f"{self.num_valid_rows:,} of {self.num_expected_rows:,} (coverage {self.coverage:.1%})"),
            ("masked rows", f"{sum(self.masked_rows.values()):,}"),
        ]
        lines += [(f"  {reason}", f"{rows:,}") for reason, rows in self.masked_rows.items()]
        lines += [("problem", f"{what}: {count:,} times") for what, count in self.problems.items()]
        lines += [("suspicious", sign) for sign in self.suspicious]
        return lines + [("note", note) for note in self.notes]

    def mask(self, reason: Reason, rows: int) -> None:
        """Count *rows* masked rows."""
        if rows:
            self.masked_rows[reason.text] = self.masked_rows.get(reason.text, 0) + rows

    def problem(self, what: str) -> None:
        """Count one more sequence with problem *what*."""
        self.problems[what] = self.problems.get(what, 0) + 1

    def note(self, text: str) -> None:
        """Say *text* once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True, kw_only=True, eq=False)
class Imported:
    """A batch and the report of its import."""

    batch: RolloutBatch
    report: ImportReport
