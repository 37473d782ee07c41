"""What the grouped GEMM kernels share: which tile a program owns, and loads of a block.

R rows sorted by expert, in tiles of BM rows of one expert each; a *slot* is the entry of ``topk_ids`` (or of the
caller's rows) that a sorted row stands for, -1 where it stands for none. Every index that is multiplied by a stride
is int64 first: 2^31 elements are passed by 524,288 rows of 4096. Sizes that change with the number of tokens are not
specialised on, so that no new number compiles a kernel anew.
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
def rows_of_tile(tile, order, offsets, tile_expert, tile_row, BM: tl.constexpr, GATHER: tl.constexpr):
    """Expert (int32) and first row (int32) of a tile, its sorted rows (int64 [BM]) and their slots (int64 [BM], -1: none)."""
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_row + tile)
    end = tl.load(offsets + expert + 1)
    rows = (first + tl.arange(0, BM)).to(tl.int64)
    slots = tl.load(order + rows, mask=rows < end, other=-1).to(tl.int64) if GATHER else tl.where(rows < end, rows, -1)
    return expert, first, rows, slots


@triton.jit
def load_block(pointers, mask0, mask1, MASK0: tl.constexpr, MASK1: tl.constexpr):
    """A block, zeros outside of the masks asked for. A load without a mask is the fastest, hence the four cases."""
    if MASK0 and MASK1:
        block = tl.load(pointers, mask=mask0 & mask1, other=0.0)
    elif MASK0:
        block = tl.load(pointers, mask=mask0, other=0.0)
    elif MASK1:
        block = tl.load(pointers, mask=mask1, other=0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit
def load_rows(a, pointers, first, k, k_range, k_size, stride_k, BM: tl.constexpr, TMA: tl.constexpr, MASK_K: tl.constexpr):
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
