"""From the reference's step time down to another run's: which waits went away, which came, what else changed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_overlap.tools.compare.comparison import Comparison, ExposedSummary, RunSummary

REST = "computation and all else"
OTHER = "other waits"

_SHARE, _MOST = 0.01, 8
"""Ops get a row of their own from this share of the reference's step on, and at most so many."""


@dataclass(frozen=True)
class Change:
    """One row: what a step of either run spends on it, and where its bar stands; milliseconds."""

    label: str
    before_ms: float
    after_ms: float
    start_ms: float
    """Where the rows above have come to."""

    @property
    def change_ms(self) -> float:
        return self.after_ms - self.before_ms

    @property
    def stop_ms(self) -> float:
        return self.start_ms + self.change_ms


@dataclass(frozen=True)
class Waterfall:
    """How one run's step time becomes another's.

    `before_ms` of the changes add up to `reference_ms`, `after_ms` to `run_ms`: each op is its median over the timed
    steps, all waits together are theirs, and what the ops lack of that is in `OTHER`.

    Attributes:
        reference: name of the run to begin with.
        run: name of the other one.
        reference_ms: its median step time.
        run_ms: the same of the other.
        changes: waits that became shorter, then those that became longer; last all that is not a wait.
        grouped: the ops in `OTHER`.
    """

    reference: str
    run: str
    reference_ms: float
    run_ms: float
    changes: tuple[Change, ...]
    grouped: tuple[str, ...]

    @property
    def reference_floor_ms(self) -> float:
        """The reference's step less all its waits: no overlap of the same computation goes below it."""
        return self.changes[-1].before_ms

    @property
    def run_floor_ms(self) -> float:
        """The same of the other run."""
        return self.changes[-1].after_ms

    @property
    def largest_ms(self) -> float:
        """Where the longest bar ends."""
        return max(self.reference_ms, *(change.stop_ms for change in self.changes))


def waterfalls(result: Comparison) -> list[Waterfall]:
    """One for each run but the first, where both recorded events."""
    first = result.runs[0]
    return [
        _waterfall(first, first.exposed, run, run.exposed)
        for run in result.runs[1:]
        if first.exposed is not None and run.exposed is not None
    ]


def op_label(key: tuple[str, str]) -> str:
    """An op with its direction, as people read it; its name may already say the direction."""
    name, direction = key
    return name if direction == "-" or name.endswith(direction) else f"{name} {direction}"


def _waterfall(first: RunSummary, before: ExposedSummary, run: RunSummary, after: ExposedSummary) -> Waterfall:
    start_ms, end_ms = first.step_time_ms.median, run.step_time_ms.median
    keys = list(dict.fromkeys([*before.by_op, *after.by_op]))
    times = {key: (before.median_by_op.get(key, 0.0), after.median_by_op.get(key, 0.0)) for key in keys}
    shown = sorted((key for key in keys if max(times[key]) >= _SHARE * start_ms), key=lambda key: -max(times[key]))
    shown = sorted(shown[:_MOST], key=lambda key: times[key][1] - times[key][0])
    waits = (before.step_ms.median, after.step_ms.median)
    rows = [(op_label(key), *times[key]) for key in shown]
    others = [waits[side] - sum(times[key][side] for key in shown) for side in (0, 1)]
    rows.append((OTHER, others[0], others[1]))
    rows.append((REST, start_ms - waits[0], end_ms - waits[1]))  # the floors
    grouped = tuple(sorted(op_label(key) for key in keys if key not in shown))
    return Waterfall(first.name, run.name, start_ms, end_ms, _stacked(rows, start_ms), grouped)


def _stacked(rows: Sequence[tuple[str, float, float]], start_ms: float) -> tuple[Change, ...]:
    changes: list[Change] = []
    at = start_ms
    for label, before_ms, after_ms in rows:
        changes.append(Change(label, before_ms, after_ms, at))
        at = changes[-1].stop_ms
    return tuple(changes)
