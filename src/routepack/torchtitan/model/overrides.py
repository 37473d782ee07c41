"""TorchTitan components with RoutePack's behaviour, activated through TorchTitan's own ``override.imports``.

``replay_router`` forces recorded expert ids and records them; ``placed_experts`` sends tokens to the slots of an
expert placement; ``document_attention`` is variable-length attention on the CPU. TorchTitan refuses nested overrides, so
``placed_experts`` also exchanges the expert computation: give it the import path of a ``GroupedExperts`` subclass.
Letters as in TorchTitan: B batch, L tokens of a row, K top-k, N = L K, E experts, D model dim, F hidden dim, R rows at local
experts.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from routepack.core.errors import ConfigError

_HERE = "routepack.torchtitan.model.overrides"
_EQUAL_WIDTH = "routepack.torchtitan.model.attention.equal_width_attention"


class ReplayRouter(TokenChoiceTopKRouter):
    """Routes as recorded where a record is given, by its own top-k elsewhere.

    Gates are always gathered from the live scores, so the router keeps learning under replay. The ids to
    replay stay set until they are cleared, so activation checkpointing recomputes the same route.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """The options of TorchTitan's own."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.replayed_expert_ids_BLK: Tensor | None = None
        self.keeps_record = False
        self.recorded_expert_ids_BLK: Tensor | None = None

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Gates [B, L, K], logical expert ids [B, L, K] and scores [B, L, E], as TorchTitan's router gives them."""
        topk_scores_BLK, topk_expert_ids_BLK, scores_BLE = super().forward(x_BLD, expert_bias_E)
        if self.replayed_expert_ids_BLK is not None:
            topk_expert_ids_BLK = replayed_or_native(self.replayed_expert_ids_BLK, topk_expert_ids_BLK, self.num_experts)
            topk_scores_BLK = self._gates(scores_BLE, topk_expert_ids_BLK)
        if self.keeps_record:
            self.recorded_expert_ids_BLK = topk_expert_ids_BLK.detach().clone()
        return topk_scores_BLK, topk_expert_ids_BLK, scores_BLE

    def _gates(self, scores_BLE: Tensor, expert_ids_BLK: Tensor) -> Tensor:
        gates_BLK = scores_BLE.gather(dim=-1, index=expert_ids_BLK)
        if self.route_norm:
            gates_BLK = gates_BLK / (gates_BLK.sum(dim=-1, keepdim=True) + 1e-20)
        return gates_BLK * self.route_scale


def replayed_or_native(replayed_BLK: Tensor, native_BLK: Tensor, num_experts: int) -> Tensor:
    """int64 [B, L, K]: each row as recorded if it can be replayed, else the native one.

    A row cannot be replayed where an id is negative (nothing recorded) or no expert, or where two ids are equal:
    TorchTitan counts a repeated expert once but sends its row twice, and the result is NaN without an error.
    """
    replayed_BLK = replayed_BLK.to(native_BLK)
    in_range_BL = ((replayed_BLK >= 0) & (replayed_BLK < num_experts)).all(dim=-1)
    sorted_BLK = replayed_BLK.sort(dim=-1).values
    distinct_BL = (sorted_BLK[..., 1:] != sorted_BLK[..., :-1]).all(dim=-1)
    return torch.where((in_range_BL & distinct_BL).unsqueeze(-1), replayed_BLK, native_BLK)


@override(target=TokenChoiceTopKRouter.Config, exact=True, description="routing replay")
def replay_router(config: TokenChoiceTopKRouter.Config) -> ReplayRouter.Config:
    """Replace every top-k router by one that can replay and record."""
    return derive(config, ReplayRouter.Config)


class TokenExperts(GroupedExperts):
    """Experts that can also take tokens which nobody has sorted: :class:`PlacedRoutedExperts` prefers that where it may."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The options of TorchTitan's own."""

    def forward_tokens(self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor) -> Tensor:
        """[T, D]: each token's experts, all of them here, weighted by its scores."""
        raise NotImplementedError


