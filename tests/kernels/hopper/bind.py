"""Launches the Hopper kernels on a device that is not there: everything but the launch itself, a JSON line a kernel.

Triton's own binding of tensors and descriptors, its specialization and its compiler, on tensors of the host.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from megatron_overlap.kernels import compiled
from megatron_overlap.kernels.configs import HOPPER, HOPPER_SMALL
from megatron_overlap.kernels.hopper import ag_gemm, gemm_rs, self_test

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
    # What they find is of no interest: nothing was computed.
    list(self_test.gathering(ag_gemm.ag_gemm, "cpu", torch.bfloat16, config, transposed))
    list(self_test.scattering(gemm_rs.gemm_to_owners, "cpu", torch.bfloat16, config, transposed))
for kernel in found:
    stores = sorted(set(compiled.peer_stores(kernel.asm["ptx"])))
    blocks = [each["block_size"] for each in kernel.metadata.tensordesc_meta]
    figures = {"name": kernel.metadata.name, "warps": kernel.metadata.num_warps, "stores": stores, "blocks": blocks}
    print(json.dumps(figures))
