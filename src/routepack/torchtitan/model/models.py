"""Models as RoutePack trains them: TorchTitan model specs, ready for replay and placement, and an unsharded copy."""

from __future__ import annotations

import copy
import importlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common import CosSinRoPE, RMSNorm
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.model_spec import ModelSpec

from routepack.core.component import Component, Count, Limits, Positive
from routepack.core.errors import ConfigError
from routepack.torchtitan.model import cpu_device, private
from routepack.torchtitan.model.overrides import override_imports

LOOP_EXPERTS = "routepack.torchtitan.model.overrides.LoopExperts"


@dataclass(frozen=True, kw_only=True)
class TrainedModel(Component):
    """Which model to train. A subclass names one; :meth:`model_spec` makes it fit for replay and placement."""

    section: ClassVar[str] = "model"

    experts: str = LOOP_EXPERTS
    """Import path of the expert computation, a ``GroupedExperts`` subclass; empty: TorchTitan's own, in bfloat16."""

    @abstractmethod
    def stock_spec(self) -> ModelSpec:
        """The model as TorchTitan builds it."""

    def model_spec(self) -> ModelSpec:
        """The model as RoutePack trains it: no load-balancing bias, which would move the routes, and sums that gloo knows."""
        spec = self.stock_spec()
        moe_layers = moe_layer_ids(spec)
        if not moe_layers:
            raise ConfigError(f"model {spec.name} {spec.flavor} has no MoE layer: choose a mixture-of-experts model.")
        for layer in moe_layers:
            cast(Decoder.Config, spec.model).layers[layer].moe.load_balance_coeff = None
        after_parallelizing(spec, cpu_device.reduce_with_plain_sums)
        spec.post_optimizer_build_fn = None
        return spec

    def override_imports(self) -> list[str | tuple[str, dict[str, Any]]]:
        """What TorchTitan's ``override.imports`` must hold for this model on this machine."""
        return override_imports(experts=self.experts, cpu_attention=cpu_device.on_cpu())


