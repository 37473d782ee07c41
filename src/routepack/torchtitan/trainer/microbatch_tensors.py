"""A microbatch as tensors on the trainer's device, and the tokens that a window trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.microbatches.materialize import Microbatch
from routepack.microbatches.trained_tokens import count_trained
from routepack.torchtitan.trainer.trainable_tokens import check_mask


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayedMicrobatch:
    """A microbatch as tensors, one row of n tokens; what TorchTitan's own inputs do not hold."""

    targets_n: Tensor
    """int64 [n]: the token that each fed token predicts."""
    loss_mask_n: Tensor
    """float32 [n]: 1 where the target is trained."""
    routed_experts_1nLK: Tensor
    """int [1, n, L, K]."""
    fields: Mapping[str, Tensor]
    """The token fields at the targets, zero where they are not trained; floats as float32."""
    num_padding: int = 0
    """The last so many tokens are padding."""

    @property
    def padding_routes_nLK(self) -> Tensor:
        """int [num_padding, L, K]: where padding goes; it is always replayed."""
        tokens = self.routed_experts_1nLK.shape[1]
        return self.routed_experts_1nLK[0, tokens - self.num_padding :]

    @classmethod
    def of(cls, microbatch: Microbatch, device: torch.device) -> ReplayedMicrobatch:
        """Move a microbatch to *device*."""
        loss_mask_n = torch.from_numpy(microbatch.fields["loss_mask"].astype(np.float32)).to(device)
        return cls(
            targets_n=torch.from_numpy(microbatch.targets_n).to(device),
            loss_mask_n=loss_mask_n,
            routed_experts_1nLK=torch.from_numpy(microbatch.routed_experts_nLK)[None].to(device),
            fields={name: _trained_only(value_n, loss_mask_n) for name, value_n in microbatch.fields.items()},
            num_padding=microbatch.num_padding,
        )


def _trained_only(value_n: np.ndarray, loss_mask_n: Tensor) -> Tensor:
    # Untrained tokens may hold anything, such as -inf: their loss must be finite before it is multiplied by 0.
    value = torch.from_numpy(value_n).to(loss_mask_n.device)
    value = value.float() if value.is_floating_point() else value
    mask = loss_mask_n.bool().reshape(-1, *[1] * (value.ndim - 1))
    return torch.where(mask, value, torch.zeros_like(value))


def num_trained_tokens(batch: RolloutBatch) -> int:
    """Tokens that the batch trains. Raises TraceError where there is none, or where ``loss_mask`` is no mask."""
    check_mask(batch)
    num_trained = count_trained(batch)
    if not num_trained:
        raise TraceError("loss_mask trains no token of this window (first tokens are not predicted): nothing to learn from.")
    return num_trained
