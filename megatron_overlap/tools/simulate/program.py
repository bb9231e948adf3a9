"""What ranks are given to play, and what playing showed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_overlap.schedules import Plan


@dataclass(frozen=True, slots=True)
class Stream:
    """One plan with its times.

    Attributes:
        plan: the schedule of this rank.
        work_us: time of the GEMM of each of `plan.work`, undisturbed.
        add_us: time of the additions after it, which begin when what they add has landed.
        send_bytes: size of the message of each of `plan.messages`.
        latency_us: fixed cost of each message, beside those before it; None takes the link's.
        stretch: how many times as long each message takes as its bytes ask for; empty: as long.
    """

    plan: Plan
    work_us: tuple[float, ...]
    add_us: tuple[float, ...]
    send_bytes: tuple[float, ...]
    latency_us: float | None = None
    stretch: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does: streams that communicate side by side, and one order of all their work.

    Attributes:
        streams: plans whose messages are on the way at the same time.
        order: (stream, index of work) in the order in which this rank computes.
    """

    streams: tuple[Stream, ...]
    order: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on one rank: `compute` or `message`."""

    rank: int
    kind: Literal["compute", "message"]
    name: str
    start_us: float
    stop_us: float


@dataclass(frozen=True, slots=True)
class Played:
    """What playing showed.

    Attributes:
        time_us: until the last rank is done and all its messages have left.
        compute_us: of the rank with the least: time in which it computed.
        undisturbed_us: what that rank's computation takes without communication beside it.
        sent_bytes: by rank.
        received_bytes: by rank.
        spans: what every rank did, for a timeline.
        slack_us: by how much later every message could have come with nobody waiting for it.
    """

    time_us: float
    compute_us: float
    undisturbed_us: float
    sent_bytes: tuple[float, ...]
    received_bytes: tuple[float, ...]
    spans: tuple[Span, ...]
    slack_us: float

    @property
    def exposed_us(self) -> float:
        """Time in which a rank waits with nothing to compute."""
        return self.time_us - self.compute_us

    @property
    def lost_us(self) -> float:
        """Time more than the computation alone: exposed communication, and computation that it slows down."""
        return self.time_us - self.undisturbed_us


def in_order(*streams: Stream) -> Program:
    """The program that does the work of the streams one after the other."""
    order = [(n, k) for n, stream in enumerate(streams) for k in range(len(stream.work_us))]
    return Program(streams, tuple(order))
