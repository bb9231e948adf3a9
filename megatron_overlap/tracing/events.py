"""When a rank computed, waited and sent: events in memory, and the compact file that they are written to.

A file is lines of JSON, some of which are followed by records of `EVENT`: a head, a block for each step, marks of the
clock. What a run that was killed leaves behind can be read up to its last whole block.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

FORMAT = "megatron_overlap events 1"


class Kind(IntEnum):
    """What an event is. Every one has a start and a stop on this rank's clock."""

    STEP = 0
    """One iteration; `op` is not used, `operation` is its number."""
    OP = 1
    """From the first message of an op being posted until its buffers are the caller's again."""
    WAIT = 2
    """The computing thread, or stream, stood still for a message of an op."""
    SENT = 3
    """A message was handed to the network: the buffer was ready at `start`."""
    LANDED = 4
    """A message arrived: it was expected from `start` on, and was there at `stop`."""
    OTHER_WAIT = 5
    """The computing thread stood still for communication that is not ours, Megatron's own collectives for example."""


EVENT = np.dtype(
    [
        ("kind", "u2"),
        ("message", "u2"),
        ("op", "u2"),
        ("group", "u2"),
        ("peer", "i2"),
        ("operation", "u4"),
        ("num_bytes", "u4"),
        ("start_ns", "i8"),
        ("stop_ns", "i8"),
    ]
)

Row = tuple[int, int, int, int, int, int, int, int, int]
Clock = Callable[[], int]

_MOST = {name: int(np.iinfo(EVENT[name]).max) for name in ("message", "op", "group", "peer", "operation", "num_bytes")}


class Trace:
    """Events of this rank, until they are taken. Threads of transports add to it: a list does both atomically.

    Attributes:
        clock: nanoseconds; what all events are on.
        settle: called before events are taken, by whoever keeps some until a device is done.
    """

    def __init__(self, clock: Clock = time.perf_counter_ns) -> None:
        self.clock = clock
        self.settle: list[Callable[[], None]] = []
        self._rows: list[Row] = []
        self._names: dict[str, int] = {}
        self._lock = threading.Lock()

    def name(self, text: str) -> int:
        """A number for an op or a group, the same for the same text."""
        number = self._names.get(text)
        if number is None:
            with self._lock:
                number = self._names.setdefault(text, len(self._names))
        return number

    def add(
        self,
        kind: Kind,
        start_ns: int,
        stop_ns: int,
        *,
        op: int = 0,
        group: int = 0,
        operation: int = 0,
        message: int = 0,
        peer: int = -1,
        num_bytes: int = 0,
    ) -> None:
        """Adds one event."""
        self._rows.append((kind, message, op, group, peer, operation, num_bytes, start_ns, stop_ns))

    def take(self) -> tuple[list[str], list[Row]]:
        """All names so far, and the events since the last call."""
        for settle in self.settle:
            settle()
        count = len(self._rows)
        rows = self._rows[:count]
        del self._rows[:count]
        return list(self._names), rows

    def operation(self, ranks: Sequence[int], channel: str, number: int, op: str) -> WorkEvents:
        """Where one operation's events go."""
        group = self.name(f"ranks {','.join(map(str, ranks))} {channel}".strip())
        return WorkEvents(self, self.name(op), group, number & _MOST["operation"], ranks)


class WorkEvents:
    """What one operation adds to a trace. `operation` and `message` name a message alike at both of its ends."""

    def __init__(self, trace: Trace, op: int, group: int, operation: int, ranks: Sequence[int]) -> None:
        self.now = trace.clock
        self._trace = trace
        self._ids = {"op": op, "group": group, "operation": operation}
        self._ranks = ranks
        self._start = self.now()

    def waited(self, start_ns: int, message: int) -> None:
        """The computing thread stood still from `start_ns` until now."""
        self._trace.add(Kind.WAIT, start_ns, self.now(), message=message & 65535, **self._ids)

    def sent(self, message: int, peer: int, num_bytes: int) -> None:
        """A message of this operation is posted now."""
        now = self.now()
        self.message(Kind.SENT, now, now, message, peer, num_bytes)

    def received(self, message: int, peer: int, num_bytes: int) -> None:
        """A message of this operation has arrived now."""
        self.message(Kind.LANDED, self._start, self.now(), message, peer, num_bytes)

    def span(self, kind: Kind, start_ns: int, stop_ns: int, message: int) -> None:
        """An event whose times are known, as of a device."""
        self._trace.add(kind, start_ns, stop_ns, message=message & 65535, **self._ids)

    def finished(self) -> None:
        """All has left and landed."""
        self._trace.add(Kind.OP, self._start, self.now(), **self._ids)

    def message(self, kind: Kind, start: int, stop: int, message: int, peer: int, num_bytes: int) -> None:
        """A message whose times are known; `peer` counts in the group."""
        self._trace.add(
            kind,
            start,
            stop,
            message=message & 65535,
            peer=self._ranks[peer],
            num_bytes=min(num_bytes, _MOST["num_bytes"]),
            **self._ids,
        )


