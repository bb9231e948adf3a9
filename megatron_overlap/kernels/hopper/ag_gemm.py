"""`kernels.ag_gemm` for Hopper: a producer warp waits for flags and loads by TMA while consumer warps run wgmma.

Training uses it only on a device where `kernels.hopper.self_test` passes. Not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton

from megatron_overlap.kernels import primitives
from megatron_overlap.kernels.hopper import pipeline
from megatron_overlap.kernels.hopper.gluon_version import gl, jit
from megatron_overlap.kernels.hopper.operands import check_operands, descriptors
from megatron_overlap.kernels.launch import GemmConfig, RowTiles, Waits, check_gemm


@jit
def ag_gemm_sm90_kernel(
    a_desc,
    b_desc,
    bias_ptr,
    out_ptr,
    tiles_ptr,
    flags_ptr,
    status_ptr,
    epoch,
    num_first_tiles,
    num_row_tiles,
    N,
    K,
    stride_om,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    NT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    MAX_POLLS: gl.constexpr,
):
    ring = pipeline.make_ring(a_desc, b_desc, NUM_STAGES)
    descs = (a_desc, b_desc)
    where = (tiles_ptr, num_first_tiles, num_row_tiles, N, K)
    gl.warp_specialize(
        [
            (
                _store_tiles,
                (ring, where, bias_ptr, out_ptr, stride_om, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_STAGES, NT, HAS_BIAS),
            ),
            (
                pipeline.produce,
                (descs, ring, where, flags_ptr, status_ptr, epoch, BLOCK_N, BLOCK_K, GROUP, NUM_STAGES, NT, MAX_POLLS),
            ),
        ],
        [1],
        [pipeline.PRODUCER_REGISTERS],
    )


@jit
def _store_tiles(
    ring,
    where,
    bias_ptr,
    out_ptr,
    stride_om,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    NT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    tiles_ptr, num_first_tiles, num_row_tiles, N, K = where
    num_columns = gl.cdiv(N, BLOCK_N)
    step = 0
    for index in range(gl.program_id(0), num_row_tiles * num_columns, gl.num_programs(0)):
        row_tile, column_tile = primitives.place_by_owner(index, num_first_tiles, num_row_tiles, num_columns, GROUP)
        tile = tiles_ptr + row_tile * primitives.COLUMNS
        start = gl.load(tile + primitives.START)
        num_rows = gl.load(tile + primitives.STOP) - start
        first = column_tile * BLOCK_N
        total, step = pipeline.multiply(ring, step, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, NT)
        if HAS_BIAS:
            columns = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, total.type.layout))
            total += gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        out = out_ptr + start.to(gl.int64) * stride_om + first
        pipeline.store_rows(out, stride_om, num_rows, N - first, total, out_ptr.dtype.element_ty)


def ag_gemm(
    gathered: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiles: RowTiles,
    waits: Waits,
    config: GemmConfig,
    num_programs: int,
) -> None:
    """Like `kernels.ag_gemm.ag_gemm`, with the same arguments, for operands that TMA can load.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or `operands.unsupported_reason` returns a reason.
    """
    check_gemm(gathered, b, out, bias, tiles, config)
    check_operands(gathered, b, config, out)
    num_columns, depth = b.shape[1], b.shape[0]
    work = tiles.count * triton.cdiv(num_columns, config.block_n)
    if work == 0:
        return
    a_desc, b_desc, transposed = descriptors(gathered, b, config)
    ag_gemm_sm90_kernel[(min(num_programs, work),)](
        a_desc,
        b_desc,
        bias if bias is not None else out,
        out,
        tiles.table,
        waits.flags,
        waits.status,
        waits.epoch,
        tiles.first,
        tiles.count,
        num_columns,
        depth,
        out.stride(0),
        NT=transposed,
        HAS_BIAS=bias is not None,
        MAX_POLLS=waits.max_polls,
        **config.constants(),
    )
