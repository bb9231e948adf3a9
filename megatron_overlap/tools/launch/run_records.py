"""Reads what a run left in its directory: steps, versions and the plugin's report, of all ranks together. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class ArtefactError(RuntimeError):
    """A run's directory does not hold what a complete run writes; the text names the file."""


@dataclass(frozen=True)
class Fallback:
    """Calls that ran Megatron's own path."""

    module: str
    op: str
    direction: str
    reason: str
    calls: int


@dataclass(frozen=True)
class PluginReport:
    """What the plugin did, over all ranks of one run.

    Attributes:
        active: whether it replaced anything.
        reason: why, or why not.
        overlapped_calls: calls whose communication was overlapped.
        sent_bytes: bytes sent in them.
        fallbacks: the other calls, with their reasons.
        not_fused: calls that ran p2p where the config asks for fused kernels, by reason.
    """

    active: bool
    reason: str
    overlapped_calls: int
    sent_bytes: int
    fallbacks: tuple[Fallback, ...]
    not_fused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StepExposed:
    """Time of one step in which a rank waited for messages and computed nothing, the mean over all ranks.

    Attributes:
        total_ms: for any message.
        by_op: by op and direction.
    """

    total_ms: float
    by_op: Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class RunRecord:
    """One run, all ranks together; the sequences have one value for each iteration.

    Attributes:
        iterations: numbers of the iterations.
        step_time_ms: of the slowest rank.
        losses: None where no rank knows it.
        grad_norms: None where no rank knows it.
        peak_memory_bytes: of the rank that needed most, over the whole run; None where it is not known.
        meta: of rank 0: versions, device, layout, link.
        report: None when the plugin was off.
        exposed: of each iteration, where events were recorded (`overlap.trace`); else None.
    """

    iterations: tuple[int, ...]
    step_time_ms: tuple[float, ...]
    losses: tuple[float | None, ...]
    grad_norms: tuple[float | None, ...]
    peak_memory_bytes: int | None
    meta: Mapping[str, Any]
    report: PluginReport | None
    exposed: tuple[StepExposed, ...] | None = None


def read_run(run_dir: Path, world_size: int, iterations: int) -> RunRecord:
    """Read a run's directory.

    Args:
        run_dir: the folder.
        world_size: ranks that must have written.
        iterations: number of the last step each must have written.

    Raises:
        ArtefactError: a file is missing, cannot be read, or ends too early.
    """
    ranks = [_read_steps(run_dir / f"steps-rank{rank}.jsonl", iterations) for rank in range(world_size)]
    numbers = tuple(int(row["iteration"]) for row in ranks[0])
    for rank, rows in enumerate(ranks):
        if tuple(int(row["iteration"]) for row in rows) != numbers:
            raise ArtefactError(f"{run_dir / f'steps-rank{rank}.jsonl'}: other iterations than rank 0")
    steps = list(zip(*ranks, strict=True))
    return RunRecord(
        iterations=numbers,
        step_time_ms=tuple(max(float(row["step_time_ms"]) for row in rows) for rows in steps),
        losses=tuple(_first_known(rows, "loss") for rows in steps),
        grad_norms=tuple(_first_known(rows, "grad_norm") for rows in steps),
        peak_memory_bytes=max(int(row["peak_memory_bytes"]) for rows in steps for row in rows),
        meta=_read_object(run_dir / "meta-rank0.json"),
        report=_read_reports(run_dir, world_size),
        exposed=_exposed(steps),
    )


def _read_steps(path: Path, iterations: int) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ArtefactError(f"{path}: {error.strerror}; the run recorded no steps") from error
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError as error:
        raise ArtefactError(f"{path}: not JSON lines: {error}") from error
    last = rows[-1]["iteration"] if rows else 0
    if last != iterations:
        raise ArtefactError(f"{path}: the last step is {last}, must be {iterations}: the run ended early")
    return rows


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtefactError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ArtefactError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ArtefactError(f"{path}: not a JSON object")
    return content


def _first_known(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The value of the first rank that has one; all that have one have the same."""
    return next((float(row[key]) for row in rows if row.get(key) is not None), None)


def _exposed(steps: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[StepExposed, ...] | None:
    if any("exposed" not in row for rows in steps for row in rows):
        return None
    means = []
    for rows in steps:
        by_op: dict[tuple[str, str], float] = {}
        for row in rows:
            for op, direction, time_ms in row["exposed"]["ops"]:
                by_op[op, direction] = by_op.get((op, direction), 0.0) + time_ms / len(rows)
        means.append(StepExposed(sum(row["exposed"]["total_ms"] for row in rows) / len(rows), by_op))
    return tuple(means)


def _read_reports(run_dir: Path, world_size: int) -> PluginReport | None:
    paths = [run_dir / f"report-rank{rank}.json" for rank in range(world_size)]
    reports = [_read_object(path) for path in paths if path.exists()]
    if not reports:
        return None
    fallbacks: dict[tuple[str, str, str, str], int] = {}
    not_fused: dict[str, int] = {}
    for report in reports:
        for module in report.get("modules", ()):
            name = f"{module['kind']} {module['name']}".strip()
            for reason, calls in module["fallbacks"].items():
                key = (name, module["op"], module["direction"], reason)
                fallbacks[key] = fallbacks.get(key, 0) + calls
            for reason, calls in module.get("not_fused", {}).items():
                not_fused[reason] = not_fused.get(reason, 0) + calls
    return PluginReport(
        active=all(bool(report["active"]) for report in reports),
        reason=str(reports[0]["reason"]),
        overlapped_calls=sum(report["totals"]["overlapped"] for report in reports),
        sent_bytes=sum(report["totals"]["bytes"] for report in reports),
        fallbacks=tuple(Fallback(*key, calls) for key, calls in sorted(fallbacks.items())),
        not_fused=not_fused,
    )
