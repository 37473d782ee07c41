"""Launches the forward kernels over sorted rows. Grids come from sizes the host knows: nothing waits for the device.

Letters: T tokens, K top-k, N slots, R sorted rows, E experts, D model dim, F hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import grouped_gemm_kernels, permute_kernels, tile_configs
from .routing import Routing, max_tiles, num_blocks
from .tile_configs import KernelConfig

# Kernels take plain numbers for their constexpr parameters, which a type checker would refuse.
_GATE_UP: Any = grouped_gemm_kernels.gate_up_forward
_DOWN: Any = grouped_gemm_kernels.down_forward
_TILE_MAP: Any = permute_kernels.tile_map
_COMBINE: Any = permute_kernels.combine
_ZERO_TAIL: Any = permute_kernels.zero_tail


def new_rows(num_rows: int, width: int, like: Tensor, parts: int = 1) -> Tensor:
    """[parts, R, width] of rows in expert order, not initialised: every kernel writes all that another one reads."""
    return torch.empty((parts, num_rows, width), dtype=like.dtype, device=like.device)


def new_output(shape: torch.Size, like: Tensor) -> Tensor:
    """Of *shape* and dense, not initialised. That tensors are made in few places lets a test put them far apart in memory."""
    return like.new_empty(shape)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The kernels' view of a :class:`Routing`: configurations and tile maps, each built once per tile height."""

    routing: Routing
    num_rows: int
    """R."""
    arch: str
    dtype: torch.dtype
    """Of x: what is multiplied."""
    tma: bool | None = None
    """Load by tensor descriptors: None where the architecture has them and the strides allow it."""
    _maps: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def config(self, kernel: str) -> KernelConfig:
        """The table's, for the average rows of an expert."""
        rows_per_expert = self.num_rows / self.routing.num_experts
        return tile_configs.config_for(kernel, self.arch, rows_per_expert, self.dtype.itemsize)

    def tiles(self, tile_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Expert and first row of each tile, and how many there are: int32, on the device."""
        if tile_rows not in self._maps:
            num_experts, offsets_E1 = self.routing.num_experts, self.routing.offsets_E1
            tile_expert, tile_row = offsets_E1.new_empty((2, max_tiles(self.num_rows, num_experts, tile_rows)))
            self._maps[tile_rows] = tile_expert, tile_row, offsets_E1.new_empty(1)
            block_E = triton.next_power_of_2(num_experts)
            _TILE_MAP[(num_experts,)](offsets_E1, *self._maps[tile_rows], E=num_experts, BLOCK_E=block_E, BM=tile_rows, STEP=64)
        return self._maps[tile_rows]

    @cached_property
    def busiest_first_E(self) -> Tensor:
        """int32 [E]: the experts by falling number of rows."""
        return torch.argsort(self.routing.offsets_E1.diff(), descending=True, stable=True).to(torch.int32)

    def has_tma(self, *tensors: Tensor) -> bool:
        """Whether all of them can be described to the TMA unit: last axis dense, the rest in steps of 16 bytes."""
        wanted = self.arch in ("sm_90", "sm_100", "sm_103") if self.tma is None else self.tma
        return wanted and all(_is_describable(tensor) for tensor in tensors)

    def launch(self, kernel: Any, config: KernelConfig, *arguments: Any, columns: int, depth: int, **constants: Any) -> None:
        """Run *kernel* over the tiles of a result [R, columns] that sums over *depth*.

        *arguments* are what stands before the order in the kernel's signature, *constants* what only this kernel has. The grid
        has a program for each tile that there could be; those beyond the real number return at once.
        """
        routing = self.routing
        num_programs = max_tiles(self.num_rows, routing.num_experts, config.BM) * num_blocks(columns, config.BN)
        kernel[(num_programs,)](
            *arguments, routing.order_R, routing.offsets_E1, *self.tiles(config.BM),
            GATHER=routing.order_R is not None, MASK_N=columns % config.BN > 0, MASK_K=depth % config.BK > 0,
            PRECISION=precision(self.dtype), **constants, **config.options,
        )  # fmt: skip


def _is_describable(tensor: Tensor) -> bool:
    steps = [stride * tensor.itemsize for stride in tensor.stride()[:-1]]
    return (
        tensor.numel() > 0
        and tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(step > 0 and step % 16 == 0 and step < 2**40 for step in steps)
    )


def described(tensor: Tensor, block: list[int], tma: bool) -> Any:
    """The tensor, or under *tma* its descriptor for loads of *block*."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block) if tma else tensor


def precision(dtype: torch.dtype) -> str:
    """fp32 products as torch computes them: in full, unless TF32 is allowed."""
    if dtype != torch.float32:
        return "ieee"
    # Reading allow_tf32 is an error where fp32_precision was set, which replaces it from torch 2.9 on.
    wanted = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    is_tf32 = torch.backends.cuda.matmul.allow_tf32 if wanted is None else wanted == "tf32"
    return "tf32" if is_tf32 else "ieee"


def schedule_of(x: Tensor, routing: Routing, tma: bool | None = None) -> Schedule:
    """The schedule for rows taken from *x*."""
    arch = tile_configs.architecture(x.device)
    return Schedule(routing=routing, num_rows=routing.num_rows(x), arch=arch, dtype=x.dtype, tma=tma)


def gate_up(
    x: Tensor,
    w1: Tensor,
    w3: Tensor,
    schedule: Schedule,
    *,
    save_h: bool,
    save_act: bool = True,
    permute_first: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """silu(x w1^T) * (x w3^T) [R, F] in expert order, and both factors before the activation [2, R, F].

    What is not saved has no rows. *permute_first*: None leaves it to :func:`.tile_configs.should_permute_first`.
    """
    _, hidden_dim, dim = w1.shape
    tma_w = schedule.has_tma(w1, w3)
    if permute_first is None:
        permute_first = tile_configs.should_permute_first(schedule.arch, hidden_dim) and tma_w
    routing, config = schedule.routing, schedule.config(tile_configs.GATE_UP)
    is_sorted = permute_first or routing.order_R is None
    if permute_first and routing.order_R is not None:
        x = x.index_select(0, routing.order_R.clamp(min=0) // routing.top_k)
    h = new_rows(schedule.num_rows if save_h else 0, hidden_dim, x, parts=2)
    act = new_rows(schedule.num_rows if save_act else 0, hidden_dim, x)[0]
    tma_x = is_sorted and schedule.has_tma(x)
    block = [1, config.BN, config.BK]
    schedule.launch(
        _GATE_UP, config,
        described(x, [config.BM, config.BK], tma_x), described(w1, block, tma_w), described(w3, block, tma_w), h, act,
        dim, hidden_dim, *x.stride(), *w1.stride(), *w3.stride(), h.stride(0), h.stride(1), act.stride(0),
        columns=hidden_dim, depth=dim,
        TOP_K=routing.top_k, SORTED=is_sorted, SAVE_H=save_h, SAVE_ACT=save_act, TMA_X=tma_x, TMA_W=tma_w,
    )  # fmt: skip
    return act, h


def down(act: Tensor, w2: Tensor, scores: Tensor | None, out: Tensor, schedule: Schedule, *, scatter: bool) -> None:
    """out = act w2^T: in expert order, or *scatter*-ed to the slots' rows; times *scores* where they are given."""
    config = schedule.config(tile_configs.DOWN)
    _, dim, hidden_dim = w2.shape
    tma_w, tma_act = schedule.has_tma(w2), schedule.has_tma(act)
    schedule.launch(
        _DOWN, config,
        described(act, [config.BM, config.BK], tma_act), described(w2, [1, config.BN, config.BK], tma_w), scores, out,
        dim, hidden_dim, act.stride(0), *w2.stride(), out.stride(0),
        columns=dim, depth=hidden_dim, SCATTER=scatter, SCALE=scores is not None, TMA_ACT=tma_act, TMA_W=tma_w,
    )  # fmt: skip


def combine(y: Tensor, scores: Tensor | None, routing: Routing, out: Tensor) -> None:
    """out[t] = sum over k of scores[t, k] y[inverse[t, k]], in fp32 and in this order."""
    num_tokens, dim = out.shape
    block = min(1024, triton.next_power_of_2(dim))
    _COMBINE[(num_tokens, num_blocks(dim, block))](
        y, routing.inverse_N, scores, routing.offsets_E1, out, dim, y.stride(0), out.stride(0),
        E=routing.num_experts, TOP_K=routing.top_k, BLOCK_D=block, SCALE=scores is not None,
    )  # fmt: skip


def zero_tail(out: Tensor, routing: Routing) -> None:
    """Zeros in the rows that belong to no expert."""
    num_rows, dim = out.shape
    rows, block = 16, min(256, triton.next_power_of_2(dim))
    _ZERO_TAIL[(num_blocks(num_rows, rows), num_blocks(dim, block))](
        out, routing.offsets_E1, num_rows, dim, out.stride(0), E=routing.num_experts, ROWS=rows, BLOCK_D=block
    )


def to_slots(
    write: Callable[[Tensor, bool], None], shape: torch.Size, like: Tensor, scores: Tensor | None, schedule: Schedule
) -> Tensor:
    """[shape]: what ``write(rows, scatter)`` computes in expert order, brought to the rows that were given.

    Slots that share a token are summed, weighted by *scores*; rows of a dispatch are scattered, or left as they are.
    """
    routing = schedule.routing
    out = new_output(shape, like)
    if routing.inverse_N is not None:
        y = new_rows(schedule.num_rows, shape[1], like)[0]
        write(y, False)
        combine(y, scores, routing, out)
    elif routing.order_R is not None:
        write(out.zero_(), True)
    else:
        write(out, False)
        zero_tail(out, routing)
    return out


def forward(
    x: Tensor, scores: Tensor | None, w1: Tensor, w3: Tensor, w2: Tensor, routing: Routing,
    *, save_h: bool, permute_first: bool | None = None, tma: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, shaped as x, and h (see :func:`gate_up`). Scores are contiguous, one per slot."""
    schedule = schedule_of(x, routing, tma)
    act, h = gate_up(x, w1, w3, schedule, save_h=save_h, permute_first=permute_first)
    row_scores = scores if routing.inverse_N is None else None

    def write(out: Tensor, scatter: bool) -> None:
        down(act, w2, row_scores, out, schedule, scatter=scatter)

    return to_slots(write, x.shape, x, scores, schedule), h
