"""What every stack's hook asks: lengths, and what each sequence routes, in; order, cell offsets and placement out.

:func:`schedule` is the one neutral call. A :class:`Hook` brings it into a stack's own call shape; none imports its stack. For a
new stack, copy ``megatron.py``: one method, in the stack's call shape, that calls ``_begin`` and ``_schedule``.
Cell c is microbatch ``c // W`` of DP rank ``c % W``, as everywhere. Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.rerouter import IdentityRerouter
from routepack.core.arrays import to_numpy
from routepack.core.checks import instance, whole
from routepack.core.errors import ConfigError, TraceError
from routepack.core.plans import ExpertPlacement, PackingRules, Plan, Topology
from routepack.core.rollouts import RolloutBatch, RoutingDemand, check_lengths
from routepack.cost.links import FreeLinks
from routepack.planning.planner import Planner
from routepack.solvers.fewest_microbatches import certify_rows

logger = logging.getLogger(__name__)

DUMMY = -1
"""In ``Schedule.order``: a cell that no sequence was left for. Its rank trains on nothing there, with every collective."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Which sequences are trained together: the same number of cells on every rank, none of them empty."""

    order: np.ndarray
    """int64: the sequences of cell 0, then of cell 1, ...; a cell without one holds a single :data:`DUMMY`."""
    cell_offsets: np.ndarray
    """int64 [M x W + 1]: cell c is ``order[cell_offsets[c]:cell_offsets[c + 1]]``."""
    plan: Plan
    """With value, bounds and certificate. Dummies, where there are any, are its last sequences, of one token each."""
    by_routing: bool
    """False: packed by length alone, since no routes were given."""

    @property
    def placement(self) -> ExpertPlacement | None:
        """Where the experts should be. None where no routes were given. No hook moves experts."""
        return self.plan.placement if self.by_routing else None

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.plan.num_microbatches

    @property
    def data_parallel_degree(self) -> int:
        """W."""
        return self.plan.topology.data_parallel_degree

    def cell(self, microbatch: int, rank: int) -> list[int]:
        """The sequences of one microbatch of one rank."""
        cell = microbatch * self.data_parallel_degree + rank
        return self.order[self.cell_offsets[cell] : self.cell_offsets[cell + 1]].tolist()

    def cells(self) -> list[list[int]]:
        """The sequences of every cell."""
        return [part.tolist() for part in np.split(self.order, self.cell_offsets[1:-1])]

    def rank(self, rank: int) -> list[list[int]]:
        """The sequences of every microbatch of one rank."""
        return [self.cell(microbatch, rank) for microbatch in range(self.num_microbatches)]


def default_planner() -> Planner:
    """What a hook plans with where no planner is given: experts stay where they are, no expert parallelism."""
    return Planner(
        topology=Topology(data_parallel_degree=1, expert_parallel_degree=1),
        packer=AttentionAwarePacker(max_tokens=1),
        rerouter=IdentityRerouter(),
    )


