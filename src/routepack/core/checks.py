"""Options and figures, checked where they enter: the error names the option, its value and the limit."""

from __future__ import annotations

import math
import sys
from numbers import Integral, Real
from typing import Any

from routepack.core.errors import ConfigError, RoutePackError

MOST = 2**48
"""No count that RoutePack works with is larger; 64-bit sums of products stay exact below it."""

LARGEST = sys.float_info.max
"""Whole numbers, too, can be larger than any float."""


def whole(name: str, value: Any, *, least: int, most: int = MOST, error: type[RoutePackError] = ConfigError) -> int:
    """*value* as an int if it is a whole number in [least, most]; else *error*.

    >>> whole("seed", 3, least=0)
    3
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise error(f"{name}={value!r} must be a whole number of at least {least}.")
    if int(value) > most:
        raise error(f"{name}={value!r} must be at most {most}.")
    return int(value)


def real(
    name: str, value: Any, *, least: float = -math.inf, most: float = math.inf, error: type[RoutePackError] = ConfigError
) -> float:
    """*value* as a float if it is a finite number in [least, most]; else *error*."""
    if isinstance(value, bool) or not isinstance(value, Real) or not _is_finite(value):
        raise error(f"{name}={value!r} must be a finite number.")
    if not least <= float(value) <= most:
        raise error(f"{name}={value!r} must lie between {least:g} and {most:g}.")
    return float(value)


def _is_finite(value: Any) -> bool:
    return abs(int(value)) <= LARGEST if isinstance(value, Integral) else math.isfinite(value)


def instance(name: str, value: Any, kind: type | tuple[type, ...], *, error: type[RoutePackError] = ConfigError) -> None:
    """Raise *error* unless *value* is an instance of *kind*."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        given = f"{name}={value!r}" if len(repr(value)) < 60 else name
        raise error(f"{given} is a {type(value).__name__}; give a {' or '.join(one.__name__ for one in kinds)}.")
