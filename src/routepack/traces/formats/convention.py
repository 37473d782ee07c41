"""What a stack writes where nothing was recorded, and how that reads as a reason to mask a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Self


class Reason(IntEnum):
    """Why a row counts for nothing, a number and a text for people; VALID where it counts."""

    text: str

    VALID = 0, "valid"
    ZEROS = 1, "all zero"
    MINUS = 2, "all -1"
    NEGATIVE = 3, "a negative id"
    OUT_OF_RANGE = 4, "id not below num_experts"
    DUPLICATE = 5, "an expert twice in a row"
    MADE_UP = 6, "last row made up by the stack"
    FILLER = 7, "filler 0 .. top_k - 1"
    MASKED = 8, "excluded by the stack's mask"
    ABSENT = 9, "no row delivered"

    def __new__(cls, value: int, text: str) -> Self:
        """The member of that number and text."""
        reason = int.__new__(cls, value)
        reason._value_, reason.text = value, text
        return reason


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
