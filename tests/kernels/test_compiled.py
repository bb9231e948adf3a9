"""Every kernel variant compiles for every architecture without a GPU, and its PTX and machine code pass the checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked_python import ForkedPython

ROOT = Path(__file__).parents[2]
DEFAULT_NAMES = [
    "ag_gemm nt bf16",
    "gemm_rs nt bf16",
    "gemm_rs nn bf16 ragged",
    "gemm_rs nn bf16 odd",
    "sum of 8 bf16",
    "add 7 bf16",
    "wait for all",
]

HOPPER = [
    "ag_gemm_sm90 nt bf16",
    "ag_gemm_sm90 nn fp16 small bias",
    "gemm_rs_sm90 nn bf16",
    "gemm_rs_sm90 nt fp16 small",
]


def compiled(python: ForkedPython, *arguments: str, cache: Path | None = None) -> list[dict[str, Any]]:
    """Return the rows of scripts/fused_table.py. Runs a subprocess, because Triton may interpret in this process."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    environment.pop("TRITON_INTERPRET", None)
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    run = subprocess.run(
        [python.executable, ROOT / "scripts/fused_table.py", "--json", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        assert row["problems"] == [], (row["name"], row["arch"])


@cache
def default_rows(python: ForkedPython, arch: int) -> dict[str, dict[str, Any]]:
    """Return the rows of a variant of each kernel with its PTX and SASS, by name."""
    names = [*DEFAULT_NAMES, *(HOPPER if arch == 90 else [])]
    rows = compiled(python, "--code", "--arch", str(arch), *(word for name in names for word in ("--name", name)))
    assert [row["name"] for row in rows] == names
    return {row["name"]: row for row in rows}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "arch", [pytest.param(80, marks=pytest.mark.long), 90, pytest.param(100, marks=pytest.mark.long)]
)
def test_a_variant_of_each_kernel(forked_python: ForkedPython, arch: int) -> None:
    check(default_rows(forked_python, arch).values())


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_all_variants(forked_python: ForkedPython, arch: int) -> None:
    rows = compiled(forked_python, "--arch", str(arch))
    assert len(rows) > 40
    check(rows)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("edit", "name", "problem"),
    [
        pytest.param(
            "gemm_rs|tl.multiple_of(tl.load(recv_buffers_ptr + owner).to(tl.pointer_type(DTYPE)), 16)|"
            "tl.load(recv_buffers_ptr + owner).to(tl.pointer_type(DTYPE))",
            "gemm_rs nt bf16",
            "16 bytes",
            marks=pytest.mark.long,
        ),
        ("hopper_gemm|                fence_reads(start)|                pass", "ag_gemm_sm90 nt bf16", "fence"),
        pytest.param(
            "hopper_gemm|gl.multiple_of(gl.load(recv_buffers_ptr + owner).to(gl.pointer_type(DTYPE)), 16)|"
            "gl.load(recv_buffers_ptr + owner).to(gl.pointer_type(DTYPE))",
            "gemm_rs_sm90 nt bf16",
            "16 bytes",
            marks=pytest.mark.long,
        ),
        pytest.param('primitives|"acquire"|"relaxed"', "ag_gemm nt bf16", "acquire", marks=pytest.mark.long),
        pytest.param('primitives|sem="release"|sem="relaxed"', "gemm_rs nt bf16", "release", marks=pytest.mark.long),
        pytest.param(
            'primitives|sem="acquire", scope="sys"|sem="acquire", scope="gpu"',
            "ag_gemm nt bf16",
            "system scope",
            marks=pytest.mark.long,
        ),
        pytest.param('primitives|sem="acq_rel"|sem="acquire"', "gemm_rs nt bf16", "stores", marks=pytest.mark.long),
        pytest.param('primitives|sem="acq_rel"|sem="release"', "gemm_rs nt bf16", "IVALL", marks=pytest.mark.long),
    ],
    ids=[
        "no alignment hint",
        "no fence",
        "no alignment hint on Hopper",
        "no acquire",
        "no release",
        "acquire of one GPU",
        "count without release",
        "count without acquire",
    ],
)
def test_an_edited_kernel_fails_its_check(
    forked_python: ForkedPython, edit: str, name: str, problem: str, tmp_path: Path
) -> None:
    (row,) = compiled(forked_python, "--arch", "90", "--name", name, "--edit", edit, cache=tmp_path)
    assert any(problem in text for text in row["problems"]), row


