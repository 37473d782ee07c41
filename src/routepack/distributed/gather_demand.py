"""One window's demand from ranks that hold its sequences: each counts its own, only counts travel. Collective.

Letters: :mod:`routepack.core`. Without an initialised process group each function acts as on a single rank.
"""

from __future__ import annotations

import numpy as np
import torch

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import RoutePackError, TraceError
from routepack.core.rollouts import RolloutBatch, RoutingDemand
from routepack.distributed.collectives import gather_bytes, num_ranks


def collect_demand(
    collector: RoutingDemandCollector,
    batch: RolloutBatch | None,
    *,
    positions_S: np.ndarray | None = None,
    device: torch.device | str = "cpu",
    called: str = "positions_S",
) -> RoutingDemand:
    """The demand of all ranks' sequences, the same on every rank.

    What travels is [L, E] counts a sequence, 2 bytes each (4 where a sequence has more than 65,535 ids in a layer), and
    five numbers; never an id. Sequences without routes are estimated from the whole window, as on a single rank.

    Args:
        batch: this rank's sequences; None where it has none.
        positions_S: int64 [S of this rank], where each sequence stands in the window; together a permutation. None: the
            ranks' sequences one after another.
        device: where the collective runs; an accelerator for NCCL.
        called: what errors call *positions_S*.

    Raises:
        TraceError: on every rank, where one of them cannot count or the ranks disagree on layers, experts or top-k.
    """
    demand, coverage_S, error = None, np.empty(0), None
    try:
        if batch is not None:
            demand, coverage_S = collector.count(batch)
        positions_S = _positions(positions_S, 0 if demand is None else demand.num_sequences, called)
    except RoutePackError as problem:
        error = problem
    headers = gather_bytes(_header(demand, error, positions_S).tobytes(), device=device)
    shapes = _checked([np.frombuffer(header, dtype=np.int64) for header in headers], error)
    payload = b"" if demand is None else pack_counts(demand, coverage_S, positions_S, shapes[0].itemsize)
    parts = [
        _unpack(part, shape)
        for part, shape in zip(gather_bytes(payload, device=device), shapes, strict=True)
        if shape.sequences
    ]
    return _window(collector, parts, shapes, called)


def pack_counts(demand: RoutingDemand, coverage_S: np.ndarray, positions_S: np.ndarray | None, itemsize: int) -> bytes:
    """What one rank sends of its sequences: counts, lengths, groups, modalities, coverage and positions."""
    S = demand.num_sequences
    group_S, modality_S = (np.zeros(S, np.int64) if one is None else one for one in (demand.group_S, demand.modality_S))
    position_S = np.zeros(S, np.int64) if positions_S is None else positions_S
    counts = demand.tokens_SLE.astype(np.uint16 if itemsize == 2 else np.int32)
    words = (demand.length_S, group_S, modality_S, coverage_S.astype(np.float64), position_S)
    return b"".join(part.tobytes() for part in (counts, *words))


class _Shape:
    """One rank's header, read."""

    def __init__(self, header: np.ndarray) -> None:
        self.failed, self.sequences, self.layers, self.experts, self.top_k = (int(value) for value in header[:5])
        self.itemsize, self.has_groups, self.has_modalities, self.masked, self.placed = (int(value) for value in header[5:10])
        self.layer_ids = header[10:].tolist()
        self.flags = (self.has_modalities, self.placed)


def _header(demand: RoutingDemand | None, error: RoutePackError | None, positions_S: np.ndarray | None) -> np.ndarray:
    header = np.zeros(10, dtype=np.int64)
    header[0], header[5], header[9] = error is not None, 2, positions_S is not None
    if demand is None:
        return header
    header[1:5] = *demand.tokens_SLE.shape, demand.top_k
    header[5:7] = demand.tokens_SLE.itemsize, demand.group_S is not None
    header[7:9] = demand.modality_S is not None, demand.num_masked_rows
    return np.concatenate([header, demand.layer_ids_L.astype(np.int64)])


