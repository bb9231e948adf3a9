"""Compiles every fused kernel without a GPU, checks its code and prints its resource usage as a table.

python scripts/fused_table.py             a Markdown table
python scripts/fused_table.py --json      one JSON line per kernel
python scripts/fused_table.py --code      the same with PTX and SASS
python scripts/fused_table.py --check     exit code 1 if a kernel fails a check
"""

from __future__ import annotations

import argparse
import atexit
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_overlap import kernels  # noqa: E402
from megatron_overlap.kernels import gluon_version  # noqa: E402
from megatron_overlap.kernels.launch import ARCHITECTURES  # noqa: E402
from scripts.kernels import compiled  # noqa: E402
from scripts.kernels.variants import Variant, shipped, shipped_for_hopper  # noqa: E402

PACKAGE = "megatron_overlap.kernels"


def problems(variant: Variant, result: compiled.Compiled) -> list[str]:
    """Return the failed checks of a compiled kernel."""
    found = []
    code = compiled.parse_sass(result.sass)
    is_gemm = "BLOCK_K" in variant.constants
    odd = variant.name.endswith("odd")
    hopper = bool(variant.descriptors)
    spills = compiled.number_of(code, compiled.LOCAL_ACCESS)
    if result.stack_bytes or spills:
        found.append(f"spills: {result.stack_bytes} bytes of stack per thread, {spills} loads and stores")
    if result.shared_bytes > compiled.SHARED_LIMIT_BYTES[variant.arch]:
        found.append(f"shared memory: {result.shared_bytes} bytes exceed the limit of a block")
    if is_gemm and not compiled.number_of(code, compiled.TENSOR_CORE[variant.arch]):
        found.append(f"no {compiled.TENSOR_CORE[variant.arch]}")
    narrow = stores(code).keys() - {"STG.E.128"}
    if narrow and not odd:
        found.append(f"stores are not of 16 bytes: {', '.join(sorted(narrow))}")
    if is_gemm and not odd and not hopper and not compiled.number_of(code, compiled.WIDE_PREFETCH):
        found.append("the main loop does not prefetch 16 bytes at a time (no LDGSTS.E.BYPASS.128)")
    if hopper:
        found += hopper_problems(result, code)
    if variant.kernel.startswith("gemm_to_owners"):
        found += release_problems(result, code)
    elif "flags_ptr" in variant.pointers:
        found += acquire_problems(variant, result, code)
    return found


def stores(code: list[compiled.Instruction]) -> Counter[str]:
    """Return the number of instructions that store data to global memory, by opcode."""
    return Counter(each.opcode for each in code if each.opcode.startswith(compiled.DATA_STORE))


def hopper_problems(result: compiled.Compiled, code: list[compiled.Instruction]) -> list[str]:
    """Return the failed checks that only kernels with a producer warp and a ring have."""
    found = []
    if not compiled.number_of(code, compiled.TMA_LOAD):
        found.append("no TMA load (UTMALDG)")
    if not result.count("setmaxnreg.dec") or not result.count("setmaxnreg.inc"):
        found.append("the producer releases no registers to the consumers (setmaxnreg)")
    wait = compiled.MMA_WAIT, compiled.BARRIER
    if not compiled.ordered(code, compiled.TENSOR_CORE[90], compiled.SLOT_RELEASE, *wait):
        found.append("a ring slot is released before all consumers have read it")
    return found


def acquire_problems(variant: Variant, result: compiled.Compiled, code: list[compiled.Instruction]) -> list[str]:
    """Return the failed checks of a kernel that waits for flags."""
    found = []
    if not result.count(".sys.acquire") or not compiled.number_of(code, compiled.FLAG_READ):
        found.append("the flag is read without acquire semantics of system scope")
    read, acquire = compiled.FLAG_READ, compiled.ACQUIRE
    # Data is loaded by TMA, by all threads of the block, or by the next kernel.
    if variant.descriptors:
        if not compiled.ordered(code, read, compiled.TMA_LOAD, acquire, compiled.PROXY_FENCE):
            found.append("no invalidation of L1 (CCTL.IVALL) and proxy fence between a flag and the TMA load")
    elif variant.num_warps > 1:
        if not compiled.ordered(code, read, compiled.DATA_LOAD, acquire, compiled.BARRIER):
            found.append("no invalidation of L1 (CCTL.IVALL) and block barrier between a flag and the loads of data")
    elif not compiled.ordered(code, read, "EXIT", acquire):
        found.append("no invalidation of L1 (CCTL.IVALL) between a flag and the end of the kernel")
    return found


