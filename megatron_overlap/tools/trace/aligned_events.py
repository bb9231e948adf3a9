"""The events of all ranks of a run on the clock of rank 0, and the messages between the ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_overlap.tracing.events import Kind, RankEvents, steps_of

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
        op: the operation.
        peer: global rank of the sender.
        group: name of the group.
        channel: number of the group in the file of the receiver.
        message: number of the message within the operation.
        start_ns: earliest time at which the message can have been in transit: the sender has posted it and the receiver
            has the previous message of the same peer and group.
        stop_ns: time of receipt.
        num_bytes: size.
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
