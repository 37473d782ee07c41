"""What the exporters share: one sequence's rows with a stack's filler where nothing was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch


def sequence_records(batch: RolloutBatch, *, tokens: str = "token_ids") -> Iterator[tuple[int, dict[str, Any]]]:
    """Each sequence's number and its record without routes: tokens (or ``num_tokens``), mask, log-probabilities, group."""
    for s in range(batch.num_sequences):
        span = slice(batch.cu_tokens[s], batch.cu_tokens[s + 1])
        known = [name for name in ("token_ids", "loss_mask", "logprobs", "advantages") if name in batch.token_fields]
        record: dict[str, Any] = {tokens if name == "token_ids" else name: batch.token_fields[name][span] for name in known}
        if "token_ids" not in batch.token_fields:
            record["num_tokens"] = int(batch.num_tokens_S[s])
        if "rewards" in batch.sequence_fields:
            record["reward"] = float(batch.sequence_fields["rewards"][s])
        if batch.group_S is not None:
            record["group"] = int(batch.group_S[s])
        yield s, record


def rows_of(
    batch: RolloutBatch, sequence: int, dtype: Any, *, missing: int | str | None, num_rows: int | None = None
) -> np.ndarray | None:
    """[rows, L, K]: one sequence's ids in *dtype*; None where it has no rows.

    Args:
        missing: what rows that were not recorded hold: a number, or ``arange`` for 0 .. top_k - 1. None: the form has no
            way to say so, and a TraceError names the first.
        num_rows: cut or fill to so many rows.
    """
    first, end = (int(offset) for offset in batch.cu_seqlens[sequence : sequence + 2])
    if first == end:
        return None
    if int(batch.routed_experts_TLK[first:end].max(initial=0)) > np.iinfo(dtype).max and batch.valid_T is None:
        raise TraceError(f"sequence {sequence} has expert ids beyond {np.dtype(dtype)}.")
    ids_TLK = batch.routed_experts_TLK[first:end].astype(dtype)
    if batch.valid_T is not None and not batch.valid_T[first:end].all():
        lost = ~batch.valid_T[first:end]
        if missing is None:
            raise TraceError(
                f"sequence {sequence}, row {int(lost.argmax())} was not recorded, which this form cannot say: "
                "leave the sequence out."
            )
        ids_TLK[lost] = filler(missing, batch.top_k)
    if num_rows is None or num_rows == len(ids_TLK):
        return ids_TLK
    padded = np.empty((num_rows, *ids_TLK.shape[1:]), dtype=dtype)
    padded[:] = filler(missing if missing is not None else 0, batch.top_k)
    padded[: min(num_rows, len(ids_TLK))] = ids_TLK[:num_rows]
    return padded


def token_rows(batch: RolloutBatch, dtype: Any, missing: int | str) -> list[np.ndarray]:
    """[tokens, L, K]: one row a token of each sequence, *missing* where nothing was recorded, as :func:`rows_of` has it."""
    rows = []
    for s, n in enumerate(batch.num_tokens_S.tolist()):
        ids_TLK = rows_of(batch, s, dtype, missing=missing, num_rows=n)
        if ids_TLK is None:
            ids_TLK = np.empty((n, batch.num_layers, batch.top_k), dtype)
            ids_TLK[:] = filler(missing, batch.top_k)
        rows.append(ids_TLK)
    return rows


def padded_left(parts: list[np.ndarray], fill: np.ndarray | int) -> np.ndarray:
    """[B, width, ...]: arrays of different length, each at the end of its row, with *fill* before."""
    width = max(map(len, parts))
    padded = np.empty((len(parts), width, *parts[0].shape[1:]), parts[0].dtype)
    padded[:] = fill
    for row, part in zip(padded, parts, strict=True):
        row[width - len(part) :] = part
    return padded


def filler(kind: int | str, top_k: int) -> np.ndarray | int:
    """What stands in a row without routes."""
    return np.arange(top_k) if kind == "arange" else int(kind)
