"""Binds and compiles the Hopper kernels for CPU tensors without launching them. Prints one JSON line per kernel.

Runs Triton's argument binding, specialization and compiler.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from megatron_overlap.kernels import ag_gemm, gemm_rs
from megatron_overlap.kernels import hopper_self_test as self_test
from megatron_overlap.kernels.launch import HOPPER, HOPPER_SMALL
from scripts.kernels.compiled import peer_stores

bind = JITFunction.run
found: list[Any] = []


def without_launching(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
    found.append(bind(self, *arguments, grid=grid, warmup=True, **named))


triton.runtime.driver.set_active(
    SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
)
JITFunction.run = without_launching
for config, transposed in ((HOPPER, True), (HOPPER_SMALL, False)):
    # The self-test findings are ignored: no kernel runs.
    list(self_test.gathering(ag_gemm.ag_gemm, "cpu", torch.bfloat16, config, transposed))
    list(self_test.scattering(gemm_rs.gemm_to_owners, "cpu", torch.bfloat16, config, transposed))
for kernel in found:
    stores = sorted(set(peer_stores(kernel.asm["ptx"])))
    blocks = [each["block_size"] for each in kernel.metadata.tensordesc_meta]
    figures = {"name": kernel.metadata.name, "warps": kernel.metadata.num_warps, "stores": stores, "blocks": blocks}
    print(json.dumps(figures))
