"""Per-token losses. The trainer masks them, sums them and divides by the window's trained tokens, never locally."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from routepack.core.component import Component, Limits, NotNegative


@dataclass(frozen=True, kw_only=True)
class TokenLoss(Component):
    """A loss of each token alone, so that packing and placement cannot change its sum.

    Tokens that are not trained are passed too, with a log-probability and fields of zero, and must give finite values.
    """

    section: ClassVar[str] = "loss"
    needs: ClassVar[tuple[str, ...]] = ()
    """The token fields that it reads."""

    @abstractmethod
    def __call__(self, logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """float32 [n]: the loss of each token.

        Args:
            logprobs: float32 [n], the log-probability of each token given the earlier ones; carries the gradient.
            fields: the batch's token fields at the same tokens, each [n, ...].
        """

    def metrics(self, logprobs: Tensor, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Per-token figures [n] that the trainer averages over the window's trained tokens; the same names on every rank."""
        return {}


@dataclass(frozen=True, kw_only=True)
class CrossEntropyTokenLoss(TokenLoss):
    """Minus the log-probability: supervised training on the tokens as they are."""

    def __call__(self, logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """float32 [n]: ``-logprobs``."""
        return -logprobs


@dataclass(frozen=True, kw_only=True)
class GRPOTokenLoss(TokenLoss):
    """The clipped policy-gradient loss of GRPO, averaged over tokens.

    DeepSeekMath, arXiv 2402.03300, eq. 3, without its KL term. With unequal clips it is DAPO's clip-higher
    (arXiv 2503.14476, eq. 8). Needs the token fields ``logprobs_old``, the log-probabilities before the update,
    and ``advantages``.

    >>> loss = GRPOTokenLoss(clip_low=0.2, clip_high=0.2)
    >>> fields = {"logprobs_old": torch.zeros(2), "advantages": torch.tensor([1.0, -1.0])}
    >>> loss(torch.log(torch.tensor([1.5, 1.5])), fields).tolist()
    [-1.2..., 1.5...]
    """

    needs: ClassVar[tuple[str, ...]] = ("logprobs_old", "advantages")

    clip_low: Annotated[float, Limits(least=0.0, most=1.0 - 1e-12)] = 0.2
    """The ratio of new to old probability is clipped below 1 - clip_low, which is above 0."""
    clip_high: NotNegative = 0.2
    """The ratio of new to old probability is clipped above 1 + clip_high."""

    def __call__(self, logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """float32 [n]: ``-min(ratio * advantage, clipped ratio * advantage)``."""
        ratio = torch.exp(logprobs - fields["logprobs_old"])
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        advantages = fields["advantages"]
        return -torch.minimum(ratio * advantages, clipped * advantages)

    def metrics(self, logprobs: Tensor, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``clip_fraction``: tokens whose gradient the clip removed; ``policy_kl``: ratio - 1 - log ratio, an estimate."""
        log_ratio = logprobs - fields["logprobs_old"]
        ratio, advantages = log_ratio.exp(), fields["advantages"]
        above = (ratio > 1.0 + self.clip_high) & (advantages > 0)
        below = (ratio < 1.0 - self.clip_low) & (advantages < 0)
        return {"clip_fraction": (above | below).float(), "policy_kl": ratio - 1.0 - log_ratio}
