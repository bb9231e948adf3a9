"""`megatron-overlap trace`: a Chrome trace of all ranks of a run, and a table of the exposed communication.

The file opens in Perfetto (ui.perfetto.dev) and in chrome://tracing. Each rank is a process, each row a thread.
"""

import gzip
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.table import Column, Table
from typer import Argument, Option

from megatron_overlap.config.errors import usage_error, writing
from megatron_overlap.tracing import EventFileError, Kind, Mark, RankEvents, exposed_in, merged, read_events, steps_of

# Identifies a message on all ranks: group, number of the operation, number of the message, sender, receiver.
MessageKey = tuple[str, int, int, int, int]


def clock_error_ns(rank: RankEvents) -> int | None:
    """Largest error of a clock mark. None: there are no marks, and the clock is assumed equal to that of rank 0."""
    return max((mark.error_ns for mark in rank.marks), default=0 if rank.rank == 0 else None)


def _on_clock_of_rank_0(times: npt.NDArray[np.int64], marks: Sequence[Mark]) -> npt.NDArray[np.int64]:
    """Times in nanoseconds. Clocks drift, so the offset is interpolated linearly between two marks."""
    if not marks:
        return times
    at_ns, offset_ns, _ = zip(*sorted(marks), strict=True)
    # Subtract the first mark: after months of uptime a clock value has more digits than a float.
    offsets = np.interp((times - at_ns[0]).astype(float), [at - at_ns[0] for at in at_ns], offset_ns)
    shifted: npt.NDArray[np.int64] = times + np.rint(offsets).astype(np.int64)
    return shifted


class Span(NamedTuple):
    """One event of a rank, in nanoseconds, with its row in the trace."""

    thread: int  # number of the row: of operations from 10, of messages from 100
    row: str
    name: str
    start_ns: int
    stop_ns: int
    details: dict[str, Any]


def align_steps(ranks: Sequence[RankEvents], first: int | None, last: int | None) -> list[RankEvents]:
    """The events of steps `first` to `last`, None: open end, on the clock of rank 0.

    Raises ValueError if no rank has one.
    """
    aligned = []
    for rank in ranks:
        steps = [step for step in steps_of(rank) if (first or 0) <= step[0] <= (last or step[0])]
        if not steps:
            continue
        begin, end = min(start for _, start, _ in steps), max(stop for _, _, stop in steps)
        events = rank.events[(rank.events["stop_ns"] > begin) & (rank.events["start_ns"] < end)].copy()
        for name in ("start_ns", "stop_ns"):
            events[name] = _on_clock_of_rank_0(events[name], rank.marks)
        aligned.append(replace(rank, events=events))
    if not aligned:
        numbers = sorted({number for rank in ranks for number, _, _ in steps_of(rank)})
        raise ValueError(f"the run has steps {numbers[0]} to {numbers[-1]}" if numbers else "the run has no whole step")
    return aligned


def sent_times(ranks: Sequence[RankEvents]) -> dict[MessageKey, int]:
    """The time at which each message of all ranks was posted, in nanoseconds."""
    fields = ["group", "operation", "message", "peer", "start_ns"]
    return {
        (rank.names[group], operation, message, rank.rank, peer): start_ns
        for rank in ranks
        for group, operation, message, peer, start_ns in _events_of(rank, Kind.SENT)[fields].tolist()
    }


def messages(rank: RankEvents, sent_ns: dict[MessageKey, int]) -> Iterator[Span]:
    """The messages that a rank received, in order of receipt, in a row for each peer and group.

    A message starts at the earliest time at which it can have been in transit: the sender has posted it and the
    receiver has the previous message of the same peer and group.
    """
    previous: dict[tuple[int, int], int] = {}
    fields = ["op", "peer", "group", "operation", "message", "start_ns", "stop_ns", "num_bytes"]
    events = np.sort(_events_of(rank, Kind.RECEIVED), order="stop_ns")[fields].tolist()
    for op, peer, channel, operation, message, posted, stop, size in events:
        group = rank.names[channel]
        sent = sent_ns.get((group, operation, message, peer, rank.rank))
        start = max(posted if sent is None else sent, previous.get((peer, channel), 0))
        previous[peer, channel] = stop
        details = {"bytes": size, "message": message, "from": peer}
        if sent is not None:
            details["since sent, us"] = round((stop - sent) / 1e3)
        thread, row = 100 + 100 * peer + channel % 100, f"from rank {peer} ({group})"
        # The error of the clocks must not place the receipt before the start.
        yield Span(thread, row, rank.names[op], min(start, stop), stop, details)


