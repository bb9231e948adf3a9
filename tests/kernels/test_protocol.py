"""Kernels of several ranks over shared memory in Triton's interpreter, with the slowest permitted link."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.world import World
from tests.kernels import workers
from tests.kernels.mutants import Edit
from tests.kernels.problem import Problem
from tests.kernels.wire import Findings, gathering, scattering

NOTHING = Findings()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def odd(shared: Path, ranks: int = 2) -> Problem:
    """Odd rows, columns and depth: every tile has an edge, shards and chunks differ in length."""
    return Problem(shared, ranks, rows=37, n=19, k=35, parts=2, dtype=BF16)


def test_gathering_gemm(interpreting: World, shared: Path) -> None:
    assert gathering(interpreting, replace(odd(shared), bias=True, parts=3)) == NOTHING


def test_scattering_gemm(interpreting: World, shared: Path) -> None:
    assert scattering(interpreting, odd(shared)) == NOTHING


@pytest.mark.long
@pytest.mark.parametrize("parts", [2, 4])
def test_four_ranks(interpreting: World, shared: Path, parts: int) -> None:
    """Shards of 10 and 9 rows in several chunks, with the weight layout of dgrad.

    Row tiles are in groups of 2: an odd number of own tiles puts the last one in a group with the first remote one.
    """
    problem = replace(odd(shared, 4), parts=parts, transposed=False)
    assert gathering(interpreting, problem) == NOTHING
    assert scattering(interpreting, problem) == NOTHING


@pytest.mark.parametrize(
    "dtype",
    # The tests of the layers in tests/ops/tensor_parallel/fused have fp32.
    [BF16, pytest.param(FP16, marks=pytest.mark.long), pytest.param(FP32, marks=pytest.mark.long)],
    ids=["bf16", "fp16", "fp32"],
)
@pytest.mark.parametrize(
    ("rows", "n", "k", "parts", "programs", "transposed"),
    [
        (64, 32, 32, 1, 1, True),
        (64, 32, 32, 2, 2, False),
        (33, 16, 48, 2, 3, True),
        (5, 1, 1, 2, 1, True),
        (50, 47, 16, 5, 4, False),
    ],
)
def test_shapes(
    interpreting: World,
    shared: Path,
    dtype: torch.dtype,
    rows: int,
    n: int,
    k: int,
    parts: int,
    programs: int,
    transposed: bool,
) -> None:
    """Whole tiles and parts of tiles, one row a chunk, several programs, both forms of the weight."""
    problem = Problem(shared, 2, rows, n, k, parts, dtype, transposed, programs=programs)
    assert scattering(interpreting, problem, epochs=(4, 5)) == NOTHING
    assert gathering(interpreting, problem, epochs=(4, 5)) == NOTHING


STALE = Edit("primitives", "while (seen < epoch)", "while (seen < 1)")
GATHER_MUTANTS = {
    "missing wait": Edit(
        "ag_gemm",
        "primitives.wait_for(flags_ptr + tl.load(tile + primitives.FLAG), epoch, status_ptr, MAX_POLLS)",
        "pass",
    ),
    "stale epoch": STALE,
    "wrong chunk": Edit(
        "ag_gemm", "flags_ptr + tl.load(tile + primitives.FLAG)", "flags_ptr + tl.load(tile + primitives.OWNER)"
    ),
    "own rows last": Edit("ag_gemm", "by_owner(index,", "by_owner(num_row_tiles * num_columns - 1 - index,"),
    "groups of several owners": Edit("ag_gemm", "by_owner(index, num_first_tiles,", "by_owner(index, 0,"),
    "no row mask": Edit("ag_gemm", "mask = rows[:, None] < num_rows", "mask = rows[:, None] < BLOCK_M"),
    "no depth mask": Edit("primitives", "= tl.load(b_ptrs, mask=(depth[:, None] < K - k) &", "= tl.load(b_ptrs, mask="),
    "rows of others": Edit(
        "primitives", "tl.minimum(tl.arange(0, BLOCK_M), num_rows - 1)", "tl.arange(0, BLOCK_M) * 2"
    ),
}
LATE_STORE = """flag = tl.load(flags_ptr + owner).to(tl.pointer_type(tl.int32))
        flag += first_flag + tl.load(tile + primitives.PART)
        num_tiles = tl.load(tile + primitives.TILES_IN_CHUNK) * num_columns
        primitives.count_tile(counters_ptr + tl.load(tile + primitives.FLAG), num_tiles, flag, epoch)
        tl.store(recv_buffer + rows[:, None] * N + columns[None, :], total.to(DTYPE), mask=mask)"""
SCATTER_MUTANTS = {
    "missing wait": Edit(
        "gemm_rs", "primitives.wait_for(flags_ptr + source * parts + part, epoch, status_ptr, MAX_POLLS)", "pass"
    ),
    "flag before the stores": Edit(
        "gemm_rs",
        "tl.store(recv_buffer + rows[:, None] * N + columns[None, :], total.to(DTYPE), mask=mask)",
        LATE_STORE,
    ),
    "flag after the first tile": Edit("primitives", "before == num_tiles - 1", "before == 0"),
    "stale epoch": STALE,
    "wrong owner": Edit("gemm_rs", "tl.load(recv_buffers_ptr + owner)", "tl.load(recv_buffers_ptr + 1 - owner)"),
    "wrong slot": Edit("gemm_rs", "recv_buffer += slot_offset +", "recv_buffer +="),
    "flag at the wrong owner": Edit("gemm_rs", "tl.load(flags_ptr + owner)", "tl.load(flags_ptr + 1 - owner)"),
    "counter kept": Edit("primitives", 'tl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")', "pass"),
}


def default_mutants(mutants: dict[str, Edit], *names: str) -> list[Any]:
    """Return all mutants as parameters. Only the named ones run by default; the others are marked `long`."""
    assert set(names) <= set(mutants)
    return [pytest.param(name, marks=[] if name in names else [pytest.mark.long]) for name in mutants]


@pytest.mark.parametrize(
    "name", default_mutants(GATHER_MUTANTS, "missing wait", "own rows last", "groups of several owners")
)
def test_a_wrong_gathering_gemm_is_caught(interpreting: World, shared: Path, name: str) -> None:
    # Three own row tiles, in groups of two.
    problem = replace(odd(shared), max_polls=2000, parts=3)
    findings = gathering(interpreting, problem, edits=(GATHER_MUTANTS[name],))
    assert findings != NOTHING
    if name in ("missing wait", "stale epoch"):
        assert findings.early
    if name in ("own rows last", "groups of several owners"):
        assert findings.idle


@pytest.mark.parametrize("name", default_mutants(SCATTER_MUTANTS, "missing wait", "flag before the stores"))
def test_a_wrong_scattering_gemm_is_caught(interpreting: World, shared: Path, name: str) -> None:
    problem = replace(odd(shared), max_polls=2000)
    findings = scattering(interpreting, problem, edits=(SCATTER_MUTANTS[name],))
    assert findings != NOTHING
    if name.startswith(("flag before", "flag after")):
        assert findings.not_whole


@pytest.mark.long
def test_a_sum_in_another_order_is_caught(interpreting: World, shared: Path) -> None:
    """The order of two terms does not change the sum; the order of four does."""
    edit = Edit("gemm_rs", "slot = tl.full((), source,", "slot = tl.full((), NUM_RANKS - 1 - source,")
    assert scattering(interpreting, replace(odd(shared, 4), dtype=FP32), edits=(edit,), epochs=(1,)).wrong


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("num_terms", "shape"), [(1, (2, 16)), (3, (37, 19)), (7, (5, 700))])
def test_terms_of_a_reduce_scatter(
    interpreting: World, num_terms: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    assert interpreting.run(1, workers.add_in_order, num_terms, shape, dtype) == [True]


@pytest.mark.parametrize(
    "edit",
    [
        Edit("gemm_rs", "terms_ptr + term * num_elements", "terms_ptr + (NUM_TERMS - term) * num_elements"),
        Edit("gemm_rs", "mask = offsets < num_elements", "mask = offsets < num_elements + 1"),
        Edit("gemm_rs", "    total += tl.load(own_ptr + offsets, mask=mask).to(tl.float32)\n", ""),
        Edit("gemm_rs", "total /= DIVISOR", "total /= DIVISOR - 1"),
    ],
    ids=["order", "mask", "no own rows", "divisor"],
)
def test_a_wrong_sum_of_terms_is_caught(interpreting: World, edit: Edit) -> None:
    assert interpreting.run(1, workers.add_in_order, 7, (5, 700), FP32, (edit,)) == [False]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_torch_computes_the_same(interpreting: World, shared: Path, num_ranks: int) -> None:
    """Compare with the fallbacks of torch's fused operations."""
    problem = Problem(shared, num_ranks, rows=8 * num_ranks, n=12, k=20, parts=1, dtype=FP32)
    assert gathering(interpreting, problem, epochs=(1,)) == NOTHING
    out = [problem.out(rank).clone() for rank in range(num_ranks)]
    torchs = interpreting.run(num_ranks, workers.torch_fused, problem, 1)
    for rank in range(num_ranks):
        torch.testing.assert_close(out[rank], torchs[rank][0], rtol=1e-5, atol=1e-5)
    assert scattering(interpreting, problem, epochs=(1,)) == NOTHING
    for rank in range(num_ranks):
        torch.testing.assert_close(problem.out(rank)[:8], torchs[rank][1], rtol=1e-5, atol=1e-5)


def test_a_wait_times_out_and_sets_the_status(interpreting: World) -> None:
    assert interpreting.run(2, workers.wait_for_all, [7, 8, 7], 7, ()) == [0, 0]
    assert interpreting.run(2, workers.wait_for_all, [7, 7, 6], 7, ()) == [7, 7]
    first_only = Edit("primitives", "tl.range(0, num_flags)", "tl.range(0, 1)")
    assert interpreting.run(2, workers.wait_for_all, [7, 7, 6], 7, (first_only,)) == [0, 0]
