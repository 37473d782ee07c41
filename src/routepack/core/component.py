"""What every class whose fields are options has in common: its values are checked, also in a subclass that checks nothing.

A component is a keyword-only dataclass. The type of a field says what the option may be, and :class:`Limits` between which
numbers it lies::

    @dataclass(frozen=True, kw_only=True)
    class MyPacker(routepack.Packer):
        patience: Annotated[int, Limits(least=1)] = 8
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import types
import typing
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal

from routepack.core.checks import MOST, instance, real, whole
from routepack.core.errors import ConfigError, RoutePackError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Between which numbers an option lies; given in its type, as in ``Annotated[int, Limits(least=1)]``."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    """The option must be larger than this."""
    may_be_infinite: bool = False


Count = Annotated[int, Limits(least=1, most=2**31 - 1)]
"""A whole number of at least 1."""
CountOrZero = Annotated[int, Limits(least=0, most=2**31 - 1)]
"""A whole number of at least 0."""
Share = Annotated[float, Limits(least=0.0, most=1.0)]
"""A number from 0 to 1."""
NotNegative = Annotated[float, Limits(least=0.0)]
"""A finite number of at least 0."""
Positive = Annotated[float, Limits(above=0.0)]
"""A finite number above 0."""
Speed = Annotated[float, Limits(above=0.0, may_be_infinite=True)]
"""Bytes per second, above 0; infinite: it costs no time."""


ONLY_SPEED = {"changes": "only speed"}
"""The metadata of a field that changes how long something takes, but nothing of what comes out: plans do not record it."""


class ComponentMeta(ABCMeta):
    """Checks a component once it is made, where no subclass can leave the check out."""

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        """An instance whose options are all right; raises ``cls.error`` naming the first that is not."""
        check_is_dataclass(cls)
        component = super().__call__(*arguments, **options)
        section = getattr(cls, "section", None)
        where = f"{cls.__name__}." if section is None else f"{section}." if section else ""
        for name, hint in option_types(cls).items():
            given = getattr(component, name)
            value = checked_value(f"{where}{name}", given, hint, error=getattr(cls, "error", ConfigError))
            if value is not given:
                object.__setattr__(component, name, value)
        for base in reversed(cls.__mro__):
            if "check_options" in vars(base):
                vars(base)["check_options"](component)
        return component


class Component(metaclass=ComponentMeta):
    """A keyword-only dataclass whose fields are options, each checked against its type when an instance is made.

    What depends on several fields belongs in ``check_options``. That of every class in the hierarchy is called, base class
    first, so a subclass need not call ``super()``. Methods marked ``@final`` cannot be overridden.
    """

    section: ClassVar[str | None] = None
    """The section of a config that this class is an option of; errors name it. Empty: the top of a config. None: no config
    has one, and errors name the class."""
    error: ClassVar[type[RoutePackError]] = ConfigError
    """What is raised for a wrong value."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in vars(cls):
            for base in cls.__mro__[1:]:
                if getattr(vars(base).get(name), "__final__", False):
                    raise TypeError(f"{cls.__name__}.{name} must not be overridden: {base.__name__} relies on its own.")

    def check_options(self) -> None:
        """Raise ConfigError where values that are right one by one do not go together."""


