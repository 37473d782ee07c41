"""Every launch that the MoE layer makes, forward and backward, compiled for an architecture; see offline.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from offline import Launch, compiling_for
from torch import Tensor

from routepack.triton_kernels import launch_backward, launch_forward
from routepack.triton_kernels import tile_configs as configs
from routepack.triton_kernels.routing import Needs, Routing, offsets_of_counts, route

DIM, HIDDEN_DIM, TOP_K, NUM_EXPERTS = 2_048, 768, 8, 8
"""Qwen3-30B-A3B's, with fewer experts: sizes are run-time values, so only their divisors matter to the code."""
TOKENS = {configs.SMALL: 64, configs.LARGE: 512}
"""Tokens that give the experts few rows and many."""
NEEDS = Needs(x=True, scores=True, w1=True, w3=True, w2=True)


@dataclass(frozen=True)
class Case(Launch):
    """A distinct compilation."""

    config: str
    """Tile, warps and stages as the table prints them."""


def compiled_for(
    arch: str,
    kernels: Collection[str] | None = None,
    *,
    classes: Sequence[str] = (configs.LARGE, configs.SMALL),
    variants: Collection[str] | None = None,
) -> dict[str, Case]:
    """By name, each of *kernels* with each config and operand path that *arch* ships; equal compilations once."""
    cases: dict[str, Case] = {}
    seen: set[str] = set()
    for rows_class in classes:
        for variant in VARIANTS if variants is None else variants:
            with _architecture(arch), compiling_for(arch, kernels) as launches:
                VARIANTS[variant](TOKENS[rows_class])
            for made in launches:
                if made.compiled.hash in seen:
                    continue
                seen.add(made.compiled.hash)
                name = f"{made.kernel}{_which(made)}, {rows_class}, {variant}"
                assert name not in cases, f"two different compilations are called {name}"
                cases[name] = Case(made.kernel, made.constants, made.compiled, _config(made))
    return cases


def _which(made: Launch) -> str:
    """Tells apart what one variant compiles of one kernel."""
    if made.kernel == "weight_gradient":
        return " of w2" if made.constants["GATHER_A"] else " of w1, w3"
    if made.kernel == "combine":
        return " of y" if made.constants["SCALE"] else " of dx"
    return f" of {made.constants['BM']} rows" if made.kernel == "tile_map" else ""


def _config(made: Launch) -> str:
    tile = ",".join(str(made.constants[name]) for name in ("BM", "BN", "BK") if name in made.constants)
    return f"{tile or '-'}, {made.compiled.metadata.num_warps}, {made.compiled.metadata.num_stages}"


@contextmanager
def _architecture(arch: str) -> Generator[None, None, None]:
    """The layer takes its tensors, which are on the CPU, to be on *arch*."""
    before = configs.architecture
    configs.architecture = lambda device: arch  # type: ignore[assignment]
    try:
        yield
    finally:
        configs.architecture = before  # type: ignore[assignment]


def _weights(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((NUM_EXPERTS, HIDDEN_DIM, DIM), (NUM_EXPERTS, HIDDEN_DIM, DIM), (NUM_EXPERTS, DIM, HIDDEN_DIM))
    return tuple(torch.empty(size, dtype=dtype) for size in sizes)  # type: ignore[return-value]


def _train(x: Tensor, scores: Tensor | None, routing: Routing, **options: Any) -> None:
    weights = _weights(x.dtype)
    out, h = launch_forward.forward(x, scores, *weights, routing, save_h=True, **options)
    launch_backward.backward(torch.empty_like(out), x, scores, *weights, h, routing, NEEDS)


def _tokens(num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Routing]:
    ids_TK = torch.arange(num_tokens * TOP_K).view(num_tokens, TOP_K) % NUM_EXPERTS
    order_R, inverse_N, offsets_E1 = route(ids_TK, NUM_EXPERTS)
    routing = Routing(offsets_E1=offsets_E1, order_R=order_R, inverse_N=inverse_N, top_k=TOP_K)
    return torch.empty(num_tokens, DIM, dtype=dtype), torch.empty(num_tokens * TOP_K), routing


def _rows(num_tokens: int, *, indexed: bool = False) -> tuple[Tensor, Tensor, Routing]:
    num_rows = num_tokens * TOP_K
    order_R = torch.arange(num_rows, dtype=torch.int32) if indexed else None
    offsets_E1 = offsets_of_counts(torch.full((NUM_EXPERTS,), num_tokens), num_rows)
    routing = Routing(offsets_E1=offsets_E1, order_R=order_R)
    return torch.empty(num_rows, DIM, dtype=torch.bfloat16), torch.empty(num_rows), routing


def _infer(num_tokens: int) -> None:
    x, scores, routing = _tokens(num_tokens)
    launch_forward.forward(x, scores, *_weights(), routing, save_h=False, permute_first=False)


def _recompute_and_accumulate(num_tokens: int) -> None:
    x, scores, routing = _tokens(num_tokens)
    sums = _weights(torch.float32)
    h = x.new_empty((2, 0, HIDDEN_DIM))
    launch_backward.backward(x, x, scores, *_weights(), h, routing, NEEDS, sums=sums, permute_first=False)


VARIANTS: dict[str, Callable[[int], None]] = {
    "tokens": lambda num_tokens: _train(*_tokens(num_tokens), permute_first=False),
    "permuted": lambda num_tokens: _train(*_tokens(num_tokens), permute_first=True),
    "rows": lambda num_tokens: _train(*_rows(num_tokens)),
    "indexed rows": lambda num_tokens: _train(*_rows(num_tokens, indexed=True)),
    "inference": _infer,
    "recomputing": _recompute_and_accumulate,
    "float32": lambda num_tokens: _train(*_tokens(num_tokens, torch.float32), permute_first=False),
}
"""What a kernel is compiled for: tokens through the sorting gather, the same with x copied into expert order first, rows that
come in expert order or through an index, no gradients, recomputation with float32 gradient sums, float32 throughout."""