def schedule(
    lengths: ArrayLike,
    *,
    data_parallel_degree: int,
    max_tokens: int,
    demand: RoutingDemand | None = None,
    group_ids: ArrayLike | None = None,
    modalities: ArrayLike | None = None,
    min_microbatches: int = 1,
    microbatch_multiple: int = 1,
    equal_sequences: bool = False,
    dummies: bool = False,
    padded_to: int = 1,
    planner: Planner | None = None,
) -> Schedule:
    """One optimizer step's sequences, dealt to cells.

    Args:
        lengths: int [S]: what each sequence takes of the cap, as the stack counts it.
        data_parallel_degree: W.
        max_tokens: the cap of a cell.
        demand: what each sequence routes. None: by length alone, as if experts cost what tokens do.
        group_ids: int [S], rollout groups; they never constrain packing.
        modalities: int [S]: a microbatch is of one of them, on all ranks.
        min_microbatches: M is at least this.
        microbatch_multiple: M is a multiple of this.
        equal_sequences: every rank gets S / W of them.
        dummies: where sequences are too few to fill every cell, fill it with :data:`DUMMY` instead of raising.
        padded_to: sequences were padded to multiples of this; how far *lengths* may exceed those of the demand.
        planner: what to plan with; its cap, rules and data-parallel degree give way to those asked for here.

    Raises:
        InfeasibleError: a sequence above the cap, or too few of them. From all figures, so on every rank that has them.
        TraceError: the demand is of other sequences.

    >>> planned = schedule([5, 3, 4, 4], data_parallel_degree=2, max_tokens=8)
    >>> planned.num_microbatches, sorted(sum([5, 3, 4, 4][s] for s in cell) for cell in planned.cells()), planned.by_routing
    (1, [8, 8], False)

    """
    length_S = _checked_lengths(lengths)
    planner = default_planner() if planner is None else planner
    instance("planner", planner, Planner)
    rules = {"min_microbatches": min_microbatches, "microbatch_multiple": microbatch_multiple}
    packer = replace(planner.packer, max_tokens=max_tokens, equal_sequences=equal_sequences, sequence_skew=0, **rules)
    degrees = {"data_parallel_degree": data_parallel_degree}
    if demand is None:
        window, degrees = _of_lengths(length_S), degrees | {"expert_parallel_degree": 1}
        planner = replace(planner, rerouter=IdentityRerouter(), links=FreeLinks())
    else:
        window = _as_counted(demand, length_S, padded_to)
    topology = replace(planner.topology, **degrees)
    if group_ids is not None:
        window = replace(window, group_S=to_numpy(group_ids, "group_ids"))
    if modalities is not None:
        window = replace(window, modality_S=to_numpy(modalities, "modalities"))
    if dummies:
        window = _with_dummies(window, max_tokens, data_parallel_degree, PackingRules(**rules))
    plan = replace(planner, topology=topology, packer=packer).plan(window)
    return _as_schedule(plan, len(length_S), by_routing=demand is not None)


@dataclass(kw_only=True, eq=False)
class Hook:
    """A stack's function, planned by RoutePack: give it what the next call's sequences route with :meth:`expect`."""

    planner: Planner | None = None
    """Cost model, sync, seed, expert-parallel degree and rerouter; :func:`default_planner` where None. A rerouter that moves
    experts needs somebody who moves them: by ``schedules[...].placement``, before the step."""
    schedules: list[Schedule] = field(default_factory=list, init=False)
    """Of the last call, one for each optimizer step that it planned."""
    _expected: RoutingDemand | None = field(default=None, init=False, repr=False)
    """Of the next call."""
    _demand: RoutingDemand | None = field(default=None, init=False, repr=False)
    """Of the call that is being planned."""

    def expect(self, window: RolloutBatch | RoutingDemand) -> None:
        """The next call is about these sequences, in this order. Without it, the call packs by length alone, and says so."""
        instance("window", window, (RolloutBatch, RoutingDemand))
        if isinstance(window, RolloutBatch):
            planner = default_planner() if self.planner is None else self.planner
            window = planner.collector.collect(window)
        self._expected = window

    def _begin(self, count: int) -> None:
        """Start a call about *count* sequences, with what was expected; that is used up."""
        demand = self._demand = self._expected
        self._expected, self.schedules = None, []
        if demand is None:
            logger.info("%s packs %d sequences by length alone: no routes were given to expect()", type(self).__name__, count)
        elif demand.num_sequences != count:
            raise TraceError(
                f"{type(self).__name__} was told to expect {demand.num_sequences} sequences and is called with {count}: "
                "expect() the sequences of the very next call."
            )

    def _schedule(self, lengths: ArrayLike, *, of: Sequence[int] | None = None, **asked: Any) -> Schedule:
        """Plan one optimizer step as :func:`schedule` does; *of*: which of the call's sequences it trains. None: all."""
        demand = self._demand if of is None or self._demand is None else self._demand.select(of)
        planned = schedule(lengths, demand=demand, planner=self.planner, **asked)
        self.schedules.append(planned)
        return planned


def chunks(total: int, size: int | None, called: str) -> Iterator[range]:
    """The optimizer steps of *total* sequences, *size* in each; None: one step of all.

    Raises ConfigError, which calls the size *called*, where it does not divide the sequences.
    """
    size = total if size is None else whole(called, size, least=1)
    if not total or total % size:
        raise ConfigError(f"{called}={size} does not divide the {total} sequences: choose a divisor.")
    return (range(first, first + size) for first in range(0, total, size))


