"""Compiles kernels ahead of time, without a device or a driver, and checks the generated PTX.

Triton must not run as an interpreter in this process.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scripts.kernels.variants import Variant

SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory limit of one block."""

TENSOR_CORE = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""Tensor core instruction of each architecture."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Code and resource usage of a compiled kernel.

    Attributes:
        ptx: PTX text.
        registers: registers of a thread.
        stack_bytes: local memory of a thread, which contains spilled registers.
        shared_bytes: shared memory of a block.
    """

    ptx: str
    registers: int
    stack_bytes: int
    shared_bytes: int

    def count(self, instruction: str) -> int:
        """Return the number of occurrences of `instruction` in the PTX."""
        return self.ptx.count(instruction)


def compile_variant(variant: Variant, package: str = "megatron_overlap.kernels") -> Compiled:
    """Compile `variant` of `package` for its architecture. Takes about a second."""
    kernel = getattr(importlib.import_module(f"{package}.{variant.module}"), variant.kernel)
    constants = dict(variant.constants) | dict.fromkeys(variant.unit, 1)
    if isinstance(constants.get("DTYPE"), str):
        constants["DTYPE"] = {"bf16": tl.bfloat16, "fp16": tl.float16}[constants["DTYPE"]]
    signature = {
        name: "constexpr" if name in constants else variant.pointers.get(name, "i32") for name in kernel.arg_names
    }
    aligned = [*variant.pointers, *variant.aligned]
    source = ASTSource
    if variant.descriptors:
        from triton.experimental.gluon._runtime import GluonASTSource

        from megatron_overlap.kernels.launch import shared_layout

        source = GluonASTSource
        for name, (dtype, block) in variant.descriptors.items():
            signature[name] = f"tensordesc<{dtype}{list(block)},{shared_layout(block, dtype)!r}>"
    attributes = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in constants
    }
    stages = variant.constants.get("NUM_STAGES", 3)
    binary = triton.compile(
        source(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", variant.arch, 32),
        options={"num_warps": variant.num_warps, "num_stages": stages},
    )
    registers, stack = _usage(binary.asm["cubin"])
    return Compiled(binary.asm["ptx"], registers, stack, binary.metadata.shared)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers and stack bytes of a thread that cuobjdump reports."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text}")
    return int(found[1]), int(found[2]) + int(found[3])


def peer_stores(ptx: str) -> list[str]:
    """Return the store instructions to global memory that write data, not flags."""
    return re.findall(r"\bst\.(?:[a-z_]+\.)*global(?:\.[a-z0-9_]+)*", ptx)


def barrier_before_release(ptx: str) -> bool:
    """Whether a block barrier separates the last store from the atomic add that counts the tile."""
    lines = ptx.splitlines()
    adds = [k for k, line in enumerate(lines) if re.search(r"\batom\.\S*acq_rel\S*\.add", line)]
    if not adds:
        return False
    stores = [k for k, line in enumerate(lines) if k < adds[0] and re.search(r"\bst\.global\.v", line)]
    first = stores[-1] if stores else 0
    return any("bar.sync" in line or "barrier.sync" in line for line in lines[first : adds[0]])


def barrier_before_slot_release(ptx: str) -> bool:
    """Whether a barrier of the consumer warps precedes every mbarrier arrival that releases a ring slot."""
    lines = ptx.splitlines()
    releases = [k for k, line in enumerate(lines) if "mbarrier.arrive.shared" in line]
    reads = [k for k, line in enumerate(lines) if "wgmma.wait_group" in line]
    for release in releases:
        since = max((k for k in reads if k < release), default=-1)
        if since < 0 or not any("bar.sync" in line or "barrier.sync" in line for line in lines[since:release]):
            return False
    return bool(releases)


def fence_before_loads(ptx: str) -> bool:
    """Whether a fence to the async proxy separates the wait for a flag from the first TMA load."""
    places = [ptx.rfind(".sys.acquire"), ptx.find("fence.proxy.async.global"), ptx.find("cp.async.bulk.tensor")]
    return -1 not in places and places == sorted(places)
