"""How the step time of the reference becomes the step time of another run: waits by op, and computation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_overlap.tools.compare.comparison import Comparison, ExposedSummary, RunSummary

COMPUTATION = "computation and everything else"
REMAINING_WAITS = "remaining waits"

_MIN_SHARE, _MAX_OPS = 0.01, 8
"""An op has a row of its own from this share of the reference's step on; at most so many ops."""


@dataclass(frozen=True)
class Change:
    """One row of a breakdown: the time of a step in either run, in milliseconds, and the start of its bar."""

    label: str
    before_ms: float
    after_ms: float
    start_ms: float
    """Step time of the reference plus the changes of the rows above."""

    @property
    def change_ms(self) -> float:
        return self.after_ms - self.before_ms

    @property
    def stop_ms(self) -> float:
        return self.start_ms + self.change_ms


@dataclass(frozen=True)
class Breakdown:
    """The step times of the reference and of one run, row by row.

    `before_ms` of all rows add up to `reference_ms`, `after_ms` to `run_ms`. The value of an op is its median over the
    timed steps. Medians do not add up: `REMAINING_WAITS` holds the median of all waits minus the listed ops.

    Attributes:
        reference: name of the reference.
        run: name of the run.
        reference_ms: median step time of the reference.
        run_ms: median step time of the run.
        changes: ops whose waits became shorter, then those whose waits became longer, remaining waits, computation.
        grouped: the ops in `REMAINING_WAITS`.
    """

    reference: str
    run: str
    reference_ms: float
    run_ms: float
    changes: tuple[Change, ...]
    grouped: tuple[str, ...]

    @property
    def reference_floor_ms(self) -> float:
        """Step of the reference minus all its waits: the lower bound for any overlap of the same computation."""
        return self.changes[-1].before_ms

    @property
    def run_floor_ms(self) -> float:
        """Step of the run minus all its waits."""
        return self.changes[-1].after_ms


def breakdowns(result: Comparison) -> list[Breakdown]:
    """One for each run except the reference, if both recorded events."""
    first = result.runs[0]
    return [
        _breakdown(first, first.exposed, run, run.exposed)
        for run in result.runs[1:]
        if first.exposed is not None and run.exposed is not None
    ]


def op_label(key: tuple[str, str]) -> str:
    """An op and its direction for the report. Some op names end with the direction already."""
    name, direction = key
    return name if direction == "-" or name.endswith(direction) else f"{name} {direction}"


def _breakdown(first: RunSummary, before: ExposedSummary, run: RunSummary, after: ExposedSummary) -> Breakdown:
    start_ms, end_ms = first.step_time_ms.median, run.step_time_ms.median
    keys = list(dict.fromkeys([*before.by_op, *after.by_op]))
    times = {key: (before.median_by_op.get(key, 0.0), after.median_by_op.get(key, 0.0)) for key in keys}
    shown = sorted((key for key in keys if max(times[key]) >= _MIN_SHARE * start_ms), key=lambda key: -max(times[key]))
    shown = sorted(shown[:_MAX_OPS], key=lambda key: times[key][1] - times[key][0])
    waits = (before.step_ms.median, after.step_ms.median)
    rows = [(op_label(key), *times[key]) for key in shown]
    remaining = [waits[side] - sum(times[key][side] for key in shown) for side in (0, 1)]
    rows.append((REMAINING_WAITS, remaining[0], remaining[1]))
    rows.append((COMPUTATION, start_ms - waits[0], end_ms - waits[1]))
    grouped = tuple(sorted(op_label(key) for key in keys if key not in shown))
    return Breakdown(first.name, run.name, start_ms, end_ms, _stacked(rows, start_ms), grouped)


def _stacked(rows: Sequence[tuple[str, float, float]], start_ms: float) -> tuple[Change, ...]:
    changes: list[Change] = []
    at = start_ms
    for label, before_ms, after_ms in rows:
        changes.append(Change(label, before_ms, after_ms, at))
        at = changes[-1].stop_ms
    return tuple(changes)
