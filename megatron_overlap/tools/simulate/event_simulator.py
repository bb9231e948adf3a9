"""Event simulator of a schedule: computation and messages of one rank on one clock.

The plans are those of `megatron_overlap.schedules`, which the operations run. All ranks of a group run the same
schedule, so one rank stands for all. A rank sends its messages one after the other, in the order in which they become
ready. Collectives of several streams run concurrently and share the port of the rank. A rank has one queue of
computation, which runs slower while the rank communicates.
"""

import math
from dataclasses import dataclass

from megatron_overlap.autotune.cost_model import CostModel, Link, Mover
from megatron_overlap.schedules import Chunk, Message, Plan, Work

ANY_CHUNK = Chunk(0, 0)
"""Chunk of work whose rows do not matter."""
_DONE = 1e-9


@dataclass(frozen=True, slots=True)
class Stream:
    """One plan with the times and sizes of its steps.

    Attributes:
        work_us: GEMM time of each of `plan.work` without concurrent communication.
        add_us: time of the additions of each of `plan.work`, which start when their messages have arrived.
        send_bytes: size of each of `plan.messages`.
        latency_us: fixed cost of each message; None: that of the link.
        stretch: factor on the transfer time of each message; empty: 1.
        queued_us: fixed time of each message in the queue of sends, where no other message overlaps it; empty: 0.
        movers: what moves each message; empty: as in `run_program`.
    """

    plan: Plan
    work_us: tuple[float, ...]
    add_us: tuple[float, ...]
    send_bytes: tuple[float, ...]
    latency_us: float | None = None
    stretch: tuple[float, ...] = ()
    queued_us: tuple[float, ...] = ()
    movers: tuple[Mover, ...] = ()


class StreamBuilder:
    """Builds a stream step by step where the rows of a chunk do not matter. Each step returns its number."""

    def __init__(self) -> None:
        self._messages: list[tuple[Message, float, float]] = []
        self._work: list[tuple[Work, float]] = []

    def send(self, num_bytes: float, stretch: float = 1.0) -> int:
        """A message after all work so far."""
        message = Message(ANY_CHUNK, 0, ANY_CHUNK, 0, after_work=len(self._work))
        self._messages.append((message, num_bytes, stretch))
        return len(self._messages) - 1

    def compute(self, time_us: float, *needs: int) -> int:
        """Work after the messages `needs`."""
        self._work.append((Work((ANY_CHUNK,), needs=needs), time_us))
        return len(self._work) - 1

    def add(self, *messages: int) -> None:
        """A sum after its messages, which takes no time."""
        self._work.append((Work((), adds=messages), 0.0))

    def stream(
        self, latency_us: float | None = None, queued_us: tuple[float, ...] = (), movers: tuple[Mover, ...] = ()
    ) -> Stream:
        """The stream of all steps; see `Stream`."""
        work, times = tuple(each for each, _ in self._work), tuple(time_us for _, time_us in self._work)
        messages = tuple(message for message, _, _ in self._messages)
        sizes = tuple(num_bytes for _, num_bytes, _ in self._messages)
        stretch = tuple(factor for _, _, factor in self._messages)
        plan = Plan("all_gather", "serial", 1, 0, 1, messages, work)
        return Stream(plan, times, (0.0,) * len(times), sizes, latency_us, stretch, queued_us, movers)


