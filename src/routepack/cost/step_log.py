"""What the microbatches of an optimizer step had to do, and how long the step took. Letters: :mod:`routepack.core`.

``routepack.steps/1`` is one JSON object a line and a step: what the trainer logs and ``routepack calibrate`` fits.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from routepack.core.arrays import checked_array
from routepack.core.checks import real
from routepack.core.errors import ConfigError, TraceError
from routepack.core.plans import Plan
from routepack.core.rollouts import RoutingDemand
from routepack.cost.evaluation import sums_by
from routepack.cost.models import num_packed_groups, ranks_per_group

FORMAT = "routepack.steps/1"
_ARRAYS = {"tokens_MW": 2, "pairs_MW": 2, "rows_MG": 2, "joined_rows_M": 1}


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLoads:
    """What a step's cells and units bring: all that its predicted time is made of."""

    tokens_MW: np.ndarray
    """int64 [M, W]: tokens of each cell."""
    pairs_MW: np.ndarray
    """int64 [M, W]: squares of sequence lengths, summed over each cell."""
    rows_MG: np.ndarray
    """int64 [M, G]: routed rows of the fullest EP rank of each unit, summed over layers."""
    joined_rows_M: np.ndarray
    """int64 [M]: routed rows of the fullest EP rank of any group, summed over layers."""

    def __post_init__(self) -> None:
        for name, ndim in _ARRAYS.items():
            array = checked_array(self, name, np.int64, ndim=ndim)
            if (array < 0).any():
                raise TraceError(f"{name} counts what a step brings; it has {int(array.min())}.")
        microbatches, ranks = self.tokens_MW.shape
        groups = self.rows_MG.shape[-1]
        sizes = {microbatches, len(self.pairs_MW), len(self.rows_MG), len(self.joined_rows_M)}
        if len(sizes) != 1 or not microbatches or self.pairs_MW.shape[1] != ranks or not groups or ranks % groups:
            raise TraceError(
                "a step's arrays must be of the same microbatches and ranks, and groups must divide ranks; they have shapes "
                + ", ".join(f"{name} {getattr(self, name).shape}" for name in _ARRAYS)
                + "."
            )

    @property
    def num_microbatches(self) -> int:
        """M."""
        return len(self.joined_rows_M)

    @property
    def num_groups(self) -> int:
        """G."""
        return self.rows_MG.shape[1]

    @classmethod
    def of_rows(cls, plan: Plan, rows_MGRL: np.ndarray, microbatches: np.ndarray | None = None) -> StepLoads:
        """The loads of a plan whose units routed *rows_MGRL*, int [M, G, R, L], rows to each EP rank.

        Of some *microbatches* only, int [M], where an optimizer step had only those.
        """
        cells, shape = plan.packing.num_cells, (plan.num_microbatches, plan.topology.data_parallel_degree)
        tokens_C, pairs_C = np.zeros(cells, np.int64), np.zeros(cells, np.int64)
        np.add.at(tokens_C, plan.packing.cell_of_S, plan.length_S)
        np.add.at(pairs_C, plan.packing.cell_of_S, plan.length_S**2)
        used = slice(None) if microbatches is None else microbatches
        return cls(
            tokens_MW=tokens_C.reshape(shape)[used],
            pairs_MW=pairs_C.reshape(shape)[used],
            rows_MG=rows_MGRL.max(axis=2).sum(axis=-1),
            joined_rows_M=rows_MGRL.max(axis=(1, 2)).sum(axis=-1),
        )

    @classmethod
    def planned(cls, plan: Plan, demand: RoutingDemand) -> StepLoads:
        """The loads that a plan expects of the demand that it was made for."""
        from routepack.solvers.rank_loads import rank_load

        ranks, groups = plan.topology.expert_parallel_degree, num_packed_groups(plan.topology)
        load_SRL = rank_load(demand.tokens_SLE, plan.placement.rank_of_LE(ranks), ranks)
        unit_of_S = plan.packing.cell_of_S // ranks_per_group(plan.topology)
        load_URL = sums_by(unit_of_S, load_SRL, plan.num_microbatches * groups)
        return cls.of_rows(plan, load_URL.reshape(plan.num_microbatches, groups, *load_URL.shape[1:]))


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRecord:
    """One step: what it brought and what it took."""

    loads: StepLoads
    seconds: float
    """Wall seconds of the slowest rank: forward and backward passes and the optimizer, without moves and planning."""
    step: int = 0
    predicted_seconds: Mapping[str, float] = field(default_factory=dict)
    """What each ``sync`` predicted before the step was run; empty while too little was known."""

    def __post_init__(self) -> None:
        if not real("seconds", self.seconds, error=TraceError) > 0:
            raise TraceError(f"seconds={self.seconds!r} of step {self.step} must be above 0.")

    def to_json(self) -> str:
        """One line of ``routepack.steps/1``."""
        arrays = {name: getattr(self.loads, name).tolist() for name in _ARRAYS}
        predicted = {"predicted_seconds": dict(self.predicted_seconds)} if self.predicted_seconds else {}
        return json.dumps({"format": FORMAT, "step": self.step, "seconds": self.seconds, **predicted, **arrays})


