"""Tile sizes per architecture: a table and closed-form choices, never tuned at run time.

The table's sm_90, sm_100, sm_80 and gfx942 entries compile without spills, within shared memory and onto the tensor
cores (``make gate``); none of them was timed on a GPU yet. ``benchmarks/tune_kernels.py`` times others on a GPU and writes a
file; the environment variable ROUTEPACK_KERNEL_CONFIGS names a file whose entries replace the table's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

CONFIG_FILE = "ROUTEPACK_KERNEL_CONFIGS"
"""The environment variable that names a file of configurations, as :func:`write_configs` writes it."""

SMALLEST_TILE = 16
"""Of every side of a matrix product in Triton."""
MOST_WARPS = 32
"""1024 threads; AMD's warps of 64 reach that with 16."""


@dataclass(frozen=True)
class KernelConfig:
    """How one kernel is compiled."""

    BM: int
    """Rows of a tile; of the weight gradient's output in :data:`WEIGHT_GRADIENT`."""
    BN: int
    BK: int
    num_warps: int
    num_stages: int
    SPLIT: int = 1
    """Column pieces of the down projection's backward epilogue."""
    GROUP_M: int = 8
    """Row tiles that walk the columns together."""

    @property
    def options(self) -> dict[str, int]:
        """What every launch is given: all but SPLIT, which one kernel has."""
        return {name: value for name, value in vars(self).items() if name != "SPLIT"}


GATE_UP = "gate_up_forward"
DOWN = "down_forward"
DOWN_BACKWARD = "down_backward"
INPUT_GRADIENT = "input_gradient"
WEIGHT_GRADIENT = "weight_gradient"
WEIGHT_GRADIENT_SUM = "weight_gradient_sum"
"""The weight gradient that is added to an fp32 tensor: reading the sum takes registers that the product then lacks."""
KERNELS = (GATE_UP, DOWN, DOWN_BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, WEIGHT_GRADIENT_SUM)

SMALL, LARGE = "small", "large"
"""Row classes: fewer than 256 rows per expert on average, or more."""


TABLE: dict[tuple[str, str, str], KernelConfig] = {
    ("sm_90", GATE_UP, LARGE): KernelConfig(128, 128, 64, 8, 4),
    ("sm_90", GATE_UP, SMALL): KernelConfig(64, 128, 64, 4, 4),
    ("sm_90", DOWN, LARGE): KernelConfig(128, 256, 64, 8, 4),
    ("sm_90", DOWN, SMALL): KernelConfig(64, 256, 64, 4, 4),
    ("sm_90", DOWN_BACKWARD, LARGE): KernelConfig(128, 128, 64, 8, 4, SPLIT=4),
    ("sm_90", DOWN_BACKWARD, SMALL): KernelConfig(64, 128, 64, 4, 4, SPLIT=4),
    ("sm_90", INPUT_GRADIENT, LARGE): KernelConfig(128, 256, 64, 8, 4),
    ("sm_90", INPUT_GRADIENT, SMALL): KernelConfig(64, 128, 64, 4, 4),
    ("sm_90", WEIGHT_GRADIENT, LARGE): KernelConfig(128, 256, 64, 8, 4),
    ("sm_90", WEIGHT_GRADIENT_SUM, LARGE): KernelConfig(128, 128, 64, 8, 4),
    ("sm_100", GATE_UP, LARGE): KernelConfig(128, 128, 64, 8, 4),
    ("sm_100", DOWN, LARGE): KernelConfig(128, 256, 64, 8, 3),
    ("sm_100", DOWN_BACKWARD, LARGE): KernelConfig(128, 128, 64, 8, 4, SPLIT=4),
    ("sm_100", INPUT_GRADIENT, LARGE): KernelConfig(128, 256, 64, 8, 3),
    ("sm_100", WEIGHT_GRADIENT, LARGE): KernelConfig(128, 256, 64, 8, 3),
    ("sm_100", WEIGHT_GRADIENT_SUM, LARGE): KernelConfig(128, 128, 64, 8, 3),
    ("sm_80", GATE_UP, LARGE): KernelConfig(64, 128, 32, 8, 3),
    ("sm_80", DOWN, LARGE): KernelConfig(128, 128, 32, 8, 3),
    ("sm_80", DOWN_BACKWARD, LARGE): KernelConfig(128, 128, 32, 8, 3, SPLIT=4),
    ("sm_80", INPUT_GRADIENT, LARGE): KernelConfig(128, 128, 32, 8, 3),
    ("sm_80", WEIGHT_GRADIENT, LARGE): KernelConfig(128, 128, 32, 8, 3),
    ("sm_80", WEIGHT_GRADIENT_SUM, LARGE): KernelConfig(128, 128, 32, 8, 3),
    ("gfx942", GATE_UP, LARGE): KernelConfig(128, 64, 32, 8, 2),
    ("gfx942", DOWN, LARGE): KernelConfig(128, 128, 64, 8, 2),
    ("gfx942", DOWN_BACKWARD, LARGE): KernelConfig(128, 128, 64, 8, 2, SPLIT=4),
    ("gfx942", INPUT_GRADIENT, LARGE): KernelConfig(128, 128, 64, 8, 2),
    ("gfx942", WEIGHT_GRADIENT, LARGE): KernelConfig(128, 128, 64, 8, 2),
    ("gfx942", WEIGHT_GRADIENT_SUM, LARGE): KernelConfig(128, 128, 64, 8, 2),
}
"""(architecture, kernel, row class) to configuration. A missing SMALL entry means the LARGE one; other architectures
take :func:`nearest`'s."""