def waits(rank: RankEvents) -> Iterator[Span]:
    """The waits of a rank, in the order of the file."""
    fields = ["kind", "op", "message", "start_ns", "stop_ns"]
    for kind, op, message, start, stop in _events_of(rank, Kind.WAIT, Kind.COLLECTIVE_WAIT)[fields].tolist():
        details = {"message": message} if kind == Kind.WAIT else {"by": "a collective of Megatron"}
        yield Span(2, "waits (exposed communication)", rank.names[op], start, stop, details)


def _events_of(rank: RankEvents, *kinds: Kind) -> npt.NDArray[np.void]:
    """The events of some kinds, in the order of the file."""
    return rank.events[np.isin(rank.events["kind"], kinds)]


def trace(
    run_dir: Annotated[Path, Argument(help="Folder of a run that recorded events (overlap.trace: true).")],
    output: Annotated[Path | None, Option(help=".json or .json.gz file. Default: trace.json.gz in RUN_DIR.")] = None,
    steps: Annotated[str | None, Option(help="FIRST:LAST, FIRST:, :LAST or one number. Default: all steps.")] = None,
) -> int:
    """Write a Perfetto trace of all ranks on one clock and print the exposed communication."""
    first, last = _parse_steps(steps)
    files = sorted(run_dir.glob("events-rank*[0-9].bin"))
    if not files:
        what = "no events in it" if run_dir.is_dir() else "no such folder"
        remedy = "run with overlap.trace=true, and give the folder of that run"
        raise usage_error("trace RUN_DIR", run_dir, f"{what}; {remedy}")
    try:
        ranks = sorted(map(read_events, files), key=lambda each: each.rank)
    except EventFileError as error:
        raise usage_error("trace RUN_DIR", run_dir, str(error)) from error
    console = Console()
    try:
        aligned = align_steps(ranks, first, last)
    except ValueError as error:
        raise usage_error("trace --steps", steps, str(error)) from error
    path = output or run_dir / "trace.json.gz"
    metadata = {"run": str(run_dir), "clock": "of rank 0; other ranks shifted by measured offsets"}
    with writing("trace --output", path), gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        # A long trace is never in memory as a whole.
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(metadata) + ', "traceEvents": [\n')
        for number, event in enumerate(trace_events(aligned)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
    console.print(exposed_table(aligned))
    for line in notes(ranks):
        console.print(f"- {line}", highlight=False, soft_wrap=True)
    console.print(f"{path}: open it in https://ui.perfetto.dev", highlight=False, soft_wrap=True)
    return 0


def exposed_table(ranks: Sequence[RankEvents]) -> Table:
    """Exposed time by op and direction: the mean over steps and ranks, and the largest mean of one rank."""
    whole = ("all", "")
    by_rank: dict[int, list[Mapping[tuple[str, str], float]]] = {}
    for rank in ranks:
        found = [exposed_in(rank, start, stop) for _, start, stop in steps_of(rank)]
        by_rank[rank.rank] = [{**step.by_op, whole: step.total_ms} for step in found]
    figures = [Column(heading, justify="right") for heading in ("mean", "largest", "on rank")]
    title = f"exposed communication, ms per step ({sum(map(len, by_rank.values()))} rank steps)"
    table = Table("op", "direction", *figures, box=box.SIMPLE_HEAD, title=title)
    rows = []
    for key in {key: None for steps in by_rank.values() for step in steps for key in step}:
        means = {rank: fmean(step.get(key, 0.0) for step in steps) for rank, steps in by_rank.items()}
        largest = max(means, key=means.__getitem__)
        rows.append((key, fmean(means.values()), means[largest], largest))
    for key, mean, most, largest in sorted(rows, key=lambda row: (row[0] == whole, -row[1])):
        table.add_row(*key, f"{mean:.2f}", f"{most:.2f}", str(largest))
    return table


def notes(ranks: Sequence[RankEvents]) -> list[str]:
    """Errors of the clocks, incomplete files and missing ranks, one line each."""
    errors = {rank.rank: clock_error_ns(rank) for rank in ranks}
    if unknown := [str(rank) for rank, error in errors.items() if error is None]:
        lines = [f"clocks not compared with rank 0, assumed equal: ranks {', '.join(unknown)}"]
    else:
        lines = [f"clock error of all ranks: at most {max(filter(None, errors.values()), default=0) / 1e3:.0f} us"]
    cut_off = "its file ends in the middle of a step, where the run was cut off"
    lines += [f"rank {rank.rank}: {cut_off}" for rank in ranks if not rank.whole]
    if missing := sorted(set(range(max(errors))) - set(errors)):
        lines.append(f"no events of ranks {', '.join(map(str, missing))}")
    return lines


def trace_events(ranks: Sequence[RankEvents]) -> Iterator[dict[str, Any]]:
    """The events of the Chrome trace of ranks on one clock. Times are in microseconds from the first event."""
    zero = min(int(rank.events["start_ns"].min()) for rank in ranks)
    sent = sent_times(ranks)
    for rank in ranks:
        common = {"ph": "M", "pid": rank.rank}
        yield {**common, "name": "process_name", "tid": 0, "args": {"name": f"rank {rank.rank}"}}
        yield {**common, "name": "process_sort_index", "args": {"sort_index": rank.rank}}
        rows: set[int] = set()
        steps = (Span(0, "steps", f"step {number}", start, stop, {}) for number, start, stop in steps_of(rank))
        spans = itertools.chain(steps, _compute(rank), waits(rank), _ops(rank), messages(rank, sent))
        for thread, row, name, start, stop, details in spans:
            if thread not in rows:
                rows.add(thread)
                yield {**common, "name": "thread_name", "tid": thread, "args": {"name": row}}
            times = {"ts": round((start - zero) / 1e3, 3), "dur": round(max(stop - start, 0) / 1e3, 3)}
            event = {"ph": "X", "name": name, "pid": rank.rank, "tid": thread, **times}
            yield {**event, "args": details} if details else event


def _compute(rank: RankEvents) -> Iterator[Span]:
    """The parts of the steps in which the rank did not wait."""
    waiting = merged((wait.start_ns, wait.stop_ns) for wait in waits(rank))
    for _, start, stop in steps_of(rank):
        at = start
        for begin, end in [*((b, e) for b, e in waiting if e > start and b < stop), (stop, stop)]:
            if begin > at:
                yield Span(1, "compute", "compute", at, begin, {})
            at = max(at, end)


def _ops(rank: RankEvents) -> Iterator[Span]:
    """Each operation in the first row that is free when it begins."""
    free_at: list[int] = []
    for op, start, stop in np.sort(_events_of(rank, Kind.OP), order="start_ns")[["op", "start_ns", "stop_ns"]].tolist():
        row = next((row for row, until in enumerate(free_at) if until <= start), len(free_at))
        free_at[row : row + 1] = [stop]
        name = "ops" if row == 0 else f"ops, {row} more at once"
        yield Span(10 + row, name, rank.names[op], start, stop, {})


def _parse_steps(text: str | None) -> tuple[int | None, int | None]:
    if text is not None and not re.fullmatch(r"\d+(:\d*)?|:\d+", text):
        raise usage_error("trace --steps", text, "write FIRST:LAST, FIRST:, :LAST or one number")
    first, colon, last = (text or ":").partition(":")
    last = last if colon else first
    if first and last and int(first) > int(last):
        raise usage_error("trace --steps", text, "the first step is greater than the last one")
    return int(first) if first else None, int(last) if last else None
