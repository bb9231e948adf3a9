"""Device functions of the kernels: wait for flags, multiply one tile, map a program index to a tile."""

import torch
import triton
import triton.language as tl

from megatron_overlap.kernels.launch import MAX_POLLS

# Columns of `schedules.tile_order.RowTile`, and their number.
START, STOP, OWNER, PART, ROW_IN_SHARD, TILES_IN_CHUNK, REMOTE, FLAG, COLUMNS = map(tl.constexpr, range(9))


@triton.jit
def wait_for(flag_ptr, epoch, status_ptr, MAX_POLLS: tl.constexpr):
    """Block until the flag reaches `epoch`. Data that a rank wrote before it set the flag is then visible.

    Flags only increase, so the flag of an earlier operation never satisfies a later wait. After MAX_POLLS reads the
    block stops waiting, writes the epoch to `status` and continues: the result is wrong, the host reads the status, and
    the device does not hang.
    """
    polls = 0
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    while (seen < epoch) & (polls < MAX_POLLS):
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        polls += 1
    if seen < epoch:
        tl.atomic_xchg(status_ptr, epoch, sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=["epoch", "num_flags"])
def wait_all_kernel(flags_ptr, epoch, status_ptr, num_flags, MAX_POLLS: tl.constexpr):
    for number in tl.range(0, num_flags):
        wait_for(flags_ptr + number, epoch, status_ptr, MAX_POLLS)


def wait_all(flags: torch.Tensor, epoch: int, status: torch.Tensor, max_polls: int = MAX_POLLS) -> None:
    """Block the current stream until all flags reach `epoch`. The flags must not depend on this stream."""
    wait_all_kernel[(1,)](flags, epoch, status, flags.numel(), MAX_POLLS=max_polls, num_warps=1)


@triton.jit
def place_by_owner(index, num_first, num_rows, num_columns, GROUP: tl.constexpr):
    """Return the row and column of tile `index`: GROUP rows per column, then the next column, to reuse the L2 cache.

    No group crosses the bound behind the first `num_first` rows: blocks would wait while own rows are not yet computed.
    """
    rest = index >= num_first * num_columns
    start = tl.where(rest, num_first, 0)
    in_part = index - start * num_columns
    in_group = GROUP * num_columns
    first = in_part // in_group * GROUP
    height = tl.minimum(tl.where(rest, num_rows - num_first, num_first) - first, GROUP)
    return start + first + in_part % in_group % height, in_part % in_group // height


@triton.jit
def product(
    a, b, num_rows, num_columns, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """`a[:num_rows, :K] @ b[:K, :num_columns]` in fp32, `[BLOCK_M, BLOCK_N]`; undefined past the end.

    `a` and `b` are a pointer and the strides of both dimensions.
    WIDEN multiplies in fp32, because Triton's interpreter computes a wrong bf16 dot.
    """
    a_ptr, stride_am, stride_ak = a
    b_ptr, stride_bk, stride_bn = b
    # Rows past the end read the last row of this tile instead of a mask: they do not affect other rows.
    rows = tl.minimum(tl.arange(0, BLOCK_M), num_rows - 1)
    columns = tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + depth[None, :] * stride_ak
    b_ptrs = b_ptr + depth[:, None] * stride_bk + columns[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        # Mask both operands: memory past the end may contain NaN, and 0 * NaN is NaN.
        if EVEN_K:
            a_tile = tl.load(a_ptrs)
        else:
            a_tile = tl.load(a_ptrs, mask=depth[None, :] < K - k, other=0.0)
        if EVEN_N and EVEN_K:
            b_tile = tl.load(b_ptrs)
        elif EVEN_N:
            b_tile = tl.load(b_ptrs, mask=depth[:, None] < K - k, other=0.0)
        elif EVEN_K:
            b_tile = tl.load(b_ptrs, mask=columns[None, :] < num_columns, other=0.0)
        else:
            b_tile = tl.load(b_ptrs, mask=(depth[:, None] < K - k) & (columns[None, :] < num_columns), other=0.0)
        if WIDEN:
            total = tl.dot(a_tile.to(tl.float32), b_tile.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    return total


@triton.jit
def count_tile(counter_ptr, num_tiles, flag_ptr, epoch):
    """Count a stored tile. The block that counts the last tile of a chunk sets the chunk's flag, local or at a peer.

    A reader of the flag sees all stores that the blocks issued before they counted. Resets the counter to 0.
    """
    # One thread counts for the block: all threads must have issued their stores before.
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="sys")
    if before == num_tiles - 1:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")
