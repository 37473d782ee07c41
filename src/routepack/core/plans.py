"""What is planned: on which ranks, experts in which slots, sequences in which cells. Letters: :mod:`routepack.core`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from routepack.core.arrays import as_plain, checked_array, digest_of
from routepack.core.checks import instance, real
from routepack.core.component import Component, Count, CountOrZero, Limits, NotNegative
from routepack.core.errors import ConfigError, PlanError, RoutePackError

Sync = Literal["step", "microbatch", "layer"]
SYNCS: tuple[Sync, ...] = ("step", "microbatch", "layer")


DEGREES = ("data_parallel_degree", "expert_parallel_degree", "model_parallel_degree", "ranks_per_node")
"""What a topology is given by."""


@dataclass(frozen=True, kw_only=True)
class Topology(Component):
    """Which data-parallel rank meets which in an expert-parallel group.

    The expert mesh is row-major over the same ranks as the data mesh, as in TorchTitan:
    an EP group is ``expert_parallel_degree`` consecutive ranks.

    >>> Topology(data_parallel_degree=4, expert_parallel_degree=2).group_of_W.tolist()
    [0, 0, 1, 1]
    """

    section: ClassVar[str] = "topology"

    data_parallel_degree: Count
    """W, the ranks that each get microbatches of their own."""
    expert_parallel_degree: Count
    """R, the ranks that share one copy of every layer's experts."""
    model_parallel_degree: Count = 1
    """Ranks that work on the same microbatch: context-parallel x tensor-parallel degree."""
    ranks_per_node: Count = 8
    """Ranks joined by the fast links of one node."""

    def check_options(self) -> None:
        """Raise ConfigError where the ranks do not divide into EP groups."""
        ranks = self.data_parallel_degree * self.model_parallel_degree
        if ranks % self.expert_parallel_degree:
            raise ConfigError(
                f"topology.expert_parallel_degree={self.expert_parallel_degree} does not divide the {ranks} ranks of "
                f"topology.data_parallel_degree={self.data_parallel_degree} x model_parallel_degree="
                f"{self.model_parallel_degree}: choose a divisor of {ranks}."
            )
        if self.expert_parallel_degree % self.model_parallel_degree and self.expert_parallel_degree > 1:
            raise ConfigError(
                f"topology.model_parallel_degree={self.model_parallel_degree} must divide "
                f"topology.expert_parallel_degree={self.expert_parallel_degree}: a DP rank lies in one EP group."
            )

    @property
    def num_groups(self) -> int:
        """G, the number of EP groups; each holds every expert once."""
        return self.data_parallel_degree * self.model_parallel_degree // self.expert_parallel_degree

    @cached_property
    def group_of_W(self) -> np.ndarray:
        """int32 [W]: the EP group of each DP rank."""
        rank_W = np.arange(self.data_parallel_degree, dtype=np.int64)
        return (rank_W * self.model_parallel_degree // self.expert_parallel_degree).astype(np.int32)

    def slots_per_rank(self, num_experts: int) -> int:
        """Experts that each rank of an EP group holds. Raises ConfigError where they do not divide evenly."""
        degree = self.expert_parallel_degree
        if num_experts % degree:
            below = max(r for r in range(1, min(degree, num_experts + 1)) if num_experts % r == 0)
            above = min((r for r in range(degree + 1, num_experts + 1) if num_experts % r == 0), default=None)
            remedy = f"{below}" if above is None else f"{below} or {above}"
            raise ConfigError(
                f"topology.expert_parallel_degree={degree} does not divide the {num_experts} experts, and every rank holds as "
                f"many as the next: choose a divisor of {num_experts}; the nearest are {remedy}."
            )
        return num_experts // self.expert_parallel_degree


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertPlacement:
    """Which logical expert sits in which physical slot, layer by layer.

    Slot p is held by EP rank ``p // (P / R)``. Without replicas every row is a permutation.

    >>> ExpertPlacement(physical_to_logical_LP=[[2, 0, 1, 3]]).logical_to_physical_LE.tolist()
    [[1, 2, 0, 3]]
    """

    physical_to_logical_LP: np.ndarray
    """int32 [L, P]."""

    def __post_init__(self) -> None:
        slots = checked_array(self, "physical_to_logical_LP", np.int32, ndim=2)
        wrong = np.flatnonzero((np.sort(slots, axis=1) != np.arange(slots.shape[1])).any(axis=1))
        if len(wrong):
            layer = int(wrong[0])
            raise PlanError(
                f"placement of layer {layer} is not a permutation of its {slots.shape[1]} experts: "
                f"{slots[layer].tolist()} ({len(wrong)} such layers)."
            )

    @classmethod
    def identity(cls, num_layers: int, num_experts: int) -> ExpertPlacement:
        """Expert e in slot e of every layer: what a trainer starts from."""
        return cls(physical_to_logical_LP=np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1)))

    @property
    def num_layers(self) -> int:
        """L."""
        return self.physical_to_logical_LP.shape[0]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.physical_to_logical_LP.shape[1]

    @cached_property
    def logical_to_physical_LE(self) -> np.ndarray:
        """int32 [L, E]: the slot of each logical expert."""
        return np.argsort(self.physical_to_logical_LP, axis=1).astype(np.int32)

    def rank_of_LE(self, num_ranks: int) -> np.ndarray:
        """int32 [L, E]: the EP rank, of ``num_ranks``, that holds each logical expert."""
        return self.logical_to_physical_LE // np.int32(self.num_experts // num_ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing(Component):
    """Which cell (microbatch, DP rank) each sequence goes to, and where inside it.

    Cell c is microbatch ``c // W`` of DP rank ``c % W``. Every cell holds at least one sequence, so
    every rank runs every collective.
    """

    section: ClassVar[str] = "packing"
    error: ClassVar[type[RoutePackError]] = PlanError

    cell_of_S: np.ndarray
    """int32 [S]."""
    order_S: np.ndarray = None  # pyrefly: ignore[bad-assignment]
    """int32 [S]: position of the sequence inside its cell, 0, 1, ... None, when constructing: by sequence number."""
    num_microbatches: Count
    data_parallel_degree: Count

    def __post_init__(self) -> None:
        cells = checked_array(self, "cell_of_S", np.int32, ndim=1)
        if self.order_S is None:
            object.__setattr__(self, "order_S", _positions_in_cells(cells))
        checked_array(self, "order_S", np.int32, ndim=1)

    def check_options(self) -> None:
        """Raise PlanError unless every cell holds a sequence and numbers its own 0, 1, 2, ..."""
        cells, order = self.cell_of_S, self.order_S
        if len(cells) and not (cells.min() >= 0 and cells.max() < self.num_cells):
            raise PlanError(
                f"cells run from {cells.min()} to {cells.max()}; {self.num_microbatches} microbatches on "
                f"{self.data_parallel_degree} ranks have cells 0 .. {self.num_cells - 1}."
            )
        if self.num_cells > len(cells):
            raise PlanError(
                f"{self.num_microbatches} microbatches on {self.data_parallel_degree} ranks are {self.num_cells} cells, and "
                f"{len(cells)} sequences cannot fill them: every rank needs a sequence in every microbatch."
            )
        counts_C = np.bincount(cells, minlength=self.num_cells)
        if (counts_C == 0).any():
            cell = int(np.flatnonzero(counts_C == 0)[0])
            raise PlanError(
                f"cell {cell} (microbatch {cell // self.data_parallel_degree}, rank {cell % self.data_parallel_degree}) is "
                "empty: every rank needs a sequence in every microbatch."
            )
        if len(order) != len(cells):
            raise PlanError(f"order_S has {len(order)} entries for {len(cells)} sequences.")
        by_cell = np.lexsort((order, cells))
        expected = np.arange(len(cells)) - np.repeat(np.cumsum(counts_C) - counts_C, counts_C)
        if (order[by_cell] != expected).any():
            raise PlanError("order_S must number the sequences of every cell 0, 1, 2, ... without gaps.")

    @property
    def num_cells(self) -> int:
        """M x W."""
        return self.num_microbatches * self.data_parallel_degree

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.cell_of_S)

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        by_cell = np.lexsort((self.order_S, self.cell_of_S))
        return by_cell, np.searchsorted(self.cell_of_S[by_cell], np.arange(self.num_cells + 1))

    def sequences_of(self, microbatch: int, rank: int) -> np.ndarray:
        """int64: the sequences of one cell, in their order."""
        by_cell, starts = self._sorted
        cell = microbatch * self.data_parallel_degree + rank
        return by_cell[starts[cell] : starts[cell + 1]]

    def cells(self) -> Iterator[np.ndarray]:
        """The sequences of cell 0, 1, ..., in their order."""
        for microbatch in range(self.num_microbatches):
            for rank in range(self.data_parallel_degree):
                yield self.sequences_of(microbatch, rank)


