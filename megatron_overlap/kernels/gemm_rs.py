"""`out = own rows of the sum over ranks of (a @ b)`: each rank stores GEMM tiles at their owner, which sums them once.

Source: Flux (arXiv 2406.06858), GEMM + reduce-scatter: output pointers of all ranks, tile order rotated by rank, local
sum. Own rows come last, as in Flash-Overlap (arXiv 2604.24013): the last tiles need no communication.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from megatron_overlap.kernels import primitives
from megatron_overlap.kernels.launch import GemmConfig, RowTiles, Waits, launch_gemm


@triton.jit(do_not_specialize=["epoch", "first_flag", "num_first_tiles", "num_row_tiles"])
def gemm_to_owners_kernel(
    a_ptr, b_ptr, recv_buffers_ptr, flags_ptr, counters_ptr, tiles_ptr, epoch, slot_offset, first_flag,
    num_first_tiles, num_row_tiles, N, K, stride_am, stride_ak, stride_bk, stride_bn, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NUM_STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    num_columns = tl.cdiv(N, BLOCK_N)
    for index in tl.range(tl.program_id(0), num_row_tiles * num_columns, tl.num_programs(0), flatten=False):
        row_tile, column_tile = primitives.place_by_owner(index, num_first_tiles, num_row_tiles, num_columns, GROUP)
        tile = tiles_ptr + row_tile * primitives.COLUMNS
        start = tl.load(tile + primitives.START)
        num_rows = tl.load(tile + primitives.STOP) - start
        owner = tl.load(tile + primitives.OWNER)
        first = column_tile * BLOCK_N
        a = a_ptr + start.to(tl.int64) * stride_am, stride_am, stride_ak
        b = b_ptr + first.to(tl.int64) * stride_bn, stride_bk, stride_bn
        total = primitives.product(
            a, b, num_rows, N - first, K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, EVEN_N, EVEN_K, WIDEN
        )
        # Triton loses an alignment hint on the result of a helper function, and then stores two bytes at a time.
        recv_buffer = tl.multiple_of(tl.load(recv_buffers_ptr + owner).to(tl.pointer_type(DTYPE)), 16)
        rows = tl.arange(0, BLOCK_M)
        columns = first + tl.arange(0, BLOCK_N)
        recv_buffer += slot_offset + tl.load(tile + primitives.ROW_IN_SHARD).to(tl.int64) * N
        mask = rows[:, None] < num_rows
        if not EVEN_N:
            mask = mask & (columns[None, :] < N)
        tl.store(recv_buffer + rows[:, None] * N + columns[None, :], total.to(DTYPE), mask=mask)
        flag = tl.load(flags_ptr + owner).to(tl.pointer_type(tl.int32)) + first_flag + tl.load(tile + primitives.PART)
        num_tiles = tl.load(tile + primitives.TILES_IN_CHUNK) * num_columns
        primitives.count_tile(counters_ptr + tl.load(tile + primitives.FLAG), num_tiles, flag, epoch)


@triton.jit(do_not_specialize=["epoch", "num_row_tiles", "parts"])
def sum_received_kernel(
    recv_buffer_ptr, out_ptr, tiles_ptr, flags_ptr, status_ptr, epoch, num_row_tiles, slot_stride, N, parts,
    NUM_RANKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr,
    MAX_POLLS: tl.constexpr,
):  # fmt: skip
    num_columns = tl.cdiv(N, BLOCK_N)
    for index in tl.range(tl.program_id(0), num_row_tiles * num_columns, tl.num_programs(0)):
        tile = tiles_ptr + index // num_columns * primitives.COLUMNS
        start = tl.load(tile + primitives.ROW_IN_SHARD)
        num_rows = tl.load(tile + primitives.STOP) - tl.load(tile + primitives.START)
        part = tl.load(tile + primitives.PART)
        for source in tl.static_range(NUM_RANKS):
            primitives.wait_for(flags_ptr + source * parts + part, epoch, status_ptr, MAX_POLLS)
        rows = tl.arange(0, BLOCK_M)
        columns = index % num_columns * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = rows[:, None] < num_rows
        if not EVEN_N:
            mask = mask & (columns[None, :] < N)
        offsets = start.to(tl.int64) * N + rows[:, None] * N + columns[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        # Add in rank order, not in arrival order: the result is bitwise reproducible.
        for source in tl.static_range(NUM_RANKS):
            slot = tl.full((), source, dtype=tl.int64) * slot_stride
            total += tl.load(recv_buffer_ptr + slot + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def add_terms_kernel(
    terms_ptr, own_ptr, out_ptr, num_rows, N, NUM_TERMS: tl.constexpr, DIVISOR: tl.constexpr, BLOCK: tl.constexpr
):
    num_elements = num_rows.to(tl.int64) * N
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    # In this order, so that the result is bitwise reproducible: the terms, then the own rows.
    total = tl.load(terms_ptr + offsets, mask=mask).to(tl.float32)
    for term in tl.static_range(1, NUM_TERMS):
        total += tl.load(terms_ptr + term * num_elements + offsets, mask=mask).to(tl.float32)
    total += tl.load(own_ptr + offsets, mask=mask).to(tl.float32)
    if DIVISOR > 1:
        total /= DIVISOR
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Owners:
    """Receive buffers and flags of all ranks, as addresses that are valid on this rank.

    Attributes:
        recv_buffers: int64 `[R]`, address of each owner's receive buffer `[R sources, slot_rows, N]`; 16-byte aligned.
        flags: int64 `[R]`, address of each owner's flags, int32 `[R sources, parts]`.
        counters: int32 `[R * parts]`, own memory, initially 0: number of stored tiles of each chunk.
        rank: this rank, which is the index of its slot in every receive buffer.
        parts: chunks per shard.
        slot_rows: rows of one slot, at least the rows of the largest shard.
        epoch: value that the kernel sets the flags to.
    """

    recv_buffers: torch.Tensor
    flags: torch.Tensor
    counters: torch.Tensor
    rank: int
    parts: int
    slot_rows: int
    epoch: int


def gemm_to_owners(
    a: torch.Tensor, b: torch.Tensor, *, tiles: RowTiles, owners: Owners, config: GemmConfig, num_programs: int
) -> None:
    """Enqueue `a @ b`, store each tile at the owner of its rows, and set the flag of each complete chunk.

    Forward of a row-parallel layer with `b = w.t()`, dgrad of a column-parallel one with `b = w`. `owners` may contain
    addresses of own memory: the GEMM then writes local slots, and a copy engine sends them chunk by chunk. `tiles`
    are in send order, own rows last. The other arguments are as of `ag_gemm`.
    """
    kernel: Any = gemm_to_owners_kernel
    if config.hopper:
        from megatron_overlap.kernels.hopper_gemm import gemm_to_owners_sm90_kernel as kernel
    depth, num_columns = b.shape
    addresses = owners.recv_buffers, owners.flags, owners.counters
    first_slot = owners.rank * owners.slot_rows * num_columns, owners.rank * owners.parts
    arguments = *addresses, tiles.table, owners.epoch, *first_slot, tiles.first, tiles.count, num_columns, depth
    launch_gemm(kernel, a, b, arguments, tiles, config, num_programs, {"DTYPE": TRITON_TYPES[a.dtype]})


SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 8, 512, 4


def sum_received(
    recv_buffer: torch.Tensor, out: torch.Tensor, *, tiles: RowTiles, waits: Waits, parts: int, num_programs: int
) -> None:
    """Enqueue `out = recv_buffer.sum(0)`. The kernel adds in fp32 in rank order and rounds once.

    Args:
        recv_buffer: `[R, slot_rows, N]`, contiguous: partial sums of the own rows from every rank.
        out: own rows of the sum `[rows, N]`, contiguous.
        tiles: tiles of the own rows, cut by `SUM_ROWS`.
        waits: flags, int32 `[R * parts]`; flag `source * parts + part` is set when that chunk is received.
    """
    num_ranks, slot_rows, num_columns = recv_buffer.shape
    work = tiles.count * triton.cdiv(num_columns, SUM_COLUMNS)
    if work == 0:
        return
    sum_received_kernel[(min(num_programs, work),)](
        recv_buffer, out, tiles.table, waits.flags, waits.status, waits.epoch, tiles.count, slot_rows * num_columns,
        num_columns, parts, NUM_RANKS=num_ranks, BLOCK_M=SUM_ROWS, BLOCK_N=SUM_COLUMNS,
        EVEN_N=num_columns % SUM_COLUMNS == 0, MAX_POLLS=waits.max_polls, num_warps=SUM_WARPS,
    )  # fmt: skip


ADD_WARPS = 8


def add_elements(num_columns: int) -> int:
    """Elements of one program of `add_terms_kernel`: fewer without wide loads, which need more registers."""
    return 1024 if num_columns % 16 else 2048


def add_terms(terms: torch.Tensor, own: torch.Tensor, out: torch.Tensor, divisor: int = 1) -> None:
    """Enqueue `out = (terms.sum(0) + own) / divisor`, in fp32, in this order, rounded once.

    Args:
        terms: `[number, rows, N]`, contiguous, at least one.
        own: `[rows, N]`, contiguous, of any dtype.
        out: `[rows, N]`, contiguous, of any dtype; may be `own`.
    """
    num_terms, num_rows, num_columns = terms.shape
    if out.numel():
        block = add_elements(num_columns)
        grid = (triton.cdiv(out.numel(), block),)
        constants = {"NUM_TERMS": num_terms, "DIVISOR": divisor, "BLOCK": block}
        add_terms_kernel[grid](terms, own, out, num_rows, num_columns, **constants, num_warps=ADD_WARPS)


TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
