"""The GEMM kernels for Hopper: a producer warp loads tiles by TMA, and eight consumer warps multiply them by wgmma.

Producer and consumers iterate over the same tiles and count the same steps of depth `BLOCK_K` across all tiles. One
slot of a ring in shared memory contains the operands of one step. The producer waits for the flag of a tile and then
fills slots as they become `empty`. It prefetches up to the length of the ring, also across tiles: while the consumers
store a tile, the operands of the next tile load.

Importing this module fails where `kernels.gluon_version.UNSUPPORTED_REASON` is not empty. Training uses it only
on a device where `kernels.hopper_self_test` passes. An H200 has run it.
"""

import triton.language as tl

from megatron_overlap.kernels import primitives
from megatron_overlap.kernels.gluon_version import (
    fence_async_shared,
    gl,
    jit,
    load_tile,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Registers of a producer thread; the consumers get the rest.
PRODUCER_REGISTERS = gl.constexpr(40)


@jit
def in_ring(step, STAGES: gl.constexpr):
    """Return the slot of a step and the phase parity of its barriers: the parity of the number of full ring cycles."""
    return step % STAGES, step // STAGES & 1


@jit
def make_ring(a_desc, b_desc, STAGES: gl.constexpr):
    """Allocate the slots of both operands. TMA bytes complete `full` barriers; consumers complete `empty` barriers."""
    a_slots = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_slots = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    # TMA accesses the barriers through the async proxy, which does not see their initialization without a fence.
    fence_async_shared()
    return a_slots, b_slots, full, empty


@jit
def produce(
    descs, ring, where, waits,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, NT: gl.constexpr,
    MAX_POLLS: gl.constexpr,
):  # fmt: skip
    """Load all tiles in one warp. Waits for the flag of a remote row tile first; MAX_POLLS 0 disables the wait."""
    tiles_ptr, num_first_tiles, num_row_tiles, N, K = where
    flags_ptr, status_ptr, epoch = waits
    a_desc, b_desc = descs
    a_slots, b_slots, full, empty = ring
    num_columns = gl.cdiv(N, BLOCK_N)
    step = 0
    for index in range(gl.program_id(0), num_row_tiles * num_columns, gl.num_programs(0)):
        row_tile, column_tile = primitives.place_by_owner(index, num_first_tiles, num_row_tiles, num_columns, GROUP)
        tile = tiles_ptr + row_tile * primitives.COLUMNS
        start = gl.load(tile + primitives.START)
        if MAX_POLLS > 0:  # noqa: SIM102 - a compile-time condition: removes the load of REMOTE
            if gl.load(tile + primitives.REMOTE) != 0:
                primitives.wait_for(flags_ptr + gl.load(tile + primitives.FLAG), epoch, status_ptr, MAX_POLLS)
                fence_reads(start)
        first = column_tile * BLOCK_N
        for k in range(0, K, BLOCK_K):
            slot, phase = in_ring(step, STAGES)
            # A wait for the phase before the first one returns at once: the ring starts empty.
            mbarrier.wait(empty.index(slot), phase ^ 1)
            # TMA fills the slot past the end of the matrix with zeros and counts these bytes too.
            mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            # Rows past the end of the tile belong to another chunk, which may not be received. They are never stored.
            load_tile(a_desc, [start, k], full.index(slot), a_slots.index(slot))
            if NT:
                load_tile(b_desc, [first, k], full.index(slot), b_slots.index(slot))
            else:
                load_tile(b_desc, [k, first], full.index(slot), b_slots.index(slot))
            step += 1


@jit
def fence_reads(value):
    """Make data of peers that an acquire made visible to this thread visible to TMA (the async proxy) too."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global;\n\tmov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@jit
def multiply(
    ring, step, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, NT: gl.constexpr,
):  # fmt: skip
    """Return one tile of the product in fp32 and the next step. Rows and columns past the end are undefined."""
    a_slots, b_slots, full, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    total = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    for k in range(0, K, BLOCK_K):
        slot, phase = in_ring(step, STAGES)
        mbarrier.wait(full.index(slot), phase)
        b = b_slots.index(slot)
        if NT:
            b = b.permute((1, 0))
        total = warpgroup_mma(a_slots.index(slot), b, total, is_async=True)
        # At most this step's wgmma is pending, so the slot of the previous step is free.
        total = warpgroup_mma_wait(1, deps=(total,))
        release(empty, step + STAGES - 1, k > 0, STAGES)
        step += 1
    total = warpgroup_mma_wait(0, deps=(total,))
    release(empty, step + STAGES - 1, True, STAGES)
    return total, step


@jit
def release(empty, step, done, STAGES: gl.constexpr):
    """Release the slot of a step. One thread arrives for all consumer warps after a barrier, when all have read it."""
    tl.debug_barrier()
    slot, _ = in_ring(step, STAGES)
    mbarrier.arrive(empty.index(slot), count=1, pred=done)


@jit
def store_rows(out, stride, num_rows, num_columns, total, DTYPE: gl.constexpr):
    """Round and store the first `num_rows` rows and `num_columns` columns of `total`, 16 bytes at a time."""
    BLOCK_M: gl.constexpr = total.shape[0]
    BLOCK_N: gl.constexpr = total.shape[1]
    rounded = total.to(DTYPE)
    if BLOCK_N == 256:
        # Store 128 columns at a time: the layout conversion then needs half the shared memory.
        left, right = gl.split(gl.permute(gl.reshape(rounded, [BLOCK_M, 2, 128]), (0, 2, 1)))
        _store_columns(out, stride, num_rows, num_columns, left, 0)
        _store_columns(out, stride, num_rows, num_columns, right, 128)
    else:
        _store_columns(out, stride, num_rows, num_columns, rounded, 0)


@jit
def _store_columns(out, stride, num_rows, num_columns, block, FIRST: gl.constexpr):
    BLOCK_M: gl.constexpr = block.shape[0]
    # Each warp stores the 16 rows that it computed, two rows at a time.
    layout: gl.constexpr = gl.BlockedLayout([8, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))[:, None]
    columns = FIRST + gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
    mask = (rows < num_rows) & (columns < num_columns)
    gl.store(out + rows * stride + columns, gl.convert_layout(block, layout), mask=mask)


@jit(do_not_specialize=["epoch", "num_first_tiles", "num_row_tiles"])
def ag_gemm_sm90_kernel(
    a_desc, b_desc, bias_ptr, out_ptr, tiles_ptr, flags_ptr, status_ptr, epoch, num_first_tiles, num_row_tiles,
    N, K, stride_om,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, NUM_STAGES: gl.constexpr,
    NT: gl.constexpr, HAS_BIAS: gl.constexpr, MAX_POLLS: gl.constexpr,
):  # fmt: skip
    ring = make_ring(a_desc, b_desc, NUM_STAGES)
    descs = (a_desc, b_desc)
    where = (tiles_ptr, num_first_tiles, num_row_tiles, N, K)
    waits = (flags_ptr, status_ptr, epoch)
    there = (out_ptr, stride_om, bias_ptr)
    gl.warp_specialize(
        [
            (_store_products, (ring, where, there, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_STAGES, NT, HAS_BIAS)),
            (produce, (descs, ring, where, waits, BLOCK_N, BLOCK_K, GROUP, NUM_STAGES, NT, MAX_POLLS)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


@jit
def _store_products(
    ring, where, there,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    NT: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    tiles_ptr, num_first_tiles, num_row_tiles, N, K = where
    out_ptr, stride_om, bias_ptr = there
    num_columns = gl.cdiv(N, BLOCK_N)
    step = 0
    for index in range(gl.program_id(0), num_row_tiles * num_columns, gl.num_programs(0)):
        row_tile, column_tile = primitives.place_by_owner(index, num_first_tiles, num_row_tiles, num_columns, GROUP)
        tile = tiles_ptr + row_tile * primitives.COLUMNS
        start = gl.load(tile + primitives.START)
        num_rows = gl.load(tile + primitives.STOP) - start
        first = column_tile * BLOCK_N
        total, step = multiply(ring, step, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, NT)
        if HAS_BIAS:
            columns = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, total.type.layout))
            total += gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        out = out_ptr + start.to(gl.int64) * stride_om + first
        store_rows(out, stride_om, num_rows, N - first, total, out_ptr.dtype.element_ty)


@jit(do_not_specialize=["epoch", "first_flag", "num_first_tiles", "num_row_tiles"])
def gemm_to_owners_sm90_kernel(
    a_desc, b_desc, recv_buffers_ptr, flags_ptr, counters_ptr, tiles_ptr, epoch, slot_offset, first_flag,
    num_first_tiles, num_row_tiles, N, K, DTYPE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, NUM_STAGES: gl.constexpr,
    NT: gl.constexpr,
):  # fmt: skip
    ring = make_ring(a_desc, b_desc, NUM_STAGES)
    descs = (a_desc, b_desc)
    where = (tiles_ptr, num_first_tiles, num_row_tiles, N, K)
    there = (recv_buffers_ptr, flags_ptr, counters_ptr, slot_offset, first_flag, epoch)
    gl.warp_specialize(
        [
            (_store_partial_sums, (ring, where, there, DTYPE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_STAGES, NT)),
            # MAX_POLLS 0: the producer reads neither flags nor status.
            (produce, (descs, ring, where, (tiles_ptr, tiles_ptr, epoch), BLOCK_N, BLOCK_K, GROUP, NUM_STAGES, NT, 0)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


@jit
def _store_partial_sums(
    ring, where, there, DTYPE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    NT: gl.constexpr,
):  # fmt: skip
    tiles_ptr, num_first_tiles, num_row_tiles, N, K = where
    recv_buffers_ptr, flags_ptr, counters_ptr, slot_offset, first_flag, epoch = there
    num_columns = gl.cdiv(N, BLOCK_N)
    step = 0
    for index in range(gl.program_id(0), num_row_tiles * num_columns, gl.num_programs(0)):
        row_tile, column_tile = primitives.place_by_owner(index, num_first_tiles, num_row_tiles, num_columns, GROUP)
        tile = tiles_ptr + row_tile * primitives.COLUMNS
        num_rows = gl.load(tile + primitives.STOP) - gl.load(tile + primitives.START)
        owner = gl.load(tile + primitives.OWNER)
        first = column_tile * BLOCK_N
        total, step = multiply(ring, step, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, NT)
        recv_buffer = gl.multiple_of(gl.load(recv_buffers_ptr + owner).to(gl.pointer_type(DTYPE)), 16)
        recv_buffer += slot_offset + gl.load(tile + primitives.ROW_IN_SHARD).to(gl.int64) * N + first
        store_rows(recv_buffer, N, num_rows, N - first, total, DTYPE)
        flag = gl.load(flags_ptr + owner).to(gl.pointer_type(gl.int32)) + first_flag + gl.load(tile + primitives.PART)
        num_tiles = gl.load(tile + primitives.TILES_IN_CHUNK) * num_columns
        # The barrier in count_tile covers the consumer warps only, not the producer.
        primitives.count_tile(counters_ptr + gl.load(tile + primitives.FLAG), num_tiles, flag, epoch)
