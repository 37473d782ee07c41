"""The grouped matrix products, forward and backward: the file to start from when working on the kernels.

Letters: T tokens, K top-k, R sorted rows, E experts, D model dim, F hidden dim. The R rows are sorted by expert and cut into
tiles of BM rows of one expert each. A *slot* is the entry of ``topk_ids`` (or of the caller's rows) that a sorted row stands
for, -1 where it stands for none. Weights w1, w3 (E, F, D) and w2 (E, D, F) have any strides; they come as pointers or, under
TMA_W, as tensor descriptors.

Every index that is multiplied by a stride is int64 first: 2^31 elements are passed by 524,288 rows of 4096. Sizes that
change with the number of tokens are not specialised on, so that no new number compiles a kernel anew.

Backward: with A = silu(gate) * up and out[t] = sum_k s A w2^T, the gradient dA' = dout w2 of one row gives ds = <dA', A>,
dA = s dA', and w2's gradient is dout^T (s A). So neither the down projection's output nor its gradient is ever stored.
"""

import triton
import triton.language as tl


@triton.jit
def swizzle(pid, num_m, num_n, GROUP_M: tl.constexpr):
    """Row and column tile of program *pid*: GROUP_M row tiles walk the columns together and share weights in L2."""
    per_group = GROUP_M * num_n
    first = pid // per_group * GROUP_M
    height = tl.minimum(num_m - first, GROUP_M)
    within = pid % per_group
    return first + within % height, within // height


@triton.jit
def slots_of(rows, end, order, GATHER: tl.constexpr):
    """int64: the slots of sorted rows, -1 for the rows from *end* on, which are the next expert's."""
    return tl.load(order + rows, mask=rows < end, other=-1).to(tl.int64) if GATHER else tl.where(rows < end, rows, -1)


