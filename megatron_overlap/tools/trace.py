"""`megatron-overlap trace`: a Chrome trace of all ranks of a run, and a table of the exposed communication.

The file opens in Perfetto (ui.perfetto.dev) and in chrome://tracing. Each rank is a process, each row a thread. The
first part of this module puts the events of all ranks on the clock of rank 0 and pairs the messages; `compare` uses it.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_overlap.config.errors import usage_error, writing
from megatron_overlap.tracing import EventFileError, Kind, RankEvents, exposed_in, merged, read_events, steps_of

_FILE = re.compile(r"events-rank(\d+)\.bin")

MessageKey = tuple[str, int, int, int, int]
"""Identifies a message on all ranks: group, number of the operation, number of the message, sender, receiver."""


@dataclass(frozen=True)
class Clock:
    """Converts the times of one rank to the clock of rank 0.

    Clocks drift. The offset is interpolated linearly between two marks.
    """

    at_ns: tuple[int, ...]
    offset_ns: tuple[int, ...]
    error_ns: int | None
    """Largest error of a mark. None: the rank has no marks, and its clock is assumed equal to that of rank 0."""

    @classmethod
    def of(cls, events: RankEvents) -> Clock:
        """The clock of one rank."""
        if not events.marks:
            return cls((0,), (0,), 0 if events.rank == 0 else None)
        marks = sorted(events.marks)
        error = max(mark.error_ns for mark in marks)
        return cls(tuple(mark.at_ns for mark in marks), tuple(mark.offset_ns for mark in marks), error)

    def shift(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The same times on the clock of rank 0, in nanoseconds."""
        first = self.at_ns[0]
        # Subtract the first mark: after months of uptime a clock value has more digits than a float.
        offsets = np.interp((times - first).astype(float), [at - first for at in self.at_ns], self.offset_ns)
        shifted: npt.NDArray[np.int64] = times + np.rint(offsets).astype(np.int64)
        return shifted


@dataclass(frozen=True)
class ReceivedMessage:
    """One message as its receiver recorded it.

    Attributes:
        peer: global rank of the sender.
        channel: number of the group in the file of the receiver.
        message: number of the message within the operation.
        start_ns: earliest time at which the message can have been in transit: the sender has posted it and the receiver
            has the previous message of the same peer and group.
        stop_ns: time of receipt.
        sent_ns: time at which the sender posted the message; None where the events of the sender are missing.
    """

    op: str
    peer: int
    group: str
    channel: int
    message: int
    start_ns: int
    stop_ns: int
    num_bytes: int
    sent_ns: int | None


def event_files(run_dir: Path) -> dict[int, Path]:
    """The event files in the folder of a run by rank, in order of the ranks."""
    files = {int(named[1]): path for path in run_dir.glob("events-rank*.bin") if (named := _FILE.fullmatch(path.name))}
    return dict(sorted(files.items()))


def align_steps(ranks: Sequence[RankEvents], first: int | None, last: int | None) -> list[RankEvents]:
    """The events of steps `first` to `last`, on the clock of rank 0. None leaves that end open.

    Raises:
        ValueError: no rank has such a step.
    """
    aligned = []
    for rank in ranks:
        steps = [step for step in steps_of(rank) if (first or 0) <= step[0] <= (last or step[0])]
        if not steps:
            continue
        begin, end = min(start for _, start, _ in steps), max(stop for _, _, stop in steps)
        events = rank.events[(rank.events["stop_ns"] > begin) & (rank.events["start_ns"] < end)].copy()
        clock = Clock.of(rank)
        for name in ("start_ns", "stop_ns"):
            events[name] = clock.shift(events[name])
        aligned.append(RankEvents(rank.rank, events, rank.names, rank.marks, rank.whole))
    if not aligned:
        numbers = sorted({number for rank in ranks for number, _, _ in steps_of(rank)})
        raise ValueError(f"the run has steps {numbers[0]} to {numbers[-1]}" if numbers else "the run has no whole step")
    return aligned


def sent_times(ranks: Sequence[RankEvents]) -> dict[MessageKey, int]:
    """The time at which each message of all ranks was posted, in nanoseconds."""
    return {
        (rank.names[row["group"]], int(row["operation"]), int(row["message"]), rank.rank, int(row["peer"])): int(
            row["start_ns"]
        )
        for rank in ranks
        for row in events_of(rank, Kind.SENT)
    }


