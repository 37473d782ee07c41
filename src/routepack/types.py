"""The nouns: what is recorded, what is planned, and on which ranks.

Letters, as everywhere in RoutePack (a name ends in its axes, ``tokens_SLE``):

    S sequences · T recorded rows (tokens fed in) · L MoE layers · E logical experts
    K top-k · P physical expert slots of one expert-parallel (EP) group
    R ranks of one EP group · G EP groups · W data-parallel (DP) ranks
    M microbatches of an optimizer step · N tokens (T plus the last token of each sequence)

All arrays are numpy: planning never needs torch, and ``torch.from_numpy`` shares their
memory where the trainer does. A constructor also takes CPU torch tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from routepack.errors import ConfigError, PlanError, TraceError

Sync = Literal["step", "microbatch", "layer"]
SYNCS: tuple[Sync, ...] = ("step", "microbatch", "layer")


def id_dtype(num_experts: int) -> np.dtype:
    """The dtype of recorded expert ids, chosen from the number of experts, never from the data.

    >>> [str(id_dtype(n)) for n in (256, 257, 32_768, 32_769)]
    ['uint8', 'int16', 'int16', 'int32']
    """
    if num_experts <= 256:
        return np.dtype(np.uint8)
    return np.dtype(np.int16 if num_experts <= 32_768 else np.int32)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Which data-parallel rank meets which in an expert-parallel group.

    The expert mesh is row-major over the same ranks as the data mesh, as in TorchTitan:
    an EP group is ``expert_parallel_degree`` consecutive ranks.

    >>> Topology(data_parallel_degree=4, expert_parallel_degree=2).group_of_W.tolist()
    [0, 0, 1, 1]
    """

    data_parallel_degree: int
    """W, the ranks that each get microbatches of their own."""
    expert_parallel_degree: int
    """R, the ranks that share one copy of every layer's experts."""
    model_parallel_degree: int = 1
    """Ranks that work on the same microbatch: context-parallel x tensor-parallel degree."""
    ranks_per_node: int = 8
    """Ranks joined by the fast links of one node."""

    def __post_init__(self) -> None:
        for name in ("data_parallel_degree", "expert_parallel_degree", "model_parallel_degree", "ranks_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ConfigError(f"topology.{name}={value!r} must be a whole number of at least 1.")
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
        return (
            np.arange(self.data_parallel_degree, dtype=np.int32)
            * self.model_parallel_degree
            // self.expert_parallel_degree
        )

    def slots_per_rank(self, num_experts: int) -> int:
        """Experts that each rank of an EP group holds. Raises ConfigError where they do not divide evenly."""
        if num_experts % self.expert_parallel_degree:
            raise ConfigError(
                f"topology.expert_parallel_degree={self.expert_parallel_degree} does not divide the "
                f"{num_experts} experts: choose a divisor of {num_experts}."
            )
        return num_experts // self.expert_parallel_degree


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutBatch:
    """One step's sequences, flat, with the experts that the rollout chose for every token.

    Row t of a sequence is the route of the token fed in at position t, so a sequence of n tokens has
    n rows, or n - 1 where the last token was never fed in, or none where nothing was recorded.
    Ids are global logical ids, before any logical-to-physical map; shared experts are not among them.
    """

    routed_experts_TLK: np.ndarray
    """uint8, int16 or int32 [T, L, K]: logical expert ids, see :func:`id_dtype`."""
    cu_seqlens: np.ndarray
    """int64 [S + 1]: sequence s owns rows ``cu_seqlens[s]:cu_seqlens[s + 1]``."""
    num_tokens_S: np.ndarray
    """int64 [S]: the tokens of each sequence, prompt included."""
    num_experts: int
    layer_ids_L: np.ndarray | None = None
    """int32 [L]: absolute decoder layer of each MoE layer; unique. None: 0 .. L - 1."""
    valid_T: np.ndarray | None = None
    """bool [T]: False where the row was not really recorded. None: all were."""
    group_S: np.ndarray | None = None
    """int64 [S]: the prompt that a rollout belongs to."""
    token_fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Per-token arrays [N, ...], N = sum of num_tokens_S: ``token_ids``, ``loss_mask``, ``logprobs``, ``advantages`` ..."""
    sequence_fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Per-sequence arrays [S, ...], such as ``rewards``."""
    source: str = ""
    """Where the routing came from, for people."""
    weights_version: str = ""
    """The version of the policy weights that sampled the rollouts."""

    def __post_init__(self) -> None:
        ids = _array(self, "routed_experts_TLK", ndim=3)
        if ids.dtype.kind not in "iu":
            raise TraceError(f"routed_experts has dtype {ids.dtype}; expert ids are whole numbers.")
        _array(self, "cu_seqlens", np.int64, ndim=1)
        _array(self, "num_tokens_S", np.int64, ndim=1)
        if self.layer_ids_L is None:
            object.__setattr__(self, "layer_ids_L", np.arange(ids.shape[1], dtype=np.int32))
        for name, dtype in (("layer_ids_L", np.int32), ("valid_T", np.bool_), ("group_S", np.int64)):
            if getattr(self, name) is not None:
                _array(self, name, dtype, ndim=1)
        for name in ("token_fields", "sequence_fields"):
            fields = {key: _to_numpy(value, key) for key, value in getattr(self, name).items()}
            object.__setattr__(self, name, MappingProxyType(fields))
        _check_rollout_batch(self)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.num_tokens_S)

    @property
    def num_layers(self) -> int:
        """L, the MoE layers recorded."""
        return self.routed_experts_TLK.shape[1]

    @property
    def top_k(self) -> int:
        """K, experts per token and layer."""
        return self.routed_experts_TLK.shape[2]

    @cached_property
    def cu_tokens(self) -> np.ndarray:
        """int64 [S + 1]: sequence s owns entries ``cu_tokens[s]:cu_tokens[s + 1]`` of every token field."""
        return np.concatenate([[0], np.cumsum(self.num_tokens_S)])

    def routed_experts_of(self, sequence: int) -> np.ndarray:
        """[rows, L, K]: the recorded ids of one sequence, a view."""
        return self.routed_experts_TLK[self.cu_seqlens[sequence] : self.cu_seqlens[sequence + 1]]


