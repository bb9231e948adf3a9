"""Read the records in a run directory: steps, versions and the plugin's report, aggregated over the ranks."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class RunRecordError(RuntimeError):
    """A run directory is incomplete; the text names the file."""


@dataclass(frozen=True)
class Fallback:
    """Calls of one module that ran the stock path, and the reason."""

    module: str
    op: str
    direction: str
    reason: str
    calls: int


@dataclass(frozen=True)
class PluginReport:
    """The plugin's report of one run, summed over the ranks."""

    active: bool
    reason: str  # why it is active or not
    overlapped_calls: int
    sent_bytes: int  # by the overlapped calls
    fallbacks: tuple[Fallback, ...]
    not_fused: Mapping[str, int] = field(default_factory=dict)  # calls that ran p2p instead of fused, by reason


@dataclass(frozen=True)
class StepExposed:
    """Exposed communication of one step in ms, the mean over all ranks: in total, and by (op, direction)."""

    total_ms: float
    by_op: Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class RunRecord:
    """One run, aggregated over its ranks. Sequences have one value per iteration, except `evaluation_ms`."""

    iterations: tuple[int, ...]
    step_time_ms: tuple[float, ...]  # of the slowest rank
    losses: tuple[float | None, ...]  # None if no rank recorded a value
    grad_norms: tuple[float | None, ...]
    peak_memory_bytes: int | None  # largest peak of a rank over the run; None if not recorded
    meta: Mapping[str, Any]  # versions, device, layout and link of rank 0
    report: PluginReport | None  # None if the plugin was off
    exposed: tuple[StepExposed, ...] = ()  # empty without `overlap.trace`
    evaluation_ms: tuple[float, ...] = ()  # of each evaluation on the slowest rank


def read_run(run_dir: Path, world_size: int, iterations: int) -> RunRecord:
    """Read the records of `world_size` ranks; `iterations` is the number of their last step.

    Raises RunRecordError if a file is missing, unreadable or too short.
    """
    files = [run_dir / f"steps-rank{rank}.jsonl" for rank in range(world_size)]
    ranks = [_read_lines(file, missing="; the run recorded no steps") for file in files]
    numbers = tuple(int(row["iteration"]) for row in ranks[0])
    for file, rows in zip(files, ranks, strict=True):
        if (last := rows[-1]["iteration"] if rows else 0) != iterations:
            raise RunRecordError(f"{file}: the last step is {last}, must be {iterations}: the run ended early")
        if tuple(int(row["iteration"]) for row in rows) != numbers:
            raise RunRecordError(f"{file}: its iterations differ from those of rank 0")
    steps = list(zip(*ranks, strict=True))
    evaluations = [run_dir / f"evaluations-rank{rank}.jsonl" for rank in range(world_size)]
    evaluated = zip(*(_read_lines(path) for path in evaluations if path.exists()), strict=True)
    return RunRecord(
        iterations=numbers,
        step_time_ms=tuple(max(float(row["step_time_ms"]) for row in rows) for rows in steps),
        losses=tuple(_first_value(rows, "loss") for rows in steps),
        grad_norms=tuple(_first_value(rows, "grad_norm") for rows in steps),
        peak_memory_bytes=max(int(row["peak_memory_bytes"]) for rows in steps for row in rows),
        meta=read_object(run_dir / "meta-rank0.json"),
        report=read_reports(run_dir, world_size),
        exposed=_exposed(steps),
        evaluation_ms=tuple(max(float(row["time_ms"]) for row in rows) for rows in evaluated),
    )


def deviation(a: float | None, b: float | None) -> float:
    """Relative deviation |b - a| / |a|. NaN if a value is missing or not finite."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return math.nan
    return abs(b - a) / abs(a) if a else abs(b - a)


def _read_lines(path: Path, missing: str = "") -> list[dict[str, Any]]:
    return _read(path, lambda text: [json.loads(line) for line in text.splitlines()], "JSON lines", missing)


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises RunRecordError if the file is missing, or holds something else."""
    content = _read(path, json.loads, "JSON")
    if not isinstance(content, dict):
        raise RunRecordError(f"{path}: is not a JSON object")
    return content


def _read[Content](path: Path, parse: Callable[[str], Content], kind: str, missing: str = "") -> Content:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunRecordError(f"{path}: {error.strerror}{missing}") from error
    except ValueError as error:
        raise RunRecordError(f"{path}: is not {kind}: {error}") from error


def _first_value(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The value of the first rank that recorded one. All recorded values are equal."""
    return next((float(row[key]) for row in rows if row.get(key) is not None), None)


def _exposed(steps: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[StepExposed, ...]:
    if any("exposed" not in row for rows in steps for row in rows):
        return ()
    means = []
    for rows in steps:
        by_op: dict[tuple[str, str], float] = defaultdict(float)
        for row in rows:
            for op, direction, time_ms in row["exposed"]["ops"]:
                by_op[op, direction] += time_ms / len(rows)
        means.append(StepExposed(sum(row["exposed"]["total_ms"] for row in rows) / len(rows), by_op))
    return tuple(means)


def read_reports(run_dir: Path, world_size: int) -> PluginReport | None:
    """Reads the plugin's report of a run; None if the plugin was off.

    Raises RunRecordError if a report is unreadable.
    """
    paths = [run_dir / f"report-rank{rank}.json" for rank in range(world_size)]
    reports = [read_object(path) for path in paths if path.exists()]
    if not reports:
        return None
    fallbacks, not_fused = Counter[tuple[str, str, str, str]](), Counter[str]()
    for module in (module for report in reports for module in report.get("modules", ())):
        name = f"{module['kind']} {module['name']}".strip()
        for reason, calls in module["fallbacks"].items():
            fallbacks[name, module["op"], module["direction"], reason] += calls
        not_fused.update(module.get("not_fused", {}))
    return PluginReport(
        active=all(bool(report["active"]) for report in reports),
        reason=str(reports[0]["reason"]),
        overlapped_calls=sum(report["totals"]["overlapped"] for report in reports),
        sent_bytes=sum(report["totals"]["bytes"] for report in reports),
        fallbacks=tuple(Fallback(*key, calls) for key, calls in sorted(fallbacks.items())),
        not_fused=dict(not_fused),
    )