def received_messages(rank: RankEvents, sent_ns: dict[MessageKey, int]) -> Iterator[ReceivedMessage]:
    """The messages that a rank received, in order of receipt."""
    previous: dict[tuple[int, int], int] = {}
    for row in np.sort(events_of(rank, Kind.RECEIVED), order="stop_ns"):
        peer, channel, stop = int(row["peer"]), int(row["group"]), int(row["stop_ns"])
        group, message = rank.names[channel], int(row["message"])
        sent = sent_ns.get((group, int(row["operation"]), message, peer, rank.rank))
        start = max(int(row["start_ns"]) if sent is None else sent, previous.get((peer, channel), 0))
        previous[peer, channel] = stop
        # The error of the clocks must not place the receipt before the start.
        yield ReceivedMessage(
            rank.names[row["op"]], peer, group, channel, message, min(start, stop), stop, int(row["num_bytes"]), sent
        )


def events_of(rank: RankEvents, *kinds: Kind) -> npt.NDArray[np.void]:
    """The events of some kinds, in the order of the file."""
    return rank.events[np.isin(rank.events["kind"], kinds)]


_STEPS, _COMPUTE, _WAITS, _OPS, _MESSAGES = 0, 1, 2, 10, 100
"""Thread numbers of the rows of a rank. Rows of operations and of messages count up from theirs."""


