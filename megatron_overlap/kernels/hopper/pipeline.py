"""What the Hopper kernels share: a producer warp that loads tiles by TMA, and eight warps that multiply them by wgmma.

Both walk the same list of tiles and count the same steps (`BLOCK_K` of depth each) over all of them. A step's operands
lie in one slot of a ring in shared memory. The producer waits for a tile's flag, then fills slots as they become
`empty` and runs ahead of the consumers by the length of the ring, also from one tile into the next: while one is
stored, the next one's operands are loaded.

Compiled only, never run. Importing this fails where `kernels.hopper.gluon_version.objection()` says why.
"""

from __future__ import annotations

import triton.language as tl

from megatron_overlap.kernels import primitives
from megatron_overlap.kernels.hopper.gluon_version import (
    fence_async_shared,
    gl,
    jit,
    load_tile,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# As many as it needs: what it gives back, the consumers take.
PRODUCER_REGISTERS = gl.constexpr(40)


@jit
def in_ring(step, STAGES: gl.constexpr):
    """The slot of a step, and the parity of the phase that its barriers are in: how often the ring has been round."""
    return step % STAGES, step // STAGES & 1


@jit
def make_ring(a_desc, b_desc, STAGES: gl.constexpr):
    """Slots for both operands; `full` is raised by the bytes that land in a slot, `empty` by the consumers."""
    a_slots = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_slots = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    # TMA counts its bytes on the barriers through another proxy than they were made through.
    fence_async_shared()
    return a_slots, b_slots, full, empty


@jit
def produce(
    descs,
    ring,
    where,
    flags_ptr,
    status_ptr,
    epoch,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    NT: gl.constexpr,
    MAX_POLLS: gl.constexpr,
):
    """The producer: one warp. A remote row tile is loaded once its chunk's flag is raised; MAX_POLLS 0 never waits."""
    tiles_ptr, num_first_tiles, num_row_tiles, N, K = where
    a_desc, b_desc = descs
    a_slots, b_slots, full, empty = ring
    num_columns = gl.cdiv(N, BLOCK_N)
    step = 0
    for index in range(gl.program_id(0), num_row_tiles * num_columns, gl.num_programs(0)):
        row_tile, column_tile = primitives.place_by_owner(index, num_first_tiles, num_row_tiles, num_columns, GROUP)
        tile = tiles_ptr + row_tile * primitives.COLUMNS
        start = gl.load(tile + primitives.START)
        if MAX_POLLS > 0:  # noqa: SIM102 - decided when compiling: no load of what is not looked at
            if gl.load(tile + primitives.REMOTE) != 0:
                primitives.wait_for(flags_ptr + gl.load(tile + primitives.FLAG), epoch, status_ptr, MAX_POLLS)
                fence_reads(start)
        first = column_tile * BLOCK_N
        for k in range(0, K, BLOCK_K):
            slot, phase = in_ring(step, STAGES)
            # A barrier that was never raised counts as raised in the phase before its first: the ring starts empty.
            mbarrier.wait(empty.index(slot), phase ^ 1)
            # All bytes of the slot: those behind the last row, column or depth are zeros, and are counted too.
            mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            # Rows behind the tile's last one belong to another chunk and may not be there: they are never stored.
            load_tile(a_desc, [start, k], full.index(slot), a_slots.index(slot))
            if NT:
                load_tile(b_desc, [first, k], full.index(slot), b_slots.index(slot))
            else:
                load_tile(b_desc, [k, first], full.index(slot), b_slots.index(slot))
            step += 1


@jit
def fence_reads(anything):
    """TMA reads through the async proxy. What others wrote, and an acquire has shown, is made visible to it too."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global;\n\tmov.b32 $0, $1;", "=r,r", [anything], dtype=gl.int32, is_pure=False, pack=1
    )


@jit
def multiply(
    ring,
    step,
    K,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    NT: gl.constexpr,
):
    """One tile of the product in fp32, and the step after its last; rows and columns past the end are junk."""
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
        # While this step is multiplied, the one before is done and its slot may be filled again.
        total = warpgroup_mma_wait(1, deps=(total,))
        release(empty, step + STAGES - 1, k > 0, STAGES)
        step += 1
    total = warpgroup_mma_wait(0, deps=(total,))
    release(empty, step + STAGES - 1, True, STAGES)
    return total, step


@jit
def release(empty, step, done, STAGES: gl.constexpr):
    """Gives a step's slot back. One thread arrives for all, and may only do so when every warp has read it."""
    tl.debug_barrier()
    slot, _ = in_ring(step, STAGES)
    mbarrier.arrive(empty.index(slot), count=1, pred=done)


@jit
def store_rows(out, stride, num_rows, num_columns, total, DTYPE: gl.constexpr):
    """Stores `total` rounded, 16 bytes at a time; rows and columns from `num_rows` and `num_columns` on are not."""
    BLOCK_M: gl.constexpr = total.shape[0]
    BLOCK_N: gl.constexpr = total.shape[1]
    rounded = total.to(DTYPE)
    if BLOCK_N == 256:
        # In two halves: the exchange between threads needs shared memory for one of them.
        left, right = gl.split(gl.permute(gl.reshape(rounded, [BLOCK_M, 2, 128]), (0, 2, 1)))
        _store_half(out, stride, num_rows, num_columns, left, 0)
        _store_half(out, stride, num_rows, num_columns, right, 128)
    else:
        _store_half(out, stride, num_rows, num_columns, rounded, 0)


@jit
def _store_half(out, stride, num_rows, num_columns, half, FIRST: gl.constexpr):
    BLOCK_M: gl.constexpr = half.shape[0]
    # A warp keeps the 16 rows it has multiplied, and stores two of them at a time.
    layout: gl.constexpr = gl.BlockedLayout([8, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))[:, None]
    columns = FIRST + gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
    mask = (rows < num_rows) & (columns < num_columns)
    gl.store(out + rows * stride + columns, gl.convert_layout(half, layout), mask=mask)