@triton.jit
def own_tile(
    tiles, n_size, order, offsets, tile_expert, tile_row,
    BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Expert, first row, rows (int64 [BM]), their slots, first column and columns (int64 [BN]) of the tile of this program."""
    tile, column = swizzle(tl.program_id(0), tiles, tl.cdiv(n_size, BN), GROUP_M)
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_row + tile)
    rows = (first + tl.arange(0, BM)).to(tl.int64)
    slots = slots_of(rows, tl.load(offsets + expert + 1), order, GATHER)
    n = column * BN
    return expert, first, rows, slots, n, (n + tl.arange(0, BN)).to(tl.int64)


@triton.jit
def load_block(pointers, mask0, mask1, MASK0: tl.constexpr, MASK1: tl.constexpr):
    """A block, zeros outside of the masks asked for. A load without a mask is the fastest."""
    rows_or_none = mask0 if MASK0 else None
    mask = (mask0 & mask1 if MASK0 else mask1) if MASK1 else rows_or_none
    return tl.load(pointers, mask=mask, other=0.0 if MASK0 or MASK1 else None)


@triton.jit
def load_rows(a, pointers, first, k, k_range, k_size, stride_k, TMA: tl.constexpr, MASK_K: tl.constexpr):
    """[BM, BK] of row-major activations at column *k*; *a* is a tensor descriptor where TMA is set."""
    if TMA:
        block = a.load([first, k])
    else:
        k_ok = (k + k_range < k_size)[None, :]
        block = load_block(pointers + tl.cast(k, tl.int64) * stride_k, k_ok, k_ok, MASK_K, False)
    return block


@triton.jit
def load_weight(
    w, offsets, expert, n, k, n_range, k_range, n_size, k_size, stride_k,
    BN: tl.constexpr, BK: tl.constexpr, K_LAST: tl.constexpr, TMA: tl.constexpr, MASK_N: tl.constexpr, MASK_K: tl.constexpr,
):  # fmt: skip
    """[BK, BN] of one expert's weights at (k, n). K_LAST: the contracted axis is the last of the three in *w*."""
    if TMA:
        block = w.load([expert, n, k]).reshape(BN, BK).T if K_LAST else w.load([expert, k, n]).reshape(BK, BN)
    else:
        k_ok = (k + k_range < k_size)[:, None]
        block = load_block(w + offsets + tl.cast(k, tl.int64) * stride_k, k_ok, (n_range < n_size)[None, :], MASK_K, MASK_N)
    return block


@triton.jit
def weight_offsets(expert, n_range, k_range, stride_e, stride_n, stride_k):
    """int64 [BK, BN] from the start of a weight of any strides; the ranges are int64."""
    return expert.to(tl.int64) * stride_e + k_range[:, None] * stride_k + n_range[None, :] * stride_n


@triton.jit
def add_product(
    acc, a, a_rows, first, stride_a_row, stride_a_k, w, expert, n, n_range, n_size, k_size, stride_e, stride_n, stride_k,
    BN: tl.constexpr, BK: tl.constexpr, K_LAST: tl.constexpr,
    TMA_A: tl.constexpr, TMA_W: tl.constexpr, MASK_N: tl.constexpr, MASK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [BM, BN] and the product of rows of *a* (*a_rows*, or under TMA_A those from *first* on) with w[expert]."""
    k_range = tl.arange(0, BK).to(tl.int64)
    a_pointers = a if TMA_A else a + a_rows[:, None] * stride_a_row + k_range[None, :] * stride_a_k
    w_offsets = weight_offsets(expert, n_range, k_range, stride_e, stride_n, stride_k)
    for k in range(0, k_size, BK):
        rows = load_rows(a, a_pointers, first, k, k_range, k_size, stride_a_k, TMA_A, MASK_K)
        weight = load_weight(
            w, w_offsets, expert, n, k, n_range, k_range, n_size, k_size, stride_k, BN, BK, K_LAST, TMA_W, MASK_N, MASK_K
        )
        acc = tl.dot(rows, weight, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store_tile(out, tile, rows, row_ok, columns, num_columns, stride_row, offset=0):
    """Write a tile to *rows* of *out*, from *offset* on, in the dtype of *out*, where row and column exist."""
    ok = row_ok[:, None] & (columns < num_columns)[None, :]
    pointers = out + rows[:, None] * stride_row + columns[None, :] + offset
    tl.store(pointers, tile.to(out.dtype.element_ty), mask=ok)


@triton.jit
def gate_up_forward(
    x, w1, w3, h, act,
    D, F,
    stride_x_row, stride_x_d,
    stride_w1_e, stride_w1_f, stride_w1_d, stride_w3_e, stride_w3_f, stride_w3_d,
    stride_h_part, stride_h_row, stride_act_row,
    order, offsets, tile_expert, tile_row, num_tiles,
    TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, SORTED: tl.constexpr, SAVE_H: tl.constexpr, SAVE_ACT: tl.constexpr,
    TMA_X: tl.constexpr, TMA_W: tl.constexpr,
    MASK_N: tl.constexpr, MASK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """act[r] = silu(x[r] w1[e]^T) * (x[r] w3[e]^T), and h = (gate, up) where it is saved.

    GATHER: there is an *order*, and x is read through it (row ``order[r] // TOP_K``) unless x is SORTED.
    """
    tiles = tl.load(num_tiles)
    if tl.program_id(0) >= tiles * tl.cdiv(F, BN):
        return
    expert, first, rows, slots, n, n_range = own_tile(tiles, F, order, offsets, tile_expert, tile_row, BM, BN, GROUP_M, GATHER)
    row_ok = slots >= 0
    k_range = tl.arange(0, BK).to(tl.int64)
    # Rows without a slot read a row that exists; what comes of them is not stored.
    source = tl.where(row_ok, rows, first) if SORTED else tl.where(row_ok, slots, 0) // TOP_K
    x_pointers = x if TMA_X else x + source[:, None] * stride_x_row + k_range[None, :] * stride_x_d
    w1_offsets = weight_offsets(expert, n_range, k_range, stride_w1_e, stride_w1_f, stride_w1_d)
    w3_offsets = weight_offsets(expert, n_range, k_range, stride_w3_e, stride_w3_f, stride_w3_d)
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for k in range(0, D, BK):
        a = load_rows(x, x_pointers, first, k, k_range, D, stride_x_d, TMA_X, MASK_K)
        b1 = load_weight(w1, w1_offsets, expert, n, k, n_range, k_range, F, D, stride_w1_d, BN, BK, True, TMA_W, MASK_N, MASK_K)
        b3 = load_weight(w3, w3_offsets, expert, n, k, n_range, k_range, F, D, stride_w3_d, BN, BK, True, TMA_W, MASK_N, MASK_K)
        gate = tl.dot(a, b1, gate, input_precision=PRECISION)
        up = tl.dot(a, b3, up, input_precision=PRECISION)
    # Rounded as the backward pass will see them, whether saved or computed again.
    gate_h = gate.to(act.dtype.element_ty)
    up_h = up.to(act.dtype.element_ty)
    if SAVE_H:
        store_tile(h, gate_h, rows, row_ok, n_range, F, stride_h_row)
        store_tile(h, up_h, rows, row_ok, n_range, F, stride_h_row, stride_h_part)
    if SAVE_ACT:
        gate = gate_h.to(tl.float32)
        store_tile(act, gate * tl.sigmoid(gate) * up_h.to(tl.float32), rows, row_ok, n_range, F, stride_act_row)


@triton.jit
def down_forward(
    act, w2, scores, out,
    D, F,
    stride_act_row, stride_w2_e, stride_w2_d, stride_w2_f, stride_out_row,
    order, offsets, tile_expert, tile_row, num_tiles,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, SCALE: tl.constexpr, TMA_ACT: tl.constexpr, TMA_W: tl.constexpr,
    MASK_N: tl.constexpr, MASK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[r] = act[r] w2[e]^T; SCALE: times the slot's score; SCATTER: written to the row of the slot instead of r."""
    tiles = tl.load(num_tiles)
    if tl.program_id(0) >= tiles * tl.cdiv(D, BN):
        return
    expert, first, rows, slots, n, n_range = own_tile(tiles, D, order, offsets, tile_expert, tile_row, BM, BN, GROUP_M, GATHER)
    row_ok = slots >= 0
    acc = add_product(
        tl.zeros([BM, BN], tl.float32), act, tl.where(row_ok, rows, first), first, stride_act_row, 1,
        w2, expert, n, n_range, D, F, stride_w2_e, stride_w2_d, stride_w2_f,
        BN, BK, True, TMA_ACT, TMA_W, MASK_N, MASK_K, PRECISION,
    )  # fmt: skip
    if SCALE:
        acc = acc * tl.load(scores + slots, mask=row_ok, other=0.0).to(tl.float32)[:, None]
    store_tile(out, acc, slots if SCATTER else rows, row_ok, n_range, D, stride_out_row)


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
        store_tile(scaled_act, act * score[:, None], rows, row_ok, columns, F, stride_act_row)
    if DH:
        acc = acc * score[:, None]
        dgate = acc * up * (sigmoid + silu * (1.0 - sigmoid))
        store_tile(dh, dgate, rows, row_ok, columns, F, stride_dh_row)
        store_tile(dh, acc * silu, rows, row_ok, columns, F, stride_dh_row, stride_dh_part)
    return dscore


@triton.jit
def halves(block):
    """The left and the right half of a block's columns."""
    return block.reshape(block.shape[0], 2, block.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit(do_not_specialize=["stride_parts_n"])
def down_backward(
    dout, w2, h, scores, dh, scaled_act, dscore_parts,
    D, F,
    stride_dout_row, stride_dout_d, stride_w2_e, stride_w2_d, stride_w2_f,
    stride_h_part, stride_h_row, stride_dh_part, stride_dh_row, stride_act_row, stride_parts_n,
    order, offsets, tile_expert, tile_row, num_tiles,
    TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
    GATHER: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, DH: tl.constexpr, DSCORE: tl.constexpr, TMA_W: tl.constexpr,
    MASK_N: tl.constexpr, MASK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dA'[r] = dout[r] w2[e], then :func:`swiglu_backward` on SPLIT column pieces: in one piece it spills registers.

    Each column tile leaves its part of ds in a row of *dscore_parts*, summed afterwards in a fixed order: no atomics.
    """
    tiles = tl.load(num_tiles)
    if tl.program_id(0) >= tiles * tl.cdiv(F, BN):
        return
    expert, first, rows, slots, n, n_range = own_tile(tiles, F, order, offsets, tile_expert, tile_row, BM, BN, GROUP_M, GATHER)
    row_ok = slots >= 0
    acc = add_product(
        tl.zeros([BM, BN], tl.float32), dout, tl.where(row_ok, slots, 0) // TOP_K, first, stride_dout_row, stride_dout_d,
        w2, expert, n, n_range, F, D, stride_w2_e, stride_w2_f, stride_w2_d,
        BN, BK, False, False, TMA_W, MASK_N, MASK_K, PRECISION,
    )  # fmt: skip
    ones = tl.full([BM], 1.0, tl.float32)
    score = tl.load(scores + slots, mask=row_ok, other=0.0).to(tl.float32) if SCALE else ones
    if SPLIT == 1:
        pieces = (acc,)
    elif SPLIT == 2:
        pieces = halves(acc)
    else:
        left, right = halves(acc)
        pieces = halves(left) + halves(right)
    dscore = tl.zeros([BM], tl.float32)
    for i in tl.static_range(SPLIT):
        dscore += swiglu_backward(
            pieces[i], score, h, dh, scaled_act, rows, row_ok, n + i * (BN // SPLIT), F,
            stride_h_part, stride_h_row, stride_dh_part, stride_dh_row, stride_act_row, BN // SPLIT, ACT, DH,
        )  # fmt: skip
    if DSCORE:
        tl.store(dscore_parts + (n // BN).to(tl.int64) * stride_parts_n + slots, dscore, mask=row_ok)


@triton.jit(do_not_specialize=["R"])
def input_gradient(
    dh, w1, w3, dx,
    D, F, R,
    stride_dh_part, stride_dh_row,
    stride_w1_e, stride_w1_f, stride_w1_d, stride_w3_e, stride_w3_f, stride_w3_d, stride_dx_row,
    order, offsets, tile_expert, tile_row, num_tiles,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, TMA_DH: tl.constexpr, TMA_W: tl.constexpr,
    MASK_N: tl.constexpr, MASK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx[r] = dgate[r] w1[e] + dup[r] w3[e]; SCATTER: written to the row of the slot instead of r.

    Two loops of one dot each: two dots into one accumulator per iteration double the pipeline's shared memory, and
    are reported to miscompile on sm_103 (Liger-Kernel PR 1413).
    """
    tiles = tl.load(num_tiles)
    if tl.program_id(0) >= tiles * tl.cdiv(D, BN):
        return
    expert, first, rows, slots, n, n_range = own_tile(tiles, D, order, offsets, tile_expert, tile_row, BM, BN, GROUP_M, GATHER)
    row_ok = slots >= 0
    source = tl.where(row_ok, rows, first)
    acc = add_product(
        tl.zeros([BM, BN], tl.float32), dh, source, first, stride_dh_row, 1,
        w1, expert, n, n_range, D, F, stride_w1_e, stride_w1_d, stride_w1_f,
        BN, BK, False, TMA_DH, TMA_W, MASK_N, MASK_K, PRECISION,
    )  # fmt: skip
    # A descriptor has the rows of gate and up below one another.
    acc = add_product(
        acc, dh if TMA_DH else dh + stride_dh_part, source, first + R, stride_dh_row, 1,
        w3, expert, n, n_range, D, F, stride_w3_e, stride_w3_d, stride_w3_f,
        BN, BK, False, TMA_DH, TMA_W, MASK_N, MASK_K, PRECISION,
    )  # fmt: skip
    store_tile(dx, acc, slots if SCATTER else rows, row_ok, n_range, D, stride_dx_row)


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
        slots = slots_of(rows, end, order, GATHER)
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
