"""From what `machine` measured to a cluster profile for the cost model, and the model's error against it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config.cluster import Precision, load_cluster_profile, profile_folder
from megatron_overlap.tools.doctor.machine import (
    BASE,
    CHECK_GEMM,
    CHECK_MESSAGE,
    CHECK_PIECES,
    PRODUCT,
    ROWS,
)


@dataclass(frozen=True)
class Check:
    """Something that was measured and was not used to make the profile."""

    what: str
    measured_us: float
    modelled_us: float

    @property
    def error(self) -> float:
        """Relative, above zero where the model is too slow."""
        return self.modelled_us / self.measured_us - 1


def profile_tree(found: Mapping[str, Any], precision: Precision, source: str) -> dict[str, Any]:
    """A profile's content: what was measured, over the profile `netlab` for what was not.

    Args:
        found: of any rank: they agree on what they measured.
        precision: type of the GEMMs.
        source: when and where it was measured.
    """

    figure = partial(_figure, source=source)
    rates = {int(rows): 2.0 * int(rows) * PRODUCT / us for rows, us in found["gemm_us"].items()}
    best = max(rates.values())
    peak = max(found["peak_tflops"], best / 1e6)
    latency, copy = line({int(count): us for count, us in found["message_us"].items()})
    moved = found["collective_bytes"] * (found["ranks"] - 1) / found["ranks"]
    rate, share = _lost(found, copy)
    return {
        "base": str(profile_folder() / f"{BASE}.yaml"),
        "name": "calibrated",
        "description": f"this machine, {found['ranks']} ranks over loopback: {source}; the rest as {BASE}",
        "devices_per_node": found["ranks"],
        "device": {
            "peak_tflops": {key: figure(peak) for key in {"bf16", precision}},
            "gemm": {
                "efficiency": figure(min(1.0, best / 1e6 / peak)),
                "rows": [{"rows": rows, "rate": rate / best} for rows, rate in sorted(rates.items())],
                "weight_gradient": figure(2.0 * ROWS[-1] * PRODUCT / found["weight_gradient_us"] / best),
                "source": source,
            },
            "memory_gbps": figure(found["memory_gbps"]),
            "elementwise": {
                kind: dict(zip(("forward", "backward"), gbps, strict=False)) | {"source": source}
                for kind, gbps in found["elementwise"].items()
            },
            "products": [
                {"head": int(head), "forward": forward, "backward": backward, "source": source}
                for head, (forward, backward) in found["products"].items()
            ],
            "launch_us": figure(found["launch_us"]),
        },
        "inside": {
            "latency_us": figure(latency),
            "copy_gbps": figure(copy / 1e3),
            "collective_gbps": figure(moved / found["all_gather_us"] / 1e3),
            "reduce_scatter_gbps": figure(moved / found["reduce_scatter_us"] / 1e3),
            "all_reduce_gbps": figure(moved / found["all_reduce_us"] / 1e3),
        },
        "contention": {
            "host_us_per_mb": figure(share / rate * 1e6),
            "busy_us": figure(found["busy_us"]),
            "busy_collective_us": figure(found["busy_collective_us"]),
            "late": _late(source, found),
        },
    }


def middle(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of every figure of several measurements."""

    def of(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Mapping):
            return {key: of([value[key] for value in values]) for key in values[0]}
        if isinstance(values[0], list | tuple):
            return [of(part) for part in zip(*values, strict=True)]
        return median(values)

    return {key: of([one[key] for one in found]) for key in found[0]}


