"""Events of the messages, waits and steps of one rank, in memory and in a compact file, and the exposed time.

A file is a sequence of JSON lines: a header, one block for each step, and clock marks. The records of a block, of type
`EVENT`, follow its line. The file of a killed run is readable up to its last complete block.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

FORMAT = "megatron_overlap events 1"


class Kind(IntEnum):
    """Kind of an event. Every event has a start and a stop on the clock of this rank."""

    STEP = 0  # one training step; `op` is unused, `operation` is its number
    OP = 1  # from posting the first message of an operation until the caller may reuse all buffers
    WAIT = 2  # the computing thread or stream waited for a message
    SENT = 3  # a message was posted at `start`, when its buffer was ready
    RECEIVED = 4  # a message arrived at `stop`; its receive was posted at `start`
    COLLECTIVE_WAIT = 5  # the computing thread waited for a collective outside this package, such as one of Megatron


EVENT = np.dtype(
    [(name, "u2") for name in ("kind", "message", "op", "group")]
    + [("peer", "i2"), ("operation", "u4"), ("num_bytes", "u4"), ("start_ns", "i8"), ("stop_ns", "i8")]
)

Row = tuple[int, int, int, int, int, int, int, int, int]
Clock = Callable[[], int]

_MAX_U2, _MAX_U4 = 2**16 - 1, 2**32 - 1
_DIRECTIONS = ("forward", "backward", "dgrad", "wgrad")


class Trace:
    """Collects the events of this rank. Threads of transports add events concurrently: list operations are atomic.

    `clock` returns nanoseconds. `take` first runs the callbacks `settle`: they add events that a device has completed.
    """

    def __init__(self, clock: Clock = time.perf_counter_ns) -> None:
        self.clock = clock
        self.settle: list[Callable[[], None]] = []
        self._rows: list[Row] = []
        self._names: dict[str, int] = {}
        self._lock = threading.Lock()

    def name(self, text: str) -> int:
        """Return the number of an operation or group name."""
        with self._lock:
            return self._names.setdefault(text, len(self._names))

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
        self._rows.append((kind, message, op, group, peer, operation, num_bytes, start_ns, stop_ns))

    def take(self) -> tuple[list[str], list[Row]]:
        """Return all names so far and the events since the last call."""
        for settle in self.settle:
            settle()
        rows = self._rows[:]
        del self._rows[: len(rows)]
        return list(self._names), rows


class WorkEvents:
    """Records the events of one operation. Sender and receiver use the same operation and message numbers."""

    def __init__(self, trace: Trace, ranks: Sequence[int], channel: str, number: int, op: str) -> None:
        self.now, self._trace, self._ranks = trace.clock, trace, ranks
        group = trace.name(f"ranks {','.join(map(str, ranks))} {channel}".strip())
        self._ids = {"op": trace.name(op), "group": group, "operation": number & _MAX_U4}
        self._start = self.now()

    def waited(self, start_ns: int, message: int) -> None:
        """Record a wait of the computing thread from `start_ns` until now."""
        self.span(Kind.WAIT, start_ns, self.now(), message)

    def sent(self, message: int, peer: int, num_bytes: int) -> None:
        now = self.now()
        self.message(Kind.SENT, now, now, message, peer, num_bytes)

    def received(self, message: int, peer: int, num_bytes: int) -> None:
        self.message(Kind.RECEIVED, self._start, self.now(), message, peer, num_bytes)

    def finished(self) -> None:
        self.span(Kind.OP, self._start, self.now(), 0)

    def message(self, kind: Kind, start: int, stop: int, message: int, peer: int, num_bytes: int) -> None:
        """Record a message with known times; `peer` is a group rank."""
        self.span(kind, start, stop, message, peer=self._ranks[peer], num_bytes=min(num_bytes, _MAX_U4))

    def span(self, kind: Kind, start_ns: int, stop_ns: int, message: int, **more: int) -> None:
        """Record an event with known times, such as device times; `more` are further arguments of `Trace.add`."""
        self._trace.add(kind, start_ns, stop_ns, message=message & _MAX_U2, **more, **self._ids)


class Mark(NamedTuple):
    """Offset to the clock of rank 0: at `at_ns` of this rank, the clock of rank 0 shows `at_ns + offset_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


class EventFile:
    """Writes the events of one rank step by step; a killed run loses at most one step."""

    def __init__(self, path: Path, rank: int) -> None:
        self._file: IO[bytes] = path.open("wb", buffering=0)
        self._rank, self._num_names = rank, 0
        self._line({"format": FORMAT, "rank": rank})

    def write(self, trace: Trace) -> RankEvents:
        """Write and return the events since the last call."""
        names, rows = trace.take()
        block = np.array(rows, dtype=EVENT)
        new, self._num_names = names[self._num_names :], len(names)
        self._line({"names": new, "events": len(block)}, block.tobytes())
        return RankEvents(self._rank, block, names)

    def mark(self, mark: Mark) -> None:
        self._line({"clock": mark})

    def close(self) -> None:
        self._file.close()

    def _line(self, content: dict[str, Any], more: bytes = b"") -> None:
        self._file.write(json.dumps(content).encode() + b"\n" + more)


@dataclass
class RankEvents:
    """The events of one rank, with times on its own clock; `whole` is whether the file ends with a complete block."""

    rank: int
    events: npt.NDArray[np.void]
    names: list[str] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    whole: bool = True


class EventFileError(RuntimeError):
    """A file of events cannot be read. The message names the file."""


def read_events(path: Path) -> RankEvents:
    """Read the file of one rank. Raises EventFileError if it does not exist or has another format."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EventFileError(f"{path}: {error.strerror}") from error
    file = io.BytesIO(data)
    head = _object(file.readline())
    if head.get("format") != FORMAT:
        raise EventFileError(f"{path}: not a file of events of this release ({FORMAT}): record the run again")
    found = RankEvents(int(head["rank"]), np.empty(0, EVENT))
    blocks = [found.events]
    while line := file.readline():
        content = _object(line)
        size = EVENT.itemsize * content.get("events", 0)
        block = file.read(size)
        found.whole = bool(content) and len(block) == size
        if not found.whole:
            break
        found.names += content.get("names", [])
        if "clock" in content:
            found.marks.append(Mark(*content["clock"]))
        blocks.append(np.frombuffer(block, EVENT))
    found.events = np.concatenate(blocks)
    named = found.events[found.events["kind"] != Kind.STEP]
    if len(named) and max(named["op"].max(), named["group"].max()) >= len(found.names):
        raise EventFileError(f"{path}: an event refers to an unknown name: the file is damaged")
    return found


def _object(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a complete line; empty for any other line."""
    try:
        content = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        content = None
    return content if isinstance(content, dict) else {}


def steps_of(found: RankEvents) -> list[tuple[int, int, int]]:
    """Return number, start and stop of every step, in order."""
    rows = found.events[found.events["kind"] == Kind.STEP]
    return [(int(row["operation"]), int(row["start_ns"]), int(row["stop_ns"])) for row in rows]


def merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of the intervals as disjoint intervals, in order."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif stop > start:
            joined.append((start, stop))
    return joined


@dataclass(frozen=True)
class Exposed:
    """Waits of one rank in one step: time with at least one, and time by operation and direction, longest first."""

    total_ms: float
    by_op: Mapping[tuple[str, str], float]


def exposed_in(found: RankEvents, start_ns: int, stop_ns: int) -> Exposed:
    """Return the waits between two times of the rank's clock; a longer wait counts with the part inside."""
    events = found.events
    waits = events[(events["kind"] == Kind.WAIT) | (events["kind"] == Kind.COLLECTIVE_WAIT)]
    starts = np.maximum(waits["start_ns"], start_ns)
    stops = np.minimum(waits["stop_ns"], stop_ns)
    inside = stops > starts
    starts, stops, ops = starts[inside], stops[inside], waits["op"][inside]
    by_op = {direction_of(found.names[op]): int((stops - starts)[ops == op].sum()) / 1e6 for op in np.unique(ops)}
    total = sum(stop - start for start, stop in merged(zip(starts.tolist(), stops.tolist(), strict=True)))
    return Exposed(total / 1e6, dict(sorted(by_op.items(), key=lambda item: -item[1])))


def direction_of(op: str) -> tuple[str, str]:
    """Return operation and direction from an operation name; the direction of gradients and parameters is `-`."""
    name, _, last = op.rpartition(" ")
    if last in _DIRECTIONS:
        return name, last
    return op, "-" if name else "forward"
