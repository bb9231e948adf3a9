"""Self-test of the Hopper kernels on a device, in a child process with a timeout, before training uses them.

python -m megatron_overlap.kernels.hopper_self_test 0     test device 0; print the failures; exit code 0 or 1

A kernel that hangs or reads invalid memory would end the training process, so a child process runs the test.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch

from megatron_overlap.kernels import gluon_version
from megatron_overlap.kernels.ag_gemm import ag_gemm
from megatron_overlap.kernels.gemm_rs import Owners, gemm_to_owners
from megatron_overlap.kernels.launch import HOPPER, HOPPER_SMALL, GemmConfig, RowTiles, Waits
from megatron_overlap.schedules import ChunkLayout
from megatron_overlap.schedules.tile_order import arrival_order, departure_order, row_tiles

# The first run compiles about 20 kernels. Later runs load them from Triton's cache.
DEADLINE_S = 300.0
EPOCH = 7
# Shards of 334, 333 and 333 rows: the last tile of each chunk, of the columns and of the depth is partial.
ROWS, COLUMNS, DEPTH, RANKS, RANK = 1000, 400, 336, 3, 1
# Fewer blocks than tiles: each block computes several tiles, and its ring continues across them.
PROGRAMS = 3
MAX_POLLS = 50


def hopper_unsupported_reason(device: torch.device | int | None = None, deadline_s: float = DEADLINE_S) -> str:
    """Return in one line why the Hopper kernels cannot run on `device`, or an empty string if the self-test passes.

    Takes seconds, or minutes on the first run. Ranks with different results work together: both kernels use the same
    flags, counts and addresses.
    """
    if reason := static_unsupported_reason(device):
        return reason
    index = torch.cuda.current_device() if device is None else torch.device(device).index or 0
    command = [sys.executable, "-m", "megatron_overlap.kernels.hopper_self_test", str(index)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        child = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return f"Hopper kernels: the self-test did not end within {deadline_s:g} s"
    except OSError as error:
        return f"Hopper kernels: cannot start the self-test: {error}"
    if child.returncode == 0:
        return ""
    last = (child.stdout.strip() or child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]
    return f"Hopper kernels: the self-test failed: {last[:300]}"


def static_unsupported_reason(device: torch.device | int | None = None) -> str:
    """Return why the Triton version or the device cannot run the Hopper kernels, or an empty string. Runs no kernel."""
    if gluon_version.UNSUPPORTED_REASON:
        return gluon_version.UNSUPPORTED_REASON
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"Hopper kernels need compute capability 9.0, not {capability[0]}.{capability[1]}"
    return ""


def failures(device: str) -> Iterator[str]:
    """Yield the failures of the Hopper kernels on `device` for both forms, data types and tile shapes."""
    for case in product((torch.bfloat16, torch.float16), (HOPPER, HOPPER_SMALL), (True, False)):
        yield from gathering(ag_gemm, device, *case)
        yield from scattering(gemm_to_owners, device, *case)


def gathering(
    ag_gemm: Callable[..., None], device: str, dtype: torch.dtype, config: GemmConfig, transposed: bool
) -> Iterator[str]:
    """Yield the failures of `ag_gemm`: a wrong product, writes out of bounds, missing waits."""
    name = f"ag_gemm {dtype} {config} {'nt' if transposed else 'nn'}"
    layout = ChunkLayout(ROWS, RANKS)
    a, b = _operands(device, dtype, transposed)
    bias = _random(device, COLUMNS).to(dtype) if transposed else None
    guarded = torch.full((ROWS + 2 * config.block_m, COLUMNS), torch.nan, device=device, dtype=dtype)
    out = guarded[config.block_m : config.block_m + ROWS]
    status = torch.zeros(1, dtype=torch.int32, device=device)
    flags = torch.full((RANKS,), EPOCH, dtype=torch.int32, device=device)
    table = RowTiles.of(row_tiles(layout, RANK, arrival_order(layout, RANK), config.block_m), device)

    def multiply(epoch: int) -> int:
        waits = Waits(flags, epoch, status, MAX_POLLS)
        ag_gemm(a, b, out, bias, tiles=table, waits=waits, config=config, num_programs=PROGRAMS)
        return int(status)

    if multiply(EPOCH):
        yield f"{name}: timed out on flags that were set"
    if _is_wrong(out, a, b, bias):
        yield f"{name}: wrong product"
    guarded[config.block_m : config.block_m + ROWS] = torch.nan
    if not bool(guarded.isnan().all()):
        yield f"{name}: wrote outside its rows"
    if multiply(EPOCH + 1) != EPOCH + 1:
        yield f"{name}: did not wait for flags that were not set"


def scattering(
    gemm_to_owners: Callable[..., None], device: str, dtype: torch.dtype, config: GemmConfig, transposed: bool
) -> Iterator[str]:
    """Yield the failures of `gemm_to_owners`: the rows that each owner receives, flags and counters."""
    name = f"gemm_to_owners {dtype} {config} {'nt' if transposed else 'nn'}"
    parts, slot_rows = 2, -(-ROWS // RANKS)
    layout = ChunkLayout(ROWS, RANKS, parts)
    a, b = _operands(device, dtype, transposed)
    recv_buffers = torch.full((RANKS, RANKS, slot_rows, COLUMNS), torch.nan, device=device, dtype=dtype)
    flags = torch.zeros(RANKS, RANKS * parts, dtype=torch.int32, device=device)
    counters = torch.zeros(RANKS * parts, dtype=torch.int32, device=device)
    tiles = row_tiles(layout, RANK, departure_order(layout, RANK), config.block_m)
    owners = Owners(_addresses(recv_buffers), _addresses(flags), counters, RANK, parts, slot_rows, EPOCH)
    gemm_to_owners(a, b, tiles=RowTiles.of(tiles, device), owners=owners, config=config, num_programs=PROGRAMS)
    for owner in range(RANKS):
        start, stop = layout.shard(owner)
        if _is_wrong(recv_buffers[owner, RANK, : stop - start], a[start:stop], b, None):
            yield f"{name}: wrong product at owner {owner}"
        recv_buffers[owner, RANK, : stop - start] = torch.nan
    if not bool(recv_buffers.isnan().all()):
        yield f"{name}: wrote outside its slots"
    expected = torch.zeros_like(flags)
    expected[:, RANK * parts : (RANK + 1) * parts] = EPOCH
    if not torch.equal(flags, expected) or bool(counters.any()):
        yield f"{name}: wrong flags or counters"


def _addresses(tensors: torch.Tensor) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors.device)


def _random(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def _operands(device: str, dtype: torch.dtype, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    a, w = _random(device, ROWS, DEPTH).to(dtype), _random(device, COLUMNS, DEPTH).to(dtype)
    return a, w.t() if transposed else w.t().contiguous()


def _is_wrong(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `got` differs from `a @ b + bias` by more than the rounding error of an fp32 sum and of its own dtype."""
    x, y = a.double(), b.double()
    added: Any = 0 if bias is None else bias.double()
    exact, terms = x @ y + added, x.abs() @ y.abs() + abs(added)
    return not bool(((got.double() - exact).abs() <= torch.finfo(got.dtype).eps * exact.abs() + 1e-4 * terms).all())


def main() -> int:
    device = f"cuda:{int(sys.argv[1])}"
    torch.cuda.set_device(device)
    found = "; ".join(failures(device))
    if found:
        print(found)
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
