"""``routepack.plan/1`` files: the arrays of a plan as tensors, and all its other fields as JSON in the metadata.

The entries of the JSON are the fields of :class:`~routepack.Plan` and of the nouns that it is made of. A field with a default
may be missing, as it is in files that were written before there was one.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np

from routepack.core.checks import instance
from routepack.core.errors import RoutePackError, TraceError
from routepack.core.files import naming
from routepack.core.plans import Certificate, ExpertPlacement, Packing, PackingRules, Plan, PlannedBy, Topology
from routepack.core.tensor_files import check_format, check_names, read_tensors, write_tensors

PLAN = "routepack.plan/1"
_TENSORS = ("physical_to_logical", "cell_of_sequence", "order", "length")
_OF_TENSORS = ("placement", "packing", "length_S")
"""The fields of a plan that its tensors hold."""
_PARTS = {
    "topology": Topology, "certificate": Certificate, "rules": PackingRules, "packer": PlannedBy, "rerouter": PlannedBy,
}  # fmt: skip
"""The fields of a plan that are JSON objects of their own."""


def load_plan(path: str | Path) -> Plan:
    """Read a ``routepack.plan/1`` file; whether it still is what was planned, :func:`routepack.verify` tells.

    Raises TraceError for a file that is missing, truncated, of another format, or no whole plan.
    """
    metadata, tensors = read_tensors(path)
    check_format(path, metadata, PLAN)
    header = _header(path, metadata)
    check_names(path, tensors, _TENSORS, PLAN)
    try:
        with naming(path):
            return _plan(header, tensors)
    except RoutePackError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TraceError(f"{path} is not a whole {PLAN} file: a value is not of its kind ({error}). Plan again.") from error


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a ``routepack.plan/1`` file. Raises ConfigError where *path* cannot be written."""
    instance("plan", plan, Plan)
    arrays = (plan.placement.physical_to_logical_LP, plan.packing.cell_of_S, plan.packing.order_S, plan.length_S)
    tensors = dict(zip(_TENSORS, arrays, strict=True))
    write_tensors(path, tensors, {"format": PLAN, "plan": json.dumps(plan.header())})


def _plan(header: dict[str, Any], tensors: dict[str, np.ndarray]) -> Plan:
    header |= {name: noun(**header[name]) for name, noun in _PARTS.items() if name in header}
    packing = Packing(
        cell_of_S=tensors["cell_of_sequence"],
        order_S=tensors["order"],
        num_microbatches=header.pop("num_microbatches"),
        data_parallel_degree=header["topology"].data_parallel_degree,
    )
    placement = ExpertPlacement(physical_to_logical_LP=tensors["physical_to_logical"])
    return Plan(placement=placement, packing=packing, length_S=tensors["length"], **header)


def _header(path: str | Path, metadata: dict[str, str]) -> dict[str, Any]:
    """The JSON of a plan: all entries that a plan is made of and no others."""
    if "plan" not in metadata:
        raise TraceError(f"{path} lacks the metadata entry 'plan', which says what was planned: plan again.")
    try:
        header = json.loads(metadata["plan"])
    except RecursionError as error:
        raise TraceError(f"{path} is not a whole {PLAN} file: its header is nested too deeply.") from error
    except ValueError as error:
        raise TraceError(f"{path} is not a whole {PLAN} file: its header is no JSON ({error}).") from error
    wanted = {name: needed for name, needed in _entries(Plan).items() if name not in _OF_TENSORS}
    _check_entries(path, "its header", header, wanted | {"num_microbatches": True, "digest": True})
    for name, noun in _PARTS.items():
        if name in header:
            _check_entries(path, name, header[name], _entries(noun))
    if not header["digest"]:
        raise TraceError(f"{path} has lost the digest of its plan: plan again.")
    return header


def _entries(noun: type) -> dict[str, bool]:
    """The fields of a noun, and whether each must be there because it has no default."""
    return {entry.name: entry.default is MISSING and entry.default_factory is MISSING for entry in fields(noun)}


def _check_entries(path: str | Path, name: str, given: object, wanted: dict[str, bool]) -> None:
    """Raise TraceError unless *given* is an object with the required of the *wanted* entries and no others."""
    if not isinstance(given, dict):
        raise TraceError(f"{path} is not a whole {PLAN} file: {name} is a {type(given).__name__}, no JSON object.")
    missing = [key for key, is_required in wanted.items() if is_required and key not in given]
    unknown = [key[:40] for key in given if key not in wanted]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown[:8])}, which no plan has"
        raise TraceError(f"{path} is not a whole {PLAN} file: {name} {what}. Was it changed, or cut off? Plan again.")
