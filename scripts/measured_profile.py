"""A cluster profile from the figures that `calibrate.py` measures, and the error of its cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megatron_overlap.autotune.cost_model import ITEM_BYTES, TOUCHED, CostModel
from megatron_overlap.config.cluster import Elementwise, Precision, load_cluster_profile, profile_folder

BASE = "netlab"
"""The profile with the figures that are not measured."""
ROWS = (32, 64, 128, 256, 512, 1024)
HIDDEN, FFN = 1024, 1408
LAYER = ((HIDDEN, HIDDEN), (HIDDEN, HIDDEN // 2), (2 * FFN, HIDDEN), (HIDDEN, FFN))
"""Columns and depth of the four GEMMs of a layer on one of two ranks."""
LAYER_PRODUCT = sum(columns * depth for columns, depth in LAYER)
"""Multiply-adds of the four GEMMs per row."""
MESSAGES = (1 << 10, 1 << 18, 1 << 20, 1 << 22)
"""Bytes."""
CHECK_GEMM, CHECK_MESSAGE = (384, 1536, 768), 3 << 20
HEADS = 4
ELEMENTWISE_OUTPUTS: dict[Elementwise, int] = {
    "rms_norm": ROWS[-1] * HIDDEN,
    "swiglu": ROWS[-1] * FFN,
    "scores": HEADS * ROWS[-1] ** 2,
}
"""Elements of the outputs of the operations that are timed."""


@dataclass(frozen=True)
class Check:
    """A measurement that the profile does not use, and the time that the cost model computes for it."""

    what: str
    measured_us: float
    modelled_us: float

    @property
    def error(self) -> float:
        """Relative; positive where the modelled time is longer."""
        return self.modelled_us / self.measured_us - 1


def profile_tree(
    found: Mapping[str, Any], precision: Precision, source: str, line_gbit: float | None = None
) -> dict[str, Any]:
    """The content of a profile: measured figures, and the profile `netlab` for all others.

    Args:
        found: the result of `measure` on any rank.
        precision: type of the GEMMs.
        source: time and place of the measurement.
        line_gbit: rate of the line between hosts with one rank each; None: all ranks are on one host.
    """
    figure = partial(_figure, source=source)
    rates = {int(rows): 2.0 * int(rows) * LAYER_PRODUCT / us for rows, us in found["gemm_us"].items()}
    best = max(rates.values())
    peak = max(found["peak_tflops"], best / 1e6)
    latency, copy = fit_line({int(count): us for count, us in found["message_us"].items()})
    moved = found["collective_bytes"] * (found["ranks"] - 1) / found["ranks"]
    link = {
        "latency_us": figure(latency),
        "copy_gbps": figure(copy / 1e3),
        "collective_gbps": figure(_rate(moved, found["all_gather_us"], latency)),
        "reduce_scatter_gbps": figure(_rate(moved, found["reduce_scatter_us"], latency)),
        "all_reduce_gbps": figure(_rate(moved, found["all_reduce_us"], latency)),
    }
    where = f"{found['ranks']} ranks over loopback"
    if line_gbit is not None:
        link["line_gbit"] = figure(line_gbit)
        where = f"{found['ranks']} hosts on one machine, lines of {line_gbit:g} Gbit/s"
    moved_rate, lost = _lost_computation(found, copy)
    return {
        "base": str(profile_folder() / f"{BASE}.yaml"),
        "name": "calibrated",
        "description": f"{where}: {source}; other figures as {BASE}",
        "devices_per_node": found["ranks"] if line_gbit is None else 1,
        "device": {
            "peak_tflops": {key: figure(peak) for key in {"bf16", precision}},
            "gemm": {
                "efficiency": figure(min(1.0, best / 1e6 / peak)),
                "rows": [{"rows": rows, "rate": rate / best} for rows, rate in sorted(rates.items())],
                "source": source,
            },
            "memory_gbps": figure(found["memory_gbps"]),
            "elementwise": _elementwise(found["elementwise_us"], precision, source),
            "launch_us": figure(found["launch_us"]),
        },
        "inside" if line_gbit is None else "between": link,
        "contention": {
            "host_us_per_mb": figure(lost / moved_rate * 1e6),
            "busy_us": figure(found["busy_us"]),
            "late": _lateness(found["late_us"], source),
        },
    }


def fit_line(times_us: Mapping[int, float]) -> tuple[float, float]:
    """Latency in microseconds and bytes per microsecond: the line of least relative error through message times.

    A time longer than that of a larger message is replaced by it: the receiver was late.
    """
    times_us = {count: min(us for other, us in times_us.items() if other >= count) for count in times_us}
    weights = {count: 1 / us**2 for count, us in times_us.items()}
    total = sum(weights.values())
    mean_x = sum(weights[count] * count for count in times_us) / total
    mean_y = sum(weights[count] * us for count, us in times_us.items()) / total
    above = sum(weights[count] * (count - mean_x) * (us - mean_y) for count, us in times_us.items())
    slope = max(above / sum(weights[count] * (count - mean_x) ** 2 for count in times_us), 1e-9)
    return max(0.0, mean_y - slope * mean_x), 1 / slope


def write_profile(path: Path, tree: Mapping[str, Any]) -> None:
    """Write the whole profile or nothing.

    Raises:
        OSError: the file cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    new.write_text(yaml.safe_dump(dict(tree), sort_keys=False), encoding="utf-8")
    new.replace(path)


