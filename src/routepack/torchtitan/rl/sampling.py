"""Rollouts: an unsharded copy of the policy samples with a key-value cache and records its routes while it does.

Letters: S sequences still being written, N tokens of a sequence, V vocabulary, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common.decoder import Decoder

from routepack.core.errors import ConfigError
from routepack.core.rollouts import id_dtype
from routepack.torchtitan.model import cpu_device
from routepack.torchtitan.model.models import TrainedModel, build_local_model, load_full_state
from routepack.torchtitan.model.overrides import recorded_routes, replay_routers, routes_of
from routepack.training.rollout import Rollout


class CachedAttention(nn.Module):
    """Attention of one new token a sequence to itself and to what came before, kept in a cache.

    Takes the place of TorchTitan's inner attention in the local copy; everything else there is TorchTitan's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._num_cached = 0
        self._max_tokens = 0

    def start(self, max_tokens: int) -> None:
        """Forget everything; make room for *max_tokens* tokens a sequence."""
        self._keys = self._values = None
        self._num_cached, self._max_tokens = 0, max_tokens

    def keep(self, kept_S: Tensor) -> None:
        """Go on with the sequences where *kept_S*, bool [S], is True."""
        assert self._keys is not None
        assert self._values is not None
        self._keys, self._values = self._keys[kept_S], self._values[kept_S]

    def forward(
        self, q_SLNH: Tensor, k_SLNH: Tensor, v_SLNH: Tensor, *, scale: float | None, enable_gqa: bool, **_: Any
    ) -> Tensor:
        """[S, 1, heads, head dim]; L is 1, the new token."""
        if self._keys is None or self._values is None:
            shape = (len(k_SLNH), self._max_tokens, *k_SLNH.shape[2:])
            self._keys, self._values = k_SLNH.new_zeros(shape), v_SLNH.new_zeros(shape)
        self._keys[:, self._num_cached], self._values[:, self._num_cached] = k_SLNH[:, 0], v_SLNH[:, 0]
        self._num_cached += 1
        query, keys, values = (
            x.transpose(1, 2) for x in (q_SLNH, self._keys[:, : self._num_cached], self._values[:, : self._num_cached])
        )
        attended = F.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=enable_gqa)
        return attended.transpose(1, 2)