def _check_rollout_batch(batch: RolloutBatch) -> None:
    rows, layers, top_k = batch.routed_experts_TLK.shape
    if not 1 <= batch.num_experts:
        raise TraceError(f"num_experts={batch.num_experts} must be at least 1.")
    if top_k > batch.num_experts or top_k < 1 or layers < 1:
        raise TraceError(
            f"routed_experts has shape {batch.routed_experts_TLK.shape} [rows, layers, top_k]: at least one layer, and "
            f"1 to num_experts={batch.num_experts} experts a token, are needed."
        )
    if len(batch.layer_ids_L) != layers or len(np.unique(batch.layer_ids_L)) != layers:
        raise TraceError(
            f"layer_ids={batch.layer_ids_L.tolist()} must name each of the {layers} recorded layers once "
            "(a draft or MTP layer must not share a number with a decoder layer)."
        )
    offsets = batch.cu_seqlens
    if len(offsets) != batch.num_sequences + 1 or offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 0).any():
        raise TraceError(
            f"cu_seqlens must hold {batch.num_sequences + 1} ascending offsets from 0 to the {rows} recorded rows."
        )
    _check_rows(batch)
    expected = {"valid_T": rows, "group_S": batch.num_sequences}
    for name, size in expected.items():
        value = getattr(batch, name)
        if value is not None and len(value) != size:
            raise TraceError(f"{name} has {len(value)} entries; {size} are needed.")
    for fields, size, what in (
        (batch.token_fields, int(batch.num_tokens_S.sum()), "tokens"),
        (batch.sequence_fields, batch.num_sequences, "sequences"),
    ):
        for name, value in fields.items():
            if value.ndim < 1 or len(value) != size:
                raise TraceError(f"field {name!r} has shape {value.shape}; its first axis must be the {size} {what}.")


