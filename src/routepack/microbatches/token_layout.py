"""Where every token of a microbatch goes: packed, padded, sliced over context-parallel ranks. Letters: :mod:`routepack.core`.

Token ids, targets, masks, advantages and replayed routes must stay beside one another, so all go through the same
:class:`Layout` by :func:`lay_out`; only what fills the padding differs, and routes have :func:`spread_routes` for that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from routepack.core.checks import whole
from routepack.core.errors import ConfigError, TraceError
from routepack.core.plans import ExpertPlacement
from routepack.core.rollouts import RolloutBatch

PADDING = -1
"""In ``source_n``: no token stands here."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The places of a microbatch, or of one context-parallel rank's part of it."""

    source_n: np.ndarray
    """int64 [n]: which of the packed tokens stands in each place; PADDING where none does."""
    ordinal_n: np.ndarray
    """int64 [n]: the padding's running number, the same on every context-parallel rank; 0 where a token stands."""
    cu_seqlens: np.ndarray
    """int64 [S + 1]: places of each sequence in the whole microbatch, the padding of its own included."""

    @property
    def num_padding(self) -> int:
        """Places without a token."""
        return int((self.source_n == PADDING).sum())


def packed_layout(
    length_S: np.ndarray, *, pad_sequences_to: int = 1, pad_to_multiple_of: int = 1, first_ordinal: int = 0
) -> Layout:
    """Sequences end to end, each filled to a multiple, and the whole filled to another.

    >>> packed_layout(np.array([3, 2]), pad_sequences_to=2, pad_to_multiple_of=4).source_n.tolist()
    [0, 1, 2, -1, 3, 4, -1, -1]

    Args:
        length_S: int [S], tokens of each sequence.
        pad_sequences_to: zigzag slices need twice the context-parallel degree.
        first_ordinal: the number of the first padding, so that several microbatches' padding spreads as one.
    """
    whole("pad_sequences_to", pad_sequences_to, least=1)
    whole("pad_to_multiple_of", pad_to_multiple_of, least=1)
    length_S = np.asarray(length_S, dtype=np.int64)
    filled_S = length_S + -length_S % pad_sequences_to
    cu_seqlens = np.concatenate([[0], np.cumsum(filled_S)])
    total = int(cu_seqlens[-1] + -cu_seqlens[-1] % pad_to_multiple_of)
    source_n = np.full(total, PADDING, dtype=np.int64)
    place_n = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], filled_S)
    source_n[: cu_seqlens[-1]][place_n < np.repeat(length_S, filled_S)] = np.arange(int(length_S.sum()))
    padded_n = source_n == PADDING
    return Layout(
        source_n=source_n,
        ordinal_n=np.where(padded_n, first_ordinal + np.cumsum(padded_n) - 1, 0),
        cu_seqlens=cu_seqlens,
    )


def lay_out(value_n: np.ndarray, layout: Layout, fill: Any = 0) -> np.ndarray:
    """[n, ...]: *value_n* of the packed tokens in the layout's places, *fill* in the others, one of them or one each.

    The result is wide enough for values and filler alike: a filler id of 300 does not wrap in uint8.
    """
    value_n, fill = np.asarray(value_n), np.asarray(fill)
    padded_n = layout.source_n == PADDING
    wanted = int(layout.source_n.max(initial=PADDING)) + 1
    if len(value_n) < wanted:
        raise TraceError(
            f"{len(value_n)} packed tokens do not fill a layout of {wanted}: lay out tokens and routes of one packing."
        )
    dtype = _common_dtype(value_n.dtype, fill) if padded_n.any() else value_n.dtype
    result = np.empty((len(padded_n), *value_n.shape[1:]), dtype=dtype)
    result[~padded_n] = value_n[layout.source_n[~padded_n]]
    result[padded_n] = fill
    return result


def _common_dtype(dtype: np.dtype, fill: np.ndarray) -> np.dtype:
    """*dtype*, or where whole-number filler does not fit it, the narrowest that holds both."""
    if dtype.kind not in "iu" or fill.dtype.kind not in "iu" or not fill.size:
        return dtype
    least, most = int(fill.min()), int(fill.max())
    if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
        return dtype
    return np.result_type(dtype, np.min_scalar_type(least), np.min_scalar_type(most))


