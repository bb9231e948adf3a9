"""`kernels.gemm_rs.gemm_to_owners` for Hopper: TMA and wgmma. Stores a tile at its owner while the next one loads.

Training uses it only on a device where `kernels.hopper.self_test` passes. Not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton

from megatron_overlap.kernels import primitives
from megatron_overlap.kernels.gemm_rs import TRITON_TYPES, Owners
from megatron_overlap.kernels.hopper import pipeline
from megatron_overlap.kernels.hopper.gluon_version import gl, jit
from megatron_overlap.kernels.hopper.operands import check_operands, descriptors
from megatron_overlap.kernels.launch import GemmConfig, RowTiles, check_gemm


@jit
def gemm_to_owners_sm90_kernel(
    a_desc,
    b_desc,
    recv_buffers_ptr,
    flags_ptr,
    counters_ptr,
    tiles_ptr,
    epoch,
    slot_offset,
    first_flag,
    num_first_tiles,
    num_row_tiles,
    N,
    K,
    DTYPE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    NT: gl.constexpr,
):
    ring = pipeline.make_ring(a_desc, b_desc, NUM_STAGES)
    descs = (a_desc, b_desc)
    where = (tiles_ptr, num_first_tiles, num_row_tiles, N, K)
    there = (recv_buffers_ptr, flags_ptr, counters_ptr, slot_offset, first_flag, epoch)
    gl.warp_specialize(
        [
            (_store_tiles, (ring, where, there, DTYPE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_STAGES, NT)),
            # MAX_POLLS 0: the producer reads neither flags nor status.
            (
                pipeline.produce,
                (descs, ring, where, tiles_ptr, tiles_ptr, epoch, BLOCK_N, BLOCK_K, GROUP, NUM_STAGES, NT, 0),
            ),
        ],
        [1],
        [pipeline.PRODUCER_REGISTERS],
    )


@jit
def _store_tiles(
    ring,
    where,
    there,
    DTYPE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    NT: gl.constexpr,
):
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
        total, step = pipeline.multiply(ring, step, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, NT)
        recv_buffer = gl.multiple_of(gl.load(recv_buffers_ptr + owner).to(gl.pointer_type(DTYPE)), 16)
        recv_buffer += slot_offset + gl.load(tile + primitives.ROW_IN_SHARD).to(gl.int64) * N + first
        pipeline.store_rows(recv_buffer, N, num_rows, N - first, total, DTYPE)
        flag = gl.load(flags_ptr + owner).to(gl.pointer_type(gl.int32)) + first_flag + gl.load(tile + primitives.PART)
        num_tiles = gl.load(tile + primitives.TILES_IN_CHUNK) * num_columns
        # The barrier in count_tile covers the consumer warps only, not the producer.
        primitives.count_tile(counters_ptr + gl.load(tile + primitives.FLAG), num_tiles, flag, epoch)


def gemm_to_owners(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    tiles: RowTiles,
    owners: Owners,
    config: GemmConfig,
    num_programs: int,
) -> None:
    """Like `kernels.gemm_rs.gemm_to_owners`, with the same arguments, for operands that TMA can load.

    Raises:
        ValueError: shapes or dtypes do not fit, or `operands.unsupported_reason` returns a reason.
    """
    check_gemm(a, b, None, None, tiles, config)
    check_operands(a, b, config)
    num_columns, depth = b.shape[1], b.shape[0]
    work = tiles.count * triton.cdiv(num_columns, config.block_n)
    if work == 0:
        return
    a_desc, b_desc, transposed = descriptors(a, b, config)
    gemm_to_owners_sm90_kernel[(min(num_programs, work),)](
        a_desc,
        b_desc,
        owners.recv_buffers,
        owners.flags,
        owners.counters,
        tiles.table,
        owners.epoch,
        owners.rank * owners.slot_rows * num_columns,
        owners.rank * owners.parts,
        tiles.first,
        tiles.count,
        num_columns,
        depth,
        DTYPE=TRITON_TYPES[a.dtype],
        NT=transposed,
        **config.constants(),
    )