@dataclass(frozen=True, kw_only=True)
class TinyQwen3MoE(TrainedModel):
    """A Qwen3 mixture of experts of any size; the defaults train on a CPU."""

    vocab_size: Count = 64
    """Tokens of the vocabulary."""
    dim: Count = 64
    """D, the model dimension."""
    num_layers: Count = 4
    """Decoder layers, each with a mixture of experts."""
    num_experts: Count = 16
    """E, experts of each layer."""
    top_k: Count = 2
    """K, experts a token."""
    moe_hidden_dim: Count = 64
    """F, the hidden dimension of an expert."""
    num_heads: Count = 4
    """Query heads."""
    num_kv_heads: Count = 2
    """Key and value heads; divides num_heads."""
    head_dim: Annotated[int, Limits(least=2)] = 16
    """The dimension of a head."""
    max_seq_len: Count = 512
    """Tokens that a sequence may have: the length of the table of rotary angles."""
    rope_theta: Positive = 10_000.0
    """The base of the rotary angles."""

    def check_options(self) -> None:
        """Raise ConfigError where heads or experts do not go together."""
        if self.top_k > self.num_experts:
            raise ConfigError(f"model.top_k={self.top_k} is more than model.num_experts={self.num_experts}.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"model.num_kv_heads={self.num_kv_heads} must divide model.num_heads={self.num_heads}.")
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim={self.head_dim} must be even: rotary angles turn pairs.")

    def stock_spec(self) -> ModelSpec:
        """The model of this size, built from the parts of TorchTitan's Qwen3."""
        spec = RegisteredModel(name="qwen3", flavor="debugmodel_moe").stock_spec()
        parts = cast(Qwen3Model.Config, spec.model)
        layers = private.qwen3_moe_layers(
            n_layers=self.num_layers,
            dim=self.dim,
            n_heads=self.num_heads,
            n_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            moe_hidden_dim=self.moe_hidden_dim,
            num_experts=self.num_experts,
            top_k=self.top_k,
            rope=CosSinRoPE.Config(dim=self.head_dim, max_seq_len=self.max_seq_len, theta=self.rope_theta),
        )
        model = replace(
            parts,
            vocab_size=self.vocab_size,
            dim=self.dim,
            norm=replace(parts.norm, normalized_shape=self.dim),
            tok_embeddings=replace(parts.tok_embeddings, num_embeddings=self.vocab_size, embedding_dim=self.dim),
            lm_head=replace(parts.lm_head, in_features=self.dim, out_features=self.vocab_size),
            layers=layers,
        )
        return replace(spec, flavor=f"moe_{self.num_layers}x{self.num_experts}", model=model)


@dataclass(frozen=True, kw_only=True)
class RegisteredModel(TrainedModel):
    """A model of TorchTitan's own registry, such as ``qwen3`` ``30B-A3B``."""

    name: str
    """The model's package in ``torchtitan.models``."""
    flavor: str
    """The size, a key of that package's registry."""

    def stock_spec(self) -> ModelSpec:
        """The registered model with variable-length attention."""
        try:
            registry = importlib.import_module(f"torchtitan.models.{self.name}").model_registry
            return copy.deepcopy(registry(self.flavor, attn_backend="varlen", moe_comm_backend="standard"))
        except (ImportError, AttributeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"model.name={self.name!r}, model.flavor={self.flavor!r}: TorchTitan's registry has no such mixture of "
                f"experts ({type(error).__name__}: {error})."
            ) from error


@dataclass(frozen=True, kw_only=True)
class DeepSeekV2Lite(TrainedModel):
    """DeepSeek-V2-Lite: TorchTitan's ``deepseek_v3`` ``16B``, with two constants as published.

    TorchTitan norms with an epsilon of 1e-5 and scales YaRN's softmax by 0.70; the published configuration, and so its
    weights, have 1e-6 and 0.707.
    """

    def stock_spec(self) -> ModelSpec:
        """The registered model with the published constants."""
        spec = RegisteredModel(name="deepseek_v3", flavor="16B").stock_spec()
        model = cast(Decoder.Config, spec.model)
        for _, norm, _, _ in model.traverse(RMSNorm.Config):
            cast(Any, norm).eps = 1e-6
        for layer in model.layers:
            layer.attention.mscale = 0.707
        return spec


def after_parallelizing(spec: ModelSpec, change: Callable[[nn.Module], None]) -> None:
    """Let *change* be made to the model that *spec* builds, once TorchTitan has parallelized it."""
    parallelize = spec.parallelize_fn

    def parallelize_and_change(model: nn.Module, **options: Any) -> nn.Module:
        parallel = parallelize(model, **options)
        change(parallel)
        return parallel

    spec.parallelize_fn = parallelize_and_change


def moe_layer_ids(spec: ModelSpec) -> list[int]:
    """The decoder layers that are mixtures of experts."""
    layers = cast(Decoder.Config, spec.model).layers
    return [index for index, layer in enumerate(layers) if getattr(layer, "moe", None) is not None]


def num_experts_of(spec: ModelSpec) -> int:
    """E, the experts of every MoE layer. Raises ConfigError where layers differ."""
    return _of_every_moe_layer(spec, "experts", lambda moe: moe.num_experts)


def top_k_of(spec: ModelSpec) -> int:
    """K, the experts that a token goes to in every MoE layer. Raises ConfigError where layers differ."""
    return _of_every_moe_layer(spec, "experts a token", lambda moe: moe.router.top_k)


def _of_every_moe_layer(spec: ModelSpec, what: str, count: Callable[[Any], int]) -> int:
    layers = cast(Decoder.Config, spec.model).layers
    counts = {count(layers[index].moe) for index in moe_layer_ids(spec)}
    if len(counts) != 1:
        raise ConfigError(f"model {spec.name} {spec.flavor} has layers with {sorted(counts)} {what}; one number is needed.")
    return counts.pop()


def build_local_model(model: TrainedModel, *, seed: int = 0) -> nn.Module:
    """One unsharded copy in this process, initialised from *seed*: every name and value as the trainer's before its first step.

    Touches no process group and leaves torch's random state as it was.
    """
    local = build_meta_model(model)
    local.to_empty(device=cpu_device.device_type())
    with torch.no_grad(), torch.random.fork_rng(devices=cpu_device.random_devices()):
        torch.manual_seed(seed)
        local.init_weights()
    return local


def build_meta_model(model: TrainedModel) -> Decoder:
    """The unsharded model without any memory: names and shapes."""
    spec = model.model_spec()
    apply_overrides(OverrideConfig(imports=model.override_imports()), cast(Any, spec))
    with torch.device("meta"):
        return cast(Decoder, spec.model.build())


def load_full_state(local: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give an unsharded model the parameters of ``RoutePackTrainer.logical_state_dict()``.

    By parameter name, not through ``load_state_dict``: TorchTitan's fused query-key-value layer renames itself there.
    Raises ConfigError where names or shapes differ.
    """
    check_names(_shapes(local), {name: value.shape for name, value in state.items()})
    load_parameters(local, state.items())


@torch.no_grad()
def load_parameters(local: nn.Module, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Give an unsharded model its parameters one after another, such as ``RoutePackTrainer.logical_parameters()``.

    Raises ConfigError at a name or shape that the model lacks, and at the end where a parameter is missing.
    """
    own = dict(local.named_parameters())
    for name, value in checked(parameters, _shapes(local)):
        own[name].copy_(value)


def checked(parameters: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    """Pass *parameters* on; raises ConfigError at one that *shapes* does not have, and at the end where one was missing."""
    seen: dict[str, torch.Size] = {}
    for name, value in parameters:
        seen[name] = value.shape
        check_names({name: shapes[name]} if name in shapes else {}, {name: value.shape})
        yield name, value
    check_names(shapes, seen)


def check_names(shapes: Mapping[str, torch.Size], given: Mapping[str, torch.Size]) -> None:
    """Raise ConfigError unless *given* has the same shape for each name of *shapes*, and no other name."""
    if missing := sorted(shapes.keys() - given.keys()):
        raise ConfigError(f"the state lacks {len(missing)} parameters of the model, such as {missing[0]}.")
    if unknown := sorted(given.keys() - shapes.keys()):
        raise ConfigError(f"the state has {len(unknown)} tensors that are no parameter of the model, such as {unknown[0]}.")
    for name, shape in shapes.items():
        if shape != given[name]:
            raise ConfigError(f"{name} has shape {tuple(given[name])} in the state and {tuple(shape)} in the model.")


def _shapes(local: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in local.named_parameters()}
