"""Configs: YAML files and ``key=value`` overrides in, checked components out.

A section names its class by import path in ``_target_``; the class's fields are its options. Files
merge left to right, then overrides; whatever comes later wins.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import typing
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from routepack.core.errors import ConfigError, RoutePackError

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


def build(config: DictConfig, section: str, *, base: type[T], default: type[T] | None = None) -> T:
    """Build the component that *section* names: an instance of its ``_target_``, which must be a *base*.

    A section without ``_target_`` builds *default* (*base* itself where none is given); a missing section
    builds it with its own defaults.
    Raises ConfigError naming the option, its value and what is allowed.
    """
    options = section_options(config, section)
    path = options.pop(TARGET, None)
    target = (default or base) if path is None else locate(path, where=section)
    if not (inspect.isclass(target) and issubclass(target, base)):
        raise ConfigError(f"{section}.{TARGET}={path} is not a {base.__name__}: name a subclass of {_name(base)}.")
    if inspect.isabstract(target):
        raise ConfigError(f"{section}.{TARGET}={path or _name(base)} is abstract: name one of its subclasses.")
    return instantiate(target, options, where=section)


def instantiate(target: type[T], options: dict[str, Any], *, where: str) -> T:
    """Make a *target* dataclass from plain *options*, each checked against the type of its field."""
    fields = [field for field in dataclasses.fields(cast(Any, target)) if field.init]
    types = typing.get_type_hints(target)
    check_keys(options, [field.name for field in fields], where=where, what=target.__name__)
    for field in fields:
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and field.name not in options:
            raise ConfigError(f"{where}.{field.name} is not set, and {target.__name__} needs it: give it a value.")
    options = {name: _whole_as_int(value, types.get(name)) for name, value in options.items()}
    # Where an empty text means off, so does null, which is also what YAML makes of "option=".
    off = {field.name for field in fields if field.default == "" and types.get(field.name) is str}
    options = {name: "" if value is None and name in off else value for name, value in options.items()}
    try:
        return cast(T, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(target), options)))
    except RoutePackError:
        raise
    except OmegaConfBaseException as error:
        cause = error.__cause__
        if isinstance(cause, RoutePackError):
            raise cause from error
        key = str(error.full_key or "")
        value = f"={options[key]!r}" if key in options else ""
        name = ".".join(part for part in (where, key) if part)
        wanted = _WANTED.get(cast(Any, types.get(key)))
        remedy = f": {wanted} is needed, or leave it out for its default." if wanted else ""
        raise ConfigError(f"{name}{value}: {_first_line(error)}{remedy}") from error


_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _whole_as_int(value: Any, kind: Any) -> Any:
    """*value*, but 1e9, which YAML reads as a float, as an int where the field wants one."""
    wants_int = int in (kind, *typing.get_args(kind)) and float not in (kind, *typing.get_args(kind))
    return int(value) if isinstance(value, float) and value.is_integer() and wants_int else value


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
    """Import what a ``_target_`` names, such as ``routepack.FirstFitPacker``."""
    module, _, name = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
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


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
