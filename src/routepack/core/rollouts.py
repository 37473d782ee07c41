"""What a rollout recorded, and the routing demand it amounts to. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from routepack.core.arrays import checked_array, digest_of, to_numpy
from routepack.core.checks import MOST, instance, whole
from routepack.core.errors import TraceError

TRACE_TENSORS = ("routed_experts", "cu_seqlens", "num_tokens", "layer_ids", "valid", "group_ids", "modality_ids")
"""Tensors of a trace file that are no fields; no field may take their names."""

MOST_EXPERTS = 2**16
"""Of a layer. Counts, placements and planning grow with the experts named, whether routed to or not: a larger number is a
mistake, or worse, that would take all memory and minutes."""


def id_dtype(num_experts: int) -> np.dtype:
    """The dtype of recorded expert ids, chosen from the number of experts, never from the data.

    >>> " ".join(str(id_dtype(num_experts)) for num_experts in (256, 257, 32_768, 32_769))
    'uint8 int16 int16 int32'
    """
    if num_experts <= 256:
        return np.dtype(np.uint8)
    return np.dtype(np.int16 if num_experts <= 32_768 else np.int32)


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
    layer_ids_L: np.ndarray = None  # pyrefly: ignore[bad-assignment]
    """int32 [L]: absolute decoder layer of each MoE layer; unique. None, when constructing: 0 .. L - 1."""
    valid_T: np.ndarray | None = None
    """bool [T]: False where the row was not really recorded. None: all were."""
    group_S: np.ndarray | None = None
    """int64 [S]: the prompt that a rollout belongs to."""
    modality_S: np.ndarray | None = None
    """int64 [S]: numbers for what makes sequences run different graphs, such as text and images: every microbatch then
    holds one of them, on all ranks. None: all run the same."""
    token_fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Per-token arrays [N, ...], N = sum of num_tokens_S: ``token_ids``, ``loss_mask``, ``logprobs``, ``advantages`` ..."""
    sequence_fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Per-sequence arrays [S, ...], such as ``rewards``."""
    source: str = ""
    """Where the routing came from, for people."""
    weights_version: str = ""
    """The version of the policy weights that sampled the rollouts."""

    def __post_init__(self) -> None:
        ids = checked_array(self, "routed_experts_TLK", ndim=3)
        if ids.dtype.kind not in "iu":
            raise TraceError(f"routed_experts has dtype {ids.dtype}; expert ids are whole numbers.")
        checked_array(self, "cu_seqlens", np.int64, ndim=1)
        checked_array(self, "num_tokens_S", np.int64, ndim=1)
        if self.layer_ids_L is None:
            object.__setattr__(self, "layer_ids_L", np.arange(ids.shape[1], dtype=np.int32))
        for name, dtype in (
            ("layer_ids_L", np.int32), ("valid_T", np.bool_), ("group_S", np.int64), ("modality_S", np.int64),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                checked_array(self, name, dtype, ndim=1)
        for name in ("token_fields", "sequence_fields"):
            object.__setattr__(self, name, MappingProxyType(_checked_fields(name, getattr(self, name))))
        for name in ("source", "weights_version"):
            instance(name, getattr(self, name), str, error=TraceError)
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


def fed_tokens(batch: RolloutBatch) -> np.ndarray:
    """int64 [S]: the rows that complete recording has, as many as tokens were fed in.

    The last token's counts where its route was recorded, which shows that it was fed in; else none was to be had.
    """
    rows_S, last_S = np.diff(batch.cu_seqlens), batch.cu_seqlens[1:] - 1
    was_fed_S = rows_S == batch.num_tokens_S
    if batch.valid_T is not None and len(batch.valid_T):
        was_fed_S &= batch.valid_T[last_S]
    return batch.num_tokens_S - 1 + was_fed_S


def _checked_fields(what: str, fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    instance(what, fields, Mapping, error=TraceError)
    for name in fields:
        if not isinstance(name, str) or not name or "," in name or name in TRACE_TENSORS:
            raise TraceError(
                f"{what} has a field named {name!r}: use a text without commas, other than {', '.join(TRACE_TENSORS)}."
            )
    return {name: to_numpy(value, name) for name, value in fields.items()}


def _check_rollout_batch(batch: RolloutBatch) -> None:
    rows, layers, top_k = batch.routed_experts_TLK.shape
    object.__setattr__(
        batch, "num_experts", whole("num_experts", batch.num_experts, least=1, most=MOST_EXPERTS, error=TraceError)
    )
    if top_k > batch.num_experts or top_k < 1 or layers < 1:
        raise TraceError(
            f"routed_experts has shape {batch.routed_experts_TLK.shape} [rows, layers, top_k]: at least one layer, and "
            f"1 to num_experts={batch.num_experts} experts a token, are needed."
        )
    if len(batch.layer_ids_L) != layers or len(np.unique(batch.layer_ids_L)) != layers or batch.layer_ids_L.min() < 0:
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
    expected = {"valid_T": rows, "group_S": batch.num_sequences, "modality_S": batch.num_sequences}
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
    check_lengths(tokens_S)
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
    """uint16, or int32 where a count needs it, [S, L, E]: routed rows."""
    length_S: np.ndarray
    """int64 [S]: tokens, what the token cap and attention count."""
    top_k: int
    group_S: np.ndarray | None = None
    """int64 [S]: rollout group; never constrains packing."""
    modality_S: np.ndarray | None = None
    """int64 [S]: sequences of different modality never share a microbatch. None: all are of one."""
    layer_ids_L: np.ndarray = None  # pyrefly: ignore[bad-assignment]
    """int32 [L]: absolute decoder layers. None, when constructing: 0 .. L - 1."""
    estimated_S: np.ndarray | None = None
    """bool [S]: True where too little was recorded and the window's mean route per token stands in."""
    num_masked_rows: int = 0
    """Recorded rows that the validity mask excluded from the counts."""
    name: str = ""

    def __post_init__(self) -> None:
        tokens = checked_array(self, "tokens_SLE", ndim=3)
        object.__setattr__(self, "tokens_SLE", _narrow_counts(tokens))
        checked_array(self, "length_S", np.int64, ndim=1)
        if self.layer_ids_L is None:
            object.__setattr__(self, "layer_ids_L", np.arange(tokens.shape[1], dtype=np.int32))
        for name, dtype in (
            ("layer_ids_L", np.int32), ("group_S", np.int64), ("modality_S", np.int64), ("estimated_S", np.bool_),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                checked_array(self, name, dtype, ndim=1)
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

    def select(self, sequences: Sequence[int] | np.ndarray) -> RoutingDemand:
        """The demand of some sequences, by number, in that order."""
        sequences = np.asarray(sequences, dtype=np.int64)
        optional = {name: getattr(self, name) for name in ("group_S", "modality_S", "estimated_S")}
        return replace(
            self,
            tokens_SLE=self.tokens_SLE[sequences],
            length_S=self.length_S[sequences],
            **{name: None if value is None else value[sequences] for name, value in optional.items()},
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of counts, lengths and modalities: what ties a plan to the window it was made for."""
        modality = () if self.modality_S is None else (self.modality_S,)
        return digest_of(self.tokens_SLE, self.length_S, np.asarray([self.top_k]), *modality)


def _narrow_counts(tokens_SLE: np.ndarray) -> np.ndarray:
    """The counts as uint16 where they fit, else as int32: one dtype for one window, whoever counted it."""
    if tokens_SLE.dtype == np.uint16:
        return tokens_SLE
    if tokens_SLE.dtype.kind not in "iu":
        raise TraceError(f"tokens_SLE has dtype {tokens_SLE.dtype}; counts are whole numbers (uint16 or int32).")
    least, most = (int(tokens_SLE.min()), int(tokens_SLE.max())) if tokens_SLE.size else (0, 0)
    if least < 0 or most > np.iinfo(np.int32).max:
        raise TraceError(f"tokens_SLE holds counts from {least} to {most}; they must lie in 0 .. 2147483647.")
    return tokens_SLE.astype(np.uint16 if most <= np.iinfo(np.uint16).max else np.int32, copy=False)


def _check_demand(demand: RoutingDemand) -> None:
    sequences, layers, experts = demand.tokens_SLE.shape
    if not sequences:
        raise TraceError("there are no sequences to plan for: was anything recorded?")
    if min(layers, experts) < 1:
        raise TraceError(f"tokens_SLE has shape {demand.tokens_SLE.shape}: at least one layer and expert are needed.")
    object.__setattr__(demand, "top_k", whole("top_k", demand.top_k, least=1, error=TraceError))
    if experts > MOST_EXPERTS:
        raise TraceError(f"tokens_SLE counts {experts} experts; at most {MOST_EXPERTS} can be planned.")
    if demand.top_k > experts:
        raise TraceError(f"top_k={demand.top_k} must lie between 1 and the {experts} experts.")
    sizes = dict.fromkeys(("length_S", "group_S", "modality_S", "estimated_S"), sequences) | {"layer_ids_L": layers}
    for name, size in sizes.items():
        value = getattr(demand, name)
        if value is not None and len(value) != size:
            raise TraceError(f"{name} has {len(value)} entries; tokens_SLE needs {size}.")
    if len(np.unique(demand.layer_ids_L)) != layers:
        raise TraceError(f"layer_ids={demand.layer_ids_L.tolist()} must be unique.")
    check_lengths(demand.length_S)
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
    routed_S = routed_SL[:, 0]
    # Solvers count the rows of a sequence in 32 bits.
    if routed_S.max() >= 2**31:
        s = int(routed_S.argmax())
        raise TraceError(f"sequence {s} has {routed_S[s]} routed rows a layer; at most {2**31 - 1} can be counted.")
    wrong = np.flatnonzero((routed_S // demand.top_k > demand.length_S) | (routed_S % demand.top_k != 0))
    if len(wrong):
        s = int(wrong[0])
        raise TraceError(
            f"sequence {s} has {routed_S[s]} routed rows a layer for {demand.length_S[s]} tokens and top_k={demand.top_k}: "
            f"a multiple of top_k, at most {demand.top_k * int(demand.length_S[s])}, is needed."
        )


def check_lengths(length_S: np.ndarray) -> None:
    """Raise TraceError, naming the first such sequence, unless each has 1 .. MOST tokens."""
    wrong = np.flatnonzero((length_S < 1) | (length_S > MOST))
    if len(wrong):
        s = int(wrong[0])
        raise TraceError(f"sequence {s} has {length_S[s]} tokens; every sequence has at least one, and at most {MOST}.")
