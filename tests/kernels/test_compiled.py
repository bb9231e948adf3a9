"""Every kernel variant compiles for every architecture without a GPU, and its code passes the PTX checks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.forked_python import ForkedPython

ROOT = Path(__file__).parents[2]
DEFAULT_NAMES = [
    "ag_gemm nt bf16",
    "gemm_rs nt bf16",
    "gemm_rs nn bf16 ragged",
    "gemm_rs nn bf16 odd",
    "wgrad bf16 to fp32",
    "wgrad bf16 to bf16 odd",
    "sum of 8 bf16",
    "wait for all",
]

HOPPER = [
    "ag_gemm_sm90 nt bf16",
    "ag_gemm_sm90 nn fp16 small bias",
    "gemm_rs_sm90 nn bf16",
    "gemm_rs_sm90 nt fp16 small",
]


def compiled(python: ForkedPython, *arguments: str, cache: Path | None = None) -> list[dict[str, object]]:
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


def check(rows: list[dict[str, object]]) -> None:
    for row in rows:
        assert row["problems"] == [], row


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", [80, 90, pytest.param(100, marks=pytest.mark.long)])
def test_a_variant_of_each_kernel(forked_python: ForkedPython, arch: int) -> None:
    rows = compiled(forked_python, "--arch", str(arch), *(word for name in DEFAULT_NAMES for word in ("--name", name)))
    assert [row["name"] for row in rows] == DEFAULT_NAMES
    check(rows)


@pytest.mark.timeout(1200)
def test_hopper_variants(forked_python: ForkedPython) -> None:
    rows = compiled(forked_python, "--arch", "90", *(word for name in HOPPER for word in ("--name", name)))
    assert [row["name"] for row in rows] == HOPPER
    assert all(row["tma"] for row in rows)
    check(rows)


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
        (
            "gemm_rs|tl.multiple_of(tl.load(recv_buffers_ptr + owner).to(tl.pointer_type(DTYPE)), 16)|"
            "tl.load(recv_buffers_ptr + owner).to(tl.pointer_type(DTYPE))",
            "gemm_rs nt bf16",
            "16 bytes",
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
    ],
    ids=["no alignment hint", "no fence", "no alignment hint on Hopper", "no acquire", "no release"],
)
def test_an_edited_kernel_fails_its_check(
    forked_python: ForkedPython, edit: str, name: str, problem: str, tmp_path: Path
) -> None:
    (row,) = compiled(forked_python, "--arch", "90", "--name", name, "--edit", edit, cache=tmp_path)
    assert any(problem in text for text in row["problems"]), row  # type: ignore[attr-defined]


def test_a_tile_count_before_the_barrier_is_caught() -> None:
    """Tests the check on PTX text, because Triton 3.7 inserts its own barrier before an atomic."""
    from scripts.kernels.compiled import barrier_before_release

    store, barrier, add = "st.global.v4.b32 [ %rd1 ], { %r1 };", "bar.sync 0;", "atom.global.sys.acq_rel.add.u32 %r2;"
    assert barrier_before_release("\n".join([store, barrier, add]))
    assert not barrier_before_release("\n".join([barrier, store, add]))
    assert not barrier_before_release("\n".join([store, add, barrier]))
    assert not barrier_before_release(store)


def test_an_early_slot_release_is_caught() -> None:
    """Tests the check on PTX text, because Triton inserts its own barrier before an mbarrier arrival."""
    from scripts.kernels.compiled import barrier_before_slot_release

    read, barrier, release = "wgmma.wait_group 1;", "bar.sync 0, 256;", "mbarrier.arrive.shared::cta.b64 _, [%r1];"
    assert barrier_before_slot_release("\n".join([read, barrier, release]))
    assert not barrier_before_slot_release("\n".join([barrier, read, release]))
    assert not barrier_before_slot_release("\n".join([read, barrier, release, read, release, barrier]))
    assert not barrier_before_slot_release(read)


def test_a_fence_in_the_wrong_place_is_caught() -> None:
    from scripts.kernels.compiled import fence_before_loads

    acquire, fence, load = "ld.global.sys.acquire.b32", "fence.proxy.async.global;", "cp.async.bulk.tensor.2d"
    assert fence_before_loads("\n".join([acquire, fence, load]))
    assert not fence_before_loads("\n".join([fence, acquire, load]))
    assert not fence_before_loads("\n".join([acquire, load]))