def lab_tree(
    slow: Mapping[str, Any],
    fast: Mapping[str, Any],
    gbps: tuple[float, float],
    precision: Precision,
    source: str,
    beside: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """As `profile_tree`, of hosts joined by a line: what a line of one rate and one of another have shown.

    A byte takes what is slower: the line, in proportion to its rate, or the hosts, which stay as they are. The one is
    taken from the slower line, the other from the faster one.

    Args:
        slow, fast: measured over the slower line and over the faster one; ranks of one host each.
        gbps: their rates.
        precision: type of the GEMMs.
        source: when and where it was measured.
        beside: what computation loses beside messages on lines between the two.
    """

    figure = partial(_figure, source=source)
    tree = profile_tree(fast, precision, source)
    del tree["inside"]
    latencies, rates = zip(*(_link_rates(found) for found in (slow, fast)), strict=True)
    hosts = {name: figure(max(rate, rates[0][name])) for name, rate in rates[1].items()}
    tree["contention"] = {
        "beside": _beside(source, (slow, *beside, fast)),
        **{name: figure(fmean((slow[name], fast[name]))) for name in ("busy_us", "busy_collective_us")},
        "late": _late(source, slow, fast),
    }
    return tree | {
        "name": BASE,
        "description": f"{fast['ranks']} hosts on one machine, lines of {gbps[0]:g} and {gbps[1]:g} Gbit/s: {source}",
        "devices_per_node": 1,
        "between": {
            "latency_us": figure(latencies[1]),
            **{name: figure(rate) for name, rate in rates[0].items()},
            "line_gbit": figure(gbps[0]),
            "host": hosts,
        },
    }


def _figure(value: float, source: str) -> dict[str, Any]:
    return {"value": value, "source": source}


def _late(source: str, *found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The mean of what was found; who has computed for longer is not less late."""
    points, least = [], 0.0
    for each in zip(*(one["late_us"] for one in found), strict=True):
        computed, late = (fmean(values) for values in zip(*each, strict=True))
        least = max(least, late)
        points.append({"computed_us": _figure(computed, source), "late_us": _figure(least, source)})
    return points


def _beside(source: str, found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    points = sorted(_lost(one, line({int(count): us for count, us in one["message_us"].items()})[1]) for one in found)
    return [
        {"moved_gbps": _figure(moved / 1e3, source), "lost": _figure(min(1.0, lost), source)} for moved, lost in points
    ]


def _lost(found: Mapping[str, Any], copy: float) -> tuple[float, float]:
    """Bytes per microsecond that messages move, both ways together, and share of computation that is lost meanwhile."""
    lost_us = max(0.0, found["gemm_beside_us"] - found["gemm_alone_us"])
    return 2 * copy, lost_us * copy / found["beside_bytes"]


def _link_rates(found: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """Latency in microseconds, and GB/s of messages and collectives beside it."""
    latency, copy = line({int(count): us for count, us in found["message_us"].items()})
    moved = found["collective_bytes"] * (found["ranks"] - 1) / found["ranks"]

    def rate(us: float) -> float:
        return float(moved / max(us - latency, 0.1 * us) / 1e3)

    return latency, {
        "copy_gbps": copy / 1e3,
        "collective_gbps": rate(found["all_gather_us"]),
        "reduce_scatter_gbps": rate(found["reduce_scatter_us"]),
        "all_reduce_gbps": rate(found["all_reduce_us"]),
    }


def line(times_us: Mapping[int, float]) -> tuple[float, float]:
    """Latency in microseconds and bytes per microsecond: the line of least relative error through the times.

    A time counts for as much as that of a larger message at most: one that was late says nothing of the rate.
    """
    times_us = {count: min(us for other, us in times_us.items() if other >= count) for count in times_us}
    weights = {count: 1 / us**2 for count, us in times_us.items()}
    total = sum(weights.values())
    mean_x = sum(weights[count] * count for count in times_us) / total
    mean_y = sum(weights[count] * us for count, us in times_us.items()) / total
    above = sum(weights[count] * (count - mean_x) * (us - mean_y) for count, us in times_us.items())
    slope = above / sum(weights[count] * (count - mean_x) ** 2 for count in times_us)
    slope = max(slope, 1e-9)
    return max(0.0, mean_y - slope * mean_x), 1 / slope


def write_profile(path: Path, tree: Mapping[str, Any]) -> None:
    """Write the profile: all or nothing.

    Raises:
        OSError: the file cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    new.write_text(yaml.safe_dump(dict(tree), sort_keys=False), encoding="utf-8")
    new.replace(path)


def checks(path: Path, found: Mapping[str, Any], precision: Precision) -> list[Check]:
    """What the written profile says of shapes and sizes that were measured beside."""
    model = CostModel(load_cluster_profile(str(path)), precision)
    gemm = model.gemm_us(*CHECK_GEMM)
    modelled = {
        "gemm": gemm,
        "split gemm": gemm * model.split_penalty(*CHECK_GEMM, CHECK_PIECES),
        "message": model.message_us(CHECK_MESSAGE, model.link(found["ranks"])),
    }
    names = {
        "gemm": "GEMM {} x {} x {}".format(*CHECK_GEMM),
        "split gemm": f"the same in {CHECK_PIECES} pieces",
        "message": f"message of {CHECK_MESSAGE >> 20} MiB",
    }
    return [Check(names[what], found["check"][what], modelled[what]) for what in names]