def checks(path: Path, found: Mapping[str, Any], precision: Precision) -> list[Check]:
    """The GEMM and the message that the profile at `path` was not made from."""
    model = CostModel(load_cluster_profile(str(path)), precision)
    message_us = model.message_us(CHECK_MESSAGE, model.link(found["ranks"]))
    return [
        Check("GEMM {} x {} x {}".format(*CHECK_GEMM), found["check"]["gemm"], model.gemm_us(*CHECK_GEMM)),
        Check(f"message of {CHECK_MESSAGE >> 20} MiB", found["check"]["message"], message_us),
    ]


def _figure(value: float, source: str) -> dict[str, Any]:
    return {"value": value, "source": source}


def _rate(moved: float, us: float, latency_us: float) -> float:
    """GB/s of a collective without its latency."""
    return moved / max(us - latency_us, 0.1 * us) / 1e3


def _elementwise(times_us: Mapping[str, Any], precision: Precision, source: str) -> dict[str, Any]:
    """All rates of the base profile, scaled by one factor: base time over measured time of the timed operations."""
    base = CostModel(load_cluster_profile(BASE))  # memory rates need no peak of `precision`
    modelled = sum(
        base.memory_us(moved * ELEMENTWISE_OUTPUTS[kind] * ITEM_BYTES[precision], kind, backward=backward)
        - base.launch_us
        for kind in ELEMENTWISE_OUTPUTS
        for backward, moved in zip((False, True), TOUCHED[kind], strict=True)
    )
    factor = modelled / sum(sum(times) for times in times_us.values())
    rates = base.profile.device.elementwise.model_dump(exclude_none=True)
    return {
        kind: {key: rate * factor for key, rate in rate_of.items() if key != "source"} | {"source": source}
        for kind, rate_of in rates.items()
    }


def _lateness(points: list[tuple[float, float]], source: str) -> list[dict[str, Any]]:
    """Lateness by the time of computation before it, made monotone: noise must not give it a negative slope."""
    result, least = [], 0.0
    for computed_us, late_us in points:
        least = max(least, late_us)
        result.append({"computed_us": _figure(computed_us, source), "late_us": _figure(least, source)})
    return result


def _lost_computation(found: Mapping[str, Any], copy: float) -> tuple[float, float]:
    """Bytes per microsecond of messages in both directions, and the share of computation that is lost beside them."""
    lost_us = max(0.0, found["gemm_beside_us"] - found["gemm_alone_us"])
    return 2 * copy, lost_us * copy / found["beside_bytes"]
