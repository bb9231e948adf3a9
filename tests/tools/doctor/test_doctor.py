"""doctor: real ranks talk, what hurts is named, and a calibrated profile is one that the cost model reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_overlap import cli
from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config.cluster import load_cluster_profile, with_hosts
from megatron_overlap.tools.doctor import findings, precision
from megatron_overlap.tools.doctor.calibration import checks, lab_tree, line, middle, profile_tree, write_profile
from megatron_overlap.tools.doctor.machine import LAYER, MESSAGES, PRODUCT, ROWS, late_gemms

# A machine of 0.1 TFLOP/s, 50 us and 1 GB/s a message.
FOUND: dict[str, Any] = {
    "ranks": 2,
    "peak_tflops": 0.1,
    "gemm_us": {str(rows): 2.0 * rows * PRODUCT / 0.1e6 for rows in ROWS},
    "weight_gradient_us": 2.0 * ROWS[-1] * PRODUCT / 0.08e6,
    "message_us": {str(count): 50 + count / 1000 for count in MESSAGES},
    "all_gather_us": 8192.0,
    "reduce_scatter_us": 16384.0,
    "all_reduce_us": 12288.0,
    "collective_bytes": 8 << 20,
    "memory_gbps": 5.0,
    "launch_us": 3.0,
    "busy_us": 700.0,
    "busy_collective_us": 900.0,
    "late_us": [(10_000.0, 500.0), (40_000.0, 2000.0)],
    "gemm_alone_us": 40_000.0,
    "gemm_beside_us": 44_000.0,
    "beside_bytes": 8 << 20,
    "elementwise": {"rms_norm": [4.0, 2.0], "update": [5.0]},
    "products": {"64": [0.04, 0.03], "128": [0.05, 0.04]},
    "check": {"gemm": 9060.0, "split gemm": 9060.0, "message": 3195.0},
}


def test_ranks_talk_and_every_feature_has_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--deadline", "120"]) == 0
    said = capsys.readouterr().out
    assert "agree with plain collectives" in said
    for feature in ("tensor: p2p", "data: p2p", "ulysses: p2p", "in Megatron", "tensor: fused"):
        assert feature in said
    assert "no CUDA device: `method: fused` runs p2p" in " ".join(said.split())


def test_ranks_that_do_not_answer_in_time_are_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--deadline", "0.1"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("not available") >= 3
    assert "the self-test failed" in said


def test_variables_that_hurt_are_named_with_what_to_do() -> None:
    env = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_IB_DISABLE": "0",
        "OMP_NUM_THREADS": "100000",
        "MEGATRON_OVERLAP": "0",
        "HOME": "/",
    }
    on_gpu = [name for name, _, _ in findings.environment(env, cuda=True)]
    assert on_gpu == ["CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_P2P_DISABLE", "MEGATRON_OVERLAP", "OMP_NUM_THREADS"]
    assert [name for name, _, _ in findings.environment(env, cuda=False)] == ["MEGATRON_OVERLAP", "OMP_NUM_THREADS"]
    assert findings.environment({}, cuda=True) == []


def test_a_calibrated_profile_says_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    write_profile(path, profile_tree(FOUND, "bf16", "made up"))
    assert [file.name for file in tmp_path.iterdir()] == ["mine.yaml"]
    profile = load_cluster_profile(str(path))
    model = CostModel(profile)
    link = model.link(2)
    assert model.message_us(3 << 20, link) == pytest.approx(50 + (3 << 20) / 1000)
    assert sum(model.gemm_us(256, n, k) for n, k in LAYER) == pytest.approx(FOUND["gemm_us"]["256"], rel=0.01)
    gradient_us = sum(model.weight_gradient_us(n, k, ROWS[-1]) for n, k in LAYER)
    assert gradient_us == pytest.approx(FOUND["weight_gradient_us"], rel=0.01)
    assert model.collective_us("all_gather", 8 << 20, link) == pytest.approx(8192 + 50 + 3)
    assert model.collective_us("reduce_scatter", 8 << 20, link) == pytest.approx(16384 + 50 + 3)
    assert model.collective_us("all_reduce", 8 << 20, link) == pytest.approx(12288 + 2 * 50 + 3)
    assert model.memory_us(1e6, "rms_norm") == pytest.approx(1e3 / 4 + 3)
    assert model.memory_us(1e6, "rms_norm", backward=True) == pytest.approx(1e3 / 2 + 3)
    assert model.memory_us(1e6, "update", backward=True) == pytest.approx(1e3 / 5 + 3)
    assert model.memory_us(1e6) == pytest.approx(1e3 / 5 + 3)
    # Of heads between two that were measured the time of a score, in proportion to columns / rate.
    for head, forward, backward in (
        (32, 0.04, 0.03),
        (64, 0.04, 0.03),
        (96, 96 / ((64 / 0.04 + 128 / 0.05) / 2), 96 / ((64 / 0.03 + 128 / 0.04) / 2)),
        (128, 0.05, 0.04),
    ):
        assert model.products_us(1e6, head) == pytest.approx(1e6 / (forward * 1e6) + 3)
        assert model.products_us(1e6, head, backward=True) == pytest.approx(1e6 / (backward * 1e6) + 3)
    # Bytes that went both ways took 4 ms from the GEMMs.
    moved = 2 * (8 << 20) / 1e6
    assert profile.contention.host_us_per_mb.value == pytest.approx(4000 / moved)
    assert [model.busy_us("copy"), model.busy_us("collective")] == [700, 900]
    assert [model.late_us(us) for us in (0.0, 5e3, 2.5e4, 5e4)] == pytest.approx([0, 250, 1250, 2500])
    for check in checks(path, FOUND, "bf16"):
        assert abs(check.error) < 0.02, check


def test_a_byte_takes_what_is_slower_the_line_or_the_hosts(tmp_path: Path) -> None:
    """Hosts of 2, 4, 0.5 and 16 ns a byte beside lines of 0.5 and 8 Gbit/s, 16 ns and 1 ns a byte."""
    half = FOUND["collective_bytes"] / 2
    own = {"copy": 2.0, "all_gather": 4.0, "reduce_scatter": 0.5, "all_reduce": 16.0}

    def found(line_ns: float) -> dict[str, Any]:
        messages = {str(count): 50 + count * max(line_ns, own["copy"]) / 1e3 for count in MESSAGES}
        collectives = {f"{name}_us": 50 + half * max(line_ns, ns) / 1e3 for name, ns in own.items() if name != "copy"}
        copy = 1e3 / max(line_ns, own["copy"])
        # A tenth of the time that messages take, and 200 us for 10^6 bytes of either direction.
        lost = FOUND["beside_bytes"] / copy * (0.1 + 200e-6 * 2 * copy)
        waits = {
            "gemm_beside_us": FOUND["gemm_alone_us"] + lost,
            "late_us": [(10_000.0, 500.0 + 10 * line_ns), (40_000.0, 100.0)],
        }
        return {**FOUND, "message_us": messages, **collectives, **waits}

    path = tmp_path / "lab.yaml"
    half_lost = {"gemm_beside_us": FOUND["gemm_alone_us"] + 0.5 * FOUND["beside_bytes"] / 250.0}
    between = [{**found(4.0), **half_lost}]
    write_profile(path, lab_tree(found(16.0), found(1.0), (0.5, 8.0), "bf16", "made up", between))
    profile = load_cluster_profile(str(path))
    # 2 / 16, 2 / 4 and 2 / 2 GB/s both ways; between them straight.
    rates = [(125.0, 0.125), (312.5, 0.3125), (500.0, 0.5), (750.0, 0.4), (1000.0, 0.3), (4000.0, 0.3)]
    lost = [1 - CostModel(profile).compute_rate("copy", moved) for moved, _ in rates]
    assert lost == pytest.approx([lost for _, lost in rates])
    # After more computation nobody is less late.
    assert [CostModel(profile).late_us(us) for us in (1e4, 1e6)] == pytest.approx([500 + 10 * 8.5] * 2)
    for gbps in (0.5, 1.0, 4.0, 8.0):
        link = CostModel(with_hosts(profile, gbps, 1)).link(2)
        assert link.latency_us == pytest.approx(50)
        assert link.copy_rate == pytest.approx(1e3 / max(8 / gbps, 2))
        assert link.collective_rate == pytest.approx(1e3 / max(8 / gbps, 4))
        assert link.scatter_rate == pytest.approx(1e3 / (8 / gbps))
        assert link.all_reduce_rate == pytest.approx(1e3 / 16)


def test_the_middle_of_several_measurements() -> None:
    several = [{"a": {"b": value}, "c": [value, 1.0], "d": value} for value in (3.0, 1.0, 2.0)]
    assert middle(several) == {"a": {"b": 2.0}, "c": [2.0, 1.0], "d": 2.0}


def test_lateness_is_measured_after_two_times_however_slow_gemms_are() -> None:
    assert late_gemms(1250.0) == (8, 32)
    assert late_gemms(1e5) == (1, 4)


def test_the_line_through_messages() -> None:
    assert line({0: 7.0, 1000: 17.0, 5000: 57.0}) == (pytest.approx(7), pytest.approx(100))
    late = line({0: 40.0, 1000: 17.0, 5000: 57.0})
    assert late == line({0: 17.0, 1000: 17.0, 5000: 57.0}), "the smallest came late"


@pytest.mark.long
def test_calibration_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    assert cli.main(["doctor", "--deadline", "120", "--calibrate", "--output", str(path), "--precision", "fp32"]) == 0
    assert "modelled us" in capsys.readouterr().out
    assert CostModel(load_cluster_profile(str(path)), "fp32").gemm_us(64, 64, 64) > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--precision", "fp8"], "--precision: fp8: use fp32, bf16 or fp16"), (["--ranks", "1"], "doctor --ranks: 1")],
)
def test_a_wrong_request_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert cli.main(["doctor", *arguments]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert told in said


@pytest.mark.parametrize(("rate", "usual"), [(1.0, "fp32"), (12.0, "bf16"), (400.0, "bf16")])
def test_what_a_processor_cannot_compute_is_said(rate: float, usual: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"fp32": 40.0, "bf16": rate, "fp16": 1.0}
    monkeypatch.setattr(precision, "gemm_gflops", rates.__getitem__)
    monkeypatch.setattr(precision.torch.cuda, "is_available", lambda: False)
    assert precision.usual_precision() == usual
    assert precision.objection("fp32") is None
    said = precision.objection("fp16")
    assert said is not None
    assert "train.precision=fp32" in said
    assert "1.0 GFLOP/s" in said


def test_the_rate_of_a_gemm_is_that_of_its_type() -> None:
    """Fp32 is measured, not taken from elsewhere: no processor is below 1 GFLOP/s or above a petaflop."""
    assert 1 < precision.gemm_gflops("fp32") < 1e6