class PlacedRoutedExperts(RoutedExperts):
    """Maps logical expert ids to physical slots right before dispatch; everything outside stays in logical ids.

    The map is a plain attribute, not a buffer: a buffer would need a sharding of its own. The trainer saves it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """The options of TorchTitan's own."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.logical_to_physical_E: Tensor | None = None
        self.physical_to_logical_P: Tensor | None = None
        self.last_tokens_per_expert_E: Tensor | None = None
        self._adds_in_recorded_order = False

    def add_in_recorded_order(self) -> None:
        """From now on a token's experts are added as they stand among its ids, not by slot. Two add up alike either way."""
        if not self._sorts_only():
            kind = type(self.token_dispatcher).__name__
            raise ConfigError(
                f"trainer.placement_invariant=true needs TorchTitan's standard dispatcher: {kind} adds experts itself."
            )
        if self.token_dispatcher.top_k > 2:
            self._adds_in_recorded_order, self.token_dispatcher.top_k = True, 1

    def set_placement(self, physical_to_logical_P: Tensor) -> None:
        """From now on expert ``physical_to_logical_P[p]`` is computed with the weights in slot p (int64 [P])."""
        self.physical_to_logical_P = physical_to_logical_P
        self.logical_to_physical_E = torch.argsort(physical_to_logical_P)

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """As TorchTitan's, [B, L, D]; ids and counts come in logical order."""
        # Kept, not added up: activation checkpointing runs a forward twice.
        self.last_tokens_per_expert_E = _local(num_local_tokens_per_expert_E).detach()
        if self.logical_to_physical_E is not None and self.physical_to_logical_P is not None:
            topk_expert_ids_BLK = self.logical_to_physical_E[topk_expert_ids_BLK]
            num_local_tokens_per_expert_E = num_local_tokens_per_expert_E[self.physical_to_logical_P]
        if isinstance(self.inner_experts, TokenExperts) and self._all_experts_are_here():
            flat = (tensor.flatten(0, 1) for tensor in (x_BLD, topk_scores_BLK, topk_expert_ids_BLK))
            return self.inner_experts.forward_tokens(*flat).view(x_BLD.shape)
        if not self._adds_in_recorded_order:
            return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        # Each choice of a token goes to its expert and comes back as a token of its own.
        x_BND = x_BLD.unsqueeze(2).expand(-1, -1, topk_expert_ids_BLK.shape[-1], -1).flatten(1, 2)
        scores_BN1, ids_BN1 = (chosen.flatten(1, 2).unsqueeze(-1) for chosen in (topk_scores_BLK, topk_expert_ids_BLK))
        out_BND = super().forward(x_BND, scores_BN1, ids_BN1, num_local_tokens_per_expert_E)
        return out_BND.view(*topk_expert_ids_BLK.shape, -1).sum(dim=2)

    def _all_experts_are_here(self) -> bool:
        return self._sorts_only() and getattr(self.token_dispatcher, "ep_mesh", None) is None

    def _sorts_only(self) -> bool:
        # Other dispatchers may do more than sort, pad or drop, say: those keep their own way.
        return type(self.token_dispatcher) in (LocalTokenDispatcher, AllToAllTokenDispatcher)


class LoopExperts(GroupedExperts):
    """One expert after another in the parameters' own precision: the reference, and what runs on the CPU.

    TorchTitan's own experts compute in bfloat16, which moves a loss by 6e-5 and hides smaller differences.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The options of TorchTitan's own."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """[R, D]: rows come sorted by expert. Experts without rows take part: their gradients are zeros, not missing."""
        # unbind, not w[e]: the gradient of an index is a zero tensor of all experts, once for each.
        weights = [_local(weight).unbind(0) for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)]
        rows = x_RD.split(num_tokens_per_expert_E.tolist())
        outputs = [(F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w2, w3 in zip(rows, *weights, strict=True)]
        return torch.cat(outputs)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@override(target=RoutedExperts.Config, exact=True, description="expert placement")
def placed_experts(config: RoutedExperts.Config, *, experts: str = "") -> PlacedRoutedExperts.Config:
    """Replace routed experts by placed ones, which compute by the ``GroupedExperts`` subclass at import path *experts*."""
    inner_experts = derive(config.inner_experts, experts_class(experts).Config) if experts else config.inner_experts
    return derive(config, PlacedRoutedExperts.Config, inner_experts=inner_experts)


def experts_class(path: str) -> type[GroupedExperts]:
    """The expert computation at import path *path*; raises ConfigError where there is none."""
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"experts={path!r} cannot be imported: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, GroupedExperts)):
        raise ConfigError(f"experts={path!r} is not a subclass of torchtitan.models.common.moe.GroupedExperts.")
    return found


class DocumentAttention(VarlenAttention):
    """Causal attention inside each document, one document after another, in the inputs' own precision.

    TorchTitan's variable-length attention has no CPU kernel. This stays a subclass of it because TorchTitan builds
    document boundaries for its subclasses only.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """The options of TorchTitan's own."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.window_size != (-1, 0):
            raise ConfigError(
                f"attention window_size={self.window_size}: on the CPU only full causal attention, (-1, 0), runs."
            )

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, L, N, H]; documents are given by ``attention_masks.cu_seq_q``."""
        if out_transform is not None:
            raise ConfigError("attention sinks (out_transform) do not run on the CPU: choose a model without them.")
        offsets = attention_masks.cu_seq_q.tolist()
        lengths = [end - start for start, end in pairwise(offsets)]
        queries, keys, values = (x.flatten(0, 1).transpose(0, 1).split(lengths, dim=1) for x in (q_BLNH, k_BLNH, v_BLNH))
        enable_gqa = bool(kwargs.get("enable_gqa"))
        outputs = [
            F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=enable_gqa)[0]
            for q, k, v in zip(queries, keys, values, strict=True)
        ]
        return torch.cat(outputs, dim=1).transpose(0, 1).unflatten(0, q_BLNH.shape[:2])


