"""One step of each run of a comparison as lanes of ranks, from the events that the runs recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_overlap.tools.compare.breakdown import op_label
from megatron_overlap.tools.compare.comparison import Comparison, RunSummary, TypicalStep
from megatron_overlap.tools.compare.rounds import run_folder
from megatron_overlap.tools.trace.chrome_trace import Clock, Message, chosen, event_files, messages, posted
from megatron_overlap.tracing.events import EventFileError, Kind, RankEvents, merged, read_events, steps_of
from megatron_overlap.tracing.exposed import direction_of, exposed_in

ALL_RANKS = 4
"""So many ranks are drawn all; of more, those that `Lane.role` names."""

_Row = tuple[int, int, str]
"""Start and stop in nanoseconds, and a name."""


@dataclass(frozen=True)
class Span:
    """From when until when, milliseconds since the run's step began, and the op that it was for."""

    start_ms: float
    stop_ms: float
    op: str


@dataclass(frozen=True)
class Lane:
    """One rank in one step; what is not a wait is called computation.

    Attributes:
        rank: global rank.
        role: why it is drawn, where not all are: "first", "slowest", "waited most"; several with commas.
        start_ms: when its step began, on rank 0's clock; 0: the first rank's.
        stop_ms: when its step ended.
        waits: when it stood still.
        messages: when messages of overlapped ops were on their way to it; those of several peers lie over each other.
        waited_ms: of all waits, those at the same time counted once.
        in_flight_ms: in which at least one message was on its way.
    """

    rank: int
    role: str
    start_ms: float
    stop_ms: float
    waits: tuple[Span, ...]
    messages: tuple[Span, ...]
    waited_ms: float
    in_flight_ms: float


@dataclass(frozen=True)
class Timeline:
    """The typical step of one run.

    Attributes:
        run: its name.
        step: which step.
        median_ms: of all timed steps of the run.
        lanes: of the ranks that are drawn, in order.
        num_ranks: how many recorded the step.
        clock_error_ns: how far the clocks may be apart; None where they were not compared.
    """

    run: str
    step: TypicalStep
    median_ms: float
    lanes: tuple[Lane, ...]
    num_ranks: int
    clock_error_ns: int | None


def timelines(result: Comparison, folder: Path) -> tuple[list[Timeline], list[str]]:
    """The timelines of all runs that recorded events, and in words what is missing.

    Args:
        result: the comparison.
        folder: where the launches wrote, see `rounds.run_folder`.
    """
    drawn, missing = [], []
    for run in result.runs:
        if run.exposed is None:
            missing.append(f"{run.name} recorded no events; overlap.trace=true does")
            continue
        run_dir = run_folder(folder, run.typical.round, run.name)
        ranks, unread = read_step(run_dir, run.typical.iteration)
        missing += [f"{run.name}: {text}" for text in unread]
        if ranks:
            drawn.append(timeline(run, ranks))
    return drawn, missing


def read_step(run_dir: Path, iteration: int) -> tuple[list[RankEvents], list[str]]:
    """One step of all ranks on rank 0's clock, and what could not be read: a file or more may be damaged or cut off."""
    ranks, unread = [], []
    files = event_files(run_dir)
    for path in files.values():
        try:
            ranks += chosen([read_events(path)], iteration, iteration)
        except EventFileError as error:
            unread.append(str(error))
        except ValueError as error:
            unread.append(f"{path}: step {iteration} is not in it: {error}")
    if not files:
        unread.append(f"{run_dir}: no events in it")
    return ranks, unread


def timeline(run: RunSummary, ranks: Sequence[RankEvents]) -> Timeline:
    """The lanes of one step.

    Args:
        run: gives the name and the times.
        ranks: the events of that step, on one clock; at least one rank.
    """
    bounds = {found.rank: steps_of(found)[0][1:] for found in ranks}
    zero = min(start for start, _ in bounds.values())
    waited = {found.rank: exposed_in(found, *bounds[found.rank]).total_ms for found in ranks}
    roles = _roles(bounds, waited)
    sent = posted(ranks)
    lanes = tuple(
        _lane(found, roles[found.rank], zero, sent, waited[found.rank]) for found in ranks if found.rank in roles
    )
    errors = [Clock.of(found).error_ns for found in ranks]
    known = [error for error in errors if error is not None]
    error_ns = max(known) if len(known) == len(errors) else None
    return Timeline(run.name, run.typical, run.step_time_ms.median, lanes, len(ranks), error_ns)


def _roles(bounds: dict[int, tuple[int, int]], waited: dict[int, float]) -> dict[int, str]:
    if len(bounds) <= ALL_RANKS:
        return dict.fromkeys(bounds, "")
    slowest = max(bounds, key=lambda rank: bounds[rank][1] - bounds[rank][0])
    roles: dict[int, str] = {}
    for rank, role in (
        (min(bounds), "first"),
        (slowest, "slowest"),
        (max(waited, key=waited.__getitem__), "waited most"),
    ):
        roles[rank] = f"{roles[rank]}, {role}" if rank in roles else role
    return roles


def _lane(found: RankEvents, role: str, zero: int, sent: dict[Message, int], waited_ms: float) -> Lane:
    _, start, stop = steps_of(found)[0]

    def inside(rows: Iterable[_Row]) -> list[_Row]:
        cut = sorted((max(begin, start), min(end, stop), name) for begin, end, name in rows)
        return [row for row in cut if row[1] > row[0]]

    def spans(rows: Iterable[_Row]) -> tuple[Span, ...]:
        return tuple(
            Span((begin - zero) / 1e6, (end - zero) / 1e6, op_label(direction_of(name))) for begin, end, name in rows
        )

    stood = found.events[np.isin(found.events["kind"], (Kind.WAIT, Kind.OTHER_WAIT))]
    waits = inside((int(row["start_ns"]), int(row["stop_ns"]), found.names[row["op"]]) for row in stood)
    way = inside((one["ts"], one["ts"] + one["dur"], one["name"]) for one in messages(found, sent) if "ts" in one)
    busy = merged(*(np.array([row[place] for row in way], np.int64) for place in (0, 1)))
    in_flight_ms = sum(end - begin for begin, end in busy) / 1e6
    own = ((start - zero) / 1e6, (stop - zero) / 1e6)
    return Lane(found.rank, role, *own, spans(waits), spans(way), waited_ms, in_flight_ms)
