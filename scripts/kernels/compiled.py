"""Compiles kernels ahead of time, without a device or a driver, and checks the generated PTX and machine code (SASS).

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

TENSOR_CORE = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
"""Tensor core instruction of each architecture."""

SM_SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
SM_REGISTERS, SM_THREADS, SM_BLOCKS = 64 * 1024, 2048, 32
RESERVED_BYTES = 1024
"""Shared memory that the driver adds to every block."""

NCCL_THREADS, NCCL_REGISTERS = 640, 96
NCCL_SHARED_BYTES = {80: 14_144 + 82_240, 90: 37_824 + 82_240, 100: 37_824 + 82_240}
"""Block of `ncclDevKernel_SendRecv` in NCCL 2.29: static (cuobjdump) and dynamic (`ncclShmemDynamicSize`) memory."""

# Opcodes of SASS, as nvdisasm prints them for sm_80, sm_90a and sm_100a.
FLAG_READ = r"(LDG|ATOMG)\.(?!.*EXCH).*STRONG\.SYS"
DATA_LOAD = r"(LDG|LDGSTS)\.(?!.*STRONG)"
TMA_LOAD = "UTMALDG"
WIDE_PREFETCH = r"LDGSTS\.E\.BYPASS\.(LTC128B\.)?128"
DATA_STORE = "STG"
LOCAL_ACCESS = "LDL|STL"
BARRIER = r"BAR\.SYNC"
TILE_COUNT = r"ATOMG\..*ADD.*STRONG\.SYS"
FLAG_WRITE = r"ATOMG\..*EXCH.*STRONG\.SYS"
# ptxas compiles an acquire to a strong read, then an invalidation of L1; a release to a fence, then a strong write.
ACQUIRE = r"CCTL\.IVALL"
RELEASE = r"MEMBAR\.(ALL|SC)\.SYS"
# fence.proxy.async.global
PROXY_FENCE = r"FENCE\.VIEW\.ASYNC\.G"
MMA_WAIT = r"WARPGROUP\.DEPBAR"
SLOT_RELEASE = r"SYNCS\.ARRIVE\..*A1T0"

_JUMPS = ("BRA", "BRX", "BRXU", "CALL", "JMP", "JMX", "WARPSYNC")


@dataclass(frozen=True, slots=True)
class Compiled:
    """Code and resource usage of a compiled kernel.

    Attributes:
        ptx: PTX text.
        sass: machine code, as nvdisasm prints it.
        threads: threads of a block.
        registers: registers of a thread.
        stack_bytes: local memory of a thread, which contains spilled registers.
        shared_bytes: shared memory of a block.
    """

    ptx: str
    sass: str
    threads: int
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
    ptx, shared = binary.asm["ptx"], binary.metadata.shared
    threads = re.search(r"\.reqntid (\d+)", ptx)
    if threads is None:
        raise RuntimeError(f"{variant.name}: the PTX has no .reqntid")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        registers, stack = _usage(_output_of("cuobjdump", "--dump-resource-usage", file.name))
        return Compiled(ptx, _output_of("nvdisasm", "-c", file.name), int(threads[1]), registers, stack, shared)


def _output_of(tool: str, *arguments: str) -> str:
    """Return what a tool of the Triton wheel prints."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def _usage(text: str) -> tuple[int, int]:
    """Return the registers and stack bytes of a thread that cuobjdump reports."""
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text}")
    return int(found[1]), int(found[2]) + int(found[3])


def blocks_per_sm(result: Compiled, arch: int, *, beside_nccl: bool = False) -> int:
    """Return how many blocks of a kernel fit on one SM, alone or beside one block of NCCL."""
    # The hardware allocates registers for whole warps, in multiples of 8 per thread.
    block = result.threads, result.threads * (-(-result.registers // 8) * 8), result.shared_bytes + RESERVED_BYTES, 1
    nccl = NCCL_THREADS, NCCL_THREADS * NCCL_REGISTERS, NCCL_SHARED_BYTES[arch] + RESERVED_BYTES, 1
    total = SM_THREADS, SM_REGISTERS, SM_SHARED_BYTES[arch], SM_BLOCKS
    return min((has - takes * beside_nccl) // needs for has, takes, needs in zip(total, nccl, block, strict=True))


def peer_stores(ptx: str) -> list[str]:
    """Return the store instructions to global memory that write data, not flags."""
    return re.findall(r"\bst\.(?:[a-z_]+\.)*global(?:\.[a-z0-9_]+)*", ptx)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction.

    Attributes:
        opcode: name with its modifiers, such as `LDG.E.STRONG.SYS`.
        following: indices of the instructions that may run after it.
    """

    opcode: str
    following: tuple[int, ...]


def parse_sass(text: str) -> list[Instruction]:
    """Return the instructions that nvdisasm printed and all paths between them.

    Consecutive instructions with the same predicate either all run or are all skipped.

    Raises:
        RuntimeError: an indirect branch has no list of targets.
    """
    rows: list[tuple[str, str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*([.$\w]+):$", line):
            labels[label[1]] = len(rows)
        elif row := re.search(r"/\*[0-9a-f]+\*/ +(?:@(\S+) +)?([A-Z][\w.]*)\s*(.*?)\s*;", line):
            rows.append((row[1] or "", row[2], row[3]))

    predicates = [predicate for predicate, _, _ in rows] + [""]

    def entries(target: int) -> set[int]:
        """Return `target` and the instructions that run instead of it if its predicate is false."""
        found = {target}
        while predicate := predicates[target]:
            while predicates[target] == predicate:
                target += 1
            found.add(target)
        return found

    code = []
    for number, (predicate, opcode, operands) in enumerate(rows):
        name = opcode.split(".")[0]
        targets = re.findall(r"\.L_x_\d+|\$[\w$]+", operands) if name in _JUMPS else []
        if name.startswith("BRX") and not targets:
            raise RuntimeError(f"nvdisasm printed no targets of {opcode} {operands}")
        following = {entry for each in targets for entry in entries(labels[each])}
        # A branch with a register or predicate before its target is conditional. A call may return.
        leaves = name in ("EXIT", "RET", "BRX", "BRXU") or (name in ("BRA", "JMP") and operands.startswith("`"))
        if not leaves:
            together = predicate and predicates[number + 1] == predicate
            following |= {number + 1} if together else entries(number + 1)
        code.append(Instruction(opcode, tuple(sorted(each for each in following if each < len(rows)))))
    return code


def number_of(code: list[Instruction], pattern: str) -> int:
    """Return the number of instructions whose opcode starts with `pattern`."""
    return sum(bool(re.match(pattern, each.opcode)) for each in code)


def ordered(code: list[Instruction], start: str, stop: str, *required: str) -> bool:
    """Whether every path from an instruction `start` to an instruction `stop` passes all `required` in this order.

    All arguments are patterns of opcodes. False if no path leads from `start` to `stop`.
    """
    pending = [(after, 0) for each in code if re.match(start, each.opcode) for after in each.following]
    seen = set(pending)
    reached = False
    while pending:
        number, passed = pending.pop()
        opcode = code[number].opcode
        if re.match(stop, opcode):
            if passed < len(required):
                return False
            reached = True
        if passed < len(required) and re.match(required[passed], opcode):
            passed += 1
        new = {(after, passed) for after in code[number].following} - seen
        seen |= new
        pending += new
    return reached