def import_path(cls: type) -> str:
    """The path under which a config names *cls* in ``_target_``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def as_config(component: Any) -> Any:
    """A component as the section of a config that builds it; any other value as plain numbers, texts, lists and dicts."""
    if dataclasses.is_dataclass(component) and not isinstance(component, type):
        fields = [field for field in dataclasses.fields(component) if field.init and field.metadata != ONLY_SPEED]
        values = {field.name: as_config(getattr(component, field.name)) for field in fields}
        return {"_target_": import_path(type(component)), **values}
    if isinstance(component, Mapping):
        return {str(name): as_config(value) for name, value in component.items()}
    if isinstance(component, Sequence) and not isinstance(component, str):
        return [as_config(value) for value in component]
    return component if component is None or isinstance(component, bool | int | float | str) else import_path(type(component))


def check_is_dataclass(cls: type) -> None:
    """Raise ConfigError where a class adds fields and is not decorated, so that they would be no options."""
    hints = inspect.get_annotations(cls).items()
    added = [name for name, hint in hints if not str(hint).startswith(("ClassVar", "typing.ClassVar"))]
    if added and "__dataclass_fields__" not in vars(cls):
        raise ConfigError(
            f"{cls.__name__} adds {', '.join(added)} and is no dataclass, so they are no options: write "
            f"@dataclass(frozen=True, kw_only=True) above class {cls.__name__}."
        )


@cache
def option_types(target: Callable[..., Any]) -> dict[str, Any]:
    """The options of a dataclass, another class or a function, with the type of each; Any where it has none."""
    if dataclasses.is_dataclass(target):
        hints = _hints(target)
        return {field.name: hints.get(field.name, Any) for field in dataclasses.fields(target) if field.init}
    function = target.__init__ if inspect.isclass(target) else target
    hints = typing.get_type_hints(function, include_extras=True)
    return {
        name: hints.get(name, Any)
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def _hints(target: Any) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for base in reversed(target.__mro__):
        # A class inside a function may name types that are out of reach; its base classes' options are checked all the same.
        with contextlib.suppress(NameError):
            hints |= typing.get_type_hints(base, include_extras=True)
    return hints


def checked_value(name: str, value: Any, hint: Any, *, error: type[RoutePackError] = ConfigError) -> Any:
    """*value*, as the plain type that *hint* asks for; raises *error*, naming *name*, where it is something else.

    >>> checked_value("packer.max_tokens", 0, Count)
    Traceback (most recent call last):
    routepack.core.errors.ConfigError: packer.max_tokens=0 must be a whole number of at least 1.
    """
    hint, limits, optional = plain_type(hint)
    if value is None and optional:
        return None
    origin = typing.get_origin(hint)
    if hint is int:
        least = int(max(limits.least, -MOST))
        return whole(name, value, least=least, most=int(min(limits.most, MOST)), error=error)
    if hint is float:
        return _checked_real(name, value, limits, error)
    if origin is Literal:
        if value not in typing.get_args(hint):
            raise error(f"{name}={value!r} is unknown: choose {', '.join(map(str, typing.get_args(hint)))}.")
        return value
    if origin is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        kinds = typing.get_args(hint)
        each = kinds[:1] * len(value) if kinds[1:] == (...,) else kinds
        if len(each) != len(value):
            raise error(f"{name}={value!r} must hold {len(each)} values.")
        return tuple(checked_value(name, one, kind, error=error) for one, kind in zip(value, each, strict=True))
    kind = origin or hint
    if kind is Mapping and isinstance(value, Mapping):
        for key, one in value.items():
            checked_value(f"{name}[{key!r}]", one, typing.get_args(hint)[1], error=error)
        return value
    if inspect.isclass(kind) and kind is not Any:
        instance(name, value, kind, error=error)
    return value


def plain_type(hint: Any) -> tuple[Any, Limits, bool]:
    """A type without its limits and without None, the limits, and whether it may be None."""
    limits, optional = Limits(), False
    while True:
        if typing.get_origin(hint) is Annotated:
            limits = next((one for one in hint.__metadata__ if isinstance(one, Limits)), limits)
            hint = hint.__origin__
        elif typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in typing.get_args(hint):
            others = tuple(kind for kind in typing.get_args(hint) if kind is not type(None))
            hint, optional = reduce(or_, others), True
        else:
            return hint, limits, optional


def _checked_real(name: str, value: Any, limits: Limits, error: type[RoutePackError]) -> float:
    if limits.may_be_infinite and isinstance(value, float) and value == math.inf:
        return value
    number = real(name, value, least=limits.least, most=limits.most, error=error)
    if number <= limits.above:
        raise error(f"{name}={value!r} must be above {limits.above:g}.")
    return number