@override(target=VarlenAttention.Config, exact=True, description="document attention on the CPU")
def document_attention(config: VarlenAttention.Config) -> DocumentAttention.Config:
    """Replace variable-length attention by one that runs on the CPU."""
    return derive(config, DocumentAttention.Config)


def override_imports(*, experts: str, cpu_attention: bool) -> list[str | tuple[str, dict[str, Any]]]:
    """TorchTitan's ``override.imports`` for a RoutePack model; *experts* as in :func:`placed_experts`."""
    imports: list[str | tuple[str, dict[str, Any]]] = [
        f"{_HERE}.replay_router",
        (f"{_HERE}.placed_experts", {"experts": experts}),
    ]
    return [*imports, f"{_HERE}.document_attention" if cpu_attention else _EQUAL_WIDTH]


def replay_routers(model: nn.Module) -> list[ReplayRouter]:
    """The routers of a model, in layer order."""
    return [module for module in model.modules() if isinstance(module, ReplayRouter)]


def placed_layers(model: nn.Module) -> list[PlacedRoutedExperts]:
    """The routed experts of a model, in layer order."""
    return [module for module in model.modules() if isinstance(module, PlacedRoutedExperts)]


def expert_modules(model: nn.Module) -> list[GroupedExperts]:
    """What holds the experts' weights, in layer order."""
    return [layer.inner_experts for layer in placed_layers(model)]


def tokens_per_expert(model: nn.Module) -> Tensor:
    """int64 [L, E]: how many rows each expert got in the last forward, by its logical number."""
    counts = [layer.last_tokens_per_expert_E for layer in placed_layers(model)]
    return torch.stack([count for count in counts if count is not None]).long()


def set_replay(model: nn.Module, routed_experts_BTLK: Tensor | None) -> None:
    """From now on replay these ids, int [B, tokens, layers, K], -1 where none was recorded; None: route natively."""
    for layer, router in enumerate(replay_routers(model)):
        router.replayed_expert_ids_BLK = None if routed_experts_BTLK is None else routed_experts_BTLK[:, :, layer]


@contextmanager
def recorded_routes(model: nn.Module) -> Generator[None, None, None]:
    """Record every router's choice inside the block; :func:`routes_of` reads it there, after each forward."""
    for router in replay_routers(model):
        router.keeps_record = True
    try:
        yield
    finally:
        for router in replay_routers(model):
            router.keeps_record, router.recorded_expert_ids_BLK = False, None


def routes_of(model: nn.Module) -> Tensor:
    """int64 [B, tokens, layers, K]: the logical ids chosen in the last forward inside :func:`recorded_routes`."""
    routes = [router.recorded_expert_ids_BLK for router in replay_routers(model)]
    if not routes or any(route is None for route in routes):
        raise ConfigError("no route was recorded: run a forward inside `with recorded_routes(model):` first.")
    return torch.stack([route for route in routes if route is not None], dim=2)
