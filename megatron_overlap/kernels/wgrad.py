"""`dw += dy.T @ x`, accumulated over chunks of rows in arrival order.

Flux (arXiv 2406.06858) does not cover this weight gradient. It contracts over the gathered rows, so every tile of `dw`
needs all chunks. With slow communication the first wave of tiles is exposed.
"""

import torch
import triton
import triton.language as tl

from megatron_overlap.kernels import primitives
from megatron_overlap.kernels.launch import GemmConfig, RowTiles, Waits, interpreted


@triton.jit(do_not_specialize=["epoch", "num_chunks"])
def wgrad_kernel(
    dy_ptr, x_ptr, out_ptr, chunks_ptr, flags_ptr, status_ptr, epoch, num_chunks,
    F, K, stride_dm, stride_xm, stride_om,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NUM_STAGES: tl.constexpr,
    EVEN_F: tl.constexpr, EVEN_K: tl.constexpr, ADD: tl.constexpr, WIDEN: tl.constexpr, MAX_POLLS: tl.constexpr,
):  # fmt: skip
    num_f, num_k = tl.cdiv(F, BLOCK_M), tl.cdiv(K, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    for index in tl.range(tl.program_id(0), num_f * num_k, tl.num_programs(0), flatten=False):
        f_tile, k_tile = primitives.place(index, num_f, num_k, GROUP)
        f = f_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        k = k_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for number in tl.range(0, num_chunks, flatten=False):
            chunk = chunks_ptr + number * primitives.COLUMNS
            start = tl.load(chunk + primitives.START)
            num_rows = tl.load(chunk + primitives.STOP) - start
            if tl.load(chunk + primitives.REMOTE) != 0:
                primitives.wait_for(flags_ptr + tl.load(chunk + primitives.FLAG), epoch, status_ptr, MAX_POLLS)
            dy_ptrs = dy_ptr + start.to(tl.int64) * stride_dm + depth[:, None] * stride_dm + f[None, :]
            x_ptrs = x_ptr + start.to(tl.int64) * stride_xm + depth[:, None] * stride_xm + k[None, :]
            for row in tl.range(0, num_rows, BLOCK_K, num_stages=NUM_STAGES):
                # Mask rows past the chunk in both operands: they may not be received yet.
                dy_mask = depth[:, None] < num_rows - row
                x_mask = depth[:, None] < num_rows - row
                if not EVEN_F:
                    dy_mask = dy_mask & (f[None, :] < F)
                if not EVEN_K:
                    x_mask = x_mask & (k[None, :] < K)
                dy = tl.load(dy_ptrs, mask=dy_mask, other=0.0)
                x = tl.load(x_ptrs, mask=x_mask, other=0.0)
                if WIDEN:
                    total = tl.dot(dy.to(tl.float32).T, x.to(tl.float32), total, input_precision="ieee")
                else:
                    total = tl.dot(dy.T, x, total, input_precision="ieee")
                dy_ptrs += BLOCK_K * stride_dm
                x_ptrs += BLOCK_K * stride_xm
        out = out_ptr + f[:, None].to(tl.int64) * stride_om + k[None, :]
        mask = (f[:, None] < F) & (k[None, :] < K)
        if ADD:
            total += tl.load(out, mask=mask, other=0.0).to(tl.float32)
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


def wgrad(
    dy: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    chunks: RowTiles,
    waits: Waits,
    config: GemmConfig,
    num_programs: int,
    add: bool,
) -> None:
    """Enqueue `out (+)= dy.T @ x` over the rows of all chunks, summed in fp32.

    Args:
        dy: `[M, F]`, rows contiguous. Either `dy` or `x` is gathered: its remote rows are valid when their flag is set.
        x: `[M, K]`, rows contiguous.
        out: `[F, K]`, rows contiguous: fp32 main_grad, or a gradient in the parameter dtype.
        chunks: one row tile per chunk, in arrival order.
        waits: flags of the remote chunks.
        config: tile shape: `block_m` over F, `block_n` over K, `block_k` over rows.
        num_programs: blocks of the persistent grid.
        add: add to `out` instead of overwriting it.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    if dy.dtype != x.dtype or dy.shape[0] != x.shape[0] or dy.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(f"x: {x.dtype} {tuple(x.shape)} does not fit dy of {dy.dtype} {tuple(dy.shape)}")
    if out.shape != (dy.shape[1], x.shape[1]) or out.stride(1) != 1:
        raise ValueError(f"out: shape {tuple(out.shape)}: must be ({dy.shape[1]}, {x.shape[1]}), rows contiguous")
    if chunks.rows > dy.shape[0]:
        raise ValueError(f"chunks: reach row {chunks.rows}, dy has {dy.shape[0]} rows")
    num_f, num_k = out.shape
    work = triton.cdiv(num_f, config.block_m) * triton.cdiv(num_k, config.block_n)
    if work == 0:
        return
    wgrad_kernel[(min(num_programs, work),)](
        dy, x, out, chunks.table, waits.flags, waits.status, waits.epoch, chunks.count,
        num_f, num_k, dy.stride(0), x.stride(0), out.stride(0),
        EVEN_F=num_f % config.block_m == 0, EVEN_K=num_k % config.block_n == 0, ADD=add,
        WIDEN=interpreted(), MAX_POLLS=waits.max_polls, **config.constants(),
    )  # fmt: skip
