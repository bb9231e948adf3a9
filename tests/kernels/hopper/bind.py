"""Binds and compiles the Hopper kernels for CPU tensors without launching them. Prints one JSON line per kernel.

Runs Triton's argument binding, specialization and compiler. With `variants`, binds every kernel for `EPOCHS`, each with
other numbers of rows, without compiling it, and prints the number of launches and of variants of each kernel.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from megatron_overlap.kernels import ag_gemm, gemm_rs, primitives
from megatron_overlap.kernels import hopper_self_test as self_test
from megatron_overlap.kernels.launch import ALIGNED, HOPPER, HOPPER_SMALL, RowTiles, Waits
from megatron_overlap.schedules.tile_order import RowTile
from scripts.kernels.compiled import peer_stores

EPOCHS = range(1, 65)
"""Triton specializes integers that are 1 or a multiple of 16."""

bind = JITFunction.run
found: list[Any] = []
launches: Counter[str] = Counter()
variants: set[tuple[str, str]] = set()


def without_launching(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
    launches[self.fn.__name__] += 1
    found.append(bind(self, *arguments, grid=grid, warmup=True, **named))


def without_compiling(self: Any, key: str, *_: object) -> None:
    variants.add((self.fn.__name__, key))


def launch_all(epoch: int) -> None:
    """Launch every kernel of one operation. The number of rows grows with the epoch."""
    self_test.EPOCH, self_test.ROWS, rows = epoch, 40 * epoch, 8 * epoch
    for config in (ALIGNED[90], HOPPER):
        list(self_test.gathering(ag_gemm.ag_gemm, "cpu", torch.bfloat16, config, True))
        list(self_test.scattering(gemm_rs.gemm_to_owners, "cpu", torch.bfloat16, config, True))
    tiles = RowTiles.of([RowTile(8 * number, 8, 0, 0, 0, 1, False, 0) for number in range(epoch)], "cpu")
    waits = Waits(torch.zeros(2, dtype=torch.int32), epoch, torch.zeros(1, dtype=torch.int32))
    x = torch.zeros(rows, 512)
    gemm_rs.sum_received(torch.zeros(2, rows, 512), x, tiles=tiles, waits=waits, parts=1, num_programs=1)
    gemm_rs.add_terms(torch.zeros(7, rows, 512), x, x)
    for num_flags in (2, 16):
        primitives.wait_all(torch.zeros(num_flags, dtype=torch.int32), epoch, waits.status)


triton.runtime.driver.set_active(
    SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
)
JITFunction.run = without_launching
if sys.argv[1:] == ["variants"]:
    self_test._is_wrong = lambda *_: False
    self_test.COLUMNS, self_test.DEPTH = 80, 80  # no kernel runs
    JITFunction._do_compile = without_compiling
    for number in EPOCHS:
        launch_all(number)
    print(json.dumps({name: (count, sum(each == name for each, _ in variants)) for name, count in launches.items()}))
    raise SystemExit
for config, transposed in ((HOPPER, True), (HOPPER_SMALL, False)):
    # The self-test findings are ignored: no kernel runs.
    list(self_test.gathering(ag_gemm.ag_gemm, "cpu", torch.bfloat16, config, transposed))
    list(self_test.scattering(gemm_rs.gemm_to_owners, "cpu", torch.bfloat16, config, transposed))
for kernel in found:
    stores = sorted(set(peer_stores(kernel.asm["ptx"])))
    blocks = [each["block_size"] for each in kernel.metadata.tensordesc_meta]
    figures = {"name": kernel.metadata.name, "warps": kernel.metadata.num_warps, "stores": stores, "blocks": blocks}
    print(json.dumps(figures))
