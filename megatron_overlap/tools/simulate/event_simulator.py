"""Event simulator of a schedule: computation and messages of one rank on one clock.

All ranks of a group run the same schedule, so one rank stands for all. A rank sends its messages one after the other,
as they become ready; those between nodes have a queue of their own. Its computation has one queue and runs slower while
the rank communicates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_overlap.autotune.cost_model import CostModel, Link, Mover

_DONE = 1e-9


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of a stream, or a call that carries several."""

    num_bytes: float
    after_work: int = 0  # number of works of the stream that precede it
    after_message: int | None = None  # message of the stream that arrives before it
    stretch: float = 1.0  # factor on the transfer time
    latency_us: float | None = None  # fixed time before the transfer; None: that of the link
    queued_us: float = 0.0  # fixed time in the queue of sends, where no other message overlaps it
    mover: Mover | None = None  # what moves it; None: as in `run_streams`
    between_nodes: bool = False  # it is in the queue of messages between nodes
    num_messages: int = 1


@dataclass(slots=True)
class Stream:
    """Messages and work of one rank in order. `work`: times without communication, and the messages that each needs."""

    messages: list[Transfer] = field(default_factory=list)
    work: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    def add(self, message: Transfer) -> int:
        """Add a message; returns its number."""
        self.messages.append(message)
        return len(self.messages) - 1

    def send(self, message: Transfer) -> int:
        """Add a message after all work so far; returns its number."""
        return self.add(replace(message, after_work=len(self.work)))

    def compute(self, time_us: float, *needs: int) -> int:
        """Add work after the messages `needs`; returns its number."""
        self.work.append((time_us, needs))
        return len(self.work) - 1


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Result of a simulation."""

    time_us: float  # end of the last computation and message
    compute_us: float  # with the slowdown by communication
    sent_bytes: float
    arrived_us: tuple[tuple[float, ...], ...]  # of each message, by stream
    slack_us: float  # smallest time between the arrival of a message and its use
    num_messages: int  # those with bytes

    @property
    def exposed_us(self) -> float:
        """Time in which the rank waits and does not compute."""
        return self.time_us - self.compute_us


@dataclass(slots=True)
class _InTransit:
    """A message in transit: `left` is bytes, times are in us."""

    planned: Transfer
    stream: int
    index: int
    left: float
    ready: float
    starts: float
    arrived: bool = False
    noticed: float = 0.0


class _Simulation:
    def __init__(
        self, streams: Sequence[Stream], order: Sequence[tuple[int, int]], model: CostModel, link: Link, kind: Mover
    ) -> None:
        count = len(streams)
        self.streams, self.order, self.model, self.link, self.kind = streams, order, model, link, kind
        self.port_rate = link.collective_rate if kind == "collective" else link.copy_rate
        # Half of the delay is before a message leaves, half before the receiver processes it.
        busy = None if kind == "collective" else model.profile.contention.busy_us
        self.busy_us = 0.0 if busy is None else busy.value / 2
        self.now = self.left = self.started = self.compute_us = 0.0
        self.next_work = 0
        self.computing = False
        # By stream: completed work, messages not posted, queues, arrival time by message.
        self.done = [0] * count
        self.unposted = [list(range(len(stream.messages))) for stream in streams]
        self.num_queues = [len({message.between_nodes for message in stream.messages}) for stream in streams]
        self.arrived: list[dict[int, float]] = [{} for _ in range(count)]
        self.slack_us = math.inf
        self.messages: list[_InTransit] = []

    def post(self) -> bool:
        """Post a message of each stream that may leave. A collective waits for the previous one of its stream."""
        progress = False
        for number, (stream, arrived) in enumerate(zip(self.streams, self.arrived, strict=True)):
            blocked = set[bool]()  # queues whose next message may not leave
            for at in self.unposted[number]:
                message = stream.messages[at]
                if message.after_work > self.done[number] or (self.kind == "collective" and at > len(arrived)):
                    blocked.add(message.between_nodes)
                    if len(blocked) == self.num_queues[number]:
                        break
                if message.between_nodes in blocked:
                    continue
                if message.after_message is not None and message.after_message not in arrived:
                    continue  # those of a later operation do not wait for a message that forwards
                size = message.num_bytes * message.stretch
                ready = start = self.now
                if size > 0:
                    size += message.queued_us * self.port_rate
                    ready += self.link.latency_us if message.latency_us is None else message.latency_us
                    start = ready + self.busy_us
                self.messages.append(_InTransit(message, number, at, size, ready, start))
                self.unposted[number].remove(at)
                progress = True
                break
        return progress

    def compute(self) -> bool:
        """Start the next work if the rank is idle and the messages of the work have arrived."""
        if self.computing or self.next_work == len(self.order):
            return False
        number, index = self.order[self.next_work]
        time_us, needs = self.streams[number].work[index]
        arrived = self.arrived[number]
        if any(k not in arrived for k in needs):
            return False
        if needs:
            self.slack_us = min(self.slack_us, self.now - max(arrived[k] for k in needs))
        self.left, self.computing, self.started = time_us, True, self.now
        return True

    def end_core_waits(self) -> None:
        """End the wait for a core of communication threads if the rank does not compute."""
        if not self.computing:
            for message in self.messages:
                message.starts = min(message.starts, max(self.now, message.ready))
                message.noticed = min(message.noticed, self.now)

    def advance(self) -> None:
        waiting = [message for message in self.messages if not message.arrived]
        firsts = {message.planned.between_nodes: message for message in reversed(waiting)}
        moving = [first for first in firsts.values() if first.starts <= self.now + _DONE and first.left > 0]
        speed = 1.0
        if self.computing and moving:
            num_bytes = 2 * self.port_rate * len(moving)  # sent and received
            speed = min(self.model.compute_rate(each.planned.mover or self.kind, num_bytes) for each in moving)
        steps = [message.left / self.port_rate for message in moving]
        if self.computing:
            steps.append(self.left / speed)
        for message in self.messages:
            if message.arrived:
                steps.append(max(0.0, message.noticed - self.now))
            elif message.starts > self.now + _DONE:
                steps.append(message.starts - self.now)
            elif message.left <= 0:
                steps.append(0.0)
        step = min(steps)
        self.now += step
        for message in moving:
            message.left -= step * self.port_rate
        if self.computing:
            self.left -= step * speed
            if self.left <= _DONE * max(1.0, self.now):
                number, index = self.order[self.next_work]
                self.computing = False
                self.compute_us += self.now - self.started
                self.next_work += 1
                self.done[number] = index + 1
        self._complete_messages()

    def _complete_messages(self) -> None:
        remaining = []
        for message in self.messages:
            has_arrived = message.starts <= self.now + _DONE and message.left <= _DONE * max(1.0, self.port_rate)
            if has_arrived and not message.arrived:
                message.arrived = True
                waits = self.computing and message.planned.num_bytes > 0
                message.noticed = self.now + (self.busy_us if waits else 0.0)
            if not message.arrived or message.noticed > self.now + _DONE:
                remaining.append(message)
            else:
                self.arrived[message.stream][message.index] = self.now
        self.messages = remaining


def run_streams(
    streams: Sequence[Stream],
    model: CostModel,
    link: Link,
    kind: Mover = "copy",
    order: Sequence[tuple[int, int]] | None = None,
) -> SimulatedRun:
    """Simulate rank 0 for all ranks: its messages arrive when its own messages leave.

    The streams communicate concurrently. `order` has (stream, index of work) in computation order; None: the streams
    one after the other. Raises ValueError at a deadlock; `check` in `tests/schedules/verify.py` finds its place.
    """
    if order is None:
        order = [(n, k) for n, stream in enumerate(streams) for k in range(len(stream.work))]
    simulation = _Simulation(streams, order, model, link, kind)
    while True:
        while simulation.post() | simulation.compute():
            pass
        simulation.end_core_waits()
        if not simulation.messages and not simulation.computing:
            break
        simulation.advance()
    sizes = [message.num_bytes for stream in streams for message in stream.messages]
    if any(simulation.unposted) or simulation.next_work < len(order):
        raise ValueError(f"program: deadlock at work {simulation.next_work}; verify its plan")
    return SimulatedRun(
        simulation.now,
        simulation.compute_us,
        sum(sizes),
        tuple(tuple(times[index] for index in sorted(times)) for times in simulation.arrived),
        0.0 if math.isinf(simulation.slack_us) else simulation.slack_us,
        sum(message.num_messages for stream in streams for message in stream.messages if message.num_bytes > 0),
    )
