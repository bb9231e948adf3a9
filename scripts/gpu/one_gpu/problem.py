"""The package's kernels on one device, with ranks that are virtual: operands, tables, memory, launches."""

from __future__ import annotations

from typing import Any

import torch

from megatron_overlap.kernels import ag_gemm, gemm_rs, launch
from megatron_overlap.schedules import ChunkLayout
from megatron_overlap.schedules.tile_order import arrival_order, departure_order, row_tiles


class Kernels:
    """Launchers with tables for the device.

    Args:
        hopper: the GEMMs are those of the Hopper kernels, for columns and depth that are multiples of 16.
    """

    def __init__(self, device: Any, hopper: bool = False) -> None:
        self.device, self.hopper = device, hopper
        self.ag_gemm, self.gemm_to_owners = ag_gemm.ag_gemm, gemm_rs.gemm_to_owners
        self.status = torch.zeros(1, dtype=torch.int32, device=device.name)
        self.arch = launch.newest(device.capability)

    def config(self, m: int, n: int, k: int) -> Any:
        """What the package would choose."""
        found = launch.config_for(self.device.capability, m, n, k, num_programs=self.device.num_sms)
        if not self.hopper:
            return found
        return launch.HOPPER_SMALL if found.block_n <= launch.HOPPER_SMALL.block_n else launch.HOPPER

    def table(self, layout: ChunkLayout, rank: int, order: str, block: int) -> Any:
        """Row tiles in `arrival` or `departure` order, or of the `own` rows."""
        chunks = (departure_order if order == "departure" else arrival_order)(layout, rank)
        chunks = [chunk for chunk in chunks if order != "own" or chunk.owner == rank]
        return launch.RowTiles.of(row_tiles(layout, rank, chunks, block), self.device.name)

    def waits(self, flags: torch.Tensor, epoch: int) -> Any:
        # Seconds, not minutes: a wait in vain is to be told while there is time left.
        return launch.Waits(flags, epoch, self.status, 3000 if self.device.interpreted else 1 << 24)

    def flags(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device.name)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=self.device.name).to(dtype)

    def nan(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.full(shape, torch.nan, device=self.device.name, dtype=dtype)


def copies_to(layout: ChunkLayout, rank: int, rows: torch.Tensor, far: torch.Tensor, flags: torch.Tensor) -> Any:
    """The copies of others' chunks of `far` into `rows`, in the order of arrival, with their flags."""
    copies = []
    for chunk in arrival_order(layout, rank):
        span = slice(*layout.rows(chunk))
        if chunk.owner != rank and span.start < span.stop:
            flag = flags.data_ptr() + 4 * (chunk.owner * layout.chunks_per_rank + chunk.part)
            copies.append((rows[span], far[span], flag))
    return copies


def is_wrong(got: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor) -> int:
    """1 where `got` is not `exact` up to two roundings to its own type (four where bits are cut off)."""
    bound = 4 * torch.finfo(got.dtype).eps * terms + 1e-30
    return int(not bool(((got.double() - exact).abs() <= bound).all()))


def gather(
    kernels: Kernels,
    layout: ChunkLayout,
    n: int,
    k: int,
    dtype: torch.dtype,
    rates: list[float],
    *,
    mutant: bool = False,
    programs: int | None = None,
) -> int:
    """All-gather + GEMM on all virtual ranks, from NaN; how many results are wrong.

    `mutant` waits for flags of an op that has been: what has not arrived is used, and the result must be wrong.
    """
    ranks, parts, m = layout.num_ranks, layout.chunks_per_rank, layout.num_rows
    device = kernels.device
    whole, w = kernels.random(m, k, dtype=dtype), kernels.random(n, k, dtype=dtype)
    config = kernels.config(m, n, k)
    programs = programs or max(1, device.num_sms // ranks)
    gathered = [kernels.nan(m, k, dtype=dtype) for _ in range(ranks)]
    outs = [kernels.nan(m, n, dtype=dtype) for _ in range(ranks)]
    flags = [kernels.flags(ranks * parts) for _ in range(ranks)]
    tables = [kernels.table(layout, rank, "arrival", config.block_m) for rank in range(ranks)]
    links = [device.link(rate) for rate in rates]
    far = links[0].source(whole)
    device.synchronize()
    streams = [device.stream() for _ in range(ranks)]
    for rank in range(ranks):
        own = slice(*layout.shard(rank))
        gathered[rank][own] = whole[own]
    device.synchronize()
    # All copies before any kernel that waits. A mutant's kernels run before its copies.
    steps = [False, True] if mutant else [True, False]
    for copying in steps:
        for rank in range(ranks):
            with streams[rank]:
                if copying:
                    links[rank].start(copies_to(layout, rank, gathered[rank], far, flags[rank]), 1)
                    continue
                waits = kernels.waits(flags[rank], 0 if mutant else 1)
                kernels.ag_gemm(
                    gathered[rank],
                    w.t(),
                    outs[rank],
                    tiles=tables[rank],
                    waits=waits,
                    config=config,
                    num_programs=programs,
                )
    for link in links:
        link.pace()
    device.synchronize()
    x, weight = whole.double(), w.double()
    exact, terms = x @ weight.t(), x.abs() @ weight.abs().t()
    return sum(is_wrong(out, exact, terms) for out in outs)


def scatter(kernels: Kernels, layout: ChunkLayout, n: int, k: int, dtype: torch.dtype) -> int:
    """GEMM + reduce-scatter on all virtual ranks, from NaN; how many results are wrong."""
    ranks, parts, m = layout.num_ranks, layout.chunks_per_rank, layout.num_rows
    device, slot_rows = kernels.device, -(-layout.num_rows // layout.num_ranks)
    config, programs = kernels.config(m, n, k), max(1, kernels.device.num_sms // ranks)
    operands = [(kernels.random(m, k, dtype=dtype), kernels.random(k, n, dtype=dtype)) for _ in range(ranks)]
    recv_buffers = [kernels.nan(ranks, slot_rows, n, dtype=dtype) for _ in range(ranks)]
    flags, counters = ([kernels.flags(ranks * parts) for _ in range(ranks)] for _ in range(2))
    outs = [kernels.nan(layout.shard_rows(rank), n, dtype=dtype) for rank in range(ranks)]
    to_recv_buffers, to_flags = (
        torch.tensor([tensor.data_ptr() for tensor in tensors], device=device.name) for tensors in (recv_buffers, flags)
    )
    tables = [kernels.table(layout, rank, "departure", config.block_m) for rank in range(ranks)]
    own = [kernels.table(layout, rank, "own", gemm_rs.SUM_ROWS) for rank in range(ranks)]
    device.synchronize()
    streams = [device.stream() for _ in range(ranks)]
    for rank in range(ranks):
        with streams[rank]:
            owners = gemm_rs.Owners(to_recv_buffers, to_flags, counters[rank], rank, parts, slot_rows, 1)
            kernels.gemm_to_owners(
                *operands[rank], tiles=tables[rank], owners=owners, config=config, num_programs=programs
            )
    for rank in range(ranks):
        with streams[rank]:
            waits = kernels.waits(flags[rank], 1)
            gemm_rs.sum_received(
                recv_buffers[rank], outs[rank], tiles=own[rank], waits=waits, parts=parts, num_programs=programs
            )
    device.synchronize()
    wrong = 0
    for rank in range(ranks):
        rows = slice(*layout.shard(rank))
        exact = torch.stack([a[rows].double() @ b.double() for a, b in operands]).sum(0)
        terms = torch.stack([a[rows].double().abs() @ b.double().abs() for a, b in operands]).sum(0)
        wrong += is_wrong(outs[rank], exact, terms)
    return wrong
