"""Backward grouped GEMMs. Letters: T tokens, K top-k, R sorted rows, E experts, D model dim, F hidden dim.

With A = silu(gate) * up and out[t] = sum_k s A w2^T, the gradient dA' = dout w2 of one row gives ds = <dA', A>,
dA = s dA', and w2's gradient is dout^T (s A): neither the down projection's output nor its gradient is ever stored.
"""

import triton
import triton.language as tl

from routepack.triton_kernels.tiles import load_block, load_rows, load_weight, rows_of_tile, swizzle, weight_offsets


@triton.jit
def swiglu_backward(
    acc, score, h, dh, scaled_act, rows, row_ok, n, F,
    stride_h_part, stride_h_row, stride_dh_part, stride_dh_row, stride_act_row,
    WIDTH: tl.constexpr, ACT: tl.constexpr, DH: tl.constexpr,
):  # fmt: skip
    """From dA' [BM, WIDTH] (fp32): stores s A and the gradients of gate and up, gives the part of ds (fp32 [BM])."""
    columns = n + tl.arange(0, WIDTH)
    ok = row_ok[:, None] & (columns < F)[None, :]
    h_pointers = h + rows[:, None] * stride_h_row + columns[None, :]
    gate = tl.load(h_pointers, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(h_pointers + stride_h_part, mask=ok, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    act = silu * up
    dscore = tl.sum(acc * act, axis=1)
    if ACT:
        act_pointers = scaled_act + rows[:, None] * stride_act_row + columns[None, :]
        tl.store(act_pointers, (act * score[:, None]).to(scaled_act.dtype.element_ty), mask=ok)
    if DH:
        acc = acc * score[:, None]
        dh_pointers = dh + rows[:, None] * stride_dh_row + columns[None, :]
        dgate = acc * up * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(dh_pointers, dgate.to(dh.dtype.element_ty), mask=ok)
        tl.store(dh_pointers + stride_dh_part, (acc * silu).to(dh.dtype.element_ty), mask=ok)
    return dscore


@triton.jit(do_not_specialize=["stride_parts_n"])
def down_backward(
    dout, w2, h, order, scores, offsets, tile_expert, tile_row, num_tiles, dh, scaled_act, dscore_parts,
    D, F,
    stride_dout_row, stride_dout_d, stride_w2_e, stride_w2_d, stride_w2_f,
    stride_h_part, stride_h_row, stride_dh_part, stride_dh_row, stride_act_row, stride_parts_n,
    TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
    GATHER: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, DH: tl.constexpr, DSCORE: tl.constexpr, TMA_W: tl.constexpr,
    MASK_N: tl.constexpr, MASK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dA'[r] = dout[r] w2[e], then :func:`swiglu_backward` on SPLIT column pieces: in one piece it spills registers.

    Each column tile leaves its part of ds in a row of *dscore_parts*, summed afterwards in a fixed order: no atomics.
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
    source = tl.where(row_ok, slots, 0) // TOP_K
    a_pointers = dout + source[:, None] * stride_dout_row + k_range[None, :] * stride_dout_d
    w2_offsets = weight_offsets(expert, n_range, k_range, stride_w2_e, stride_w2_f, stride_w2_d)
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, D, BK):
        a = load_rows(dout, a_pointers, first, k, k_range, D, stride_dout_d, BM, False, MASK_K)
        b = load_weight(w2, w2_offsets, expert, n, k, n_range, k_range, F, D, stride_w2_d, BN, BK, False, TMA_W, MASK_N, MASK_K)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    ones = tl.full([BM], 1.0, tl.float32)
    score = tl.load(scores + slots, mask=row_ok, other=0.0).to(tl.float32) if SCALE else ones
    if SPLIT == 1:
        dscore = swiglu_backward(
            acc, score, h, dh, scaled_act, rows, row_ok, n, F,
            stride_h_part, stride_h_row, stride_dh_part, stride_dh_row, stride_act_row, BN, ACT, DH,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = BN // 2
        left, right = acc.reshape(BM, 2, HALF).permute(0, 2, 1).split()
        if SPLIT == 2:
            dscore = swiglu_backward(
                left, score, h, dh, scaled_act, rows, row_ok, n, F,
                stride_h_part, stride_h_row, stride_dh_part, stride_dh_row, stride_act_row, HALF, ACT, DH,
            )  # fmt: skip
            dscore += swiglu_backward(
                right, score, h, dh, scaled_act, rows, row_ok, n + HALF, F,
                stride_h_part, stride_h_row, stride_dh_part, stride_dh_row, stride_act_row, HALF, ACT, DH,
            )  # fmt: skip
        else:
            QUARTER: tl.constexpr = BN // 4
            first_quarter, second_quarter = left.reshape(BM, 2, QUARTER).permute(0, 2, 1).split()
            third_quarter, fourth_quarter = right.reshape(BM, 2, QUARTER).permute(0, 2, 1).split()
            dscore = swiglu_backward(
                first_quarter, score, h, dh, scaled_act, rows, row_ok, n, F,
                stride_h_part, stride_h_row, stride_dh_part, stride_dh_row, stride_act_row, QUARTER, ACT, DH,
            )  # fmt: skip
            dscore += swiglu_backward(
                second_quarter, score, h, dh, scaled_act, rows, row_ok, n + QUARTER, F,
                stride_h_part, stride_h_row, stride_dh_part, stride_dh_row, stride_act_row, QUARTER, ACT, DH,
            )  # fmt: skip
            dscore += swiglu_backward(
                third_quarter, score, h, dh, scaled_act, rows, row_ok, n + 2 * QUARTER, F,
                stride_h_part, stride_h_row, stride_dh_part, stride_dh_row, stride_act_row, QUARTER, ACT, DH,
            )  # fmt: skip
            dscore += swiglu_backward(
                fourth_quarter, score, h, dh, scaled_act, rows, row_ok, n + 3 * QUARTER, F,
                stride_h_part, stride_h_row, stride_dh_part, stride_dh_row, stride_act_row, QUARTER, ACT, DH,
            )  # fmt: skip
    if DSCORE:
        tl.store(dscore_parts + column.to(tl.int64) * stride_parts_n + slots, dscore, mask=row_ok)


@triton.jit(do_not_specialize=["R"])
def input_gradient(
    dh, w1, w3, order, offsets, tile_expert, tile_row, num_tiles, dx,
    D, F, R,
    stride_dh_part, stride_dh_row,
    stride_w1_e, stride_w1_f, stride_w1_d, stride_w3_e, stride_w3_f, stride_w3_d, stride_dx_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, TMA_DH: tl.constexpr, TMA_W: tl.constexpr,
    MASK_N: tl.constexpr, MASK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx[r] = dgate[r] w1[e] + dup[r] w3[e]; SCATTER: written to the row of the slot instead of r.

    Two loops of one dot each: two dots into one accumulator per iteration double the pipeline's shared memory, and
    are reported to miscompile on sm_103 (Liger-Kernel PR 1413).
    """
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
    if TMA_DH:
        gate_pointers = dh
        up_pointers = dh
    else:
        gate_pointers = dh + tl.where(row_ok, rows, first)[:, None] * stride_dh_row + k_range[None, :]
        up_pointers = gate_pointers + stride_dh_part
    w1_offsets = weight_offsets(expert, n_range, k_range, stride_w1_e, stride_w1_d, stride_w1_f)
    w3_offsets = weight_offsets(expert, n_range, k_range, stride_w3_e, stride_w3_d, stride_w3_f)
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, F, BK):
        a = load_rows(dh, gate_pointers, first, k, k_range, F, 1, BM, TMA_DH, MASK_K)
        b = load_weight(w1, w1_offsets, expert, n, k, n_range, k_range, D, F, stride_w1_f, BN, BK, False, TMA_W, MASK_N, MASK_K)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    for k in range(0, F, BK):
        a = load_rows(dh, up_pointers, first + R, k, k_range, F, 1, BM, TMA_DH, MASK_K)
        b = load_weight(w3, w3_offsets, expert, n, k, n_range, k_range, D, F, stride_w3_f, BN, BK, False, TMA_W, MASK_N, MASK_K)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    target = slots if SCATTER else rows
    ok = row_ok[:, None] & (n_range < D)[None, :]
    tl.store(dx + target[:, None] * stride_dx_row + n_range[None, :], acc.to(dx.dtype.element_ty), mask=ok)


@triton.jit
def weight_gradient(
    a, b, order, offsets, expert_order, dw,
    M, N,
    stride_a_row, stride_a_m, stride_b_row, stride_b_n, stride_dw_e, stride_dw_m, stride_dw_n,
    TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, GATHER_A: tl.constexpr, GATHER_B: tl.constexpr, ACCUMULATE: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw[e] (M, N) = sum over the expert's rows of a[r]^T b[r]; ACCUMULATE: added to what dw holds.

    GATHER_A, GATHER_B: that operand is read at row ``order[r] // TOP_K``. One program owns one tile of dw and experts
    come by falling number of rows: deterministic, and a hot expert starts first. An expert without rows gets zeros.
    """
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    expert = tl.load(expert_order + pid // (num_m * num_n))
    tile_m, tile_n = swizzle(pid % (num_m * num_n), num_m, num_n, GROUP_M)
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    m_range = (tile_m * BM + tl.arange(0, BM)).to(tl.int64)
    n_range = (tile_n * BN + tl.arange(0, BN)).to(tl.int64)
    m_ok = m_range < M
    n_ok = n_range < N
    acc = tl.zeros([BM, BN], tl.float32)
    for r in range(start, end, BK):
        rows = (r + tl.arange(0, BK)).to(tl.int64)
        slots = tl.load(order + rows, mask=rows < end, other=-1).to(tl.int64) if GATHER else tl.where(rows < end, rows, -1)
        row_ok = (slots >= 0)[:, None]
        source_a = slots // TOP_K if GATHER_A else rows
        source_b = slots // TOP_K if GATHER_B else rows
        a_pointers = a + source_a[:, None] * stride_a_row + m_range[None, :] * stride_a_m
        b_pointers = b + source_b[:, None] * stride_b_row + n_range[None, :] * stride_b_n
        a_block = load_block(a_pointers, row_ok, m_ok[None, :], True, MASK_M)
        b_block = load_block(b_pointers, row_ok, n_ok[None, :], True, MASK_N)
        acc = tl.dot(a_block.T, b_block, acc, input_precision=PRECISION)
    pointers = dw + expert.to(tl.int64) * stride_dw_e + m_range[:, None] * stride_dw_m + n_range[None, :] * stride_dw_n
    ok = m_ok[:, None] & n_ok[None, :]
    if ACCUMULATE:
        acc += tl.load(pointers, mask=ok, other=0.0).to(tl.float32)
    tl.store(pointers, acc.to(dw.dtype.element_ty), mask=ok)