@dataclass(frozen=True, slots=True)
class Program:
    """Streams of one rank that communicate concurrently, and (stream, index of work) in computation order."""

    streams: tuple[Stream, ...]
    order: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Result of a simulation: the end of the last computation and message, and the messages with bytes.

    `compute_us` has the slowdown by communication, `arrived_us` the arrival of each message by stream. `slack_us` is
    the smallest time between the arrival of a message and its use.
    """

    time_us: float
    compute_us: float
    sent_bytes: float
    arrived_us: tuple[tuple[float, ...], ...]
    slack_us: float
    num_messages: int

    @property
    def exposed_us(self) -> float:
        """Time in which the rank waits and does not compute."""
        return self.time_us - self.compute_us


def in_order(*streams: Stream) -> Program:
    """The program that computes the streams one after the other."""
    order = [(n, k) for n, stream in enumerate(streams) for k in range(len(stream.work_us))]
    return Program(streams, tuple(order))


@dataclass(slots=True)
class _Message:
    """A message in transit: `index` counts in the plan, `left` is bytes, times are in us."""

    stream: int
    index: int
    left: float
    ready: float
    starts: float
    rate: float = 0.0
    arrived: bool = False
    noticed: float = 0.0


class _Simulation:
    def __init__(self, program: Program, model: CostModel, link: Link, kind: Mover) -> None:
        count = len(program.streams)
        self.program, self.model, self.link, self.kind = program, model, link, kind
        self.port_rate = link.collective_rate if kind == "collective" else link.copy_rate
        # Half of the delay is before a message leaves, half before the receiver processes it.
        self.busy_us = 0.0 if kind == "collective" else model.busy_us / 2
        self.now = 0.0
        self.next_work = 0
        self.computing = False
        self.adding = False  # the GEMM of the next work has ended, its additions have not
        self.left = self.started = self.compute_us = self.sent_bytes = 0.0
        # By stream: messages that have left, messages posted, completed work, arrival time by message.
        self.sent, self.posted, self.done = [0] * count, [0] * count, [0] * count
        self.arrived: list[dict[int, float]] = [{} for _ in range(count)]
        self.slack_us = math.inf
        self.messages: list[_Message] = []

    def post(self) -> bool:
        """Post the messages that may leave, in plan order. A collective waits for the previous one of its stream."""
        progress = False
        for number, stream in enumerate(self.program.streams):
            planned = stream.plan.messages
            at = self.posted[number]
            if at == len(planned) or (self.kind == "collective" and at > self.sent[number]):
                continue
            message = planned[at]
            missing = message.after_message is not None and message.after_message not in self.arrived[number]
            if missing or message.after_work > self.done[number]:
                continue
            latency = self.link.latency_us if stream.latency_us is None else stream.latency_us
            size = stream.send_bytes[at] * (stream.stretch[at] if stream.stretch else 1.0)
            size += stream.queued_us[at] * self.port_rate if stream.queued_us and size > 0 else 0.0
            ready = self.now + (latency if size > 0 else 0.0)
            start = ready + (self.busy_us if size > 0 else 0.0)
            self.messages.append(_Message(number, at, size, ready, start))
            self.posted[number] += 1
            progress = True
        return progress

    def compute(self) -> bool:
        """Start the next work if the rank is idle and the messages of the work have arrived."""
        if self.computing or self.next_work == len(self.program.order):
            return False
        number, index = self.program.order[self.next_work]
        stream = self.program.streams[number]
        work = stream.plan.work[index]
        needs, arrived = work.adds if self.adding else work.needs, self.arrived[number]
        if any(k not in arrived for k in needs):
            return False
        if needs:
            self.slack_us = min(self.slack_us, self.now - max(arrived[k] for k in needs))
        self.left = stream.add_us[index] if self.adding else stream.work_us[index]
        self.computing, self.started = True, self.now
        return True

    def end_core_waits(self) -> None:
        """End the wait for a core of communication threads if the rank does not compute."""
        if not self.computing:
            for message in self.messages:
                message.starts = min(message.starts, max(self.now, message.ready))
                message.noticed = min(message.noticed, self.now)

    def advance(self) -> None:
        """Advance the clock to the next event."""
        # The messages that use the port share it equally: the first one, or all collectives.
        waiting = [message for message in self.messages if not message.arrived]
        sendable = waiting if self.kind == "collective" else waiting[:1]
        active = [message for message in sendable if message.starts <= self.now + _DONE and message.left > 0]
        for message in active:
            message.rate = self.port_rate / len(active)
        moving = [message for message in self.messages if message.rate > 0]
        speed = 1.0
        if self.computing and moving:
            # Messages of several movers are sent one after another.
            movers = self.program.streams[moving[0].stream].movers
            kind = movers[moving[0].index] if movers else self.kind
            speed = self.model.compute_rate(kind, sum(2 * message.rate for message in moving))  # sent and received
        steps = [self.left / speed] if self.computing else []
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
            message.left -= step * message.rate
        if self.computing:
            self.left -= step * speed
            if self.left <= _DONE * max(1.0, self.now):
                self._complete_work()
        self._complete_messages()

    def _complete_work(self) -> None:
        number, work = self.program.order[self.next_work]
        self.computing = False
        self.compute_us += self.now - self.started
        self.adding = not self.adding and bool(self.program.streams[number].plan.work[work].adds)
        if not self.adding:
            self.next_work += 1
            self.done[number] = work + 1

    def _complete_messages(self) -> None:
        remaining = []
        for message in self.messages:
            has_arrived = message.starts <= self.now + _DONE and message.left <= _DONE * max(1.0, self.port_rate)
            if has_arrived and not message.arrived:
                size = self.program.streams[message.stream].send_bytes[message.index]
                self.sent[message.stream] = message.index + 1
                self.sent_bytes += size
                message.arrived, message.rate = True, 0.0
                message.noticed = self.now + (self.busy_us if size > 0 and self.computing else 0.0)
            if not message.arrived or message.noticed > self.now + _DONE:
                remaining.append(message)
            else:
                self.arrived[message.stream][message.index] = self.now
        self.messages = remaining


def run_program(program: Program, model: CostModel, link: Link, kind: Mover = "copy") -> SimulatedRun:
    """Simulate the program of rank 0 for all ranks: its messages arrive when its own messages leave.

    Raises:
        ValueError: deadlock; `check` in `tests/schedules/verify.py` finds its place.
    """
    simulation = _Simulation(program, model, link, kind)
    while True:
        while simulation.post() | simulation.compute():
            pass
        simulation.end_core_waits()
        if not simulation.messages and not simulation.computing:
            break
        simulation.advance()
    waiting = any(simulation.posted[n] < len(s.plan.messages) for n, s in enumerate(program.streams))
    if waiting or simulation.next_work < len(program.order):
        raise ValueError(f"program: deadlock at work {simulation.next_work}; verify its plan")
    return SimulatedRun(
        simulation.now,
        simulation.compute_us,
        simulation.sent_bytes,
        tuple(tuple(times[index] for index in sorted(times)) for times in simulation.arrived),
        0.0 if math.isinf(simulation.slack_us) else simulation.slack_us,
        sum(size > 0 for stream in program.streams for size in stream.send_bytes),
    )
