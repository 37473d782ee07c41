"""What must be known of a model to read its recorded routing: experts, top-k, and which decoder layers have a router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from routepack.core.component import Component, Count, Limits
from routepack.core.errors import ConfigError, TraceError
from routepack.core.rollouts import MOST_EXPERTS

NAMES = {
    "num_experts": (
        "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_moe_experts", "num_routed_experts",
    ),
    "top_k": (
        "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_router_topk", "num_experts_per_token",
        "experts_per_token", "moe_k", "top_k",
    ),
    "num_layers": ("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
}  # fmt: skip
"""The names that model configs have for each, in the order they are looked for."""

MOST_LAYERS = 2**16
"""Of a model: a larger number is a mistake."""


@dataclass(frozen=True, kw_only=True)
class ModelRouting(Component):
    """The routing shape of a model.

    >>> ModelRouting.from_config({"n_routed_experts": 64, "num_experts_per_tok": 6, "num_hidden_layers": 4,
    ...                           "first_k_dense_replace": 1}).moe_layers
    (1, 2, 3)
    """

    section: ClassVar[str] = "model"

    num_experts: Annotated[int, Limits(least=1, most=MOST_EXPERTS)]
    """E, logical routed experts; shared ones are not counted."""
    top_k: Count | None = None
    """K; None: as the arrays have it, which flat payloads do not."""
    num_layers: Annotated[int, Limits(least=1, most=MOST_LAYERS)] | None = None
    """Decoder layers, draft (MTP) layers left out; None: as the arrays have it."""
    moe_layers: tuple[Annotated[int, Limits(least=0, most=MOST_LAYERS)], ...] | None = None
    """Absolute decoder layers that have a router. None: all that ever recorded anything but zeros."""

    def check_options(self) -> None:
        """Raise ConfigError where top_k or a layer is beyond the model, or a layer is named twice."""
        if self.top_k is not None and self.top_k > self.num_experts:
            raise ConfigError(f"model.top_k={self.top_k} must be at most num_experts={self.num_experts}.")
        if self.moe_layers is None:
            return
        if not self.moe_layers or len(set(self.moe_layers)) != len(self.moe_layers):
            raise ConfigError(
                f"model.moe_layers={list(self.moe_layers)} must name each MoE layer once (a draft or MTP layer must not share "
                "a number)."
            )
        if self.num_layers is not None and max(self.moe_layers) >= self.num_layers:
            raise ConfigError(
                f"model.moe_layers names layer {max(self.moe_layers)} of a model with num_layers={self.num_layers}."
            )

    @classmethod
    def from_config(cls, config: Any, **overrides: Any) -> ModelRouting:
        """Read a Hugging Face style config, a mapping or an object; *overrides* win. A ``text_config`` inside counts too.

        Raises ConfigError where no known name gives the number of experts.
        """
        found = {key: _find(config, names) for key, names in NAMES.items()}
        found = found | {key: value for key, value in overrides.items() if value is not None}
        if found.get("num_experts") is None:
            raise ConfigError(
                f"the model's config has none of {', '.join(NAMES['num_experts'])}: give num_experts, or is it no MoE model?"
            )
        if found.get("moe_layers") is None:
            found["moe_layers"] = _moe_layers(config, found.get("num_layers"))
        return cls(**found)

    def columns(self, num_columns: int) -> list[int] | None:
        """Which of an array's layer columns to keep, or None where the data must show. Raises TraceError for a misfit."""
        if self.num_layers is not None and num_columns > self.num_layers:
            raise TraceError(
                f"the layer axis has {num_columns} columns; the model has num_layers={self.num_layers}: leave draft (MTP) "
                "layers out, or correct num_layers."
            )
        if self.moe_layers is None:
            return None
        if num_columns == len(self.moe_layers):
            return list(range(num_columns))
        if max(self.moe_layers) < num_columns and self.num_layers in (None, num_columns):
            return list(self.moe_layers)
        raise TraceError(
            f"the layer axis has {num_columns} columns; {len(self.moe_layers)} (moe_layers alone) or "
            f"{self.num_layers or max(self.moe_layers) + 1} (all decoder layers) are needed."
        )

    def layer_ids(self, kept: Sequence[int], num_columns: int) -> list[int]:
        """The absolute decoder layer of each kept column."""
        if self.moe_layers is not None and num_columns == len(self.moe_layers):
            return list(self.moe_layers)
        return list(kept)


def _look_up(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _find(config: Any, names: Sequence[str]) -> Any:
    for owner in (config, _look_up(config, "text_config")):
        for name in names:
            value = None if owner is None else _look_up(owner, name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _moe_layers(config: Any, num_layers: int | None) -> tuple[int, ...] | None:
    """By DeepSeek's conventions (first_k_dense_replace, moe_layer_freq) and Qwen's (decoder_sparse_step, mlp_only_layers)."""
    owner = _look_up(config, "text_config") or config
    if num_layers is None:
        return None
    frequency = _look_up(owner, "moe_layer_freq")
    if isinstance(frequency, list):
        return tuple(layer for layer, is_moe in enumerate(frequency) if is_moe)
    first = _look_up(owner, "first_k_dense_replace")
    if isinstance(first, int):
        every = frequency if isinstance(frequency, int) and frequency > 0 else 1
        return tuple(layer for layer in range(num_layers) if layer >= first and layer % every == 0)
    step = _look_up(owner, "decoder_sparse_step")
    if isinstance(step, int) and step > 0:
        dense = set(_look_up(owner, "mlp_only_layers") or ())
        return tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    return None
