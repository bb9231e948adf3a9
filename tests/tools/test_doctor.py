"""`megatron-overlap doctor`: the self-test on real ranks, environment variables, and slow precisions."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megatron_overlap import cli
from megatron_overlap.patching.manifest import load_permits
from megatron_overlap.tools import doctor, gemm_rate
from tests.helpers.forked_python import ForkedPython


def test_the_self_test_passes_and_every_feature_has_a_verdict(
    capsys: pytest.CaptureFixture[str], forked_python: ForkedPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", forked_python.executable)
    assert cli.main(["doctor", "--deadline", "120"]) == 0
    printed = capsys.readouterr().out
    assert "agree with plain collectives" in printed
    for feature in ("tensor: p2p", "data: p2p", "ulysses: p2p", "in Megatron", "tensor: fused"):
        assert feature in printed
    for permit in load_permits():
        assert permit.what[:12] in printed
    words = " ".join(printed.split())
    assert "no CUDA device: `method: fused` runs p2p" in words
    assert "no CUDA device: messages use gloo" in words


@pytest.mark.parametrize(
    ("gpus", "reachable", "expected"), [(1, True, "needs"), (4, False, "some pairs"), (4, True, "")]
)
def test_the_transport_of_gpus_has_its_reason(
    gpus: int, reachable: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "local_unsupported_reason", lambda: "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: reachable or {a, b} != {1, 2})
    found = doctor.verdicts(None, 2)
    verdict, reason = found["tensor: p2p by copy engines"]
    assert found["tensor: fused"][0] == verdict
    if expected:
        assert verdict == "not available"
        assert reason.startswith(expected)
        assert reason.endswith("use NCCL")
    else:
        assert verdict == "works"


def test_a_tool_that_hangs_ends_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "_TOOL_S", 0.2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (line,) = doctor.devices()
    assert line.startswith("no topology: Command ")
    assert line.endswith("timed out after 0.2 seconds")


def test_the_self_test_fails_at_its_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--deadline", "0.1"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("not available") >= 3
    assert "the self-test failed" in printed


def test_harmful_environment_variables_are_named() -> None:
    env = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_IB_DISABLE": "0",
        "OMP_NUM_THREADS": "100000",
        "MEGATRON_OVERLAP": "0",
        "HOME": "/",
    }
    on_gpu = [name for name, _, _ in doctor.environment(env, cuda=True)]
    assert on_gpu == ["CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_P2P_DISABLE", "MEGATRON_OVERLAP", "OMP_NUM_THREADS"]
    assert [name for name, _, _ in doctor.environment(env, cuda=False)] == ["MEGATRON_OVERLAP", "OMP_NUM_THREADS"]
    assert doctor.environment({}, cuda=True) == []


def test_a_wrong_request_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--ranks", "1"]) == 2
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    assert "doctor --ranks: 1" in printed


@pytest.mark.parametrize(("bf16_gflops", "default"), [(1.0, "fp32"), (12.0, "bf16"), (400.0, "bf16")])
def test_a_precision_without_instructions_is_reported(
    bf16_gflops: float, default: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"fp32": 40.0, "bf16": bf16_gflops, "fp16": 1.0}
    monkeypatch.setattr(gemm_rate, "small_gemm_gflops", rates.__getitem__)
    monkeypatch.setattr(gemm_rate.torch.cuda, "is_available", lambda: False)
    assert gemm_rate.default_precision() == default
    assert gemm_rate.slow_precision_reason("fp32") is None
    reason = gemm_rate.slow_precision_reason("fp16")
    assert reason is not None
    assert "train.precision=fp32" in reason
    assert "1.0 GFLOP/s" in reason


def test_the_rate_of_a_small_gemm_is_plausible() -> None:
    """No processor is below 1 GFLOP/s or above 1 PFLOP/s."""
    # A busy machine may take the core away during a measurement.
    assert any(1 < gemm_rate.small_gemm_gflops("fp32") < 1e6 for _ in range(20))
