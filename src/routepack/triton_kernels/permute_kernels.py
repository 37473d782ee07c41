"""Around the GEMMs: the tile map, the weighted un-permute, zeros beyond the last row."""

import triton
import triton.language as tl


@triton.jit
def tile_map(
    offsets, tile_expert, tile_row, num_tiles, E: tl.constexpr, BLOCK_E: tl.constexpr, BM: tl.constexpr, STEP: tl.constexpr
):
    """Expert and first row of every tile of BM rows, and how many tiles there are. One program per expert."""
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    known = experts < E
    starts = tl.load(offsets + experts, mask=known, other=0)
    ends = tl.load(offsets + experts + 1, mask=known, other=0)
    tiles = tl.cdiv(ends - starts, BM)
    first_tile = tl.sum(tl.where(experts < expert, tiles, 0))
    own_tiles = tl.sum(tl.where(experts == expert, tiles, 0))
    first_row = tl.load(offsets + expert)
    if expert == E - 1:
        tl.store(num_tiles, first_tile + own_tiles)
    for step in range(0, own_tiles, STEP):
        tile = step + tl.arange(0, STEP)
        tl.store(tile_expert + first_tile + tile, tl.full([STEP], 0, tl.int32) + expert, mask=tile < own_tiles)
        tl.store(tile_row + first_tile + tile, first_row + tile * BM, mask=tile < own_tiles)


@triton.jit
def combine(
    y, inverse, scores, offsets, out,
    D, stride_y_row, stride_out_row,
    E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k, in this order and in fp32, of score[t, k] y[inverse[t, k]]; slots without an expert add nothing."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.load(offsets + E)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(inverse + token * TOP_K + k).to(tl.int64)
        value = tl.load(y + row * stride_y_row + columns, mask=(columns < D) & (row < total), other=0.0).to(tl.float32)
        if SCALE:
            # The score of a slot without an expert may be NaN.
            value = value * tl.load(scores + token * TOP_K + k, mask=row < total, other=0.0).to(tl.float32)
        acc += value
    tl.store(out + token * stride_out_row + columns, acc.to(out.dtype.element_ty), mask=columns < D)


@triton.jit(do_not_specialize=["R"])
def zero_tail(out, offsets, R, D, stride_out_row, E: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """out[r] = 0 for the rows that belong to no expert: r >= offsets[E]."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok = ((rows >= tl.load(offsets + E)) & (rows < R))[:, None] & (columns < D)[None, :]
    pointers = out + rows[:, None] * stride_out_row + columns[None, :]
    tl.store(pointers, tl.zeros([ROWS, BLOCK_D], out.dtype.element_ty), mask=ok)
