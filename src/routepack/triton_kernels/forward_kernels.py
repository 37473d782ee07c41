"""Forward grouped GEMMs. Letters: T tokens, K top-k, R sorted rows, E experts, D model dim, F hidden dim.

Weights: w1, w3 (E, F, D) and w2 (E, D, F) of any strides, as pointers or (TMA_W) as tensor descriptors.
"""

import triton
import triton.language as tl

from routepack.triton_kernels.tiles import load_rows, load_weight, rows_of_tile, swizzle, weight_offsets


@triton.jit
def gate_up_forward(
    x, w1, w3, order, offsets, tile_expert, tile_row, num_tiles, h, act,
    D, F,
    stride_x_row, stride_x_d,
    stride_w1_e, stride_w1_f, stride_w1_d, stride_w3_e, stride_w3_f, stride_w3_d,
    stride_h_part, stride_h_row, stride_act_row,
    TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, SORTED: tl.constexpr, SAVE_H: tl.constexpr, SAVE_ACT: tl.constexpr,
    TMA_X: tl.constexpr, TMA_W: tl.constexpr,
    MASK_N: tl.constexpr, MASK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """act[r] = silu(x[r] w1[e]^T) * (x[r] w3[e]^T), and h = (gate, up) where it is saved.

    GATHER: there is an *order*, and x is read through it (row ``order[r] // TOP_K``) unless x is SORTED.
    """
    num_n = tl.cdiv(F, BN)
    tiles = tl.load(num_tiles)
    pid = tl.program_id(0)
    if pid >= tiles * num_n:
        return
    tile, column = swizzle(pid, tiles, num_n, GROUP_M)
    expert, first, rows, slots = rows_of_tile(tile, order, offsets, tile_expert, tile_row, BM, GATHER)
    row_ok = slots >= 0
    n = column * BN
    n_range = (n + tl.arange(0, BN)).to(tl.int64)
    k_range = tl.arange(0, BK).to(tl.int64)
    # Rows without a slot read a row that exists; what comes of them is not stored.
    source = tl.where(row_ok, rows, first) if SORTED else tl.where(row_ok, slots, 0) // TOP_K
    x_pointers = x if TMA_X else x + source[:, None] * stride_x_row + k_range[None, :] * stride_x_d
    w1_offsets = weight_offsets(expert, n_range, k_range, stride_w1_e, stride_w1_f, stride_w1_d)
    w3_offsets = weight_offsets(expert, n_range, k_range, stride_w3_e, stride_w3_f, stride_w3_d)
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for k in range(0, D, BK):
        a = load_rows(x, x_pointers, first, k, k_range, D, stride_x_d, BM, TMA_X, MASK_K)
        b1 = load_weight(w1, w1_offsets, expert, n, k, n_range, k_range, F, D, stride_w1_d, BN, BK, True, TMA_W, MASK_N, MASK_K)
        b3 = load_weight(w3, w3_offsets, expert, n, k, n_range, k_range, F, D, stride_w3_d, BN, BK, True, TMA_W, MASK_N, MASK_K)
        gate = tl.dot(a, b1, gate, input_precision=PRECISION)
        up = tl.dot(a, b3, up, input_precision=PRECISION)
    ok = row_ok[:, None] & (n_range < F)[None, :]
    # Rounded as the backward pass will see them, whether saved or computed again.
    gate_h = gate.to(act.dtype.element_ty)
    up_h = up.to(act.dtype.element_ty)
    if SAVE_H:
        h_pointers = h + rows[:, None] * stride_h_row + n_range[None, :]
        tl.store(h_pointers, gate_h, mask=ok)
        tl.store(h_pointers + stride_h_part, up_h, mask=ok)
    if SAVE_ACT:
        gate = gate_h.to(tl.float32)
        y = gate * tl.sigmoid(gate) * up_h.to(tl.float32)
        tl.store(act + rows[:, None] * stride_act_row + n_range[None, :], y.to(act.dtype.element_ty), mask=ok)


@triton.jit
def down_forward(
    act, w2, order, scores, offsets, tile_expert, tile_row, num_tiles, out,
    D, F,
    stride_act_row, stride_w2_e, stride_w2_d, stride_w2_f, stride_out_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, SCALE: tl.constexpr, TMA_ACT: tl.constexpr, TMA_W: tl.constexpr,
    MASK_N: tl.constexpr, MASK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[r] = act[r] w2[e]^T; SCALE: times the slot's score; SCATTER: written to the row of the slot instead of r."""
    num_n = tl.cdiv(D, BN)
    tiles = tl.load(num_tiles)
    pid = tl.program_id(0)
    if pid >= tiles * num_n:
        return
    tile, column = swizzle(pid, tiles, num_n, GROUP_M)
    expert, first, rows, slots = rows_of_tile(tile, order, offsets, tile_expert, tile_row, BM, GATHER)
    row_ok = slots >= 0
    n = column * BN
    n_range = (n + tl.arange(0, BN)).to(tl.int64)
    k_range = tl.arange(0, BK).to(tl.int64)
    source = tl.where(row_ok, rows, first)
    a_pointers = act if TMA_ACT else act + source[:, None] * stride_act_row + k_range[None, :]
    w2_offsets = weight_offsets(expert, n_range, k_range, stride_w2_e, stride_w2_d, stride_w2_f)
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, F, BK):
        a = load_rows(act, a_pointers, first, k, k_range, F, 1, BM, TMA_ACT, MASK_K)
        b = load_weight(w2, w2_offsets, expert, n, k, n_range, k_range, D, F, stride_w2_f, BN, BK, True, TMA_W, MASK_N, MASK_K)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if SCALE:
        acc = acc * tl.load(scores + slots, mask=row_ok, other=0.0).to(tl.float32)[:, None]
    target = slots if SCATTER else rows
    ok = row_ok[:, None] & (n_range < D)[None, :]
    tl.store(out + target[:, None] * stride_out_row + n_range[None, :], acc.to(out.dtype.element_ty), mask=ok)
