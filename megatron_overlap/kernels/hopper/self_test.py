"""Whether the Hopper kernels may be used on a device: they prove themselves on it first, in a process of their own.

python -m megatron_overlap.kernels.hopper.self_test 0     on device 0: prints the objection, or nothing; exit code 0
or 1

They have been compiled and never run. A kernel that hangs, or reads where nothing is, would take the training process
with it: a child process is tried, and given up at a deadline.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_overlap.kernels.configs import HOPPER, HOPPER_SMALL
from megatron_overlap.kernels.gemm_rs import Owners
from megatron_overlap.kernels.hopper import gluon_version
from megatron_overlap.kernels.launch import GemmConfig, RowTiles, Waits
from megatron_overlap.schedules import ChunkLayout
from megatron_overlap.schedules.tile_order import arrival_order, departure_order, row_tiles

# Cold, it compiles some twenty kernels; the next time they are in Triton's cache.
DEADLINE_S = 300.0
EPOCH = 7
# Shards of 334, 333 and 333 rows: no tile ends with its chunk. Columns and depth end inside a tile, too.
ROWS, COLUMNS, DEPTH, RANKS, RANK = 1000, 400, 336, 3, 1
# Fewer blocks than tiles: each has several, and its ring goes on from one to the next.
PROGRAMS = 3
MAX_POLLS = 50


def hopper_objection(device: torch.device | int | None = None, deadline_s: float = DEADLINE_S) -> str:
    """Why the Hopper kernels cannot be used on `device`, in one line; empty where they have proved themselves.

    Takes seconds, some minutes the first time: ask once and keep the answer. It is this process's own; that all ranks
    of a group choose alike is the caller's business. A group that does not is still right: flags, counts and
    addresses are the same in both kernels.
    """
    reason = static_objection(device)
    if reason:
        return reason
    index = torch.cuda.current_device() if device is None else torch.device(device).index or 0
    command = [sys.executable, "-m", "megatron_overlap.kernels.hopper.self_test", str(index)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"Hopper kernels: the trial did not end within {deadline_s:g} s"
    except OSError as error:
        return f"Hopper kernels: no process for a trial: {error}"
    if child.returncode == 0:
        return ""
    last = (child.stdout.strip() or child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]
    return f"Hopper kernels: the trial failed: {last[:300]}"


def static_objection(device: torch.device | int | None = None) -> str:
    """What speaks against the Hopper kernels without running anything."""
    if gluon_version.objection():
        return gluon_version.objection()
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"Hopper kernels need compute capability 9.0, not {capability[0]}.{capability[1]}"
    return ""


def trial(device: str) -> Iterator[str]:
    """What is wrong with the Hopper kernels on `device`: both forms, types and tile shapes."""
    from megatron_overlap.kernels.hopper.ag_gemm import ag_gemm
    from megatron_overlap.kernels.hopper.gemm_rs import gemm_to_owners

    for dtype in (torch.bfloat16, torch.float16):
        for config in (HOPPER, HOPPER_SMALL):
            for transposed in (True, False):
                yield from gathering(ag_gemm, device, dtype, config, transposed)
                yield from scattering(gemm_to_owners, device, dtype, config, transposed)


def gathering(
    ag_gemm: Callable[..., None], device: str, dtype: torch.dtype, config: GemmConfig, transposed: bool
) -> Iterator[str]:
    """What is wrong with `ag_gemm`: the product, what it writes beside it, and that it waits."""
    name = f"ag_gemm {dtype} {config} {'nt' if transposed else 'nn'}"
    layout = ChunkLayout(ROWS, RANKS)
    a, b = _operands(device, dtype, transposed)
    bias = _random(device, COLUMNS).to(dtype) if transposed else None
    guarded = torch.full((ROWS + 2 * config.block_m, COLUMNS), torch.nan, device=device, dtype=dtype)
    out = guarded[config.block_m : config.block_m + ROWS]
    status = torch.zeros(1, dtype=torch.int32, device=device)
    flags = torch.full((RANKS,), EPOCH, dtype=torch.int32, device=device)
    tiles = row_tiles(layout, RANK, arrival_order(layout, RANK), config.block_m)
    table = RowTiles.of(tiles, device)

    def multiply(epoch: int) -> int:
        waits = Waits(flags, epoch, status, MAX_POLLS)
        ag_gemm(a, b, out, bias, tiles=table, waits=waits, config=config, num_programs=PROGRAMS)
        return int(status)

    if multiply(EPOCH):
        yield f"{name}: gave up waiting for flags that were raised"
    if _is_wrong(out, a, b, bias):
        yield f"{name}: wrong product"
    guarded[config.block_m : config.block_m + ROWS] = torch.nan
    if not bool(guarded.isnan().all()):
        yield f"{name}: wrote outside of its rows"
    if multiply(EPOCH + 1) != EPOCH + 1:
        yield f"{name}: did not wait for flags that were not raised"


def scattering(
    gemm_to_owners: Callable[..., None], device: str, dtype: torch.dtype, config: GemmConfig, transposed: bool
) -> Iterator[str]:
    """What is wrong with `gemm_to_owners`: what lands with each owner, flags and counters."""
    name = f"gemm_to_owners {dtype} {config} {'nt' if transposed else 'nn'}"
    parts, slot_rows = 2, -(-ROWS // RANKS)
    layout = ChunkLayout(ROWS, RANKS, parts)
    a, b = _operands(device, dtype, transposed)
    landings = torch.full((RANKS, RANKS, slot_rows, COLUMNS), torch.nan, device=device, dtype=dtype)
    flags = torch.zeros(RANKS, RANKS * parts, dtype=torch.int32, device=device)
    counters = torch.zeros(RANKS * parts, dtype=torch.int32, device=device)
    tiles = row_tiles(layout, RANK, departure_order(layout, RANK), config.block_m)
    owners = Owners(_addresses(landings), _addresses(flags), counters, RANK, parts, slot_rows, EPOCH)
    gemm_to_owners(a, b, tiles=RowTiles.of(tiles, device), owners=owners, config=config, num_programs=PROGRAMS)
    for owner in range(RANKS):
        start, stop = layout.shard(owner)
        if _is_wrong(landings[owner, RANK, : stop - start], a[start:stop], b, None):
            yield f"{name}: wrong product at owner {owner}"
        landings[owner, RANK, : stop - start] = torch.nan
    if not bool(landings.isnan().all()):
        yield f"{name}: wrote outside of its slots"
    expected = torch.zeros_like(flags)
    expected[:, RANK * parts : (RANK + 1) * parts] = EPOCH
    if not torch.equal(flags, expected) or bool(counters.any()):
        yield f"{name}: flags or counters are not as they should be"


def _addresses(tensors: torch.Tensor) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors.device)


def _random(device: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device)


def _operands(device: str, dtype: torch.dtype, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    a, w = _random(device, ROWS, DEPTH).to(dtype), _random(device, COLUMNS, DEPTH).to(dtype)
    return a, w.t() if transposed else w.t().contiguous()


def _is_wrong(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `got` is off by more than rounding it to its own type, and adding up its terms in fp32, may be."""
    x, y = a.double(), b.double()
    added: Any = 0 if bias is None else bias.double()
    exact, terms = x @ y + added, x.abs() @ y.abs() + abs(added)
    return not bool(((got.double() - exact).abs() <= torch.finfo(got.dtype).eps * exact.abs() + 1e-4 * terms).all())


def main() -> int:
    device = f"cuda:{int(sys.argv[1])}"
    torch.cuda.set_device(device)
    found = "; ".join(trial(device))
    if found:
        print(found)
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
