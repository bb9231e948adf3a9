"""Every kernel a user may run compiles with no GPU for every architecture, and is what it was written to be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVERYDAY = [
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


def compiled(*arguments: str, cache: Path | None = None) -> list[dict[str, object]]:
    """The rows of scripts/fused_table.py, from a process of its own: this one may be an interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    run = subprocess.run(
        [sys.executable, ROOT / "scripts/fused_table.py", "--json", *arguments],
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
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_a_variant_of_each_kernel(arch: int) -> None:
    rows = compiled("--arch", str(arch), *(word for name in EVERYDAY for word in ("--name", name)))
    assert [row["name"] for row in rows] == EVERYDAY
    check(rows)


@pytest.mark.timeout(1200)
def test_hopper_variants() -> None:
    rows = compiled("--arch", "90", *(word for name in HOPPER for word in ("--name", name)))
    assert [row["name"] for row in rows] == HOPPER
    assert all(row["tma"] for row in rows)
    check(rows)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_all_variants(arch: int) -> None:
    rows = compiled("--arch", str(arch))
    assert len(rows) > 40
    check(rows)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("edit", "name", "problem"),
    [
        (
            "gemm_rs|tl.multiple_of(tl.load(landings_ptr + owner).to(tl.pointer_type(DTYPE)), 16)|"
            "tl.load(landings_ptr + owner).to(tl.pointer_type(DTYPE))",
            "gemm_rs nt bf16",
            "16 bytes",
        ),
        ("hopper.pipeline|                fence_reads(start)|                pass", "ag_gemm_sm90 nt bf16", "fence"),
        pytest.param(
            "gemm_rs_hopper.pipeline|gl.multiple_of(gl.load(landings_ptr + owner).to(gl.pointer_type(DTYPE)), 16)|"
            "gl.load(landings_ptr + owner).to(gl.pointer_type(DTYPE))",
            "gemm_rs_sm90 nt bf16",
            "16 bytes",
            marks=pytest.mark.long,
        ),
        pytest.param('device|"acquire"|"relaxed"', "ag_gemm nt bf16", "acquire", marks=pytest.mark.long),
        pytest.param('device|sem="release"|sem="relaxed"', "gemm_rs nt bf16", "release", marks=pytest.mark.long),
    ],
    ids=["alignment not said", "no fence", "alignment not said on Hopper", "no acquire", "no release"],
)
def test_a_wrong_kernel_is_caught(edit: str, name: str, problem: str, tmp_path: Path) -> None:
    (row,) = compiled("--arch", "90", "--name", name, "--edit", edit, cache=tmp_path)
    assert any(problem in text for text in row["problems"]), row  # type: ignore[attr-defined]


def test_a_count_before_the_barrier_is_caught() -> None:
    """Triton 3.7 sets a barrier of its own before an atomic: without ours there is one still, so this is about text."""
    from megatron_overlap.kernels.compiled import barrier_before_release

    store, barrier, add = "st.global.v4.b32 [ %rd1 ], { %r1 };", "bar.sync 0;", "atom.global.sys.acq_rel.add.u32 %r2;"
    assert barrier_before_release("\n".join([store, barrier, add]))
    assert not barrier_before_release("\n".join([barrier, store, add]))
    assert not barrier_before_release("\n".join([store, add, barrier]))
    assert not barrier_before_release(store)


def test_a_slot_given_back_early_is_caught() -> None:
    """Triton sets a barrier of its own before an arrival, too."""
    from megatron_overlap.kernels.compiled import slots_are_given_back_together

    read, barrier, arrival = "wgmma.wait_group 1;", "bar.sync 0, 256;", "mbarrier.arrive.shared::cta.b64 _, [%r1];"
    assert slots_are_given_back_together("\n".join([read, barrier, arrival]))
    assert not slots_are_given_back_together("\n".join([barrier, read, arrival]))
    assert not slots_are_given_back_together("\n".join([read, barrier, arrival, read, arrival, barrier]))
    assert not slots_are_given_back_together(read)


def test_a_fence_in_the_wrong_place_is_caught() -> None:
    from megatron_overlap.kernels.compiled import fence_before_loads

    look, fence, load = "ld.global.sys.acquire.b32", "fence.proxy.async.global;", "cp.async.bulk.tensor.2d"
    assert fence_before_loads("\n".join([look, fence, load]))
    assert not fence_before_loads("\n".join([fence, look, load]))
    assert not fence_before_loads("\n".join([look, load]))
