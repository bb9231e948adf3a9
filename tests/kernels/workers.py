"""Functions that run in worker processes with Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_overlap.schedules.tile_order import arrival_order, departure_order, row_tiles
from tests.kernels.heap import unwritten
from tests.kernels.looks import watched
from tests.kernels.mutants import Edit, kernels
from tests.kernels.problem import Problem


def _config(launch: Any, problem: Problem) -> Any:
    return launch.GemmConfig(problem.block, problem.block, problem.block, group=2, num_stages=2, num_warps=4)


def gather(group: dist.ProcessGroup, problem: Problem, epoch: int, edits: Sequence[Edit]) -> int:
    """One rank of `ag_gemm`; returns the epoch of a wait that timed out."""
    rank, layout = dist.get_rank(group), problem.layout
    launch = kernels("launch", edits)
    a, b, bias = problem.operands(rank, epoch)
    gathered = problem.heap.half(rank, epoch, (problem.rows, problem.k), problem.dtype)
    own = slice(*layout.shard(rank))
    gathered[own] = a[own]
    status = torch.zeros(1, dtype=torch.int32)
    flags = problem.heap.flags(rank, epoch)
    config = _config(launch, problem)
    with watched(flags, problem.looks()[rank]):
        kernels("ag_gemm", edits).ag_gemm(
            gathered,
            b,
            problem.out(rank),
            bias if problem.bias else None,
            tiles=launch.RowTiles.of(row_tiles(layout, rank, arrival_order(layout, rank), config.block_m), "cpu"),
            waits=launch.Waits(flags, epoch, status, problem.max_polls),
            config=config,
            num_programs=problem.programs,
        )
    return int(status)


def scatter(group: dist.ProcessGroup, problem: Problem, epoch: int, edits: Sequence[Edit]) -> dict[str, Any]:
    """One rank of `gemm_to_owners` and `sum_received`; reports flags that are set too early."""
    rank, layout = dist.get_rank(group), problem.layout
    launch, gemm_rs = kernels("launch", edits), kernels("gemm_rs", edits)
    a, b, _ = problem.operands(rank, epoch)
    staged_rows = [problem.staged_rows(rank, owner) for owner in range(problem.ranks)]
    flags_there = [problem.staged_flags(rank, owner) for owner in range(problem.ranks)]
    not_whole = []

    def raised(address: int) -> None:
        for owner, there in enumerate(flags_there):
            index = (address - there.data_ptr()) // 4
            if 0 <= index < there.numel():
                source, part = divmod(index, problem.parts)
                if unwritten(staged_rows[owner][source, problem.in_slot(owner, part)].contiguous()).any():
                    not_whole.append((owner, part))

    config = _config(launch, problem)
    counters = torch.zeros(problem.ranks * problem.parts, dtype=torch.int32)
    status = torch.zeros(1, dtype=torch.int32)
    flags = problem.heap.flags(rank, epoch)
    with watched(flags, problem.looks()[rank], raised):
        gemm_rs.gemm_to_owners(
            a,
            b,
            tiles=launch.RowTiles.of(row_tiles(layout, rank, departure_order(layout, rank), config.block_m), "cpu"),
            owners=gemm_rs.Owners(
                recv_buffers=torch.tensor([recv_buffer.data_ptr() for recv_buffer in staged_rows]),
                flags=torch.tensor([there.data_ptr() for there in flags_there]),
                counters=counters,
                rank=rank,
                parts=problem.parts,
                slot_rows=problem.slot_rows,
                epoch=epoch,
            ),
            config=config,
            num_programs=problem.programs,
        )
        own = [chunk for chunk in arrival_order(layout, rank) if chunk.owner == rank]
        shape = (problem.ranks, problem.slot_rows, problem.n)
        gemm_rs.sum_received(
            problem.heap.half(rank, epoch, shape, problem.dtype),
            problem.out(rank)[: layout.shard_rows(rank)],
            tiles=launch.RowTiles.of(row_tiles(layout, rank, own, gemm_rs.SUM_ROWS), "cpu"),
            waits=launch.Waits(flags, epoch, status, problem.max_polls),
            parts=problem.parts,
            num_programs=problem.programs,
        )
    return {"gave_up": int(status), "not_whole": not_whole, "counters": int(counters.abs().sum())}


def torch_fused(group: dist.ProcessGroup, problem: Problem, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's all-gather + matmul of the shards and its matmul + reduce-scatter of the same operands."""
    from torch.distributed._symmetric_memory import (
        _fused_all_gather_matmul_fallback,
        _fused_matmul_reduce_scatter_fallback,
    )

    a, b, _ = problem.operands(dist.get_rank(group), epoch)
    own = a[slice(*problem.layout.shard(dist.get_rank(group)))]
    _, (gathered,) = _fused_all_gather_matmul_fallback(own, [b], 0, group.group_name)
    return gathered, _fused_matmul_reduce_scatter_fallback(a, b, "sum", 0, group.group_name)