def trace(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run that recorded events (overlap.trace: true).")],
    output: Annotated[
        Path | None,
        typer.Option("--output", help="File of the trace, .json or .json.gz. Default: trace.json.gz in RUN_DIR."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", help="FIRST:LAST, FIRST:, :LAST or one number. Default: all steps.")
    ] = None,
) -> int:
    """Write a Perfetto trace of all ranks on one clock and print the exposed communication."""
    first, last = _parse_steps(steps)
    ranks = _read(run_dir)
    console = Console()
    try:
        aligned = align_steps(ranks, first, last)
    except ValueError as error:
        raise usage_error("trace --steps", steps, str(error)) from error
    path = output if output is not None else run_dir / "trace.json.gz"
    metadata = {"run": str(run_dir), "clock": "of rank 0; other ranks shifted by measured offsets"}
    with writing("trace --output", path), gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.writelines(encode(trace_events(aligned), metadata))
    console.print(exposed_table(aligned))
    for line in notes(ranks):
        console.print(f"- {line}", highlight=False, soft_wrap=True)
    console.print(f"{path}: open it in https://ui.perfetto.dev", highlight=False, soft_wrap=True)
    return 0


def exposed_table(ranks: Sequence[RankEvents]) -> Table:
    """Exposed time by op and direction: the mean over steps and ranks, and the largest mean of one rank."""
    by_rank = {rank.rank: [exposed_in(rank, start, stop) for _, start, stop in steps_of(rank)] for rank in ranks}
    count = sum(len(steps) for steps in by_rank.values())
    table = Table(
        "op", "direction", box=box.SIMPLE_HEAD, title=f"exposed communication, ms per step ({count} rank steps)"
    )
    for heading in ("mean", "largest", "on rank"):
        table.add_column(heading, justify="right")
    keys = {key: None for steps in by_rank.values() for step in steps for key in step.by_op}
    rows = [
        (key, {rank: _mean([step.by_op.get(key, 0.0) for step in steps]) for rank, steps in by_rank.items()})
        for key in keys
    ]
    totals = {rank: _mean([step.total_ms for step in steps]) for rank, steps in by_rank.items()}
    for key, means in [*sorted(rows, key=lambda row: -sum(row[1].values())), (("all", ""), totals)]:
        largest = max(means, key=means.__getitem__)
        table.add_row(*key, f"{_mean(list(means.values())):.2f}", f"{means[largest]:.2f}", str(largest))
    return table


def notes(ranks: Sequence[RankEvents]) -> list[str]:
    """Errors of the clocks, incomplete files and missing ranks, one line each."""
    errors = {rank.rank: Clock.of(rank).error_ns for rank in ranks}
    lines = []
    known = [error for error in errors.values() if error is not None]
    unknown = [str(rank) for rank, error in errors.items() if error is None]
    if unknown:
        lines.append(f"clocks not compared with rank 0, assumed equal: ranks {', '.join(unknown)}")
    else:
        lines.append(f"clock error of all ranks: at most {max(known) / 1e3:.0f} us")
    lines += [
        f"rank {rank.rank}: its file ends in the middle of a step, where the run was cut off"
        for rank in ranks
        if not rank.whole
    ]
    missing = sorted(set(range(max(errors) + 1)) - set(errors))
    if missing:
        lines.append(f"no events of ranks {', '.join(map(str, missing))}")
    return lines


def trace_events(ranks: Sequence[RankEvents]) -> Iterator[dict[str, Any]]:
    """The events of the Chrome trace of ranks on one clock. Times are in microseconds from the first event."""
    zero = min(int(rank.events["start_ns"].min()) for rank in ranks)
    sent = sent_times(ranks)
    for rank in ranks:
        yield _name("process_name", rank.rank, 0, f"rank {rank.rank}")
        yield {"ph": "M", "name": "process_sort_index", "pid": rank.rank, "args": {"sort_index": rank.rank}}
        for row in (_steps(rank), _compute(rank), _waits(rank), _ops(rank), _messages(rank, sent)):
            for event in row:
                if "ts" in event:
                    start, duration = event["ts"] - zero, event["dur"]
                    event["ts"], event["dur"] = round(start / 1e3, 3), round(max(duration, 0) / 1e3, 3)
                yield event


def encode(events: Iterable[dict[str, Any]], metadata: dict[str, Any]) -> Iterator[str]:
    """The text of the file in pieces. A long trace is never in memory as a whole."""
    yield '{"displayTimeUnit": "ms", "otherData": ' + json.dumps(metadata) + ', "traceEvents": [\n'
    separator = ""
    for event in events:
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ",\n"
    yield "\n]}\n"


def _steps(rank: RankEvents) -> Iterator[dict[str, Any]]:
    yield _name("thread_name", rank.rank, _STEPS, "steps")
    for number, start, stop in steps_of(rank):
        yield _event(f"step {number}", rank.rank, _STEPS, start, stop)


def _compute(rank: RankEvents) -> Iterator[dict[str, Any]]:
    """The parts of the steps in which the rank did not wait."""
    yield _name("thread_name", rank.rank, _COMPUTE, "compute")
    waits = events_of(rank, Kind.WAIT, Kind.COLLECTIVE_WAIT)
    waiting = merged(waits["start_ns"], waits["stop_ns"])
    for _, start, stop in steps_of(rank):
        at = start
        for begin, end in [*((b, e) for b, e in waiting if e > start and b < stop), (stop, stop)]:
            if begin > at:
                yield _event("compute", rank.rank, _COMPUTE, at, begin)
            at = max(at, end)


def _waits(rank: RankEvents) -> Iterator[dict[str, Any]]:
    yield _name("thread_name", rank.rank, _WAITS, "waits (exposed communication)")
    for row in events_of(rank, Kind.WAIT, Kind.COLLECTIVE_WAIT):
        details = {"message": int(row["message"])} if row["kind"] == Kind.WAIT else {"by": "a collective of Megatron"}
        yield _event(rank.names[row["op"]], rank.rank, _WAITS, int(row["start_ns"]), int(row["stop_ns"]), details)


def _ops(rank: RankEvents) -> Iterator[dict[str, Any]]:
    """Each operation in the first row that is free when it begins."""
    free_at: list[int] = []
    for event in np.sort(events_of(rank, Kind.OP), order="start_ns"):
        start, stop = int(event["start_ns"]), int(event["stop_ns"])
        row = next((row for row, until in enumerate(free_at) if until <= start), len(free_at))
        if row == len(free_at):
            free_at.append(stop)
            yield _name("thread_name", rank.rank, _OPS + row, "ops" if row == 0 else f"ops, {row} more at once")
        free_at[row] = stop
        yield _event(rank.names[event["op"]], rank.rank, _OPS + row, start, stop)


def _messages(rank: RankEvents, sent_ns: dict[MessageKey, int]) -> Iterator[dict[str, Any]]:
    """A row for each peer and group with the messages received from it."""
    named: set[int] = set()
    for message in received_messages(rank, sent_ns):
        row = _MESSAGES + 100 * message.peer + message.channel % 100
        if row not in named:
            named.add(row)
            yield _name("thread_name", rank.rank, row, f"from rank {message.peer} ({message.group})")
        details = {"bytes": message.num_bytes, "message": message.message, "from": message.peer}
        if message.sent_ns is not None:
            details["since sent, us"] = round((message.stop_ns - message.sent_ns) / 1e3)
        yield _event(message.op, rank.rank, row, message.start_ns, message.stop_ns, details)


def _name(what: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": text}}


def _event(
    name: str, process: int, thread: int, start: int, stop: int, details: dict[str, Any] | None = None
) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": start, "dur": stop - start}
    return event if details is None else {**event, "args": details}


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _read(run_dir: Path) -> list[RankEvents]:
    files = event_files(run_dir)
    if not files:
        what = "no events in it" if run_dir.is_dir() else "no such folder"
        raise usage_error(
            "trace RUN_DIR", run_dir, f"{what}; run with overlap.trace=true, and give the folder of that run"
        )
    try:
        return [read_events(path) for path in files.values()]
    except EventFileError as error:
        raise usage_error("trace RUN_DIR", run_dir, str(error)) from error


def _parse_steps(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    found = re.fullmatch(r"(\d*)(:?)(\d*)", text)
    if found is None or text == ":" or (not found[2] and not found[1]):
        raise usage_error("trace --steps", text, "write FIRST:LAST, FIRST:, :LAST or one number")
    first = int(found[1]) if found[1] else None
    last = int(found[3]) if found[3] else None if found[2] else first
    return first, last