def spread_routes(ordinal_n: np.ndarray, top_k: int, placement: ExpertPlacement, num_ranks: int) -> np.ndarray:
    """int32 [n, L, K]: logical experts for padding tokens by their numbers, spread over the *num_ranks* EP ranks.

    Choice i = ordinal * K + k goes to EP rank i mod R and there to slot (i // R) mod P/R: any E choices in a row are
    different experts, and any R choices in a row are different ranks.
    """
    num_experts = placement.num_experts
    if top_k > num_experts:
        raise ConfigError(f"top_k={top_k} is more than the {num_experts} experts of the placement.")
    if num_ranks < 1 or num_experts % num_ranks:
        raise ConfigError(f"expert_parallel_degree={num_ranks} does not divide the {num_experts} experts.")
    slots = num_experts // num_ranks
    choice_nK = np.asarray(ordinal_n)[:, None] * top_k + np.arange(top_k)
    slot_nK = (choice_nK % num_ranks) * slots + (choice_nK // num_ranks) % slots
    return placement.physical_to_logical_LP[:, slot_nK].transpose(1, 0, 2)


def lay_out_routes(routed_experts_nLK: np.ndarray, layout: Layout, placement: ExpertPlacement, num_ranks: int) -> np.ndarray:
    """[n, L, K]: routes in the layout's places, and :func:`spread_routes` where it has no token.

    Args:
        routed_experts_nLK: the packed tokens' routes, in the row order of every other array that is laid out.
    """
    ordinal_n = layout.ordinal_n[layout.source_n == PADDING]
    fill = spread_routes(ordinal_n, routed_experts_nLK.shape[2], placement, num_ranks)
    return lay_out(routed_experts_nLK, layout, fill)


class ContextSlices(ABC):
    """How a microbatch's places are divided over the ranks of a context-parallel group."""

    def __init__(self, degree: int) -> None:
        """*degree*: the ranks of the group."""
        self.degree = whole("context_parallel_degree", degree, least=1, most=2**16)

    def of_rank(self, layout: Layout, rank: int) -> Layout:
        """The part of context-parallel rank *rank*. Raises ConfigError where the places do not divide."""
        if not 0 <= rank < self.degree:
            raise ConfigError(f"rank={rank} is not one of the {self.degree} context-parallel ranks.")
        place_n = self.places(layout, rank)
        return replace(layout, source_n=layout.source_n[place_n], ordinal_n=layout.ordinal_n[place_n])

    @abstractmethod
    def places(self, layout: Layout, rank: int) -> np.ndarray:
        """int64: the places that rank *rank* holds, in its order."""


class ContiguousSlices(ContextSlices):
    """Each rank one run of the whole microbatch's places, whatever sequences it cuts."""

    def places(self, layout: Layout, rank: int) -> np.ndarray:
        """See :class:`ContextSlices`."""
        total = len(layout.source_n)
        if total % self.degree:
            raise ConfigError(f"{total} places do not divide over {self.degree} ranks: pad_to_multiple_of={self.degree}.")
        return np.arange(total // self.degree * rank, total // self.degree * (rank + 1))


class ZigzagSlices(ContextSlices):
    """Each sequence in twice as many pieces as ranks, of which rank r holds the r-th from either end.

    Causal attention evens out that way. Padding after the last sequence counts as one more.
    """

    def places(self, layout: Layout, rank: int) -> np.ndarray:
        """See :class:`ContextSlices`."""
        pieces = 2 * self.degree
        edges = np.unique(np.concatenate([layout.cu_seqlens, [len(layout.source_n)]]))
        size_S = np.diff(edges)
        if (size_S % pieces).any():
            raise ConfigError(
                f"sequences of {size_S[size_S % pieces > 0][0]} places do not divide into {pieces} pieces: "
                f"pad_sequences_to={pieces}, and pad_to_multiple_of a multiple of it."
            )
        parts = [
            np.arange(first + size * piece // pieces, first + size * (piece + 1) // pieces)
            for first, size in zip(edges[:-1].tolist(), size_S.tolist(), strict=True)
            for piece in (rank, pieces - 1 - rank)
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def truncate(batch: RolloutBatch, max_tokens: int) -> RolloutBatch:
    """*batch* with no sequence longer than *max_tokens*: tokens, their fields, routes and validity are cut together."""
    whole("max_tokens", max_tokens, least=1)
    num_tokens_S = np.minimum(batch.num_tokens_S, max_tokens)
    rows_S = np.minimum(np.diff(batch.cu_seqlens), num_tokens_S)
    keeps_T = _kept(batch.cu_seqlens, rows_S)
    keeps_N = _kept(batch.cu_tokens, num_tokens_S)
    return replace(
        batch,
        routed_experts_TLK=batch.routed_experts_TLK[keeps_T],
        cu_seqlens=np.concatenate([[0], np.cumsum(rows_S)]),
        num_tokens_S=num_tokens_S,
        valid_T=None if batch.valid_T is None else batch.valid_T[keeps_T],
        token_fields={name: value[keeps_N] for name, value in batch.token_fields.items()},
    )


def _kept(edges: np.ndarray, size_S: np.ndarray) -> np.ndarray:
    length_S = np.diff(edges)
    return np.arange(edges[-1]) - np.repeat(edges[:-1], length_S) < np.repeat(size_S, length_S)