class LocalPolicy:
    """An unsharded copy of the policy in this process. Sampling needs no other rank.

    A sequence depends on its prompt and its random numbers alone, not on the sequences sampled beside it (but for
    the last bits of a matrix product, which change with the batch).
    """

    def __init__(self, model: TrainedModel, *, seed: int = 0) -> None:
        self._model = cast(Decoder, build_local_model(model, seed=seed)).eval()
        self._attention = [CachedAttention() for _ in self._model.layers]
        for layer, attention in zip(self._model.layers.values(), self._attention, strict=True):
            cast(Any, layer).attention.inner_attention = attention
        router = replay_routers(self._model)[0]
        self._num_experts = router.num_experts
        self.top_k = router.top_k
        self._max_tokens = self._model.config.max_seq_len

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the weights of ``RoutePackTrainer.logical_state_dict()``."""
        load_full_state(self._model, state)

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[np.ndarray],
        random_SN: np.ndarray,
        *,
        temperature: float = 1.0,
        end_token_id: int = 0,
        on_end: Callable[[int, Rollout], None] | None = None,
    ) -> list[Rollout]:
        """Continue each prompt until its end token, or for as many tokens as *random_SN* has columns.

        Args:
            prompts: int64 token ids, at least one each; lengths may differ.
            random_SN: float64 [S, N] in [0, 1): what decides token N of response S, by inverse CDF.
            temperature: 0 takes the likeliest token.
            on_end: called with each response's number and itself as soon as it has ended, while others are still written.
        """
        if not prompts:
            return []
        writing = _Writing.start(prompts, random_SN, end_token_id, id_dtype(self._num_experts))
        if writing.limit_S.max() > self._max_tokens + 1:
            raise ConfigError(
                f"rollout.max_new_tokens={random_SN.shape[1]} after a prompt of {max(map(len, prompts))} tokens is more than "
                f"model.max_seq_len={self._max_tokens}: raise it."
            )
        for attention in self._attention:
            attention.start(int(writing.limit_S.max()) - 1)
        with recorded_routes(self._model), cpu_device.quiet():
            while writing.live_S.numel():
                live_S = writing.live_S
                kept_S = writing.advance(*self._step(writing), temperature)
                if not kept_S.all():
                    for attention in self._attention:
                        attention.keep(kept_S)
                if on_end is not None:
                    for s in live_S[~kept_S].tolist():
                        on_end(s, writing.rollout(s))
        return [writing.rollout(s) for s in range(len(prompts))]

    def _step(self, writing: _Writing) -> tuple[Tensor, Tensor]:
        tokens_SL = writing.tokens_SN[writing.live_S, writing.position, None]
        logits_SLV = self._model(tokens_SL, torch.full_like(tokens_SL, writing.position))
        return logits_SLV[:, 0].float(), routes_of(self._model)[:, 0]


@dataclass(kw_only=True, eq=False)
class _Writing:
    """Sequences while they are written, all at the same position. Those that have ended leave ``live_S``."""

    tokens_SN: Tensor
    logprobs_SN: Tensor
    id_dtype: np.dtype
    random_SN: Tensor
    num_prompt_tokens_S: Tensor
    limit_S: Tensor
    """A sequence ends here at the latest."""
    length_S: Tensor
    live_S: Tensor
    """int64: the sequences still being written."""
    end_token_id: int
    position: int = 0
    routes_SNLK: Tensor | None = None
    """Of *id_dtype*; those of a sequence are written while it is live."""

    @classmethod
    def start(cls, prompts: Sequence[np.ndarray], random_SN: np.ndarray, end_token_id: int, id_dtype: np.dtype) -> _Writing:
        lengths_S = torch.tensor([len(prompt) for prompt in prompts])
        tokens_SN = torch.zeros(len(prompts), int(lengths_S.max()) + random_SN.shape[1], dtype=torch.int64)
        for row, prompt in zip(tokens_SN, prompts, strict=True):
            row[: len(prompt)] = torch.from_numpy(np.asarray(prompt))
        return cls(
            tokens_SN=tokens_SN,
            logprobs_SN=torch.zeros(tokens_SN.shape),
            id_dtype=id_dtype,
            random_SN=torch.from_numpy(random_SN),
            num_prompt_tokens_S=lengths_S,
            limit_S=lengths_S + random_SN.shape[1],
            length_S=lengths_S + random_SN.shape[1],
            live_S=torch.arange(len(prompts)),
            end_token_id=end_token_id,
        )

    def advance(self, logits_SV: Tensor, routes_SLK: Tensor, temperature: float) -> Tensor:
        """Write the next token of each live sequence; bool [S]: which of them go on. A prompt's tokens stand already."""
        live_S, following = self.live_S, self.position + 1
        self._record(routes_SLK)
        samples_S = following >= self.num_prompt_tokens_S[live_S]
        sampling_S = live_S[samples_S]
        column_S = following - self.num_prompt_tokens_S[sampling_S]
        tokens_S = sampled_tokens(logits_SV[samples_S], self.random_SN[sampling_S, column_S], temperature)
        self.tokens_SN[sampling_S, following] = tokens_S
        logprobs_SV = F.log_softmax(logits_SV[samples_S], dim=-1)
        self.logprobs_SN[sampling_S, following] = logprobs_SV.gather(1, tokens_S[:, None])[:, 0]
        ended_S = samples_S & (self.tokens_SN[live_S, following] == self.end_token_id)
        ended_S |= following + 1 == self.limit_S[live_S]
        self.length_S[live_S[ended_S]] = following + 1
        self.live_S, self.position = live_S[~ended_S], following
        return ~ended_S

    def _record(self, routes_SLK: Tensor) -> None:
        if self.routes_SNLK is None:
            dtype = torch.from_numpy(np.empty(0, self.id_dtype)).dtype
            self.routes_SNLK = torch.zeros(*self.tokens_SN.shape, *routes_SLK.shape[1:], dtype=dtype)
        self.routes_SNLK[self.live_S, self.position] = routes_SLK.sort(dim=-1).values.to(self.routes_SNLK.dtype)

    def rollout(self, s: int) -> Rollout:
        """A sequence that has ended."""
        assert self.routes_SNLK is not None
        length = int(self.length_S[s])
        return Rollout(
            token_ids=self.tokens_SN[s, :length].numpy(),
            num_prompt_tokens=int(self.num_prompt_tokens_S[s]),
            logprobs=self.logprobs_SN[s, :length].numpy(),
            routed_experts=self.routes_SNLK[s, : length - 1].numpy(),
        )


def sampled_tokens(logits_SV: Tensor, random_S: Tensor, temperature: float) -> Tensor:
    """int64 [S]: the token at which the cumulative probability passes *random_S*; the likeliest at temperature 0."""
    if temperature == 0.0:
        return logits_SV.argmax(dim=-1)
    cumulative_SV = torch.softmax(logits_SV.double() / temperature, dim=-1).cumsum(dim=-1)
    drawn_S1 = random_S[:, None] * cumulative_SV[:, -1:]
    return torch.searchsorted(cumulative_SV, drawn_S1, right=True)[:, 0].clamp_(max=logits_SV.shape[1] - 1)


def random_numbers(sequences: Sequence[int], num_tokens: int, *, seed: Sequence[int]) -> np.ndarray:
    """float64 [S, num_tokens] in [0, 1): each sequence's own stream, whatever rank samples it and whatever else it samples."""
    return np.stack([np.random.default_rng([*seed, s]).random(num_tokens) for s in sequences])