def fewest_microbatches(length_S: np.ndarray, max_tokens: int, ranks: int, rules: PackingRules) -> int:
    """How many microbatches a rank needs at least, none above *max_tokens*, which no length exceeds."""
    certificate, _ = certify_rows(length_S, max_tokens, ranks, rules=rules)
    return certificate.num_microbatches


def _checked_lengths(lengths: ArrayLike) -> np.ndarray:
    length_S = to_numpy(lengths, "lengths")
    if length_S.ndim != 1 or length_S.dtype.kind not in "iu" or not len(length_S):
        raise TraceError(f"lengths has shape {length_S.shape} and dtype {length_S.dtype}; whole numbers [S] are needed, S > 0.")
    check_lengths(length_S)
    return length_S.astype(np.int64)


def _of_lengths(length_S: np.ndarray) -> RoutingDemand:
    """One expert that gets every token: nothing but lengths."""
    return RoutingDemand(tokens_SLE=length_S[:, None, None], length_S=length_S, top_k=1, name="lengths alone")


def _as_counted(demand: RoutingDemand, length_S: np.ndarray, padded_to: int) -> RoutingDemand:
    """The demand with lengths as the stack counts them: padded, or without the last token, which is never fed in."""
    instance("demand", demand, RoutingDemand)
    whole("padded_to", padded_to, least=1)
    if demand.num_sequences != len(length_S):
        raise TraceError(f"the demand is of {demand.num_sequences} sequences; {len(length_S)} lengths were given.")
    more_S = length_S - demand.length_S
    wrong = np.flatnonzero((more_S < -1) | (more_S >= padded_to))
    if len(wrong):
        s = int(wrong[0])
        raise TraceError(
            f"sequence {s} has {demand.length_S[s]} tokens in the demand and {length_S[s]} here ({len(wrong)} such sequences): "
            f"give both in one order, cut alike, and padded_to={padded_to} as sequences are padded."
        )
    return replace(demand, length_S=length_S)


def _with_dummies(window: RoutingDemand, max_tokens: int, ranks: int, rules: PackingRules) -> RoutingDemand:
    """The window and, for each modality that cannot fill its cells, as many sequences of one token as are missing."""
    whole("data_parallel_degree", ranks, least=1)
    tagged = window.modality_S
    kinds = [None] if tagged is None else np.unique(tagged).tolist()
    asked = rules if len(kinds) == 1 else PackingRules()
    missing: list[tuple[Any, int]] = []
    for kind in kinds:
        length_S = window.length_S if tagged is None else window.length_S[tagged == kind]
        if length_S.max() <= max_tokens:
            missing.append((kind, max(0, fewest_microbatches(length_S, max_tokens, ranks, asked) * ranks - len(length_S))))
    count = sum(more for _, more in missing)
    if not count:
        return window
    nothing_SLE = np.zeros((count, *window.tokens_SLE.shape[1:]), dtype=window.tokens_SLE.dtype)
    more_modality = [kind for kind, more in missing for _ in range(more)]
    estimated_S = window.estimated_S
    return replace(
        window,
        tokens_SLE=np.concatenate([window.tokens_SLE, nothing_SLE]),
        length_S=np.concatenate([window.length_S, np.ones(count, dtype=np.int64)]),
        group_S=None,
        modality_S=None if tagged is None else np.concatenate([tagged, more_modality]).astype(np.int64),
        estimated_S=None if estimated_S is None else np.concatenate([estimated_S, np.zeros(count, dtype=bool)]),
    )


def _as_schedule(plan: Plan, num_sequences: int, *, by_routing: bool) -> Schedule:
    cells = [cell[cell < num_sequences] for cell in plan.packing.cells()]
    cells = [cell if len(cell) else np.array([DUMMY]) for cell in cells]
    return Schedule(
        order=np.concatenate(cells).astype(np.int64),
        cell_offsets=np.concatenate([[0], np.cumsum([len(cell) for cell in cells])]).astype(np.int64),
        plan=plan,
        by_routing=by_routing,
    )


def setting(of: Any, name: str) -> Any:
    """A stack's setting, from an object or a mapping; None where it has none of that name."""
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)
