"""Configs: YAML files and ``key=value`` overrides in, checked components out.

A section names its class by import path in ``_target_``; the class's fields are its options. Files
merge left to right, then overrides; whatever comes later wins.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from routepack.core.component import ComponentMeta, check_is_dataclass, checked_value, option_types, plain_type
from routepack.core.errors import ConfigError

T = TypeVar("T")
TARGET = "_target_"


def load(paths: Iterable[str | Path], overrides: Iterable[str] = ()) -> DictConfig:
    """Merge YAML files, then ``key=value`` overrides; the later one wins.

    A layer that sets a section's ``_target_`` replaces that section, so that options of the old component
    never reach the new one; only those that both inherit from a common base class carry over (swapping
    the packer keeps ``packer.max_tokens``).

    Raises ConfigError for a file that is missing or not YAML, and for an override without ``=``.
    """
    config = OmegaConf.create()
    for layer in [*map(_read, paths), _dotlist(overrides)]:
        _replace_sections(config, layer)
        try:
            config = OmegaConf.merge(config, layer)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key}: {_first_line(error)}") from error
    assert isinstance(config, DictConfig)
    _resolve(config)
    return config


def split_layers(layers: list[str]) -> tuple[list[str], list[str]]:
    """Config files and overrides; an argument with ``=`` is an override unless a file has that name."""
    overrides = [layer for layer in layers if "=" in layer and not Path(layer).exists()]
    return [layer for layer in layers if layer not in overrides], overrides


def build(config: DictConfig, section: str, *, base: type[T], default: Callable[..., T] | None = None) -> T:
    """Build the component that *section* names: what its ``_target_`` makes, which must be a *base*.

    A ``_target_`` is a class or a function that returns a component, such as ``routepack.CostModel.for_model``. Options may
    hold components of their own, at any depth. A section without ``_target_`` builds *default* (*base* itself where none is
    given); a missing section builds it with its own defaults.
    Raises ConfigError naming the option, its value and what is allowed.
    """
    return _component(section_options(config, section), base, default or base, where=section)


def instantiate(target: Callable[..., T], options: Mapping[str, Any], *, where: str) -> T:
    """Call *target*, a class or a function, with *options*, each checked against the type that *target* gives it."""
    if inspect.isclass(target):
        check_is_dataclass(target)
    types, needed, what = option_types(target), _needed(target), getattr(target, "__name__", str(target))
    check_keys(options, list(types), where=where, what=what)
    prefix = f"{where}." if where else ""
    for name in needed:
        if name not in options:
            raise ConfigError(f"{prefix}{name} is not set, and {what} needs it: give it a value.")
    given = {name: _option(value, types[name], f"{prefix}{name}") for name, value in options.items()}
    for name, value in given.items():
        _check_kind(f"{prefix}{name}", value, types[name], has_default=name not in needed)
    return target(**given)


def _component(options: dict[str, Any], base: type[T], default: Callable[..., T], *, where: str) -> T:
    path = options.pop(TARGET, None)
    target = default if path is None else locate(path, where=where)
    named = f"{where}.{TARGET}={path or _name(target)}"
    wrong = ConfigError(f"{named} is not a {base.__name__}: name a subclass of {_name(base)}, or a function that makes one.")
    if not callable(target) or (inspect.isclass(target) and not issubclass(target, base)):
        raise wrong
    if inspect.isabstract(target):
        raise ConfigError(f"{named} is abstract: name one of its subclasses.")
    made = instantiate(target, options, where=where)
    if not isinstance(made, base):
        raise wrong
    return made


def _option(value: Any, hint: Any, where: str) -> Any:
    """*value* as *hint* wants it: components built, whole numbers that YAML reads as floats made whole, texts read."""
    kind, _, optional = plain_type(hint)
    parts = typing.get_args(kind)
    if isinstance(value, dict):
        base = kind if inspect.isclass(kind) else object
        if TARGET in value or (dataclasses.is_dataclass(base) and not inspect.isabstract(base)):
            return _component(value, base, base, where=where)
        if isinstance(base, ComponentMeta):
            raise ConfigError(f"{where} must say in {where}.{TARGET} which {base.__name__} it is.")
        return {name: _option(one, parts[1] if len(parts) == 2 else Any, f"{where}.{name}") for name, one in value.items()}
    if isinstance(value, list):
        return [_option(one, parts[0] if parts else Any, f"{where}[{place}]") for place, one in enumerate(value)]
    if isinstance(value, float) and value.is_integer() and kind is int:
        return int(value)
    if isinstance(value, str) and kind in (int, float, bool):
        # An environment variable gives a text.
        read = yaml.safe_load(value) if value else value
        return read if isinstance(read, int | float) else value
    # Where an empty text means off, so does null, which is also what YAML makes of "option=".
    return "" if value is None and kind is str and not optional else value


def _check_kind(where: str, value: Any, hint: Any, *, has_default: bool) -> None:
    """Raise ConfigError where *value* is of another kind than *hint*, or outside of its limits."""
    kind, _, optional = plain_type(hint)
    if value is None and optional:
        return
    kinds = {float: (int, float)}.get(kind, kind)
    if kind in _WANTED and (not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool)):
        remedy = ", or leave it out for its default" if has_default else ""
        raise ConfigError(f"{where}={value!r}: this is a {type(value).__name__}: {_WANTED[kind]} is needed{remedy}.")
    checked_value(where, value, hint)


_WANTED: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _needed(target: Callable[..., Any]) -> list[str]:
    """The options of *target* that have no default."""
    if dataclasses.is_dataclass(target):
        missing = dataclasses.MISSING
        fields = [field for field in dataclasses.fields(target) if field.init]
        return [field.name for field in fields if field.default is missing and field.default_factory is missing]
    parameters = inspect.signature(target).parameters
    return [name for name in option_types(target) if parameters[name].default is inspect.Parameter.empty]


def section_options(config: DictConfig, section: str) -> dict[str, Any]:
    """The options of a section as a plain dict; raises ConfigError where a value is still ``???``."""
    node = OmegaConf.select(config, section)
    if node is None:
        return {}
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{section}={node!r} must be a section with options of its own.")
    try:
        options = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key} is not set: give it a value, as in {error.full_key}=...") from error
    assert isinstance(options, dict)
    return {str(key): value for key, value in options.items()}


def check_keys(given: Iterable[Any], allowed: Collection[str], *, where: str = "", what: str = "this config") -> None:
    """Raise ConfigError for the first of the keys *given* that is not *allowed*, with the nearest that is."""
    for key in map(str, given):
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            name = f"{where}.{key}" if where else key
            raise ConfigError(f"{name} is no option of {what}: {hint}It has {', '.join(allowed) or 'none'}.")


def locate(path: Any, *, where: str) -> Any:
    """Import what a ``_target_`` names, such as ``routepack.FirstFitPacker`` or ``routepack.CostModel.for_model``."""
    try:
        if "." not in str(path):
            raise ImportError("it names no module")
        return pkgutil.resolve_name(str(path))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where}.{TARGET}: cannot import {path!r} ({error}): give the full import path.") from error


def _read(path: str | Path) -> DictConfig:
    try:
        layer = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"config file {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(layer, DictConfig):
        raise ConfigError(f"config file {path} must hold sections (key: value), not a list.")
    return layer


def _resolve(config: DictConfig) -> None:
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'config'}: {_first_line(error)}") from error
    except RecursionError as error:
        raise ConfigError("a ${...} of the config refers to itself, by itself or through others: give it a value.") from error


def _dotlist(overrides: Iterable[str]) -> DictConfig:
    overrides = list(overrides)
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key or any(not part for part in key.split(".")):
            raise ConfigError(f"override {override!r} must read key=value, as in packer.max_tokens=8192.")
        try:
            OmegaConf.from_dotlist([override])
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"override {override!r} cannot be read: {' '.join(str(error).split())}") from error
    return OmegaConf.from_dotlist(overrides)


def _replace_sections(config: Any, layer: DictConfig, where: str = "") -> None:
    for name in list(layer):
        new = layer._get_node(name)
        old = config._get_node(name) if OmegaConf.is_dict(config) and name in config else None
        if not isinstance(new, DictConfig) or not isinstance(old, DictConfig) or new._is_none() or old._is_none():
            continue
        path = f"{where}{name}"
        if TARGET in new and new[TARGET] != old.get(TARGET):
            shared = _shared_options(old.get(TARGET), new[TARGET], where=path)
            for key in [key for key in old if key not in shared]:
                old.pop(key)
        _replace_sections(old, new, f"{path}.")


def _shared_options(old: Any, new: Any, *, where: str) -> set[str]:
    """The options that two components both have from a common base class."""
    if old is None:
        return set()
    classes = [locate(path, where=where) for path in (old, new)]
    if not all(map(inspect.isclass, classes)):
        return set()
    common = [base for base in classes[0].__mro__ if issubclass(classes[1], base) and dataclasses.is_dataclass(base)]
    return {field.name for field in dataclasses.fields(common[0])} if common else set()


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
