"""Cluster profiles whose times can be computed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config import ModelConfig
from megatron_overlap.config.cluster import ClusterProfile
from megatron_overlap.tools.simulate.job import Job
from megatron_overlap.tools.simulate.linear import Method

LATE_AFTER_US = 1e4
METHODS: tuple[Method, ...] = get_args(Method)


def number(value: float) -> dict[str, Any]:
    return {"value": value, "source": "made up for a test"}


def profile(elementwise: Mapping[str, tuple[float, float]] | None = None, **changes: float) -> ClusterProfile:
    """A profile with 1 TFLOP/s, 1 GB/s links, free memory accesses and launches, no latency and no contention.

    Args:
        elementwise: (forward, backward) GB/s by kind of operation.
        changes: tflops, gbps, latency_us, between_us, launch_us, call_us, copy (contention), collective,
            host_us_per_mb, busy_us, late_us (after `LATE_AFTER_US`), devices, nics, memory_gib, memory_gbps.
    """
    given = {
        "tflops": 1.0,
        "gbps": 1.0,
        "latency_us": 0.0,
        "launch_us": 0.0,
        "call_us": 0.0,
        "copy": 0.0,
        "collective": 0.0,
        "host_us_per_mb": 0.0,
        "busy_us": 0.0,
        "late_us": 0.0,
        "devices": 8,
        "nics": 8,
        "memory_gib": 80.0,
        "memory_gbps": 1e15,
        "between_us": changes.get("latency_us", 0.0),
        **changes,
    }
    link = {
        "latency_us": number(given["latency_us"]),
        "copy_gbps": number(given["gbps"]),
        "collective_gbps": number(given["gbps"]),
    }
    return ClusterProfile.model_validate(
        {
            "name": "ideal",
            "description": "made up",
            "devices_per_node": given["devices"],
            "device": {
                "peak_tflops": {"bf16": number(given["tflops"])},
                "gemm": {"efficiency": number(1.0), "processors": 1, "source": "made up"},
                "attention_forward": number(1.0),
                "attention_backward": number(1.0),
                "memory_gib": number(given["memory_gib"]),
                "memory_gbps": number(given["memory_gbps"]),
                "launch_us": number(given["launch_us"]),
                "call_us": number(given["call_us"]),
                "elementwise": {
                    kind: {"forward": rates[0], "backward": rates[1], "source": "made up for a test"}
                    for kind, rates in (elementwise or {}).items()
                },
                "optimizer_bytes": number(30.0),
                "step_ms": number(0.0),
            },
            "inside": link,
            "between": {**link, "latency_us": number(given["between_us"]), "nics_per_node": given["nics"]},
            "contention": {
                "collective": number(given["collective"]),
                "copy": number(given["copy"]),
                "host_us_per_mb": number(given["host_us_per_mb"]),
                "busy_us": number(given["busy_us"]),
                "late": [{"computed_us": number(LATE_AFTER_US), "late_us": number(given["late_us"])}],
            },
        }
    )


def machine(elementwise: Mapping[str, tuple[float, float]] | None = None, **changes: float) -> CostModel:
    return CostModel(profile(elementwise, **changes))


def job(**changes: Any) -> Job:
    """A GPT of eight layers with changed fields."""
    shape = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "vocab_size": 128}
    shape |= {key: changes.pop(key) for key in list(changes) if key in shape}
    model = ModelConfig.model_validate({"arch": "gpt", "max_position_embeddings": 4096, **shape})
    given: dict[str, Any] = {
        "seq_length": 1024,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "sequence_parallel": changes.get("tensor", 1) > 1,
    }
    return Job(model, **{**given, **changes})
