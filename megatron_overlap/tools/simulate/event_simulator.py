"""Plays schedules of all ranks of a group on a clock: computation, messages, and links that they share.

The plans are the ones that run (`megatron_overlap.schedules`). A rank's messages leave one after the other, in the
order in which they were ready; collectives of several streams go side by side. All that are on the way are fluid: they
share the ports they go through by max-min fairness, and whenever one starts or ends the rates are made anew.
Computation is one queue per rank, slower while that rank communicates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_overlap.autotune.cost_model import CostModel, Link
from megatron_overlap.tools.simulate.program import Played, Program, Span

_DONE = 1e-9


@dataclass(slots=True)
class _Message:
    sender: int
    stream: int
    exchange: int
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
    program: Program
    next_work: int = 0
    computing: bool = False
    adding: bool = False  # the GEMM of the next piece is done, its additions are not
    left: float = 0.0
    started: float = 0.0
    compute_us: float = 0.0
    sent: list[int] = field(default_factory=list)  # exchanges that have left, by stream
    posted: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)  # pieces of work that are done, by stream
    landed: list[dict[int, float]] = field(default_factory=list)  # when, by exchange
    sent_bytes: float = 0.0
    received_bytes: float = 0.0


class _World:
    def __init__(
        self, programs: Sequence[Program], model: CostModel, link: Link, kind: Literal["copy", "collective"], fold: bool
    ) -> None:
        self.ranks = [_Rank(program) for program in programs]
        for rank in self.ranks:
            count = len(rank.program.streams)
            rank.sent, rank.posted, rank.done = [0] * count, [0] * count, [0] * count
            rank.landed = [{} for _ in range(count)]
        self.model, self.link, self.kind, self.fold = model, link, kind, fold
        self.port_rate = link.copy_rate if kind == "copy" else link.collective_rate
        # Half of it before a message leaves, half until its arrival is noticed.
        self.busy_us = model.busy_us(kind) / 2
        self.now = 0.0
        self.slack_us = math.inf
        self.messages: list[_Message] = []
        self.spans: list[Span] = []

    def post(self) -> bool:
        """Queues messages that may leave, in each stream in the plan's order; a collective when the one before has."""
        moved = False
        for index, rank in enumerate(self.ranks):
            for number, stream in enumerate(rank.program.streams):
                exchanges = stream.plan.messages
                at = rank.posted[number]
                if at == len(exchanges) or (self.kind == "collective" and at > rank.sent[number]):
                    continue
                exchange = exchanges[at]
                if exchange.after_work > rank.done[number]:
                    continue
                if exchange.after_message is not None and exchange.after_message not in rank.landed[number]:
                    continue
                latency = self.link.latency_us if stream.latency_us is None else stream.latency_us
                receiver = index if self.fold else exchange.to
                size = stream.send_bytes[at] * (stream.stretch[at] if stream.stretch else 1.0)
                ready = self.now + (latency if size > 0 else 0.0)
                start = ready + (self.busy_us if size > 0 else 0.0)
                self.messages.append(_Message(index, number, at, receiver, size, ready, start, self.now))
                rank.posted[number] += 1
                moved = True
        return moved

    def compute(self) -> bool:
        """Starts the next piece of work of every rank that is idle and has what it needs."""
        moved = False
        for rank in self.ranks:
            if rank.computing or rank.next_work == len(rank.program.order):
                continue
            number, index = rank.program.order[rank.next_work]
            stream = rank.program.streams[number]
            work = stream.plan.work[index]
            needs, landed = work.adds if rank.adding else work.needs, rank.landed[number]
            if any(k not in landed for k in needs):
                continue
            if needs:
                self.slack_us = min(self.slack_us, self.now - max(landed[k] for k in needs))
            time = stream.add_us[index] if rank.adding else stream.work_us[index]
            rank.computing, rank.left, rank.started = True, time, self.now
            moved = True
        return moved

    def give_cores(self) -> None:
        """Threads that send or take a message wait for a core no longer than their rank computes."""
        for message in self.messages:
            if not self.ranks[message.sender].computing:
                message.starts = min(message.starts, max(self.now, message.ready))
            if not self.ranks[message.receiver].computing:
                message.noticed = min(message.noticed, self.now)

    def _first(self) -> list[_Message]:
        """Messages that no other of their rank has to leave before."""
        if self.kind == "collective":
            return self.messages
        first: dict[int, _Message] = {}
        for message in self.messages:
            if not message.arrived:
                first.setdefault(message.sender, message)
        return list(first.values())

    def set_rates(self) -> None:
        """Max-min fairness over the ports: the fullest port fixes its messages' rate, then the next fullest."""
        flowing = [
            message
            for message in self._first()
            if message.starts <= self.now + _DONE and message.left > 0 and not message.arrived
        ]
        ports: dict[tuple[str, int], list[_Message]] = {}
        for message in flowing:
            message.rate = 0.0
            ports.setdefault(("out", message.sender), []).append(message)
            ports.setdefault(("in", message.receiver), []).append(message)
        room = dict.fromkeys(ports, self.port_rate)
        open_messages = {id(message) for message in flowing}
        while open_messages:
            counts = {port: sum(id(m) in open_messages for m in ports[port]) for port in ports}
            tightest = min((port for port in ports if counts[port]), key=lambda port: room[port] / counts[port])
            rate = room[tightest] / counts[tightest]
            for message in [m for m in ports[tightest] if id(m) in open_messages]:
                message.rate = rate
                open_messages.discard(id(message))
                room["out", message.sender] -= rate
                room["in", message.receiver] -= rate

    def speed(self, index: int) -> float:
        """Speed of computation of a rank now."""
        moving = sum(
            message.rate * ((message.sender == index) + (message.receiver == index)) for message in self.messages
        )
        return self.model.compute_rate(self.kind, moving) if moving > 0 else 1.0

    def advance(self) -> None:
        """Moves the clock to whatever ends first."""
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
                    self._work_done(index, rank)
        self._land()

    def _work_done(self, index: int, rank: _Rank) -> None:
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

    def _land(self) -> None:
        staying = []
        for message in self.messages:
            sender, receiver = self.ranks[message.sender], self.ranks[message.receiver]
            there = message.starts <= self.now + _DONE and message.left <= _DONE * max(1.0, self.port_rate)
            if there and not message.arrived:
                size = sender.program.streams[message.stream].send_bytes[message.exchange]
                sender.sent[message.stream] = message.exchange + 1
                sender.sent_bytes += size
                receiver.received_bytes += size
                message.arrived, message.rate = True, 0.0
                message.noticed = self.now + (self.busy_us if size > 0 and receiver.computing else 0.0)
            if not message.arrived or message.noticed > self.now + _DONE:
                staying.append(message)
                continue
            receiver.landed[message.stream][message.exchange] = self.now
            name = f"exchange {message.stream}.{message.exchange}"
            self.spans.append(Span(message.sender, "message", name, message.posted, self.now))
        self.messages = staying