def load_steps(paths: Iterable[str | Path]) -> list[StepRecord]:
    """The steps of ``routepack.steps/1`` files, in order. Raises ConfigError or TraceError naming file and line.

    Of a line that was cut off at the end of a file, as a killed run leaves it, there is a warning.
    """
    records: list[StepRecord] = []
    for path in paths:
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"step log {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
        lines = text.splitlines()
        if _is_torn(text, lines):
            warnings.warn(f"{path}: the last line, {len(lines)}, was cut off and does not count.", stacklevel=2)
            del lines[-1]
        records += [_parsed(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    return records


def _is_torn(text: str, lines: Sequence[str]) -> bool:
    """Whether the last line is the beginning of one: what a run leaves that was killed while it wrote."""
    if text.endswith("\n") or not lines or not lines[-1].startswith("{"):
        return False
    try:
        json.loads(lines[-1])
    except ValueError:
        return True
    return False


def _parsed(line: str, where: str) -> StepRecord:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON ({error}); a step log has one JSON object a line: remove the line.") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise TraceError(f"{where}: not a line of {FORMAT}; the trainer writes one where trainer.step_log is set.")
    missing = [name for name in (*_ARRAYS, "seconds") if name not in value]
    if missing:
        raise TraceError(f"{where}: {', '.join(missing)} missing.")
    try:
        loads = StepLoads(**{name: np.asarray(value[name]) for name in _ARRAYS})
        predicted = value.get("predicted_seconds", {})
        return StepRecord(loads=loads, seconds=value["seconds"], step=int(value.get("step", 0)), predicted_seconds=predicted)
    except (ValueError, TypeError) as error:
        raise TraceError(f"{where}: {error}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class StackedLoads:
    """The loads of n steps side by side; microbatches that a step does not have are zeros, which cost nothing."""

    tokens_nMGw: np.ndarray
    """float64 [n, M, G, W / G]."""
    pairs_nMGw: np.ndarray
    rows_nMG: np.ndarray
    """float64 [n, M, G]."""
    joined_rows_n: np.ndarray
    """float64 [n]."""
    microbatches_n: np.ndarray
    """float64 [n]."""

    @classmethod
    def of(cls, steps: Sequence[StepLoads]) -> StackedLoads:
        """Stack steps. Raises TraceError where they are of different ranks or groups."""
        layouts = {(loads.tokens_MW.shape[1], loads.num_groups) for loads in steps}
        if len(layouts) != 1:
            raise TraceError(f"the steps are of {sorted(layouts)} [ranks, groups]: fit the logs of one topology at a time.")
        ((ranks, groups),) = layouts
        most = max(loads.num_microbatches for loads in steps)

        def stacked(name: str) -> np.ndarray:
            arrays = [getattr(loads, name) for loads in steps]
            return np.stack([np.pad(a, ((0, most - len(a)), (0, 0))) for a in arrays]).astype(np.float64)

        cells = (len(steps), most, groups, ranks // groups)
        return cls(
            tokens_nMGw=stacked("tokens_MW").reshape(cells),
            pairs_nMGw=stacked("pairs_MW").reshape(cells),
            rows_nMG=stacked("rows_MG"),
            joined_rows_n=np.array([float(loads.joined_rows_M.sum()) for loads in steps]),
            microbatches_n=np.array([float(loads.num_microbatches) for loads in steps]),
        )