_FOUR_BYTES = KernelConfig(64, 64, 16, 8, 3, SPLIT=2)
"""For fp32, whose products are computed in full without matrix instructions: deeper or wider tiles spill."""
_INTERPRETER = KernelConfig(64, 64, 64, 4, 1, SPLIT=2)


@cache
def architecture(device: torch.device) -> str:
    """``sm_90``, ``gfx942``, ...; ``interpreter`` for tensors on the CPU."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def nearest(arch: str) -> str:
    """The architecture of the table whose entries *arch* uses: its own, else the newest before it of the same maker."""
    known = {name for name, _, _ in shipped_or_given()}
    if arch in known:
        return arch
    if arch.startswith("gfx"):
        return "gfx942"
    # Consumer chips (sm_86, sm_89, sm_120) have neither Hopper's instructions nor its shared memory.
    number = int(arch.removeprefix("sm_"))
    return "sm_80" if number < 90 or number >= 120 else "sm_90" if number < 100 else "sm_100"


def row_class(rows_per_expert: float) -> str:
    """Which tile height pays: with fewer than 256 rows an expert, 128-row tiles would run a quarter empty or worse."""
    return SMALL if rows_per_expert < 256 else LARGE


def config_for(kernel: str, arch: str, rows_per_expert: float, itemsize: int = 2) -> KernelConfig:
    """The configuration of *kernel* for 16-bit (``itemsize=2``) or fp32 (4) tensors.

    >>> config_for("down_forward", "sm_90", rows_per_expert=100).BM
    64
    """
    if arch == "interpreter":
        return _INTERPRETER
    if itemsize == 4:
        return _FOUR_BYTES
    table, name = shipped_or_given(), nearest(arch)
    return table.get((name, kernel, row_class(rows_per_expert))) or table[name, kernel, LARGE]


Table = Mapping[tuple[str, str, str], KernelConfig]


@cache
def shipped_or_given() -> Table:
    """:data:`TABLE`, with the entries of the file that ROUTEPACK_KERNEL_CONFIGS names in place of its own; read once."""
    path = os.environ.get(CONFIG_FILE)
    return {**TABLE, **read_configs(path)} if path else TABLE


def read_configs(path: str | Path) -> Table:
    """The entries of a file of configurations. Raises ValueError, with the entry, where it cannot be used."""
    try:
        read = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{CONFIG_FILE}={path} cannot be read: {error}.") from error
    entries = {}
    for arch, kernels in _object(f"{path}", read, "architectures"):
        if not re.fullmatch(r"sm_\d{2,3}|gfx[0-9a-f]{3,5}", arch):
            raise ValueError(f"{path}: {arch!r} is no architecture: name it as sm_90 or gfx942.")
        for kernel, classes in _object(f"{path}: {arch}", kernels, "kernels"):
            for rows, options in _object(f"{path}: {arch} {kernel}", classes, "row classes"):
                entries[arch, kernel, rows] = _checked(f"{path}: {arch} {kernel} {rows}", kernel, rows, options)
    _check_whole(path, entries)
    return entries


def _object(where: str, value: Any, keys: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {type(value).__name__}; give an object of {keys}.")
    return value.items()


def write_configs(path: str | Path, table: Table) -> None:
    """Write *table* as JSON: architecture, kernel, row class, and the fields of :class:`KernelConfig`."""
    nested: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    for (arch, kernel, rows), config in table.items():
        nested.setdefault(arch, {}).setdefault(kernel, {})[rows] = asdict(config)
    Path(path).write_text(json.dumps(nested, indent=1) + "\n")


def _checked(where: str, kernel: str, rows: str, options: Any) -> KernelConfig:
    if kernel not in KERNELS:
        raise ValueError(f"{where}: there is no such kernel: choose one of {', '.join(KERNELS)}.")
    if rows not in (SMALL, LARGE):
        raise ValueError(f"{where}: there is no such row class: choose {SMALL} or {LARGE}.")
    options = dict(_object(where, options, "options"))
    known = {field.name for field in fields(KernelConfig)}
    needed = known - {"SPLIT", "GROUP_M"}
    if not needed <= options.keys() <= known:
        raise ValueError(f"{where} has {sorted(options)}; give {', '.join(sorted(needed))}, and SPLIT and GROUP_M if need be.")
    for name, value in options.items():
        if type(value) is not int or value < 1 or (name not in ("num_stages", "GROUP_M") and value & (value - 1)):
            raise ValueError(f"{where}: {name}={value!r}; give a whole number of at least 1, tiles and warps as powers of two.")
    if options.get("SPLIT", 1) > 4:
        raise ValueError(f"{where}: SPLIT={options['SPLIT']}; the epilogue is cut into 1, 2 or 4 pieces.")
    config = KernelConfig(**options)
    if small := [name for name in ("BM", "BN", "BK") if getattr(config, name) < SMALLEST_TILE]:
        raise ValueError(f"{where}: {small[0]}={options[small[0]]}; the kernels' products take at least {SMALLEST_TILE}.")
    if config.BN // config.SPLIT < SMALLEST_TILE:
        raise ValueError(f"{where}: BN={config.BN} in SPLIT={config.SPLIT} pieces; a piece needs {SMALLEST_TILE} columns.")
    if config.num_warps > MOST_WARPS:
        raise ValueError(f"{where}: num_warps={config.num_warps}; a program has at most {MOST_WARPS}.")
    return config


def _check_whole(path: str | Path, entries: Table) -> None:
    """An architecture that the shipped table lacks needs an entry for every kernel."""
    shipped = {arch for arch, _, _ in TABLE}
    for arch in sorted({arch for arch, _, _ in entries} - shipped):
        if missing := [kernel for kernel in KERNELS if (arch, kernel, LARGE) not in entries]:
            raise ValueError(f"{path}: {arch} is new to the table and lacks {LARGE} entries for {', '.join(missing)}.")


def should_permute_first(arch: str, hidden_dim: int) -> bool:
    """Whether copying x into expert order first, to load it by TMA too, costs less than the gathered loads.

    By F (1/gathered - 1/tma) > 1/bandwidth with the figures of others' kernels on an H200 (docs/design/kernels.md): F > 648.
    Twice that is asked for until it is measured here.
    """
    gathered, with_tma, bytes_per_second = 469e12, 564e12, 4.3e12
    break_even = 1.0 / (bytes_per_second * (1.0 / gathered - 1.0 / with_tma))
    return arch in ("sm_90", "sm_100") and hidden_dim >= 2 * break_even
