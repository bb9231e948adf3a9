"""The self-test of the Hopper kernels, applied to kernels that run on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_overlap.kernels import gluon_version, launch
from megatron_overlap.kernels import hopper_self_test as self_test
from megatron_overlap.kernels.launch import HOPPER
from tests.helpers.forked_python import ForkedPython
from tests.helpers.world import World
from tests.kernels import workers
from tests.kernels.gluon_model import on
from tests.kernels.modelled import modelled
from tests.kernels.mutants import Edit
from tests.kernels.turns import Machine


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["small", "whole"])
@pytest.mark.parametrize("transposed", [True, False], ids=["nt", "nn"])
@pytest.mark.parametrize("kind", ["ag_gemm", "gemm_to_owners"])
def test_right_kernels_pass(interpreting: World, kind: str, transposed: bool, whole: bool) -> None:
    """The portable kernels, interpreted."""
    assert interpreting.run(1, workers.self_check, kind, transposed, whole=whole) == [[]]


def test_the_hopper_kernel_passes_on_the_model() -> None:
    ag_gemm = modelled("ag_gemm").ag_gemm
    with on(Machine(seed=0)):
        assert list(self_test.gathering(ag_gemm, "cpu", torch.bfloat16, HOPPER, True)) == []


def bound(python: ForkedPython, *arguments: str) -> list[dict[str, Any]]:
    """Return the rows that bind.py prints."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [python.executable, str(Path(__file__).with_name("bind.py")), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_neither_epoch_nor_rows_select_a_variant_of_a_kernel(forked_python: ForkedPython) -> None:
    """A variant is a module, and a module that is loaded during a run waits for all streams."""
    (kernels,) = bound(forked_python, "variants")
    names = ["ag_gemm_kernel", "gemm_to_owners_kernel", "sum_received_kernel", "wait_all_kernel"]
    names += ["add_terms_kernel", "ag_gemm_sm90_kernel", "gemm_to_owners_sm90_kernel"]
    assert sorted(kernels) == sorted(names)
    for name, (launches, variants) in kernels.items():
        assert launches >= 64, name
        assert variants == 1, name


@pytest.mark.timeout(300)
def test_launchers_bind_and_compile(forked_python: ForkedPython) -> None:
    """Eight consumer warps and a producer warp group of four; TMA blocks match the swizzled layout."""
    rows = bound(forked_python)
    names = ["ag_gemm_sm90_kernel", "ag_gemm_sm90_kernel", "gemm_to_owners_sm90_kernel"]
    assert [row["name"] for row in rows] == names * 2
    assert [row["blocks"][1] for row in rows] == [[256, 64]] * 3 + [[64, 64]] * 3
    for row in rows:
        assert (row["warps"], row["stores"], row["blocks"][0]) == (12, ["st.global.v4.b32"], [128, 64])


WRONG = {
    "no wait": ("ag_gemm", Edit("ag_gemm", "+ primitives.REMOTE) != 0", "+ primitives.REMOTE) > 1"), "did not wait"),
    "no status": ("ag_gemm", Edit("primitives", "    if seen < epoch:\n", "    if seen < 0:\n"), "did not wait"),
    "another epoch": (
        "ag_gemm",
        Edit("ag_gemm", "primitives.FLAG), epoch,", "primitives.FLAG), epoch + 1,"),
        "timed out",
    ),
    "no bias": ("ag_gemm", Edit("ag_gemm", "        if HAS_BIAS:", "        if HAS_BIAS and N < 0:"), "wrong product"),
    "rows past the end": ("ag_gemm", Edit("ag_gemm", "rows[:, None] < num_rows", "rows[:, None] < BLOCK_M"), "outside"),
    "another owner": (
        "gemm_to_owners",
        Edit("gemm_rs", "(recv_buffers_ptr + owner)", "(recv_buffers_ptr + 0)"),
        "at owner 1",
    ),
    "flag too high": (
        "gemm_to_owners",
        Edit("primitives", "(flag_ptr, epoch, sem", "(flag_ptr, epoch + 1, sem"),
        "flags",
    ),
    "counter left": ("gemm_to_owners", Edit("primitives", "xchg(counter_ptr, 0", "xchg(counter_ptr, 1"), "counters"),
    "another slot": ("gemm_to_owners", Edit("gemm_rs", "recv_buffer += slot_offset +", "recv_buffer +="), "outside"),
}


@pytest.mark.parametrize("what", WRONG)
def test_edited_kernels_fail(interpreting: World, what: str) -> None:
    kind, edit, text = WRONG[what]
    (found,) = interpreting.run(1, workers.self_check, kind, True, (edit,))
    assert any(text in each for each in found), found


def test_no_device_no_self_test() -> None:
    assert self_test.hopper_unsupported_reason() == "no CUDA device"


def test_a_failure_or_a_timeout_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the real child process, which fails without a device."""
    monkeypatch.setattr(self_test, "static_unsupported_reason", lambda device: "")
    found = self_test.hopper_unsupported_reason(torch.device("cuda", 0))
    assert found.startswith("Hopper kernels: the self-test failed: ")
    assert "\n" not in found
    assert "did not end within 0.01 s" in self_test.hopper_unsupported_reason(0, deadline_s=0.01)


def test_device_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((9, 0), ""), ((10, 0), "not 10.0"), ((8, 0), "not 8.0")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert self_test.static_unsupported_reason(0).endswith(expected)
        assert bool(self_test.static_unsupported_reason(0)) == bool(expected)
    monkeypatch.setattr(gluon_version, "UNSUPPORTED_REASON", "no Gluon")
    assert self_test.static_unsupported_reason(0) == "no Gluon"


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=dtype)


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (matrix(8, 32), matrix(32, 48), ""),
        (matrix(8, 32), matrix(48, 32).t(), ""),
        (matrix(8, 32, torch.float32), matrix(32, 48, torch.float32), "not torch.float32"),
        (matrix(8, 24), matrix(24, 48), "depth 24"),
        (matrix(8, 32), matrix(32, 40), "columns 40"),
        (matrix(8, 32), matrix(32, 96)[:, ::2], "b: strides"),
        (matrix(8, 33)[:, 1:], matrix(32, 48), "a: rows"),
        (matrix(8, 36)[:, :32], matrix(32, 48), "a: rows"),
        (matrix(9, 32).flatten()[4:260].view(8, 32), matrix(32, 48), "a: rows"),
        (matrix(32, 8).t(), matrix(32, 48), "a: rows"),
        (matrix(8, 32), matrix(32, 52)[:, :48], "b: rows"),
    ],
)
def test_operands(a: torch.Tensor, b: torch.Tensor, text: str) -> None:
    found = launch.tma_unsupported_reason(a, b)
    assert text in found
    assert bool(found) == bool(text)


def test_output_must_be_aligned() -> None:
    assert "out: rows" in launch.tma_unsupported_reason(matrix(8, 32), matrix(32, 48), matrix(8, 52)[:, :48])


def test_triton_without_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module imports without Gluon and reports in one line what is missing."""
    assert not gluon_version.UNSUPPORTED_REASON
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    assert gluon_version.__file__ is not None
    spec = importlib.util.spec_from_file_location("without_gluon", gluon_version.__file__)
    assert spec is not None
    assert spec.loader is not None
    shim = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shim)
    assert "has no Gluon for Hopper" in shim.UNSUPPORTED_REASON
    assert "\n" not in shim.UNSUPPORTED_REASON
