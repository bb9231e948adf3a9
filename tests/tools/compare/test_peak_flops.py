"""The table of peaks by the names drivers report, and a real calibration."""

from __future__ import annotations

import pytest

from megatron_overlap.config import LaunchConfig
from megatron_overlap.tools.compare.peak_flops import find_peak, known_peak


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.4),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H800", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 311.9),
        ("NVIDIA A100 80GB PCIe", 311.9),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA L40", 181.1),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L20", 119.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
    ],
)
def test_device_names(name: str, tflops: float) -> None:
    peak = known_peak(name, "bf16")
    assert peak is not None
    assert peak.tflops == tflops
    assert not peak.measured


def test_what_no_data_sheet_says_is_not_guessed() -> None:
    assert known_peak("x86_64", "bf16") is None
    assert known_peak("NVIDIA H100 80GB HBM3", "fp32") is None
    assert known_peak("NVIDIA A1000", "bf16") is None
    assert known_peak("NVIDIA A10G", "bf16") is None
    assert known_peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16") is None


def test_measured_on_this_machine_with_all_ranks_at_once() -> None:
    cfg = LaunchConfig.model_validate(
        {
            "name": "x",
            "model": {"preset": "gpt_tiny"},
            "parallel": {"tensor": 2},
            "train": {"seq_length": 64, "global_batch_size": 1, "iterations": 3, "precision": "fp32"},
            "launch": {"device": "cpu"},
        }
    )
    peak = find_peak("x86_64", cfg)
    assert peak.measured
    assert "2 processes at once, 1 thread each" in peak.source
    # A core between a small one and one with wide vector units.
    assert 0.001 < peak.tflops < 2