def _checked(headers: list[np.ndarray], error: RoutePackError | None) -> list[_Shape]:
    """Every rank's shape; the same errors on every rank, so that none waits for the next collective alone."""
    if error is not None:
        raise error
    shapes = [_Shape(header) for header in headers]
    failed = [rank for rank, shape in enumerate(shapes) if shape.failed]
    if failed:
        raise TraceError(f"rank {failed[0]} could not count its sequences: see its error. No demand was made.")
    first = next((shape for shape in shapes if shape.sequences), None)
    if first is None:
        raise TraceError(f"none of the {num_ranks()} ranks has a sequence.")
    for rank, shape in enumerate(shapes):
        mine, others = (shape.layers, shape.experts, shape.top_k), (first.layers, first.experts, first.top_k)
        if shape.sequences and (mine != others or shape.layer_ids != first.layer_ids or shape.flags != first.flags):
            raise TraceError(
                f"rank {rank} recorded {mine} [layers, experts, top_k], another rank {others}, or other layers, or positions "
                "or modalities are given on some ranks only: all must record one model."
            )
    itemsize = max(shape.itemsize for shape in shapes)
    for shape in shapes:
        shape.itemsize = itemsize
    return shapes


def _unpack(payload: bytes, shape: _Shape) -> list[np.ndarray]:
    S, dtype = shape.sequences, np.dtype(np.uint16 if shape.itemsize == 2 else np.int32)
    counts = np.frombuffer(payload, dtype, S * shape.layers * shape.experts).reshape(S, shape.layers, shape.experts)
    words = np.frombuffer(payload, np.int64, 5 * S, counts.nbytes).reshape(5, S)
    return [counts, words[0], words[1], words[2], words[3].view(np.float64), words[4]]


def _window(
    collector: RoutingDemandCollector, parts: list[list[np.ndarray]], shapes: list[_Shape], called: str
) -> RoutingDemand:
    rank_S = np.repeat(np.arange(len(shapes)), [shape.sequences for shape in shapes])
    shapes = [shape for shape in shapes if shape.sequences]
    counts, length_S, group_S, modality_S, coverage_S, position_S = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    order_S = np.arange(len(length_S))
    if shapes[0].placed:
        _check_permutation(position_S, rank_S, called)
        order_S = np.argsort(position_S)
    has_groups, has_modalities = (all(getattr(shape, name) for shape in shapes) for name in ("has_groups", "has_modalities"))
    window = RoutingDemand(
        tokens_SLE=counts[order_S],
        length_S=length_S[order_S],
        top_k=shapes[0].top_k,
        group_S=group_S[order_S] if has_groups else None,
        modality_S=modality_S[order_S] if has_modalities else None,
        layer_ids_L=np.asarray(shapes[0].layer_ids),
        num_masked_rows=sum(shape.masked for shape in shapes),
    )
    return collector.estimate(window, coverage_S[order_S])


def _check_permutation(position_S: np.ndarray, rank_S: np.ndarray, called: str) -> None:
    """Raise TraceError, naming number and ranks, unless *position_S* holds 0, 1, ... each once; *rank_S* gave them."""
    count, wrong = len(position_S), ""
    beyond = np.flatnonzero((position_S < 0) | (position_S >= count))
    if len(beyond):
        wrong = f"rank {rank_S[beyond[0]]} has {position_S[beyond[0]]}"
    else:
        times_S = np.bincount(position_S, minlength=count)
        if (times_S > 1).any():
            number = int(times_S.argmax())
            ranks = sorted(set(rank_S[position_S == number].tolist()))
            holders = f"ranks {' and '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]} twice"
            wrong = f"{number} is held by {holders}, and {int(times_S.argmin())} by none"
    if wrong:
        raise TraceError(
            f"{called} of all ranks must be 0 .. {count - 1}, each once: {wrong}. Number the sequences of all ranks together."
        )


def _positions(positions_S: np.ndarray | None, sequences: int, called: str) -> np.ndarray | None:
    if positions_S is None:
        return None
    positions_S = np.asarray(positions_S)
    if positions_S.shape != (sequences,) or (positions_S.size and positions_S.dtype.kind not in "iu"):
        raise TraceError(f"{called} has shape {positions_S.shape}; {sequences} whole numbers are needed.")
    return positions_S.astype(np.int64)
