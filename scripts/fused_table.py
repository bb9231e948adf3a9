"""Compiles every fused kernel without a GPU and prints its resource usage: the table of docs/design/fused_protocol.md.

python scripts/fused_table.py             a Markdown table
python scripts/fused_table.py --json      one JSON line per kernel
python scripts/fused_table.py --check     exit code 1 if a kernel fails a check
"""

from __future__ import annotations

import argparse
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
    is_gemm = "BLOCK_K" in variant.constants
    odd = variant.name.endswith("odd")
    if result.stack_bytes:
        found.append(f"spills: {result.stack_bytes} bytes of stack per thread")
    if result.shared_bytes > compiled.SHARED_LIMIT_BYTES[variant.arch]:
        found.append(f"shared memory: {result.shared_bytes} bytes exceed the limit of a block")
    if is_gemm and not result.count(compiled.TENSOR_CORE[variant.arch]):
        found.append(f"no {compiled.TENSOR_CORE[variant.arch]}")
    stores = set(compiled.peer_stores(result.ptx))
    if stores and not odd and stores != {"st.global.v4.b32"}:
        found.append(f"stores are not of 16 bytes: {', '.join(sorted(stores))}")
    hopper = bool(variant.descriptors)
    if is_gemm and not odd and not hopper and not result.count("cp.async.cg"):
        found.append("the main loop does not prefetch (no cp.async)")
    if hopper:
        found += hopper_problems(variant, result)
    if variant.kernel.startswith("gemm_to_owners"):
        if not compiled.barrier_before_release(result.ptx):
            found.append("no block barrier between the stores and the atomic add that counts the tile")
        if not result.count(".release"):
            found.append("the flag is set without release semantics")
    elif "flags_ptr" in variant.pointers and not result.count(".sys.acquire"):
        found.append("the flag is read without acquire semantics of system scope")
    return found


def hopper_problems(variant: Variant, result: compiled.Compiled) -> list[str]:
    """Return the failed checks that only kernels with a producer warp and a ring have."""
    found = []
    if not result.count("cp.async.bulk.tensor"):
        found.append("no TMA load")
    if not result.count("setmaxnreg.dec") or not result.count("setmaxnreg.inc"):
        found.append("the producer releases no registers to the consumers (setmaxnreg)")
    if not compiled.barrier_before_slot_release(result.ptx):
        found.append("a ring slot is released before all consumers have read it")
    if variant.kernel.startswith("ag_gemm") and not compiled.fence_before_loads(result.ptx):
        found.append("no fence between the wait for a flag and the TMA load")
    return found


def row(variant: Variant, package: str) -> dict[str, Any]:
    """Compile one variant and return its JSON line."""
    result = compiled.compile_variant(variant, package)
    return {
        "name": variant.name,
        "arch": variant.arch,
        "tile": [variant.constants.get(key) for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "NUM_STAGES")],
        "warps": variant.num_warps,
        "registers": result.registers,
        "stack_bytes": result.stack_bytes,
        "shared_bytes": result.shared_bytes,
        "tensor_core": result.count(compiled.TENSOR_CORE[variant.arch]),
        "cp_async": result.count("cp.async.cg"),
        "tma": result.count("cp.async.bulk.tensor"),
        "stores": dict(Counter(compiled.peer_stores(result.ptx))),
        "problems": problems(variant, result),
    }


def edited(edit: str) -> str:
    """Copy the kernels with one edit, `module|old|new`, and return the name of the copied package."""
    module, old, new = edit.split("|")
    source = Path(kernels.__file__).parent
    folder = Path(tempfile.mkdtemp(prefix="edited-"))
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
    """Return the rows as the Markdown table of docs/design/fused_protocol.md."""
    lines = [
        "| kernel | arch | tile m, n, k, stages | warps | registers | spilled | shared KiB | tensor core | stores |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        tile = ", ".join(str(extent) for extent in each["tile"] if extent is not None)
        core = f"{each['tensor_core']} x {compiled.TENSOR_CORE[each['arch']]}" if each["tensor_core"] else "-"
        stores = ", ".join(f"{count} x {name[10:]}" for name, count in each["stores"].items())
        suffix = "" if each["arch"] == ARCHITECTURES[0] else "a"
        lines.append(
            f"| {each['name']} | sm_{each['arch']}{suffix} | {tile} | {each['warps']} | {each['registers']} | "
            f"{each['stack_bytes']} | {each['shared_bytes'] / 1024:.0f} | {core} | {stores} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, help="compile for this architecture only")
    parser.add_argument("--name", action="append", help="compile this kernel only; repeat for several, in order")
    parser.add_argument("--json", action="store_true", help="one JSON line per kernel")
    parser.add_argument("--check", action="store_true", help="exit 1 if a kernel fails a check")
    parser.add_argument("--edit", help="module|old|new: compile an edited copy, to test the checks")
    options = parser.parse_args()
    hopper = [] if gluon_version.unsupported_reason() else shipped_for_hopper()
    variants = [each for each in [*shipped(), *hopper] if options.arch in (None, each.arch)]
    if options.name:
        variants = [each for name in options.name for each in variants if each.name == name]
    package = edited(options.edit) if options.edit else PACKAGE
    rows = []
    for variant in variants:
        rows.append(row(variant, package))
        if options.json:
            print(json.dumps(rows[-1]), flush=True)
    if not options.json:
        print(markdown(rows))
    wrong = [f"{each['name']} sm_{each['arch']}: {'; '.join(each['problems'])}" for each in rows if each["problems"]]
    if options.check and wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
