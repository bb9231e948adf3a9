"""The events of all ranks of a run as one Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_overlap.tracing.events import Kind, RankEvents, merged, steps_of

_STEPS, _COMPUTE, _WAITS, _OPS, _MESSAGES = 0, 1, 2, 10, 100
"""Lanes of a rank, and the first of those that are several."""

_OTHER = "outside of overlapped ops"
_FILE = re.compile(r"events-rank(\d+)\.bin")


@dataclass(frozen=True)
class Clock:
    """Puts one rank's times on rank 0's clock; between two marks it goes straight, as clocks drift."""

    at_ns: tuple[int, ...]
    offset_ns: tuple[int, ...]
    error_ns: int | None
    """Largest error of a mark; None where the clocks were never compared, and taken as equal."""

    @classmethod
    def of(cls, found: RankEvents) -> Clock:
        """The clock of one rank."""
        if not found.marks:
            return cls((0,), (0,), 0 if found.rank == 0 else None)
        marks = sorted(found.marks)
        error = max(mark.error_ns for mark in marks)
        return cls(tuple(mark.at_ns for mark in marks), tuple(mark.offset_ns for mark in marks), error)

    def shift(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Times of rank 0's clock."""
        first = self.at_ns[0]
        # Differences: a clock that has run for months has more digits than a float.
        offsets = np.interp((times - first).astype(float), [at - first for at in self.at_ns], self.offset_ns)
        shifted: npt.NDArray[np.int64] = times + np.rint(offsets).astype(np.int64)
        return shifted


def event_files(run_dir: Path) -> dict[int, Path]:
    """The files of events in a run's folder by rank, in order; empty where there are none."""
    files = {int(named[1]): path for path in run_dir.glob("events-rank*.bin") if (named := _FILE.fullmatch(path.name))}
    return dict(sorted(files.items()))


def chosen(ranks: Sequence[RankEvents], first: int | None, last: int | None) -> list[RankEvents]:
    """The events of steps `first` to `last`, on rank 0's clock; None leaves that end open.

    Raises:
        ValueError: no rank has such a step.
    """
    kept = []
    for found in ranks:
        steps = [step for step in steps_of(found) if (first or 0) <= step[0] <= (last or step[0])]
        if not steps:
            continue
        events = found.events
        begin, end = min(start for _, start, _ in steps), max(stop for _, _, stop in steps)
        events = events[(events["stop_ns"] > begin) & (events["start_ns"] < end)].copy()
        clock = Clock.of(found)
        for name in ("start_ns", "stop_ns"):
            events[name] = clock.shift(events[name])
        kept.append(RankEvents(found.rank, events, found.names, found.marks, found.whole))
    if not kept:
        numbers = sorted({number for found in ranks for number, _, _ in steps_of(found)})
        raise ValueError(f"the run has steps {numbers[0]} to {numbers[-1]}" if numbers else "the run has no whole step")
    return kept


def trace_events(ranks: Sequence[RankEvents]) -> Iterator[dict[str, Any]]:
    """The trace's events, of one rank after the other.

    Args:
        ranks: on one clock.
    """
    zero = min(int(found.events["start_ns"].min()) for found in ranks)
    sent = posted(ranks)
    for found in ranks:
        yield _name("process_name", found.rank, 0, f"rank {found.rank}")
        yield {"ph": "M", "name": "process_sort_index", "pid": found.rank, "args": {"sort_index": found.rank}}
        for lane in (_steps(found), _compute(found), _waits(found), _ops(found), messages(found, sent)):
            for event in lane:
                if "ts" in event:
                    start, stop = event["ts"] - zero, event["dur"]
                    event["ts"], event["dur"] = round(start / 1e3, 3), round(max(stop, 0) / 1e3, 3)
                yield event


def encode(events: Iterable[dict[str, Any]], facts: dict[str, Any]) -> Iterator[str]:
    """The file's text in pieces, so that a long trace is never in memory whole."""
    yield '{"displayTimeUnit": "ms", "otherData": ' + json.dumps(facts) + ', "traceEvents": [\n'
    separator = ""
    for event in events:
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ",\n"
    yield "\n]}\n"


def _steps(found: RankEvents) -> Iterator[dict[str, Any]]:
    yield _name("thread_name", found.rank, _STEPS, "steps")
    for number, start, stop in steps_of(found):
        yield _event(f"step {number}", found.rank, _STEPS, start, stop)


