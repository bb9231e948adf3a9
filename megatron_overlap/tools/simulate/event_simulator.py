"""Event simulator of the schedules of a group: computation, messages and shared links on one clock.

The plans are those of `megatron_overlap.schedules`, which the operations run. A rank sends its messages one after the
other, in the order in which they become ready. Collectives of several streams run concurrently. Messages in transit
share the ports by max-min fairness; each start and end of a message changes the rates. Each rank has one queue of
computation, which runs slower while the rank communicates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_overlap.autotune.cost_model import CostModel, Link
from megatron_overlap.schedules import Plan

_DONE = 1e-9


@dataclass(frozen=True, slots=True)
class Stream:
    """One plan with the times and sizes of its steps.

    Attributes:
        plan: schedule of this rank.
        work_us: GEMM time of each of `plan.work` without concurrent communication.
        add_us: time of the additions of each of `plan.work`, which start when their messages have arrived.
        send_bytes: size of each of `plan.messages`.
        latency_us: fixed cost of each message; None: that of the link.
        stretch: factor on the transfer time of each message; empty: 1.
    """

    plan: Plan
    work_us: tuple[float, ...]
    add_us: tuple[float, ...]
    send_bytes: tuple[float, ...]
    latency_us: float | None = None
    stretch: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """The program of one rank: streams that communicate concurrently, and one order of all their work.

    Attributes:
        streams: plans whose messages run concurrently.
        order: (stream, index of work) in computation order.
    """

    streams: tuple[Stream, ...]
    order: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Span:
    """One entry of the timeline of a rank: a computation or a message."""

    rank: int
    kind: Literal["compute", "message"]
    name: str
    start_us: float
    stop_us: float


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Result of a simulation.

    Attributes:
        time_us: end of the last computation and message.
        compute_us: smallest computation time of a rank, slowed down by communication.
        undisturbed_us: smallest computation time of a rank without communication.
        sent_bytes: bytes sent by each rank.
        received_bytes: bytes received by each rank.
        spans: timeline of all ranks.
        slack_us: smallest time between the arrival of a message and its use.
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
        """Time in which a rank waits and does not compute."""
        return self.time_us - self.compute_us

    @property
    def lost_us(self) -> float:
        """Time beyond undisturbed computation: exposed communication and slowdown of the computation."""
        return self.time_us - self.undisturbed_us


def in_order(*streams: Stream) -> Program:
    """The program that computes the streams one after the other."""
    order = [(n, k) for n, stream in enumerate(streams) for k in range(len(stream.work_us))]
    return Program(streams, tuple(order))


@dataclass(slots=True)
class _Message:
    """A message in transit: `index` counts in the plan, `left` is bytes, times are in us."""

    sender: int
    stream: int
    index: int
    receiver: int
    left: float
    ready: float
    starts: float
    posted: float
    rate: float = 0.0
    arrived: bool = False
    noticed: float = 0.0


@dataclass(slots=True)
class _Rank:
    """State of one rank."""

    program: Program
    next_work: int = 0
    computing: bool = False
    adding: bool = False  # the GEMM of the next work has ended, its additions have not
    left: float = 0.0
    started: float = 0.0
    compute_us: float = 0.0
    sent: list[int] = field(default_factory=list)  # messages that have left, by stream
    posted: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)  # completed work, by stream
    arrived: list[dict[int, float]] = field(default_factory=list)  # arrival time by message, by stream
    sent_bytes: float = 0.0
    received_bytes: float = 0.0


class _Simulation:
    def __init__(
        self,
        programs: Sequence[Program],
        model: CostModel,
        link: Link,
        kind: Literal["copy", "collective"],
        one_rank: bool,
    ) -> None:
        self.ranks = [_Rank(program) for program in programs]
        for rank in self.ranks:
            count = len(rank.program.streams)
            rank.sent, rank.posted, rank.done = [0] * count, [0] * count, [0] * count
            rank.arrived = [{} for _ in range(count)]
        self.model, self.link, self.kind, self.one_rank = model, link, kind, one_rank
        self.port_rate = link.copy_rate if kind == "copy" else link.collective_rate
        # Half of the delay is before a message leaves, half before the receiver processes it.
        self.busy_us = model.busy_us(kind) / 2
        self.now = 0.0
        self.slack_us = math.inf
        self.messages: list[_Message] = []
        self.spans: list[Span] = []

    def post(self) -> bool:
        """Post the messages that may leave, in plan order. A collective waits for the previous one of its stream."""
        progress = False
        for index, rank in enumerate(self.ranks):
            for number, stream in enumerate(rank.program.streams):
                planned = stream.plan.messages
                at = rank.posted[number]
                if at == len(planned) or (self.kind == "collective" and at > rank.sent[number]):
                    continue
                message = planned[at]
                if message.after_work > rank.done[number]:
                    continue
                if message.after_message is not None and message.after_message not in rank.arrived[number]:
                    continue
                latency = self.link.latency_us if stream.latency_us is None else stream.latency_us
                receiver = index if self.one_rank else message.to
                size = stream.send_bytes[at] * (stream.stretch[at] if stream.stretch else 1.0)
                ready = self.now + (latency if size > 0 else 0.0)
                start = ready + (self.busy_us if size > 0 else 0.0)
                self.messages.append(_Message(index, number, at, receiver, size, ready, start, self.now))
                rank.posted[number] += 1
                progress = True
        return progress

    def compute(self) -> bool:
        """Start the next work of every idle rank whose messages have arrived."""
        progress = False
        for rank in self.ranks:
            if rank.computing or rank.next_work == len(rank.program.order):
                continue
            number, index = rank.program.order[rank.next_work]
            stream = rank.program.streams[number]
            work = stream.plan.work[index]
            needs, arrived = work.adds if rank.adding else work.needs, rank.arrived[number]
            if any(k not in arrived for k in needs):
                continue
            if needs:
                self.slack_us = min(self.slack_us, self.now - max(arrived[k] for k in needs))
            time = stream.add_us[index] if rank.adding else stream.work_us[index]
            rank.computing, rank.left, rank.started = True, time, self.now
            progress = True
        return progress

    def end_core_waits(self) -> None:
        """End the wait for a core of communication threads whose rank does not compute."""
        for message in self.messages:
            if not self.ranks[message.sender].computing:
                message.starts = min(message.starts, max(self.now, message.ready))
            if not self.ranks[message.receiver].computing:
                message.noticed = min(message.noticed, self.now)

    def _sendable(self) -> list[_Message]:
        """The messages that may use the ports: the first one of each rank, or all collectives."""
        if self.kind == "collective":
            return self.messages
        first: dict[int, _Message] = {}
        for message in self.messages:
            if not message.arrived:
                first.setdefault(message.sender, message)
        return list(first.values())

    def set_rates(self) -> None:
        """Max-min fairness over the ports: the most loaded port fixes the rate of its messages, then the next one."""
        active = [
            message
            for message in self._sendable()
            if message.starts <= self.now + _DONE and message.left > 0 and not message.arrived
        ]
        ports: dict[tuple[str, int], list[_Message]] = {}
        for message in active:
            message.rate = 0.0
            ports.setdefault(("out", message.sender), []).append(message)
            ports.setdefault(("in", message.receiver), []).append(message)
        capacity = dict.fromkeys(ports, self.port_rate)
        open_messages = {id(message) for message in active}
        while open_messages:
            counts = {port: sum(id(m) in open_messages for m in ports[port]) for port in ports}
            tightest = min((port for port in ports if counts[port]), key=lambda port: capacity[port] / counts[port])
            rate = capacity[tightest] / counts[tightest]
            for message in [m for m in ports[tightest] if id(m) in open_messages]:
                message.rate = rate
                open_messages.discard(id(message))
                capacity["out", message.sender] -= rate
                capacity["in", message.receiver] -= rate

    def speed(self, index: int) -> float:
        """Present speed of the computation of a rank, 1 without communication."""
        moving = sum(
            message.rate * ((message.sender == index) + (message.receiver == index)) for message in self.messages
        )
        return self.model.compute_rate(self.kind, moving) if moving > 0 else 1.0

    def advance(self) -> None:
        """Advance the clock to the next event."""
        self.set_rates()
        speeds = [self.speed(index) if rank.computing else 1.0 for index, rank in enumerate(self.ranks)]
        steps = [rank.left / speed for rank, speed in zip(self.ranks, speeds, strict=True) if rank.computing]
        for message in self.messages:
            if message.arrived:
                steps.append(max(0.0, message.noticed - self.now))
            elif message.starts > self.now + _DONE:
                steps.append(message.starts - self.now)
            elif message.rate > 0 or message.left <= 0:
                steps.append(max(0.0, message.left) / max(message.rate, _DONE))
        step = min(steps)
        self.now += step
        for message in self.messages:
            if message.rate > 0:
                message.left -= step * message.rate
        for index, (rank, speed) in enumerate(zip(self.ranks, speeds, strict=True)):
            if rank.computing:
                rank.left -= step * speed
                if rank.left <= _DONE * max(1.0, self.now):
                    self._complete_work(index, rank)
        self._complete_messages()

    def _complete_work(self, index: int, rank: _Rank) -> None:
        number, work = rank.program.order[rank.next_work]
        rank.computing = False
        rank.compute_us += self.now - rank.started
        if self.now > rank.started:
            name = f"{'add' if rank.adding else 'work'} {number}.{work}"
            self.spans.append(Span(index, "compute", name, rank.started, self.now))
        rank.adding = not rank.adding and bool(rank.program.streams[number].plan.work[work].adds)
        if not rank.adding:
            rank.next_work += 1
            rank.done[number] = work + 1

    def _complete_messages(self) -> None:
        remaining = []
        for message in self.messages:
            sender, receiver = self.ranks[message.sender], self.ranks[message.receiver]
            has_arrived = message.starts <= self.now + _DONE and message.left <= _DONE * max(1.0, self.port_rate)
            if has_arrived and not message.arrived:
                size = sender.program.streams[message.stream].send_bytes[message.index]
                sender.sent[message.stream] = message.index + 1
                sender.sent_bytes += size
                receiver.received_bytes += size
                message.arrived, message.rate = True, 0.0
                message.noticed = self.now + (self.busy_us if size > 0 and receiver.computing else 0.0)
            if not message.arrived or message.noticed > self.now + _DONE:
                remaining.append(message)
                continue
            receiver.arrived[message.stream][message.index] = self.now
            name = f"message {message.stream}.{message.index}"
            self.spans.append(Span(message.sender, "message", name, message.posted, self.now))
        self.messages = remaining


def run_programs(
    programs: Sequence[Program],
    model: CostModel,
    link: Link,
    *,
    kind: Literal["copy", "collective"] = "copy",
    one_rank: bool = False,
) -> SimulatedRun:
    """Simulate the programs of a group to their end.

    Args:
        programs: programs of rank 0, 1, ...; with `one_rank` that of rank 0.
        model: cost model; gives the slowdown of computation by communication.
        link: link between the ranks.
        kind: copies and point-to-point messages, or kernels of a collective.
        one_rank: simulate rank 0 for all ranks: its messages arrive when its own messages leave.

    Raises:
        ValueError: deadlock; `check` in `tests/schedules/verify.py` finds its place.
    """
    simulation = _Simulation(programs, model, link, kind, one_rank)
    while True:
        while simulation.post() | simulation.compute():
            pass
        simulation.end_core_waits()
        if not simulation.messages and not any(rank.computing for rank in simulation.ranks):
            break
        simulation.advance()
    for index, rank in enumerate(simulation.ranks):
        waiting = any(rank.posted[n] < len(s.plan.messages) for n, s in enumerate(rank.program.streams))
        if waiting or rank.next_work < len(rank.program.order):
            raise ValueError(f"programs: rank {index} is in a deadlock at work {rank.next_work}; verify its plan")
    compute = min(rank.compute_us for rank in simulation.ranks)
    undisturbed = min(
        math.fsum(rank.program.streams[n].work_us[k] + rank.program.streams[n].add_us[k] for n, k in rank.program.order)
        for rank in simulation.ranks
    )
    return SimulatedRun(
        simulation.now,
        compute,
        undisturbed,
        tuple(rank.sent_bytes for rank in simulation.ranks),
        tuple(rank.received_bytes for rank in simulation.ranks),
        tuple(simulation.spans),
        0.0 if math.isinf(simulation.slack_us) else simulation.slack_us,
    )