class Mark(NamedTuple):
    """Where another clock stands: at `at_ns` of this rank, rank 0's clock shows `at_ns + offset_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


class EventFile:
    """Writes one rank's events; a step at a time, so that a run that ends early leaves what it did.

    Args:
        path: replaced if it is there.
        rank: global rank.
        head: what else a reader wants to know.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, rank: int, head: dict[str, Any] | None = None) -> None:
        self._file: IO[bytes] = path.open("wb", buffering=0)
        self._rank = rank
        self._num_names = 0
        self._line({"format": FORMAT, "rank": rank, **(head or {})})

    def write(self, trace: Trace) -> RankEvents:
        """Writes what was traced since the last call, and returns it."""
        names, rows = trace.take()
        block = np.array(rows, dtype=EVENT)
        new, self._num_names = names[self._num_names :], len(names)
        self._line({"names": new, "events": len(block)}, block.tobytes())
        return RankEvents(self._rank, block, names)

    def mark(self, mark: Mark) -> None:
        """Writes where the other clock stands."""
        self._line({"clock": mark})

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def _line(self, content: dict[str, Any], more: bytes = b"") -> None:
        self._file.write(json.dumps(content).encode() + b"\n" + more)


@dataclass
class RankEvents:
    """What one rank's file holds.

    Attributes:
        rank: global rank.
        events: in the order in which they were added; times are of this rank's clock.
        names: of ops and groups, by number.
        marks: where rank 0's clock stood.
        whole: false where the file ends in the middle of a block.
    """

    rank: int
    events: npt.NDArray[np.void]
    names: list[str] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    whole: bool = True


class EventFileError(RuntimeError):
    """A file of events cannot be read; the text names it."""


def read_events(path: Path) -> RankEvents:
    """Read one rank's file.

    Raises:
        EventFileError: it is not there, or not such a file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EventFileError(f"{path}: {error.strerror}") from error
    lines = _lines(data)
    head: dict[str, Any] = next(lines, ({}, b""))[0]
    if head.get("format") != FORMAT:
        raise EventFileError(f"{path}: not a file of events of this release ({FORMAT}): record the run again")
    found = RankEvents(int(head["rank"]), np.empty(0, EVENT))
    blocks = []
    for content, block in lines:
        if not content:
            found.whole = False
            break
        found.names += content.get("names", [])
        if "clock" in content:
            found.marks.append(Mark(*content["clock"]))
        blocks.append(np.frombuffer(block, EVENT))
    found.events = np.concatenate(blocks) if blocks else found.events
    named = found.events[found.events["kind"] != Kind.STEP]
    if len(named) and max(named["op"].max(), named["group"].max()) >= len(found.names):
        raise EventFileError(f"{path}: has an event whose op or group has no name: the file is damaged")
    return found


def _lines(data: bytes) -> Any:
    """Each line's object with the records that follow it; an empty object where the file is cut."""
    at = 0
    while at < len(data):
        end = data.find(b"\n", at)
        try:
            content = json.loads(data[at:end]) if end >= 0 else {}
        except ValueError:
            content = {}
        size = EVENT.itemsize * content.get("events", 0) if isinstance(content, dict) else 0
        if not isinstance(content, dict) or not content or end + 1 + size > len(data):
            yield {}, b""
            return
        yield content, data[end + 1 : end + 1 + size]
        at = end + 1 + size


def steps_of(found: RankEvents) -> list[tuple[int, int, int]]:
    """Number, start and stop of every step, in order."""
    rows = found.events[found.events["kind"] == Kind.STEP]
    return [(int(row["operation"]), int(row["start_ns"]), int(row["stop_ns"])) for row in rows]


def merged(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Intervals joined where they touch or overlap, in order."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(zip(starts.tolist(), stops.tolist(), strict=True)):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif stop > start:
            joined.append((start, stop))
    return joined