def _compute(found: RankEvents) -> Iterator[dict[str, Any]]:
    """Steps without their waits, cut where ops begin and end."""
    yield _name("thread_name", found.rank, _COMPUTE, "compute")
    waits = _of(found, Kind.WAIT, Kind.OTHER_WAIT)
    still = merged(waits["start_ns"], waits["stop_ns"])
    ops = [(int(row["start_ns"]), int(row["stop_ns"]), found.names[row["op"]]) for row in _of(found, Kind.OP)]
    cuts = np.unique([time for start, stop, _ in ops for time in (start, stop)])
    ops.sort()
    active: list[tuple[int, int, str]] = []
    following = 0
    for start, stop in _between(steps_of(found), still):
        inside = cuts[np.searchsorted(cuts, start, "right") : np.searchsorted(cuts, stop, "left")].tolist()
        previous: list[Any] = []
        for begin, end in zip([start, *inside], [*inside, stop], strict=True):
            while following < len(ops) and ops[following][0] <= begin:
                active.append(ops[following])
                following += 1
            active = [op for op in active if op[1] > begin]
            # The op that began last is at work: an earlier one is on its way meanwhile.
            name = active[-1][2] if active else _OTHER
            if previous and previous[0] == name:
                previous[2] = end
            else:
                if previous:
                    yield _event(previous[0], found.rank, _COMPUTE, previous[1], previous[2])
                previous = [name, begin, end]
        if previous:
            yield _event(previous[0], found.rank, _COMPUTE, previous[1], previous[2])


def _waits(found: RankEvents) -> Iterator[dict[str, Any]]:
    yield _name("thread_name", found.rank, _WAITS, "waits (exposed communication)")
    for row in _of(found, Kind.WAIT, Kind.OTHER_WAIT):
        name = found.names[row["op"]]
        more = {"message": int(row["message"])} if row["kind"] == Kind.WAIT else {"by": "not this plugin"}
        yield _event(name, found.rank, _WAITS, int(row["start_ns"]), int(row["stop_ns"]), more)


def _ops(found: RankEvents) -> Iterator[dict[str, Any]]:
    """Ops may begin before others end: each goes on the first lane that is free."""
    free: list[int] = []
    for row in np.sort(_of(found, Kind.OP), order="start_ns"):
        start, stop = int(row["start_ns"]), int(row["stop_ns"])
        lane = next((lane for lane, until in enumerate(free) if until <= start), len(free))
        if lane == len(free):
            free.append(stop)
            yield _name("thread_name", found.rank, _OPS + lane, "ops" if lane == 0 else f"ops, {lane} more at once")
        free[lane] = stop
        yield _event(found.names[row["op"]], found.rank, _OPS + lane, start, stop)


Message = tuple[str, int, int, int, int]
"""What names a message on all ranks: group, flight, message, from, to."""


def posted(ranks: Sequence[RankEvents]) -> dict[Message, int]:
    """When each message was handed to the network, of all ranks."""
    return {
        (found.names[row["group"]], int(row["operation"]), int(row["message"]), found.rank, int(row["peer"])): int(
            row["start_ns"]
        )
        for found in ranks
        for row in _of(found, Kind.SENT)
    }


def messages(found: RankEvents, sent_at: dict[Message, int]) -> Iterator[dict[str, Any]]:
    """A rank's lanes of messages: from when one could be under way, sent and none before it, until it had landed."""
    busy: dict[tuple[int, int], int] = {}
    for row in np.sort(_of(found, Kind.LANDED), order="stop_ns"):
        peer, group, stop = int(row["peer"]), int(row["group"]), int(row["stop_ns"])
        lane = _MESSAGES + 100 * peer + group % 100
        if (peer, group) not in busy:
            yield _name("thread_name", found.rank, lane, f"from rank {peer} ({found.names[group]})")
        sent = sent_at.get((found.names[group], int(row["operation"]), int(row["message"]), peer, found.rank))
        start = max(int(row["start_ns"]) if sent is None else sent, busy.get((peer, group), 0))
        busy[peer, group] = stop
        more = {"bytes": int(row["num_bytes"]), "message": int(row["message"]), "from": peer}
        if sent is not None:
            more["since sent, us"] = round((stop - sent) / 1e3)
        # Clocks are compared only so well: never a message that lands before it left.
        yield _event(found.names[row["op"]], found.rank, lane, min(start, stop), stop, more)


def _between(steps: Sequence[tuple[int, int, int]], still: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of the steps in which nothing stood still."""
    for _, start, stop in steps:
        at = start
        for begin, end in still:
            if end <= start or begin >= stop:
                continue
            if begin > at:
                yield at, begin
            at = max(at, end)
        if at < stop:
            yield at, stop


def _of(found: RankEvents, *kinds: Kind) -> npt.NDArray[np.void]:
    return found.events[np.isin(found.events["kind"], kinds)]


def _name(what: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": text}}


def _event(
    name: str, process: int, thread: int, start: int, stop: int, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": start, "dur": stop - start}
    return event if more is None else {**event, "args": more}
