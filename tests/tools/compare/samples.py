"""Records of runs with chosen figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic_core import to_json

from megatron_overlap.tools.compare.comparison import Comparison, Side, Workload, comparison_content
from megatron_overlap.tools.compare.flops import Peak
from megatron_overlap.tools.launch.run_records import Fallback, PluginReport, RunRecord

META = {"device": "cpu", "device_name": "x86_64", "world_size": 2, "versions": {"torch": "2.13.0", "apex": None}}
LINK = {"kind": "loopback", "description": "loopback, its rate is not limited"}


def record(
    step_time_ms: Sequence[float],
    losses: Sequence[float | None] | None = None,
    grad_norms: Sequence[float | None] | None = None,
    memory: int = 1000,
    fallbacks: tuple[Fallback, ...] = (),
    not_fused: Mapping[str, int] = MappingProxyType({}),
) -> RunRecord:
    size = len(step_time_ms)
    return RunRecord(
        iterations=tuple(range(1, size + 1)),
        step_time_ms=tuple(step_time_ms),
        losses=tuple(losses if losses is not None else [8.0 - 0.1 * index for index in range(size)]),
        grad_norms=tuple(grad_norms if grad_norms is not None else [2.0] * size),
        peak_memory_bytes=memory,
        meta=META,
        report=PluginReport(True, "2 functions of Megatron are replaced", 12, 3 << 20, fallbacks, dict(not_fused)),
    )


def side(name: str, records: Sequence[RunRecord], flops: float | None = 4e9) -> Side:
    work = Workload(tokens=512, flops=flops, flops_convention="counted", devices=2)
    return Side(name, LINK, tuple(records), work, Peak(0.1, "measured here"))


def written(comparison: Comparison) -> Any:
    """The content of compare.json, read back."""
    return json.loads(to_json(comparison_content(comparison), inf_nan_mode="null"))