GATHER, SCATTER, SUM, WAIT = (DEFAULT_NAMES[number] for number in (0, 1, 4, 6))
HOPPER_GATHER, HOPPER_SCATTER = HOPPER[0], HOPPER[2]
WAITING, SCATTERING = (GATHER, SUM, WAIT, HOPPER_GATHER), (SCATTER, HOPPER_SCATTER)
GEMMS = (GATHER, SCATTER, HOPPER_GATHER, HOPPER_SCATTER)
MACHINE_CODE_EDITS = {
    "flag read at GPU scope": (WAITING, r"STRONG\.SYS", "STRONG.GPU", "system scope"),
    "no acquire": (WAITING, r"CCTL\.IVALL", "NOP", "CCTL.IVALL"),
    "no barrier after the flag": ((GATHER, SUM), r"BAR\.SYNC", "NOP", "block barrier"),
    "no proxy fence": ((HOPPER_GATHER,), r"FENCE\.VIEW\.ASYNC\.G", "FENCE.VIEW.ASYNC.S", "proxy fence"),
    "no barrier before the count": (SCATTERING, r"BAR\.SYNC", "NOP", "block barrier"),
    "no fence before the count": (
        SCATTERING,
        r"(?s)MEMBAR\.ALL\.SYS(?=((?!ATOMG).)*ATOMG\S+ADD)",
        "NOP",
        "between the stores",
    ),
    "count without acquire": (SCATTERING, r"CCTL\.IVALL", "NOP", "and the flag"),
    "fence of GPU scope before the flag": (
        SCATTERING,
        r"(?s)MEMBAR\.ALL\.SYS(?=((?!ATOMG).)*ATOMG\S+EXCH)",
        "MEMBAR.ALL.GPU",
        "and the flag",
    ),
    "no TMA": ((HOPPER_GATHER, HOPPER_SCATTER), "UTMALDG", "NOP", "no TMA"),
    "no wait for wgmma": ((HOPPER_GATHER, HOPPER_SCATTER), r"WARPGROUP\.DEPBAR", "NOP", "ring slot"),
    "no tensor core": (GEMMS, r"\b(HMMA|HGMMA|UTCHMMA)\b", "NOP", "MMA"),
    "narrow stores": ((*GEMMS, SUM), r"STG\.E\.128", "STG.E.64", "16 bytes"),
    "no prefetch": ((GATHER, SCATTER), r"LDGSTS\.E\.BYPASS(\.LTC128B)?\.128", "LDG.E.128", "prefetch"),
    "spills": (GEMMS, r"LDG\.E(?!\.)", "LDL", "spills"),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "arch", "old", "new", "problem"),
    [
        pytest.param(name, arch, *edit, id=f"{label}: {name}, sm_{arch}", marks=[] if arch == 90 else pytest.mark.long)
        for label, (names, *edit) in MACHINE_CODE_EDITS.items()
        for name in names
        for arch in ([90] if name in HOPPER else [80, 90, 100])
    ],
)
def test_edited_machine_code_fails_its_check(
    forked_python: ForkedPython, name: str, arch: int, old: str, new: str, problem: str
) -> None:
    from scripts.fused_table import problems
    from scripts.kernels.compiled import Compiled
    from scripts.kernels.variants import shipped, shipped_for_hopper

    variants = {(each.name, each.arch): each for each in [*shipped(), *shipped_for_hopper()]}
    row = default_rows(forked_python, arch)[name]
    before = Compiled(
        row["ptx"], row["sass"], row["threads"], row["registers"], row["stack_bytes"], row["shared_bytes"]
    )
    after = replace(before, sass=re.sub(old, new, before.sass))
    assert after != before
    assert problems(variants[name, arch], before) == []
    assert any(problem in text for text in problems(variants[name, arch], after))


