"""What recorded events add to a comparison: the breakdown of each step time, and one step of each run, rank by rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_overlap import tracing
from megatron_overlap.tools import trace
from megatron_overlap.tools.compare.comparison import Comparison, RunSummary
from megatron_overlap.tools.compare.rounds import run_folder

COMPUTATION = "computation and everything else"
REMAINING_WAITS = "remaining waits"

_MIN_SHARE, _MAX_OPS = 0.01, 8  # an op has a row from this share of the reference's step on; at most so many ops


@dataclass(frozen=True)
class Change:
    """One row of a breakdown: its time in either step. `start_ms`: reference plus the changes of the rows above."""

    label: str
    before_ms: float
    after_ms: float
    start_ms: float

    @property
    def change_ms(self) -> float:
        return self.after_ms - self.before_ms

    @property
    def stop_ms(self) -> float:
        return self.start_ms + self.change_ms


@dataclass(frozen=True)
class Breakdown:
    """How the step time of the reference becomes that of one run: waits by op, and computation.

    `before_ms` of all rows add up to `reference_ms`, `after_ms` to `run_ms`. The value of an op is its median over the
    timed steps. Medians do not add up: `REMAINING_WAITS` holds the median of all waits minus the listed ops. A floor is
    the step minus all its waits; that of the reference is the lower bound for any overlap of the same computation.
    `changes` are ops whose waits became shorter, then those whose waits became longer, remaining waits, computation;
    `grouped` are the ops in `REMAINING_WAITS`.
    """

    reference: str
    run: str
    reference_ms: float
    run_ms: float
    reference_floor_ms: float
    run_floor_ms: float
    changes: tuple[Change, ...]
    grouped: tuple[str, ...]


def breakdowns(result: Comparison) -> list[Breakdown]:
    """One for each run except the reference, if both recorded events."""
    first, before, found = result.runs[0], result.runs[0].exposed, []
    for run in result.runs[1:]:
        after = run.exposed
        if before is None or after is None:
            continue
        start_ms, end_ms = first.step_time_ms.median, run.step_time_ms.median
        old, new = ({(each.op, each.direction): each.median_ms for each in side.by_op} for side in (before, after))
        times = {key: (old.get(key, 0.0), new.get(key, 0.0)) for key in {**old, **new}}
        longest = sorted(times, key=lambda key: -max(times[key]))[:_MAX_OPS]
        shown = [key for key in longest if max(times[key]) >= _MIN_SHARE * start_ms]
        shown.sort(key=lambda key: times[key][1] - times[key][0])
        rows = [(op_label(key), *times[key]) for key in shown]
        shown_old, shown_new = (sum(times[key][side] for key in shown) for side in (0, 1))
        rows.append((REMAINING_WAITS, before.step_ms.median - shown_old, after.step_ms.median - shown_new))
        rows.append((COMPUTATION, before.floor_ms, after.floor_ms))
        changes, at = [], start_ms
        for row in rows:
            changes.append(Change(*row, start_ms=at))
            at = changes[-1].stop_ms
        grouped = tuple(sorted(op_label(key) for key in times if key not in shown))
        floors = before.floor_ms, after.floor_ms
        found.append(Breakdown(first.name, run.name, start_ms, end_ms, *floors, tuple(changes), grouped))
    return found


def op_label(key: tuple[str, str]) -> str:
    """An op and its direction for the report. Some op names already end with the direction."""
    name, direction = key
    return name if direction == "-" or name.endswith(direction) else f"{name} {direction}"


MAX_RANKS = 4  # with more ranks the picture shows only those that `RankStep.role` describes


@dataclass(frozen=True)
class Span:
    """An interval of one op, in milliseconds from the first start of the step on any rank."""

    start_ms: float
    stop_ms: float
    op: str


@dataclass(frozen=True)
class RankStep:
    """One step on one rank, on the clock of rank 0. The first rank starts at 0.

    All time that is not a wait for communication counts as computation. `messages` of overlapped ops to this rank were
    in transit; they can overlap. `waited_ms` and `receiving_ms` are the lengths of the unions of waits and messages.
    `role` is why the rank is shown when not all are: "first", "slowest", "longest wait", several joined by commas.
    """

    rank: int
    start_ms: float
    stop_ms: float
    waits: tuple[Span, ...]
    messages: tuple[Span, ...]
    waited_ms: float
    receiving_ms: float
    role: str = ""


@dataclass(frozen=True)
class StepTimeline:
    """The typical step of one run: `ranks` are shown of `num_ranks` that recorded it.

    `clock_error_ns` is the largest clock error of a rank; None where a clock was not compared.
    """

    run: RunSummary
    ranks: tuple[RankStep, ...]
    num_ranks: int
    clock_error_ns: int | None


def timelines(result: Comparison, folder: Path) -> tuple[list[StepTimeline], list[str]]:
    """The timelines of all runs that recorded events in `folder`, and one line for each run or file that has none."""
    found, missing = [], []
    for run in result.runs:
        if run.exposed is None:
            missing.append(f"{run.name} recorded no events; set overlap.trace=true to record them")
            continue
        run_dir, iteration = run_folder(folder, run.typical_step.round, run.name), run.typical_step.iteration
        ranks: list[tracing.RankEvents] = []
        files = trace.event_files(run_dir).values()
        if not files:
            missing.append(f"{run.name}: {run_dir}: no events in it")
        for path in files:
            try:
                ranks += trace.align_steps([tracing.read_events(path)], iteration, iteration)
            except tracing.EventFileError as error:
                missing.append(f"{run.name}: {error}")
            except ValueError as error:
                missing.append(f"{run.name}: {path}: step {iteration} is not in it: {error}")
        if ranks:
            found.append(_step_timeline(run, ranks))
    return found, missing


def _step_timeline(run: RunSummary, ranks: Sequence[tracing.RankEvents]) -> StepTimeline:
    zero = min(tracing.steps_of(rank)[0][1] for rank in ranks)
    sent = trace.sent_times(ranks)
    steps = [_rank_step(rank, zero, sent) for rank in ranks]
    if len(steps) > MAX_RANKS:
        slowest = max(steps, key=lambda step: step.stop_ms - step.start_ms)
        longest_wait = max(steps, key=lambda step: step.waited_ms)
        roles = ((steps[0], "first"), (slowest, "slowest"), (longest_wait, "longest wait"))
        named = [replace(step, role=", ".join(role for one, role in roles if one is step)) for step in steps]
        steps = [step for step in named if step.role]
    errors = [trace.clock_error_ns(rank) for rank in ranks]
    error_ns = None if None in errors else max(error for error in errors if error is not None)
    return StepTimeline(run, tuple(steps), len(ranks), error_ns)


def _rank_step(rank: tracing.RankEvents, zero: int, sent: dict[trace.MessageKey, int]) -> RankStep:
    _, start, stop = tracing.steps_of(rank)[0]

    def inside(found: Iterable[trace.Span]) -> tuple[Span, ...]:
        """The parts inside the step, in order."""
        cut = sorted((max(one.start_ns, start), min(one.stop_ns, stop), one.name) for one in found)
        return tuple(
            Span((begin - zero) / 1e6, (end - zero) / 1e6, op_label(tracing.direction_of(name)))
            for begin, end, name in cut
            if end > begin
        )

    messages = inside(trace.messages(rank, sent))
    return RankStep(
        rank=rank.rank,
        start_ms=(start - zero) / 1e6,
        stop_ms=(stop - zero) / 1e6,
        waits=inside(trace.waits(rank)),
        messages=messages,
        waited_ms=tracing.exposed_in(rank, start, stop).total_ms,
        receiving_ms=sum(end - begin for begin, end in tracing.merged((one.start_ms, one.stop_ms) for one in messages)),
    )
