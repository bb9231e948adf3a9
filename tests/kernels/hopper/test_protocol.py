"""The source of the Hopper kernels on the SM model with the latest permitted timing; see `gluon_model`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatron_overlap.kernels.gemm_rs import Owners
from megatron_overlap.kernels.launch import HOPPER, HOPPER_SMALL, GemmConfig, RowTiles, Waits
from megatron_overlap.schedules import Chunk, ChunkLayout
from megatron_overlap.schedules.tile_order import arrival_order, departure_order, row_tiles
from tests.helpers.mutants import Edit
from tests.kernels.gluon_model import on
from tests.kernels.modelled import modelled
from tests.kernels.turns import Machine, StuckError

RANKS, RANK, EPOCH = 3, 1, 5
# Two slots are the minimum for prefetching, and the ring wraps around often.
RING_OF_TWO = replace(HOPPER_SMALL, num_stages=2, group=2)


def operands(rows: int, n: int, k: int, transposed: bool, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + n + k)
    a, w, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, k), (n, k), (n,)))
    return a, w.t() if transposed else w.t().contiguous(), bias


def is_right(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    added = torch.zeros(()) if bias is None else bias.double()
    exact, terms = a.double() @ b.double() + added, a.double().abs() @ b.double().abs() + added.abs()
    return bool(((got.double() - exact).abs() <= torch.finfo(got.dtype).eps * exact.abs() + 1e-5 * terms).all())


def gathering(
    seed: int,
    *,
    rows: int = 418,
    n: int = 144,
    k: int = 272,
    config: GemmConfig = RING_OF_TWO,
    transposed: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    programs: int = 2,
    edits: Sequence[Edit] = (),
) -> list[str]:
    """Return the failures of an all-gather + GEMM where every chunk is received after a read of its unset flag."""
    layout = ChunkLayout(rows, RANKS, 2)
    a, b, bias = operands(rows, n, k, transposed, dtype)
    gathered = torch.full_like(a, torch.nan)
    own = slice(*layout.shard(RANK))
    gathered[own] = a[own]
    guarded = torch.full((rows + 2 * config.block_m, n), torch.nan, dtype=dtype)
    out = guarded[config.block_m : config.block_m + rows]
    flags = torch.full((2 * RANKS,), EPOCH - 1, dtype=torch.int32)
    status = torch.zeros(1, dtype=torch.int32)
    looks = [0] * len(flags)

    def looked(address: int) -> None:
        number = (address - flags.data_ptr()) // 4
        if looks[number] == 2:
            span = slice(*layout.rows(Chunk(number // 2, number % 2)))
            gathered[span] = a[span]
            flags[number] = EPOCH
        looks[number] += 1

    tiles = RowTiles.of(row_tiles(layout, RANK, arrival_order(layout, RANK), config.block_m), "cpu")
    with on(Machine(seed, looked=looked)):
        modelled("ag_gemm", edits).ag_gemm(
            gathered,
            b,
            out,
            bias if transposed else None,
            tiles=tiles,
            waits=Waits(flags, EPOCH, status, 100),
            config=config,
            num_programs=programs,
        )
    found = [] if is_right(out, a, b, bias if transposed else None) else ["wrong product"]
    found += ["timed out"] * int(status != 0)
    found += ["waited for itself"] * any(looks[2 * RANK : 2 * RANK + 2])
    guarded[config.block_m : config.block_m + rows] = torch.nan
    return found + ["wrote outside its rows"] * (not bool(guarded.isnan().all()))


def scattering(
    seed: int,
    *,
    rows: int = 418,
    n: int = 144,
    k: int = 272,
    config: GemmConfig = RING_OF_TWO,
    transposed: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    programs: int = 2,
    edits: Sequence[Edit] = (),
) -> list[str]:
    """Return the failures of a GEMM + reduce-scatter: at each owner when a flag is set, and at the end."""
    parts, slot_rows = 2, -(-rows // RANKS)
    layout = ChunkLayout(rows, RANKS, parts)
    a, b, _ = operands(rows, n, k, transposed, dtype)
    recv_buffers = [torch.full((RANKS, slot_rows, n), torch.nan, dtype=dtype) for _ in range(RANKS)]
    flags = [torch.zeros(RANKS * parts, dtype=torch.int32) for _ in range(RANKS)]
    counters = torch.zeros(RANKS * parts, dtype=torch.int32)
    found = []

    def raised(address: int) -> None:
        for owner, there in enumerate(flags):
            source, part = divmod((address - there.data_ptr()) // 4, parts)
            if source == RANK and bool(
                recv_buffers[owner][RANK, slice(*layout.rows_in_shard(Chunk(owner, part)))].isnan().any()
            ):
                found.append(f"chunk {part} of {owner} is not whole")

    machine = Machine(seed, raised=raised)
    addresses = [torch.tensor([machine.know(tensor) for tensor in tensors]) for tensors in (recv_buffers, flags)]
    tiles = RowTiles.of(row_tiles(layout, RANK, departure_order(layout, RANK), config.block_m), "cpu")
    with on(machine):
        modelled("gemm_rs", edits).gemm_to_owners(
            a,
            b,
            tiles=tiles,
            owners=Owners(*addresses, counters, RANK, parts, slot_rows, EPOCH),
            config=config,
            num_programs=programs,
        )
    for owner, recv_buffer in enumerate(recv_buffers):
        span = slice(*layout.shard(owner))
        mine = recv_buffer[RANK, : span.stop - span.start]
        found += [] if is_right(mine, a[span], b) else [f"wrong product at {owner}"]
        found += ["a flag is not set"] * (flags[owner].tolist() != [0, 0, EPOCH, EPOCH, 0, 0])
        mine.fill_(torch.nan)
    found += ["wrote outside its slots"] * (not all(bool(recv_buffer.isnan().all()) for recv_buffer in recv_buffers))
    return found + ["counters are left"] * bool(counters.any())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("run", [gathering, scattering])
def test_latest_permitted_timing(run, seed: int) -> None:  # type: ignore[no-untyped-def]
    assert run(seed) == []


@pytest.mark.parametrize("run", [gathering, scattering])
@pytest.mark.parametrize(
    ("rows", "n", "k", "config", "transposed", "dtype", "programs"),
    [
        (418, 144, 208, HOPPER, False, torch.float16, 3),
        (418, 400, 336, HOPPER, True, torch.bfloat16, 2),
        # One step a tile, fewer than the ring has slots; whole tiles; more blocks than tiles.
        (768, 128, 64, HOPPER_SMALL, True, torch.bfloat16, 4),
        (384, 512, 128, HOPPER, False, torch.bfloat16, 64),
        # Depth and columns of less than a tile; shards that differ; chunks of one row.
        (7, 16, 16, HOPPER, True, torch.bfloat16, 1),
    ],
)
def test_shapes(run, rows, n, k, config, transposed, dtype, programs) -> None:  # type: ignore[no-untyped-def]
    found = run(1, rows=rows, n=n, k=k, config=config, transposed=transposed, dtype=dtype, programs=programs)
    assert found == []


RELEASE = "step + STAGES - 1, k > 0, STAGES"
WRONG = {
    "no wait for an empty slot": ("hopper_gemm", "mbarrier.wait(empty.index(slot), phase ^ 1)", "pass"),
    "ring starts full": ("hopper_gemm", "empty.index(slot), phase ^ 1)", "empty.index(slot), phase)"),
    "no wait for operands": ("hopper_gemm", "mbarrier.wait(full.index(slot), phase)", "pass"),
    "phase never changes": ("hopper_gemm", "step // STAGES & 1", "0"),
    "phase changes too late": ("hopper_gemm", "step // STAGES & 1", "(step - 1) // STAGES & 1"),
    "slot released while it is read": ("hopper_gemm", "warpgroup_mma_wait(1, deps", "warpgroup_mma_wait(2, deps"),
    "slot released a step early": ("hopper_gemm", RELEASE, "step, True, STAGES"),
    "slot released before the first": ("hopper_gemm", RELEASE, "step + STAGES - 1, True, STAGES"),
    "last slot not released": ("hopper_gemm", "release(empty, step + STAGES - 1, True, STAGES)", "pass"),
    "bytes of one operand counted": ("hopper_gemm", "a_desc.block_type.nbytes + b_desc.block_type.nbytes", "16384"),
    "each tile restarts the ring": (
        "hopper_gemm",
        "        first = column_tile * BLOCK_N\n        for k",
        "        first, step = column_tile * BLOCK_N, 0\n        for k",
    ),
    "short tiles stored whole": ("hopper_gemm", "(rows < num_rows) &", "(rows >= 0) &"),
    "columns past the end stored": ("hopper_gemm", "& (columns < num_columns)", "& (columns >= 0)"),
}
WRONG_GATHERING = {
    "no wait": ("hopper_gemm", "primitives.wait_for(flags_ptr", "(flags_ptr"),
    "no fence": ("hopper_gemm", "                fence_reads(start)\n", ""),
    "fence before the wait": (
        "hopper_gemm",
        "primitives.wait_for(flags_ptr + gl.load(tile + primitives.FLAG), epoch, status_ptr, MAX_POLLS)\n"
        "                fence_reads(start)\n",
        "fence_reads(start)\n"
        "                primitives.wait_for("
        "flags_ptr + gl.load(tile + primitives.FLAG), epoch, status_ptr, MAX_POLLS)\n",
    ),
    "another chunk's flag": (
        "hopper_gemm",
        "flags_ptr + gl.load(tile + primitives.FLAG)",
        "flags_ptr + gl.load(tile + primitives.PART)",
    ),
}
WRONG_SCATTERING = {
    "counted before it is stored": ("primitives", "    tl.debug_barrier()\n", ""),
    "another owner": (
        "hopper_gemm",
        "gl.load(recv_buffers_ptr + owner)",
        "gl.load(recv_buffers_ptr + (owner + 1) % 3)",
    ),
    "another slot": ("hopper_gemm", "recv_buffer += slot_offset +", "recv_buffer +="),
    "flag after the first tile": ("hopper_gemm", "gl.load(tile + primitives.TILES_IN_CHUNK) * num_columns", "1"),
}


def noticed(run, edit: Edit) -> bool:  # type: ignore[no-untyped-def]
    """Whether the edited kernel fails for one of six seeds."""
    for seed in range(6):
        try:
            if run(seed, edits=(edit,)):
                return True
        except (StuckError, AssertionError, IndexError):
            return True
    return False


@pytest.mark.parametrize("what", WRONG | WRONG_GATHERING)
def test_wrong_gathering_is_noticed(what: str) -> None:
    assert noticed(gathering, Edit(*(WRONG | WRONG_GATHERING)[what]))


@pytest.mark.parametrize("what", WRONG | WRONG_SCATTERING)
def test_wrong_scattering_is_noticed(what: str) -> None:
    assert noticed(scattering, Edit(*(WRONG | WRONG_SCATTERING)[what]))