def code_of(*lines: str) -> Any:
    """Parse lines of SASS without addresses; a line that ends with a colon is a label."""
    from scripts.kernels.compiled import parse_sass

    return parse_sass("\n".join(line if line.endswith(":") else f"/*0000*/ {line} ;" for line in lines))


STORE, BARRIER, FENCE = "STG.E.128 [R2.64], R4", "BAR.SYNC.DEFER_BLOCKING 0x0", "MEMBAR.ALL.SYS"
COUNT = "ATOMG.E.ADD.STRONG.SYS PT, R0, [R8.64], R5"


@pytest.mark.parametrize(
    ("lines", "holds"),
    [
        ((STORE, BARRIER, FENCE, COUNT), True),
        ((STORE, FENCE, BARRIER, COUNT), False),
        ((BARRIER, STORE, FENCE, COUNT), False),
        ((BARRIER, FENCE, COUNT, STORE), False),
        ((BARRIER, FENCE, COUNT), False),
        ((STORE, BARRIER, "@P0 BRA `(.L_x_1)", FENCE, COUNT, ".L_x_1:", "EXIT"), True),
        ((STORE, BARRIER, "@P0 BRA `(.L_x_1)", FENCE, ".L_x_1:", COUNT), False),
        ((STORE, BARRIER, "BRA P0, `(.L_x_1)", FENCE, ".L_x_1:", COUNT), False),
        ((STORE, BARRIER, "BRA `(.L_x_1)", ".L_x_0:", FENCE, COUNT, ".L_x_1:", "BRA `(.L_x_0)"), True),
        ((STORE, BARRIER, '@P0 BRX R2 -0x1 (*"BRANCH_TARGETS .L_x_1"*)', FENCE, ".L_x_1:", COUNT), False),
        ((".L_x_0:", BARRIER, FENCE, COUNT, STORE, "@P0 BRA `(.L_x_0)"), True),
        ((".L_x_0:", FENCE, COUNT, STORE, "@P0 BRA `(.L_x_0)"), False),
        ((STORE, BARRIER, f"@P1 {FENCE}", "@P1 ERRBAR", f"@P1 {COUNT}"), True),
        ((STORE, BARRIER, f"@P1 {FENCE}", f"@!P1 {COUNT}"), False),
        ((STORE, BARRIER, f"@P1 {FENCE}", COUNT), False),
        ((f"@P1 {STORE}", "@P0 EXIT", BARRIER, FENCE, COUNT), True),
        ((STORE, "EXIT", BARRIER, FENCE, COUNT), False),
    ],
)
def test_the_order_of_instructions_holds_on_all_paths(lines: tuple[str, ...], holds: bool) -> None:
    from scripts.kernels.compiled import ordered

    assert ordered(code_of(*lines), "STG", r"ATOMG\..*ADD", "BAR", "MEMBAR") is holds


def test_an_indirect_branch_without_targets_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="BRX"):
        code_of("BRX R2 -0x1b0")


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes", "alone", "beside_nccl"),
    [
        (384, 168, 229_508, 1, 0),  # registers of 97 % of an SM
        (128, 54, 4, 9, 0),  # 56 registers are allocated per thread
        (128, 32, 4, 16, 1),  # NCCL leaves 4,096 registers
        (32, 8, 4, 32, 16),  # 32 blocks at most
        (32, 8, 100 * 1024, 2, 1),  # shared memory
    ],
)
def test_blocks_that_fit_on_an_sm(
    threads: int, registers: int, shared_bytes: int, alone: int, beside_nccl: int
) -> None:
    from scripts.kernels.compiled import Compiled, blocks_per_sm

    result = Compiled("", "", threads, registers, 0, shared_bytes)
    assert blocks_per_sm(result, 90) == alone
    assert blocks_per_sm(result, 90, beside_nccl=True) == beside_nccl