def play(
    programs: Sequence[Program],
    model: CostModel,
    link: Link,
    *,
    kind: Literal["copy", "collective"] = "copy",
    fold: bool = False,
) -> Played:
    """Plays the programs of a group until all is done.

    Args:
        programs: of rank 0, 1, ...; with `fold` that of rank 0 alone.
        model: says how communication slows computation down.
        link: what joins them.
        kind: who moves the bytes: copies and point-to-point messages, or a collective's kernels.
        fold: all ranks do the same at the same time, so that rank 0's arrivals come when its sends leave.

    Raises:
        ValueError: the programs wait for each other for ever; `megatron_overlap.schedules.check` says where.
    """
    world = _World(programs, model, link, kind, fold)
    while True:
        while world.post() | world.compute():
            pass
        world.give_cores()
        if not world.messages and not any(rank.computing for rank in world.ranks):
            break
        world.advance()
    for index, rank in enumerate(world.ranks):
        waiting = any(rank.posted[n] < len(s.plan.messages) for n, s in enumerate(rank.program.streams))
        if waiting or rank.next_work < len(rank.program.order):
            raise ValueError(f"programs: rank {index} waits for ever at work {rank.next_work}; check its plans")
    compute = min(rank.compute_us for rank in world.ranks)
    undisturbed = min(
        math.fsum(rank.program.streams[n].work_us[k] + rank.program.streams[n].add_us[k] for n, k in rank.program.order)
        for rank in world.ranks
    )
    return Played(
        world.now,
        compute,
        undisturbed,
        tuple(rank.sent_bytes for rank in world.ranks),
        tuple(rank.received_bytes for rank in world.ranks),
        tuple(world.spans),
        0.0 if math.isinf(world.slack_us) else world.slack_us,
    )