def release_problems(result: compiled.Compiled, code: list[compiled.Instruction]) -> list[str]:
    """Return the failed checks of a kernel that counts stored tiles and sets flags."""
    found = []
    if not result.count(".release"):
        found.append("the flag is set without release semantics")
    count, flag, release = compiled.TILE_COUNT, compiled.FLAG_WRITE, compiled.RELEASE
    if not compiled.ordered(code, compiled.DATA_STORE, count, compiled.BARRIER, release):
        found.append("no block barrier and MEMBAR.SYS between the stores and the atomic add that counts the tile")
    if not compiled.ordered(code, count, flag, compiled.ACQUIRE, release):
        found.append("no CCTL.IVALL and MEMBAR.SYS between the atomic add that counts the tile and the flag")
    return found


def row(variant: Variant, package: str, *, with_code: bool = False) -> dict[str, Any]:
    """Compile one variant and return its JSON line, with the PTX and SASS if `with_code`."""
    result = compiled.compile_variant(variant, package)
    code = compiled.parse_sass(result.sass)
    text = {"ptx": result.ptx, "sass": result.sass} if with_code else {}
    return {
        "name": variant.name,
        "arch": variant.arch,
        "tile": [variant.constants.get(key) for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "NUM_STAGES")],
        "warps": variant.num_warps,
        "threads": result.threads,
        "registers": result.registers,
        "stack_bytes": result.stack_bytes,
        "shared_bytes": result.shared_bytes,
        "blocks_per_sm": compiled.blocks_per_sm(result, variant.arch),
        "beside_nccl": compiled.blocks_per_sm(result, variant.arch, beside_nccl=True),
        "tensor_core": compiled.number_of(code, compiled.TENSOR_CORE[variant.arch]),
        "tma": compiled.number_of(code, compiled.TMA_LOAD),
        "stores": dict(stores(code)),
        "problems": problems(variant, result),
        **text,
    }


def edited(edit: str) -> str:
    """Copy the kernels with one edit, `module|old|new`, and return the name of the copied package."""
    module, old, new = edit.split("|")
    source = Path(kernels.__file__).parent
    made = tempfile.TemporaryDirectory(prefix="edited-")
    atexit.register(made.cleanup)
    folder = Path(made.name)
    if not (source / (module.replace(".", "/") + ".py")).is_file():
        raise SystemExit(f"--edit: {module}: no such module in {PACKAGE}")
    for file in source.rglob("*.py"):
        text = file.read_text()
        copy = folder / "edited_kernels" / file.relative_to(source)
        if ".".join(copy.relative_to(folder / "edited_kernels").with_suffix("").parts) == module:
            if old not in text:
                raise SystemExit(f"--edit: {old!r}: not found in {module}")
            text = text.replace(old, new)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text.replace(PACKAGE, "edited_kernels"))
    sys.path.insert(0, str(folder))
    return "edited_kernels"


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table. `beside NCCL`: blocks that fit on an SM that also runs a block of NCCL."""
    lines = [
        "| kernel | arch | tile m, n, k, stages | warps | registers | spilled | shared KiB "
        "| blocks per SM | beside NCCL | tensor core | stores |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        tile = ", ".join(str(extent) for extent in each["tile"] if extent is not None)
        core = f"{each['tensor_core']} x {compiled.TENSOR_CORE[each['arch']]}" if each["tensor_core"] else "-"
        stores = ", ".join(f"{count} x {name}" for name, count in each["stores"].items())
        suffix = "" if each["arch"] == ARCHITECTURES[0] else "a"
        lines.append(
            f"| {each['name']} | sm_{each['arch']}{suffix} | {tile} | {each['warps']} | {each['registers']} | "
            f"{each['stack_bytes']} | {each['shared_bytes'] / 1024:.0f} | "
            f"{each['blocks_per_sm']} | {each['beside_nccl']} | {core} | {stores} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, help="compile for this architecture only")
    parser.add_argument("--name", action="append", help="compile this kernel only; repeat for several, in order")
    parser.add_argument("--json", action="store_true", help="one JSON line per kernel")
    parser.add_argument("--code", action="store_true", help="one JSON line per kernel, with its PTX and SASS")
    parser.add_argument("--check", action="store_true", help="exit 1 if a kernel fails a check")
    parser.add_argument("--edit", help="module|old|new: compile an edited copy, to test the checks")
    options = parser.parse_args()
    hopper = [] if gluon_version.UNSUPPORTED_REASON else shipped_for_hopper()
    variants = [each for each in [*shipped(), *hopper] if options.arch in (None, each.arch)]
    if options.name:
        variants = [each for name in options.name for each in variants if each.name == name]
    package = edited(options.edit) if options.edit else PACKAGE
    rows = []
    for variant in variants:
        rows.append(row(variant, package, with_code=options.code))
        if options.json or options.code:
            print(json.dumps(rows[-1]), flush=True)
    if not options.json and not options.code:
        print(markdown(rows))
    wrong = [f"{each['name']} sm_{each['arch']}: {'; '.join(each['problems'])}" for each in rows if each["problems"]]
    if options.check and wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
