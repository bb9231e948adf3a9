"""`out = gathered @ b + bias`, where each GEMM tile waits for the flag of the chunk that it reads.

Source: Flux (arXiv 2406.06858), all-gather + GEMM: one flag per communication tile, own rows first, tiles in arrival
order. The communication tile size is independent of the GEMM tile size.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_overlap.kernels import primitives
from megatron_overlap.kernels.launch import GemmConfig, RowTiles, Waits, launch_gemm


@triton.jit(do_not_specialize=["epoch", "num_first_tiles", "num_row_tiles"])
def ag_gemm_kernel(
    a_ptr, b_ptr, bias_ptr, out_ptr, tiles_ptr, flags_ptr, status_ptr, epoch, num_first_tiles, num_row_tiles,
    N, K, stride_om, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NUM_STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, WIDEN: tl.constexpr, MAX_POLLS: tl.constexpr,
):  # fmt: skip
    num_columns = tl.cdiv(N, BLOCK_N)
    # flatten=False: Triton does not pipeline the inner loop of a flattened nest that contains a wait.
    for index in tl.range(tl.program_id(0), num_row_tiles * num_columns, tl.num_programs(0), flatten=False):
        row_tile, column_tile = primitives.place_by_owner(index, num_first_tiles, num_row_tiles, num_columns, GROUP)
        tile = tiles_ptr + row_tile * primitives.COLUMNS
        start = tl.load(tile + primitives.START)
        num_rows = tl.load(tile + primitives.STOP) - start
        if tl.load(tile + primitives.REMOTE) != 0:
            primitives.wait_for(flags_ptr + tl.load(tile + primitives.FLAG), epoch, status_ptr, MAX_POLLS)
        first = column_tile * BLOCK_N
        a = a_ptr + start.to(tl.int64) * stride_am, stride_am, stride_ak
        b = b_ptr + first.to(tl.int64) * stride_bn, stride_bk, stride_bn
        total = primitives.product(
            a, b, num_rows, N - first, K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, EVEN_N, EVEN_K, WIDEN
        )
        rows = tl.arange(0, BLOCK_M)
        columns = first + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        out = out_ptr + start.to(tl.int64) * stride_om + rows[:, None] * stride_om + columns[None, :]
        mask = rows[:, None] < num_rows
        if not EVEN_N:
            mask = mask & (columns[None, :] < N)
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


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
    """Enqueue `out = gathered @ b + bias` on the current stream.

    Forward of a column-parallel layer with `b = w.t()`, dgrad of a row-parallel one with `b = w`.

    Args:
        gathered: `[M, K]`. Own rows are valid at launch; peers' rows are valid when their flag in `waits` is set.
        b: `[K, N]`, any strides.
        out: `[M, N]`, rows contiguous. The kernel writes every row of `tiles` once.
        bias: `[N]`, contiguous.
        tiles: row tiles in arrival order, cut by `config.block_m`.
        waits: flags of the remote chunks.
        config: tile shape of the GEMM, and which kernel computes it.
        num_programs: blocks of the persistent grid. All of them must be resident together with the kernels that set
            the flags. Enqueue copies and flag writes before this call.

    Raises:
        ValueError: the bias is not contiguous.
    """
    if bias is not None and not bias.is_contiguous():
        raise ValueError(f"bias: strides {bias.stride()}: must be contiguous for fused kernels")
    kernel: Any = ag_gemm_kernel
    if config.hopper:
        from megatron_overlap.kernels.hopper_gemm import ag_gemm_sm90_kernel as kernel
    depth, num_columns = b.shape
    flags, sizes = (waits.flags, waits.status, waits.epoch), (num_columns, depth, out.stride(0))
    arguments = out if bias is None else bias, out, tiles.table, *flags, tiles.first, tiles.count, *sizes
    constants = {"HAS_BIAS": bias is not None, "MAX_POLLS": waits.max_polls}
    launch_gemm(kernel, gathered, b, arguments, tiles, config, num_programs, constants)
