"""The breakdown of the step time into waits by op and computation, of runs that recorded events."""

from dataclasses import dataclass

from megatron_overlap.tools.compare.comparison import Comparison

COMPUTATION = "computation and everything else"
REMAINING_WAITS = "remaining waits"

_MIN_SHARE, _MAX_OPS = 0.01, 8  # an op has a row from this share of the reference's step on; at most so many ops


@dataclass(frozen=True)
class Change:
    """One row of a breakdown: its time in either step."""

    label: str
    before_ms: float
    after_ms: float

    @property
    def change_ms(self) -> float:
        return self.after_ms - self.before_ms


@dataclass(frozen=True)
class Breakdown:
    """How the step time of the reference becomes that of one run: waits by op, and computation.

    `before_ms` of all rows add up to `reference_ms`, `after_ms` to `run_ms`. The value of an op is its median over the
    timed steps. Medians do not add up: `REMAINING_WAITS` holds the median of all waits minus the listed ops.
    """

    reference: str
    run: str
    reference_ms: float
    run_ms: float
    reference_floor_ms: float  # the step minus all its waits: the lower bound for any overlap of this computation
    run_floor_ms: float
    changes: tuple[Change, ...]  # ops whose waits became shorter, longer ones, remaining waits, computation
    grouped: tuple[str, ...]  # the ops in `REMAINING_WAITS`


def breakdowns(result: Comparison) -> list[Breakdown]:
    """One for each run except the reference, if both recorded events."""
    first, before, found = result.runs[0], result.runs[0].exposed, []
    for run in result.runs[1:]:
        after = run.exposed
        if before is None or after is None:
            continue
        before_ms, after_ms = first.step_time_ms.median, run.step_time_ms.median
        old, new = ({(each.op, each.direction): each.median_ms for each in side.by_op} for side in (before, after))
        times = {key: (old.get(key, 0.0), new.get(key, 0.0)) for key in {**old, **new}}
        longest = sorted(times, key=lambda key: -max(times[key]))[:_MAX_OPS]
        shown = [key for key in longest if max(times[key]) >= _MIN_SHARE * before_ms]
        shown.sort(key=lambda key: times[key][1] - times[key][0])
        rows = [Change(op_label(*key), *times[key]) for key in shown]
        shown_old, shown_new = (sum(times[key][side] for key in shown) for side in (0, 1))
        rows.append(Change(REMAINING_WAITS, before.step_ms.median - shown_old, after.step_ms.median - shown_new))
        rows.append(Change(COMPUTATION, before.floor_ms, after.floor_ms))
        grouped = tuple(sorted(op_label(*key) for key in times if key not in shown))
        floors = before.floor_ms, after.floor_ms
        found.append(Breakdown(first.name, run.name, before_ms, after_ms, *floors, tuple(rows), grouped))
    return found


def op_label(op: str, direction: str) -> str:
    """An op and its direction for the report. Some op names already end with the direction."""
    return op if direction == "-" or op.endswith(direction) else f"{op} {direction}"