def _check_rows(batch: RolloutBatch) -> None:
    rows_S, tokens_S = np.diff(batch.cu_seqlens), batch.num_tokens_S
    if batch.num_sequences and tokens_S.min() < 1:
        s = int(tokens_S.argmin())
        raise TraceError(f"sequence {s} has {tokens_S[s]} tokens; every sequence has at least one.")
    wrong = np.flatnonzero((rows_S != tokens_S) & (rows_S != tokens_S - 1) & (rows_S != 0))
    if len(wrong):
        s = int(wrong[0])
        raise TraceError(
            f"sequence {s} has {rows_S[s]} recorded rows for {tokens_S[s]} tokens ({len(wrong)} such sequences): rows must "
            f"be {tokens_S[s] - 1} or {tokens_S[s]}, or 0 where nothing was recorded. Cut routes together with tokens."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingDemand:
    """How many routed rows each sequence brings to each expert of each layer: all that planning needs.

    Without ``estimated_S`` every count was recorded. A sequence's counts add up, in every layer, to
    top_k times its valid rows (conservation), which construction checks.
    """

    tokens_SLE: np.ndarray
    """uint16 or int32 [S, L, E]: routed rows."""
    length_S: np.ndarray
    """int64 [S]: tokens, what the token cap and attention count."""
    top_k: int
    group_S: np.ndarray | None = None
    """int64 [S]: rollout group; never constrains packing."""
    layer_ids_L: np.ndarray | None = None
    """int32 [L]: absolute decoder layers. None: 0 .. L - 1."""
    estimated_S: np.ndarray | None = None
    """bool [S]: True where too little was recorded and the window's mean route per token stands in."""
    num_masked_rows: int = 0
    """Recorded rows that the validity mask excluded from the counts."""
    name: str = ""

    def __post_init__(self) -> None:
        tokens = _array(self, "tokens_SLE", ndim=3)
        if tokens.dtype not in (np.uint16, np.int32):
            if tokens.dtype.kind not in "iu":
                raise TraceError(f"tokens_SLE has dtype {tokens.dtype}; counts are whole numbers (uint16 or int32).")
            if tokens.size and (tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max):
                raise TraceError("tokens_SLE holds counts outside 0 .. 2147483647.")
            object.__setattr__(self, "tokens_SLE", tokens.astype(np.int32))
        _array(self, "length_S", np.int64, ndim=1)
        if self.layer_ids_L is None:
            object.__setattr__(self, "layer_ids_L", np.arange(tokens.shape[1], dtype=np.int32))
        for name, dtype in (("layer_ids_L", np.int32), ("group_S", np.int64), ("estimated_S", np.bool_)):
            if getattr(self, name) is not None:
                _array(self, name, dtype, ndim=1)
        _check_demand(self)

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.tokens_SLE.shape[0]

    @property
    def num_layers(self) -> int:
        """L."""
        return self.tokens_SLE.shape[1]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.tokens_SLE.shape[2]

    @cached_property
    def tokens_LE(self) -> np.ndarray:
        """int64 [L, E]: the window's routed rows of each expert."""
        return self.tokens_SLE.sum(axis=0, dtype=np.int64)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of counts and lengths: what ties a plan to the window it was made for."""
        return digest_of(self.tokens_SLE, self.length_S, np.asarray([self.top_k]))


def _check_demand(demand: RoutingDemand) -> None:
    sequences, layers, experts = demand.tokens_SLE.shape
    if min(sequences, layers, experts) < 1:
        raise TraceError(
            f"tokens_SLE has shape {demand.tokens_SLE.shape}: at least one sequence, layer and expert are needed."
        )
    if not 1 <= demand.top_k <= experts:
        raise TraceError(f"top_k={demand.top_k} must lie between 1 and the {experts} experts.")
    for name, size in (("length_S", sequences), ("group_S", sequences), ("estimated_S", sequences), ("layer_ids_L", layers)):
        value = getattr(demand, name)
        if value is not None and len(value) != size:
            raise TraceError(f"{name} has {len(value)} entries; tokens_SLE needs {size}.")
    if len(np.unique(demand.layer_ids_L)) != layers:
        raise TraceError(f"layer_ids={demand.layer_ids_L.tolist()} must be unique.")
    if demand.length_S.min() < 1:
        s = int(demand.length_S.argmin())
        raise TraceError(f"sequence {s} has length {demand.length_S[s]}; every sequence has at least one token.")
    if demand.tokens_SLE.dtype == np.int32 and demand.tokens_SLE.min() < 0:
        raise TraceError("tokens_SLE holds negative counts.")
    _check_conservation(demand)


def _check_conservation(demand: RoutingDemand) -> None:
    routed_SL = demand.tokens_SLE.sum(axis=2, dtype=np.int64)
    uneven = np.flatnonzero((routed_SL != routed_SL[:, :1]).any(axis=1))
    if len(uneven):
        s = int(uneven[0])
        raise TraceError(
            f"sequence {s} has {routed_SL[s].min()} to {routed_SL[s].max()} routed rows in its layers; every layer routes "
            f"the same tokens, so counts must agree ({len(uneven)} such sequences)."
        )
    routed_S, most_S = routed_SL[:, 0], demand.top_k * demand.length_S
    wrong = np.flatnonzero((routed_S > most_S) | (routed_S % demand.top_k != 0))
    if len(wrong):
        s = int(wrong[0])
        raise TraceError(
            f"sequence {s} has {routed_S[s]} routed rows a layer for {demand.length_S[s]} tokens and top_k={demand.top_k}: "
            f"a multiple of top_k, at most {most_S[s]}, is needed."
        )


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
        slots = _array(self, "physical_to_logical_LP", np.int32, ndim=2)
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
class Packing:
    """Which cell (microbatch, DP rank) each sequence goes to, and where inside it.

    Cell c is microbatch ``c // W`` of DP rank ``c % W``. Every cell holds at least one sequence, so
    every rank runs every collective.
    """

    cell_of_S: np.ndarray
    """int32 [S]."""
    order_S: np.ndarray | None = None
    """int32 [S]: position of the sequence inside its cell, 0, 1, ... None: by sequence number."""
    num_microbatches: int
    data_parallel_degree: int

    def __post_init__(self) -> None:
        cells = _array(self, "cell_of_S", np.int32, ndim=1)
        if self.order_S is None:
            object.__setattr__(self, "order_S", _positions_in_cells(cells))
        order = _array(self, "order_S", np.int32, ndim=1)
        if len(cells) and not (0 <= cells.min() and cells.max() < self.num_cells):
            raise PlanError(
                f"cells run from {cells.min()} to {cells.max()}; {self.num_microbatches} microbatches on "
                f"{self.data_parallel_degree} ranks have cells 0 .. {self.num_cells - 1}."
            )
        counts_C = np.bincount(cells, minlength=self.num_cells)
        if (counts_C == 0).any():
            cell = int(np.flatnonzero(counts_C == 0)[0])
            raise PlanError(
                f"cell {cell} (microbatch {cell // self.data_parallel_degree}, rank {cell % self.data_parallel_degree}) is "
                "empty: every rank needs a sequence in every microbatch."
            )
        by_cell = np.lexsort((order, cells))
        expected = np.arange(len(cells)) - np.repeat(np.cumsum(counts_C) - counts_C, counts_C)
        if len(order) != len(cells) or (order[by_cell] != expected).any():
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


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """How many microbatches a window needs at least, and how that is known."""

    num_microbatches: int
    lower_bound: int
    """Microbatches that no packing can go below: a bin-packing bound divided by the DP ranks, rounded up."""
    method: str
    """The bound that gave it, such as ``L2``."""

    @property
    def certified(self) -> bool:
        """True where no plan can do with fewer microbatches."""
        return self.num_microbatches == self.lower_bound

    def __str__(self) -> str:
        state = "certified" if self.certified else f"best known, at least {self.lower_bound}"
        return f"M = {self.num_microbatches} ({state}, {self.method})"


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A placement and a packing of one optimizer-step window, with what they cost and how good that can get."""

    topology: Topology
    placement: ExpertPlacement
    packing: Packing
    length_S: np.ndarray
    """int64 [S]: the lengths that were packed."""
    max_tokens: int
    """The token cap of a cell."""
    sync: Sync
    """What joins the ranks in the value: ``step``, ``microbatch`` or ``layer``."""
    value: float
    """Predicted step, in the cost model's unit."""
    bound: float
    """No plan of this window can be predicted below this."""
    baseline_value: float
    """The same prediction for identity placement and first-fit packing."""
    certificate: Certificate
    baseline_microbatches: int = 0
    """Microbatches that the baseline needs."""
    unit: str = "relative"
    """``seconds``, or ``relative`` to a perfectly even window."""
    cost: Mapping[str, Any] = field(default_factory=dict)
    """The rates that priced the plan: ``expert``, ``linear``, ``quadratic``; and the model's name and options."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Terms and imbalance figures, ``planned.*``, ``baseline.*`` and ``bound.*``; see :mod:`routepack.metrics`."""
    seed: int = 0
    budget: Mapping[str, Any] = field(default_factory=dict)
    """How long the search ran: ``num_proposals`` (deterministic) or ``time_limit_seconds`` (not)."""
    plan_seconds: float = 0.0
    demand_digest: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    """SHA-256 of what the plan decides, taken when it was made; a later change of a cell or slot contradicts it."""

    def __post_init__(self) -> None:
        _array(self, "length_S", np.int64, ndim=1)
        if self.sync not in SYNCS:
            raise ConfigError(f"sync={self.sync!r} is unknown: choose {', '.join(SYNCS)}.")
        if len(self.length_S) != self.packing.num_sequences:
            raise PlanError(f"length_S has {len(self.length_S)} entries for {self.packing.num_sequences} packed sequences.")
        if not self.digest:
            object.__setattr__(self, "digest", self.content_digest())

    @property
    def gap(self) -> float:
        """How far the value lies above its bound, as a fraction: 0.02 is 2 %."""
        return self.value / self.bound - 1.0

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.packing.num_microbatches

    def content_digest(self) -> str:
        """The digest of the plan as it is now."""
        header = [self.num_microbatches, self.max_tokens, *vars_of(self.topology)]
        return digest_of(
            self.placement.physical_to_logical_LP,
            self.packing.cell_of_S,
            self.packing.order_S,
            self.length_S,
            np.asarray(header, dtype=np.int64),
        )


def vars_of(topology: Topology) -> list[int]:
    """The four degrees of a topology, in the order in which they are declared."""
    return [
        topology.data_parallel_degree,
        topology.expert_parallel_degree,
        topology.model_parallel_degree,
        topology.ranks_per_node,
    ]


def digest_of(*arrays: np.ndarray) -> str:
    """SHA-256 over dtype, shape and bytes of each array, in order."""
    digest = hashlib.sha256()
    for array in arrays:
        array = np.ascontiguousarray(array)
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _to_numpy(value: Any, name: str) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{name} is not an array: {error}") from error


def _array(noun: Any, name: str, dtype: Any = None, *, ndim: int) -> np.ndarray:
    value = _to_numpy(getattr(noun, name), name)
    if value.ndim != ndim:
        raise TraceError(f"{name} has shape {value.shape}; {ndim} axes are needed.")
    if dtype is not None and value.dtype != dtype:
        cast = value.astype(dtype)
        if value.size and not np.array_equal(cast, value):
            raise TraceError(f"{name} has dtype {value.dtype} with values that {np.dtype(dtype)} cannot hold.")
        value = cast
    object.__setattr__(noun, name, value)
    return value