def _positions_in_cells(cell_of_S: np.ndarray) -> np.ndarray:
    by_cell = np.argsort(cell_of_S, kind="stable")
    sorted_cells = cell_of_S[by_cell]
    position_S = np.empty(len(cell_of_S), dtype=np.int32)
    position_S[by_cell] = np.arange(len(cell_of_S)) - np.searchsorted(sorted_cells, sorted_cells)
    return position_S


@dataclass(frozen=True, kw_only=True)
class PackingRules(Component):
    """What a training stack asks of the microbatches beyond the cap. The defaults ask nothing.

    >>> PackingRules(min_microbatches=3, microbatch_multiple=4).allowed(1)
    4
    """

    section: ClassVar[str] = "packer"

    min_microbatches: Count = 1
    """Microbatches that there must be at least, as a pipeline needs to fill its stages."""
    microbatch_multiple: Count = 1
    """Their number must be a multiple of this, as interleaved pipeline schedules need."""
    equal_sequences: bool = False
    """Every DP rank gets S / W sequences over the window, as stacks need that split a batch evenly. Cells may differ."""
    sequence_skew: CountOrZero = 0
    """By how many sequences ranks may differ under ``equal_sequences``: 1 serves windows that W does not divide."""

    def check_options(self) -> None:
        """Raise ConfigError where a skew is given that nothing asks about."""
        if self.sequence_skew and not self.equal_sequences:
            raise ConfigError(
                f"packer.sequence_skew={self.sequence_skew} loosens packer.equal_sequences, which is off: turn that on, or "
                "leave sequence_skew at 0."
            )

    def allowed(self, num_microbatches: int) -> int:
        """The fewest microbatches, of so many or more, that the rules allow."""
        least = max(num_microbatches, self.min_microbatches)
        return -(-least // self.microbatch_multiple) * self.microbatch_multiple

    def counts_allowed(self, cell_of_S: np.ndarray, num_ranks: int) -> bool:
        """Whether the ranks' numbers of sequences are near enough to one another."""
        if not self.equal_sequences:
            return True
        count_W = np.bincount(cell_of_S % num_ranks, minlength=num_ranks)
        return bool(count_W.max() - count_W.min() <= self.sequence_skew)


@dataclass(frozen=True, kw_only=True)
class Certificate(Component):
    """How many microbatches a window needs at least, and how that is known."""

    section: ClassVar[str] = "certificate"
    error: ClassVar[type[RoutePackError]] = PlanError

    num_microbatches: Count
    """Microbatches of the plan; of the packing found, where there is no plan yet."""
    lower_bound: Count
    """Microbatches that no packing can go below: a bin-packing bound divided by the DP ranks, rounded up."""
    method: str
    """What proves that: ``L2``, or an exact search that found fewer impossible: ``bin completion``, ``CP-SAT``."""
    possible: Count = None  # pyrefly: ignore[bad-assignment]
    """The fewest that a packing was found for. None, when constructing: ``num_microbatches``."""

    def __post_init__(self) -> None:
        if self.possible is None:
            object.__setattr__(self, "possible", self.num_microbatches)

    @property
    def certified(self) -> bool:
        """True where no plan can do with fewer microbatches."""
        return self.num_microbatches == self.lower_bound

    def __str__(self) -> str:
        state = "certified" if self.possible == self.lower_bound else f"best known, at least {self.lower_bound}"
        if self.possible < self.num_microbatches:
            state = f"{self.possible} possible: {state}"
        return f"M = {self.num_microbatches} ({state}, {self.method})"


@dataclass(frozen=True, kw_only=True)
class PlannedBy(Component):
    """Which packer made a plan's packing, or which rerouter its placement."""

    section: ClassVar[str] = "plan.packer or plan.rerouter"
    error: ClassVar[type[RoutePackError]] = PlanError

    name: str
    """Its class, by import path."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options that it had; components inside it as configs with a ``_target_``."""
    instead_of: str = ""
    """The planner's own component, where what that made was not taken; else empty."""
    why: str = ""
    """Why it was not taken, or what else is to be said."""

    def __str__(self) -> str:
        name, other = (path.rpartition(".")[2] for path in (self.name, self.instead_of))
        return f"{name} instead of {other}: {self.why}" if other else f"{name} ({self.why})" if self.why else name


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(Component):
    """A placement and a packing of one optimizer-step window, with what they cost and how good that can get."""

    section: ClassVar[str] = "plan"
    error: ClassVar[type[RoutePackError]] = PlanError

    topology: Topology
    placement: ExpertPlacement
    packing: Packing
    length_S: np.ndarray
    """int64 [S]: the lengths that were packed."""
    max_tokens: Annotated[int, Limits(least=1)]
    """The token cap of a cell."""
    sync: Sync
    """What joins the ranks in the value: ``step``, ``microbatch`` or ``layer``."""
    value: NotNegative
    """Predicted step, in the cost model's unit."""
    bound: NotNegative
    """No plan of this window can be predicted below this."""
    baseline_value: NotNegative
    """The same prediction for identity placement and first-fit packing."""
    certificate: Certificate
    baseline_microbatches: Annotated[int, Limits(least=0)] = 0
    """Microbatches that the baseline needs."""
    packer: PlannedBy | None = None
    """What made the packing: the planner's packer, or a baseline's where that was better. None: the file does not say."""
    rerouter: PlannedBy | None = None
    """What made the placement."""
    rules: PackingRules = PackingRules()
    """What was asked of the microbatches. The baseline is not held to ``equal_sequences``."""
    unit: str = "relative"
    """``seconds``, or ``relative`` to a perfectly even window."""
    cost: Mapping[str, Any] = field(default_factory=dict)
    """The rates that priced the plan: ``expert``, ``linear``, ``quadratic``; and the model's name and options."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Terms and imbalance figures, ``planned.*``, ``baseline.*`` and ``bound.*``; see :mod:`routepack.report.plan_metrics`."""
    seed: Annotated[int, Limits(least=0)] = 0
    budget: Mapping[str, Any] = field(default_factory=dict)
    """How long the search ran: ``num_proposals`` (deterministic) or ``time_limit_seconds`` (not)."""
    plan_seconds: NotNegative = 0.0
    kernel_seconds: NotNegative = 0.0
    """Of these, what compiling or loading kernels took before the clock of a time limit started; 0 without one."""
    demand_digest: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    """SHA-256 of all that the plan decides and says, taken when it was made; any later change contradicts it."""

    def __post_init__(self) -> None:
        checked_array(self, "length_S", np.int64, ndim=1)

    def check_options(self) -> None:
        """Raise PlanError where the plan contradicts itself; take its digest where it has none."""
        if len(self.length_S) != self.packing.num_sequences:
            raise PlanError(f"length_S has {len(self.length_S)} entries for {self.packing.num_sequences} packed sequences.")
        if self.value > 0 and not self.bound > 0:
            raise PlanError(f"plan.bound={self.bound!r} must be above 0, as plan.value={self.value!r} is.")
        self._check_cost()
        if not self.digest:
            object.__setattr__(self, "digest", self.content_digest())

    def _check_cost(self) -> None:
        """The rates that are there: numbers, and lists with one for every attention stage."""
        for name in {"expert", "inside", "across"} & self.cost.keys():
            real(f"plan.cost[{name!r}]", self.cost[name], least=0.0, error=PlanError)
        stages = {name: as_plain(self.cost[name]) for name in ("linear", "quadratic", "window") if name in self.cost}
        for name, rates in stages.items():
            instance(f"plan.cost[{name!r}]", rates, list, error=PlanError)
            for rate in rates:
                real(f"plan.cost[{name!r}]", rate, least=0.0, error=PlanError)
        if any(not rates or len(rates) != len(next(iter(stages.values()))) for rates in stages.values()):
            raise PlanError(
                f"plan.cost must hold {', '.join(stages)} once for each attention stage, of which there is at least one."
            )
        for name, kind in (("model", str), ("options", Mapping), ("links", Mapping)):
            if name in self.cost:
                instance(f"plan.cost[{name!r}]", self.cost[name], kind, error=PlanError)

    @property
    def gap(self) -> float:
        """How far the value lies above its bound, as a fraction: 0.02 is 2 %."""
        return self.value / self.bound - 1.0 if self.bound else 0.0

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.packing.num_microbatches

    def header(self) -> dict[str, Any]:
        """All that is not an array, as plain numbers, strings, lists and dicts."""
        return {
            "topology": {name: getattr(self.topology, name) for name in DEGREES},
            "num_microbatches": int(self.num_microbatches),
            "certificate": asdict(self.certificate),
            "rules": asdict(self.rules),
            **{name: asdict(made) for name in ("packer", "rerouter") if (made := getattr(self, name)) is not None},
            **{name: as_plain(getattr(self, name)) for name in _FIGURES},
        }

    def content_digest(self) -> str:
        """The digest of the plan as it is now. The time that planning took is left out: it differs between ranks."""
        header = {name: value for name, value in self.header().items() if name not in _TIMES_AND_DIGEST}
        text = json.dumps(header, sort_keys=True).encode()
        arrays = (self.placement.physical_to_logical_LP, self.packing.cell_of_S, self.packing.order_S, self.length_S)
        return digest_of(*arrays, np.frombuffer(text, dtype=np.uint8))


_FIGURES = (
    "max_tokens", "sync", "value", "bound", "baseline_value", "baseline_microbatches", "unit", "cost", "parts", "seed",
    "budget", "plan_seconds", "kernel_seconds", "demand_digest", "versions", "digest",
)  # fmt: skip
_TIMES_AND_DIGEST = ("digest", "plan_seconds", "kernel_seconds")
