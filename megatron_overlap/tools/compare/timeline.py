"""One step of each run of a comparison, rank by rank, from the events that the runs recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_overlap.tools.compare.breakdown import op_label
from megatron_overlap.tools.compare.comparison import Comparison, RunSummary, TypicalStep
from megatron_overlap.tools.compare.rounds import run_folder
from megatron_overlap.tools.trace.aligned_events import (
    Clock,
    MessageKey,
    align_steps,
    event_files,
    events_of,
    received_messages,
    sent_times,
)
from megatron_overlap.tracing.events import EventFileError, Kind, RankEvents, merged, read_events, steps_of
from megatron_overlap.tracing.exposed import direction_of, exposed_in

MAX_RANKS = 4
"""With more ranks the picture shows only those that `RankStep.role` describes."""

_Interval = tuple[int, int, str]
"""Start and stop in nanoseconds, and the op."""


@dataclass(frozen=True)
class Span:
    """An interval of one op, in milliseconds from the first start of the step on any rank."""

    start_ms: float
    stop_ms: float
    op: str


@dataclass(frozen=True)
class RankStep:
    """One step on one rank. All time that is not a wait counts as computation.

    Attributes:
        rank: global rank.
        role: why the rank is shown when not all are: "first", "slowest", "longest wait", several joined by commas.
        start_ms: start of the step on the clock of rank 0. The first rank starts at 0.
        stop_ms: end of the step.
        waits: intervals in which the rank waited for communication.
        messages: intervals in which messages of overlapped ops to this rank were in transit. They can overlap.
        waited_ms: length of the union of all waits.
        receiving_ms: length of the union of all messages.
    """

    rank: int
    role: str
    start_ms: float
    stop_ms: float
    waits: tuple[Span, ...]
    messages: tuple[Span, ...]
    waited_ms: float
    receiving_ms: float


@dataclass(frozen=True)
class StepTimeline:
    """The typical step of one run.

    Attributes:
        run: name of the run.
        step: the step.
        median_ms: median over all timed steps of the run.
        ranks: the ranks that are shown, in order.
        num_ranks: number of ranks that recorded the step.
        clock_error_ns: largest clock error of a rank; None where a clock was not compared.
    """

    run: str
    step: TypicalStep
    median_ms: float
    ranks: tuple[RankStep, ...]
    num_ranks: int
    clock_error_ns: int | None


def timelines(result: Comparison, folder: Path) -> tuple[list[StepTimeline], list[str]]:
    """The timelines of all runs that recorded events, and one line for each run or file that has none.

    Args:
        result: the comparison.
        folder: folder of the launches, see `rounds.run_folder`.
    """
    found, missing = [], []
    for run in result.runs:
        if run.exposed is None:
            missing.append(f"{run.name} recorded no events; set overlap.trace=true to record them")
            continue
        run_dir = run_folder(folder, run.typical_step.round, run.name)
        ranks, unreadable = read_step(run_dir, run.typical_step.iteration)
        missing += [f"{run.name}: {reason}" for reason in unreadable]
        if ranks:
            found.append(step_timeline(run, ranks))
    return found, missing


def read_step(run_dir: Path, iteration: int) -> tuple[list[RankEvents], list[str]]:
    """One step of all ranks on the clock of rank 0, and the reason for each file that cannot be read."""
    ranks, unreadable = [], []
    files = event_files(run_dir)
    for path in files.values():
        try:
            ranks += align_steps([read_events(path)], iteration, iteration)
        except EventFileError as error:
            unreadable.append(str(error))
        except ValueError as error:
            unreadable.append(f"{path}: step {iteration} is not in it: {error}")
    if not files:
        unreadable.append(f"{run_dir}: no events in it")
    return ranks, unreadable


def step_timeline(run: RunSummary, ranks: Sequence[RankEvents]) -> StepTimeline:
    """The timeline of one step.

    Args:
        run: the run of the step.
        ranks: the events of that step on one clock; at least one rank.
    """
    bounds = {rank.rank: steps_of(rank)[0][1:] for rank in ranks}
    zero = min(start for start, _ in bounds.values())
    waited = {rank.rank: exposed_in(rank, *bounds[rank.rank]).total_ms for rank in ranks}
    roles = _roles(bounds, waited)
    sent = sent_times(ranks)
    shown = tuple(
        _rank_step(rank, roles[rank.rank], zero, sent, waited[rank.rank]) for rank in ranks if rank.rank in roles
    )
    errors = [Clock.of(rank).error_ns for rank in ranks]
    known = [error for error in errors if error is not None]
    error_ns = max(known) if len(known) == len(errors) else None
    return StepTimeline(run.name, run.typical_step, run.step_time_ms.median, shown, len(ranks), error_ns)


def _roles(bounds: dict[int, tuple[int, int]], waited: dict[int, float]) -> dict[int, str]:
    if len(bounds) <= MAX_RANKS:
        return dict.fromkeys(bounds, "")
    slowest = max(bounds, key=lambda rank: bounds[rank][1] - bounds[rank][0])
    longest_wait = max(waited, key=waited.__getitem__)
    roles: dict[int, str] = {}
    for rank, role in ((min(bounds), "first"), (slowest, "slowest"), (longest_wait, "longest wait")):
        roles[rank] = f"{roles[rank]}, {role}" if rank in roles else role
    return roles


def _rank_step(rank: RankEvents, role: str, zero: int, sent: dict[MessageKey, int], waited_ms: float) -> RankStep:
    _, start, stop = steps_of(rank)[0]

    def inside(intervals: Iterable[_Interval]) -> list[_Interval]:
        cut = sorted((max(begin, start), min(end, stop), name) for begin, end, name in intervals)
        return [interval for interval in cut if interval[1] > interval[0]]

    def spans(intervals: Iterable[_Interval]) -> tuple[Span, ...]:
        return tuple(
            Span((begin - zero) / 1e6, (end - zero) / 1e6, op_label(direction_of(name)))
            for begin, end, name in intervals
        )

    recorded = events_of(rank, Kind.WAIT, Kind.COLLECTIVE_WAIT)
    waits = inside((int(row["start_ns"]), int(row["stop_ns"]), rank.names[row["op"]]) for row in recorded)
    messages = inside((one.start_ns, one.stop_ns, one.op) for one in received_messages(rank, sent))
    receiving = merged(*(np.array([interval[place] for interval in messages], np.int64) for place in (0, 1)))
    return RankStep(
        rank=rank.rank,
        role=role,
        start_ms=(start - zero) / 1e6,
        stop_ms=(stop - zero) / 1e6,
        waits=spans(waits),
        messages=spans(messages),
        waited_ms=waited_ms,
        receiving_ms=sum(end - begin for begin, end in receiving) / 1e6,
    )