def wait_for_all(group: dist.ProcessGroup, flags: list[int], epoch: int, edits: Sequence[Edit]) -> int:
    """Return the status word after `wait_all` with at most 50 reads per flag."""
    status = torch.zeros(1, dtype=torch.int32)
    kernels("primitives", edits).wait_all(torch.tensor(flags, dtype=torch.int32), epoch, status, 50)
    return int(status)


def converted(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 to `dtype` as the interpreter does: it truncates to bf16 instead of rounding."""
    if dtype == torch.bfloat16:
        return (total.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return total.to(dtype)


def add_in_order(
    group: dist.ProcessGroup, num_terms: int, shape: tuple[int, int], dtype: torch.dtype, edits: Sequence[Edit] = ()
) -> bool:
    """Whether `add_terms` adds in fp32 in the order of the terms, then the own rows, and converts sum or mean once.

    It may write an fp32 total, to which a second call adds the last term. Memory behind the result stays.
    """
    count = shape[0] * shape[1]
    terms, memory = torch.empty(num_terms, *shape, dtype=dtype), torch.full((count + 99,), 7, dtype=dtype)
    out = memory[:count].view(shape)
    generator = torch.Generator().manual_seed(num_terms)
    for tensor in (terms, out):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    total = terms[0].float()
    for term in (*terms[1:], out):
        total = total + term.float()
    add_terms, own = kernels("gemm_rs", edits).add_terms, out.clone()
    mean = torch.empty_like(out)
    add_terms(terms, out, mean, num_terms + 1)
    add_terms(terms, out, out)
    right = torch.equal(out, converted(total, dtype)) and bool((memory[count:] == 7).all())
    right &= torch.equal(mean, converted(total / (num_terms + 1), dtype))
    # As two sums: all terms but the last one to an fp32 total, and the last one later.
    if num_terms > 1:
        total = terms[0].float()
        for term in (*terms[1:-1], own, terms[-1]):
            total = total + term.float()
        early = torch.empty(shape, dtype=torch.float32)
        add_terms(terms[:-1], own, early)
        add_terms(terms[-1:], early, out)
        right &= torch.equal(out, converted(total, dtype))
    return right


def self_check(
    group: dist.ProcessGroup, kind: str, transposed: bool, edits: Sequence[Edit] = (), whole: bool = False
) -> list[str]:
    """Return the failures of the portable `ag_gemm` or `gemm_to_owners` in the self-test of the Hopper kernels.

    Without `whole` the product has two tiles of columns and of depth, of which the last is partial as in the self-test.
    """
    from megatron_overlap.kernels import hopper_self_test as self_test
    from megatron_overlap.kernels.launch import HOPPER_SMALL

    extents = (self_test.COLUMNS, self_test.DEPTH) if whole else (80, 80)
    problem = ("cpu", torch.bfloat16, replace(HOPPER_SMALL, hopper=False), transposed)
    with patch.multiple(self_test, COLUMNS=extents[0], DEPTH=extents[1]):
        if kind == "ag_gemm":
            return list(self_test.gathering(kernels("ag_gemm", edits).ag_gemm, *problem))
        return list(self_test.scattering(kernels("gemm_rs", edits).gemm_to_owners, *problem))
