"""What a stack writes where nothing was recorded, and how that reads as a reason to mask a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum


class Reason(IntEnum):
    """Why a row counts for nothing; VALID where it counts."""

    VALID = 0
    ZEROS = 1
    MINUS = 2
    NEGATIVE = 3
    OUT_OF_RANGE = 4
    DUPLICATE = 5
    MADE_UP = 6
    FILLER = 7
    MASKED = 8
    ABSENT = 9

    @property
    def text(self) -> str:
        """For people."""
        return _TEXTS[self]


_TEXTS = {
    Reason.VALID: "valid",
    Reason.ZEROS: "all zero",
    Reason.MINUS: "all -1",
    Reason.NEGATIVE: "a negative id",
    Reason.OUT_OF_RANGE: "id not below num_experts",
    Reason.DUPLICATE: "an expert twice in a row",
    Reason.MADE_UP: "last row made up by the stack",
    Reason.FILLER: "filler 0 .. top_k - 1",
    Reason.MASKED: "excluded by the stack's mask",
    Reason.ABSENT: "no row delivered",
}

CODE, COUNTS_UP, REPEATS = 0x0F, 0x40, 0x80
"""Bits of a judged row: its Reason; every layer reads 0 .. top_k - 1; it equals the row before it."""


@dataclass(frozen=True, kw_only=True)
class Convention:
    """One stack's way of saying that a row was not recorded."""

    stack: str
    switch: str
    """How its users switch recording on, for the error where nothing was recorded."""
    missing: frozenset[Reason] = frozenset()
    """What it writes into rows that were not recorded; any other bad row is an error under ``strict``."""
    ends_early: bool = False
    """Whether fewer rows than tokens - 1 are usual: trailing tokens were never fed in."""
    fills_last: bool = False
    """Whether a row for the last token, which was never fed in, is made up (zeros, a copy, 0 .. top_k - 1)."""
    fills_inside: bool = False
    """Whether 0 .. top_k - 1 also stands inside a sequence."""


def tell_tale(num_experts: int, top_k: int, num_layers: int) -> bool:
    """Whether one given row is too unlikely to be a route, so that it can serve as filler without being mistaken.

    There are (E! / (E - K)!)^L rows; from 2^64 on a pattern in all layers of one is no coincidence.

    >>> tell_tale(128, 8, 48), tell_tale(4, 2, 1)
    (True, False)
    """
    return num_layers * math.log2(math.perm(num_experts, top_k)) >= 64
