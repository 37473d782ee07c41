"""Expert ids to the order in which the kernels walk the rows: on the device, without the host waiting for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Rows sorted by expert. A *slot* is an entry of ``topk_ids``, or a row of the caller's under an EP dispatch.

    Everything lies on the device; all sizes are known to the host.
    """

    offsets_E1: Tensor
    """int32 [E + 1]: expert e computes sorted rows ``offsets[e]`` to ``offsets[e + 1] - 1``."""
    order_R: Tensor | None = None
    """int32 [R]: the slot of each sorted row, -1 for a row that no one asks for. None: row r is slot r."""
    inverse_N: Tensor | None = None
    """int32 [N]: the sorted row of each slot, where several slots add up to a token. None: a slot is a row of the output."""
    top_k: int = 1
    """Slots per row of x: slot s reads row ``s // top_k``."""

    @property
    def num_experts(self) -> int:
        """E."""
        return self.offsets_E1.shape[0] - 1

    def num_rows(self, x: Tensor) -> int:
        """R: the number of slots, or of rows of x where there is no order."""
        return x.shape[0] if self.order_R is None else self.order_R.shape[0]


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    scores: bool
    w1: bool
    w3: bool
    w2: bool


def signed(integers: Tensor) -> Tensor:
    """The same numbers in int32 or int64: narrow types do not hold E, and torch hardly computes in unsigned ones."""
    if integers.dtype in (torch.int32, torch.int64):
        return integers
    return integers.to(torch.int32 if integers.itemsize <= 2 else torch.int64)


def route(topk_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order (int32 [R]), inverse (int32 [N]) and offsets (int32 [E + 1]) of expert ids [T, K]; R = N = T K.

    Slots of an expert keep their order, and an id that a token repeats counts as often as it stands there. An id outside
    of 0 .. E - 1 marks a slot without an expert: it comes last, beyond ``offsets[E]``.

    >>> [part.tolist() for part in route(torch.tensor([[2, 0], [2, -1]]), 3)]
    [[1, 0, 2, 3], [1, 0, 2, 3], [0, 1, 1, 3]]
    """
    # Radix sort takes a pass per byte of the key.
    dtype = torch.int16 if num_experts < 2**15 else torch.int32
    ids_N = signed(topk_ids_TK.reshape(-1))
    known_N = (ids_N >= 0) & (ids_N < num_experts)
    keys_N = torch.where(known_N, ids_N, num_experts).to(dtype)
    keys_R, order_R = torch.sort(keys_N, stable=True)
    bounds_E1 = torch.arange(num_experts + 1, dtype=dtype, device=keys_R.device)
    offsets_E1 = torch.searchsorted(keys_R, bounds_E1, out_int32=True)
    rows_R = torch.arange(order_R.shape[0], dtype=torch.int32, device=order_R.device)
    inverse_N = torch.empty_like(rows_R).scatter_(0, order_R, rows_R)
    return order_R.to(torch.int32), inverse_N, offsets_E1


def offsets_of_counts(counts_E: Tensor, num_rows: int) -> Tensor:
    """int32 [E + 1] from rows per expert, rising and never beyond *num_rows*, so that no kernel can leave the rows that exist.

    A count below zero counts as zero.

    >>> offsets_of_counts(torch.tensor([2, 0, 3]), 6).tolist()
    [0, 2, 2, 5]
    """
    ends_E = torch.cumsum(signed(counts_E).clamp(min=0), dim=0).clamp(max=num_rows).to(torch.int32)
    return torch.cat([ends_E.new_zeros(1), ends_E])


def num_blocks(size: int, block: int) -> int:
    """Blocks of *block* that cover *size*."""
    return -(-size // block)


def max_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """How many tiles of *tile_rows* rows there are at most, however the rows fall on the experts.

    As many experts as possible have one row too many for their full tiles.

    >>> max_tiles(10, 4, 8)
    4
    """
    partial = min(num_rows, num_experts)
    return (num_rows - partial) // tile_rows + partial
