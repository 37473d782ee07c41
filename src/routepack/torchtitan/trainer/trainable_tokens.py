"""Whether a window can be trained on: what every rank checks of mask, fields and token ids before anything moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec

from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.microbatches.trained_tokens import trained_mask


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenCheck:
    """What a model and a loss need of a window's tokens."""

    spec: ModelSpec
    """Of the model: its vocabulary, and the longest sequence that it takes."""
    needs: Sequence[str] = ()
    """The token fields that the loss reads."""
    window: str = "the batch"
    """What errors call the window: its file, where there is one."""
    recorded_as: Mapping[str, str] = field(default_factory=dict)
    """Names that fields have in the file, where they differ."""

    def check(self, batch: RolloutBatch, sequences_S: np.ndarray | None = None) -> None:
        """Raise TraceError naming field, sequence and token where *batch* cannot be trained on.

        Args:
            sequences_S: int64 [S], the numbers of its sequences in the window; None: 0, 1, ...
        """
        numbers_S = np.arange(batch.num_sequences) if sequences_S is None else sequences_S
        self.check_lengths(batch, numbers_S)
        self._check_token_ids(batch, numbers_S)
        check_mask(batch, numbers_S, window=self.window)
        for name in self.needs:
            self._check_field(batch, numbers_S, name)

    def check_lengths(self, batch: RolloutBatch, numbers_S: np.ndarray) -> None:
        """Raise TraceError where a sequence is longer than the model takes."""
        limit = cast(Decoder.Config, self.spec.model).max_seq_len
        wrong = np.flatnonzero(batch.num_tokens_S > limit + 1)
        if len(wrong):
            s = int(wrong[0])
            raise TraceError(
                f"{self.window}: a sequence has {batch.num_tokens_S[s]} tokens, number {numbers_S[s]}; "
                f"model.max_seq_len={limit} feeds in at most {limit}: raise it, or leave longer sequences out."
            )

    def _check_token_ids(self, batch: RolloutBatch, numbers_S: np.ndarray) -> None:
        ids_N, size = self._field(batch, "token_ids"), cast(Decoder.Config, self.spec.model).vocab_size
        if ids_N.dtype.kind not in "iu" or ids_N.ndim != 1:
            raise TraceError(
                f"{self.window}: token_ids is {ids_N.dtype} of shape {ids_N.shape}; one whole number a token is needed."
            )
        wrong = np.flatnonzero((ids_N < 0) | (ids_N >= size))
        if len(wrong):
            raise TraceError(
                f"{self.window} has token id {ids_N[wrong[0]]}; the model's vocabulary has {size}, 0 .. {size - 1}: it is "
                f"{place_of(batch, numbers_S, wrong)}. Train the model that sampled it, and cut padding off."
            )

    def _check_field(self, batch: RolloutBatch, numbers_S: np.ndarray, name: str) -> None:
        value_N, trained_N = self._field(batch, name), trained_mask(batch)
        if value_N.dtype.kind not in "iufb":
            raise TraceError(f"{self.window}: {name} has dtype {value_N.dtype}; numbers are needed.")
        # The loss reads floats as float32, where a larger one is infinite.
        with np.errstate(over="ignore"):
            finite_N = np.isfinite(value_N.astype(np.float32, copy=False)).reshape(len(value_N), -1).all(axis=1)
        wrong = np.flatnonzero(trained_N & ~finite_N)
        if len(wrong):
            called, place = self.recorded_as.get(name, name), place_of(batch, numbers_S, wrong)
            raise TraceError(
                f"{self.window}: {called} is {value_N[wrong[0]]} at {place}, which loss_mask trains: record "
                "finite values, or set loss_mask to 0 there."
            )

    def _field(self, batch: RolloutBatch, name: str) -> np.ndarray:
        if name not in batch.token_fields:
            raise TraceError(
                f"{self.window} has token fields {sorted(batch.token_fields)} but no {name}: record them to train on it."
            )
        return np.asarray(batch.token_fields[name])


def check_mask(batch: RolloutBatch, numbers_S: np.ndarray | None = None, *, window: str = "the batch") -> None:
    """Raise TraceError unless the batch has a ``loss_mask`` that is 0 or 1 at every token."""
    if "loss_mask" not in batch.token_fields:
        raise TraceError(
            f"{window} has token fields {sorted(batch.token_fields)} but no loss_mask, 1 where a token is trained."
        )
    mask_N = np.asarray(batch.token_fields["loss_mask"])
    told = "loss_mask must be one 0 or 1 for each token: put weights into the advantages"
    if mask_N.ndim != 1:
        raise TraceError(f"{window}: {told}; it has shape {mask_N.shape}.")
    wrong = np.flatnonzero((mask_N != 0) & (mask_N != 1))
    if len(wrong):
        numbers_S = np.arange(batch.num_sequences) if numbers_S is None else numbers_S
        raise TraceError(f"{window}: {told}. It is {mask_N[wrong[0]]} at {place_of(batch, numbers_S, wrong)}.")


def place_of(batch: RolloutBatch, numbers_S: np.ndarray, tokens: np.ndarray) -> str:
    """In words: where the first of these tokens of the batch is, and how many there are."""
    first = int(tokens[0])
    s = int(np.searchsorted(batch.cu_tokens, first, side="right")) - 1
    return f"sequence {numbers_S[s]}, token {first - batch.cu_tokens[s]} ({len(tokens)} such tokens)"
