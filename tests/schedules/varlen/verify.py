"""Executes the messages of all ranks of a pass symbolically, and proves them or reports the fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_overlap.schedules.varlen.message_order import MessagePlan
from megatron_overlap.schedules.varlen.messages import RingMessages
from megatron_overlap.schedules.varlen.ring_groups import chunks_at
from tests.schedules.verify import ScheduleError

Rows = Counter[int]
TaskKind = Literal["compute", "send result"]


@dataclass(frozen=True, slots=True)
class MessagesProof:
    """Result of a proof.

    Attributes:
        messages: number of messages of all ranks, those to proxies included.
        routed: number of messages to proxies.
    """

    messages: int
    routed: int


@dataclass(slots=True)
class _Post:
    """The messages of one rank in one round: numbers of their ring groups and of the messages in these."""

    round: int
    collects: bool
    messages: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Rank:
    queues: dict[str, list[_Post]] = field(default_factory=lambda: {"inter": [], "intra": []})
    tasks: list[tuple[tuple[int, ...], TaskKind, int, int, int]] = field(default_factory=list)
    """Remaining tasks in order: key of the order, kind, ring group, payload and ring step."""


def check_messages(groups: Sequence[RingMessages], ranks: int) -> MessagesProof:
    """Executes the messages under the strictest assumptions: rendezvous transport and blocking ranks.

    Every rank has one queue for its inter-node payloads and all results, and one for its intra-node payloads. It posts
    a round when all its sends in the round are ready, and the round blocks the later ones of its queue until all its
    messages are done. A rank waits for each ring step in order, and sends results only after all its ring steps, in the
    order of their rounds. Messages that complete under these rules complete on faster ranks and on buffered transports.

    Proved: every row of a payload reaches each ring step once; no rank sends rows that it does not hold; no rank sends
    a result before it is complete; every owner gets the result of each ring step for each row once; nothing deadlocks;
    every message that is sent is received.

    Args:
        groups: the ring groups of one pass.
        ranks: number of ranks of the topology.

    Raises:
        ScheduleError: names the rank and the message at fault.
    """
    state = [_Rank() for _ in range(ranks)]
    for collects in (False, True):
        for zone in ("inter",) if collects else ("inter", "intra"):
            posts = [dict[int, _Post]() for _ in range(ranks)]
            for number, group in enumerate(groups):
                plan = group.collect if collects else group.distribute
                for rank in range(ranks) if plan and (collects or group.ring_group.zone == zone) else ():
                    for index in plan.of(rank):  # type: ignore[union-attr]
                        place = plan.messages[index].round  # type: ignore[union-attr]
                        posts[rank].setdefault(place, _Post(place, collects)).messages.append((number, index))
            for rank, found in enumerate(posts):
                state[rank].queues[zone] += [found[place] for place in sorted(found)]
    for number, group in enumerate(groups):
        for position, rank in enumerate(group.ring_group.ranks):
            steps = group.received_steps(position)
            state[rank].tasks += [((0,), "compute", number, each.payload, each.step) for each in steps]
            steps = group.result_steps(position)
            state[rank].tasks += [((1, each.round), "send result", number, each.payload, each.step) for each in steps]
    for each_rank in state:
        each_rank.tasks.sort(key=lambda task: task[0])
    simulation = _Simulation(groups, state)
    while any(simulation.advance(rank) for rank in range(ranks)):
        pass
    simulation.finish()
    plans: list[MessagePlan] = [plan for group in groups for plan in (group.distribute, group.collect) if plan]
    messages = [message for plan in plans for message in plan.messages]
    return MessagesProof(len(messages), sum(not message.is_final for message in messages))


class _Simulation:
    def __init__(self, groups: Sequence[RingMessages], state: list[_Rank]) -> None:
        self._groups, self._state = groups, state
        self._held: dict[tuple[int, int, int], Rows] = {}
        """Payload rows that a rank holds, by group, payload and rank."""
        self._delivered: set[tuple[int, bool, int]] = set()
        self._results: dict[tuple[int, int, int], dict[int, Rows]] = {}
        """For each row the positions whose results it includes, by group, payload and ring step; -1 is the owner."""
        self._complete: set[tuple[int, int, int]] = set()
        for number, group in enumerate(groups):
            for index, payload in enumerate(group.payloads):
                self._held[number, index, group.ring_group.ranks[payload.owner]] = Rows(range(payload.rows[0]))

    def advance(self, rank: int) -> bool:
        """Executes all messages and tasks of a rank that can run; returns whether there was one."""
        advanced = False
        for queue in self._state[rank].queues.values():
            while queue and self._finish_round(rank, queue[0]):
                queue.pop(0)
                advanced = True
        tasks = self._state[rank].tasks
        while tasks and self._run_task(rank, *tasks[0][1:]):
            tasks.pop(0)
            advanced = True
        return advanced

    def _finish_round(self, rank: int, post: _Post) -> bool:
        """Tries to deliver the messages of a round; returns whether all are delivered."""
        if not self._is_posted(rank, post):
            return False
        for number, index in post.messages:
            if (number, post.collects, index) not in self._delivered:
                message = self._plan(number, post.collects).messages[index]
                self._deliver(post, number, index, message.to if rank == message.source else message.source)
        return all((number, post.collects, index) in self._delivered for number, index in post.messages)

    def _is_posted(self, rank: int, post: _Post) -> bool:
        """Whether all sends of a round are ready."""
        for number, index in post.messages:
            message = self._plan(number, post.collects).messages[index]
            if message.source != rank:
                continue
            if not all((number, post.collects, each) in self._delivered for each in message.after):
                return False
            key = number, message.payload, message.step
            if post.collects and not message.after and key not in self._complete:
                return False
        return True

    def _plan(self, number: int, collects: bool) -> MessagePlan:
        group = self._groups[number]
        plan = group.collect if collects else group.distribute
        assert plan is not None
        return plan

    def _deliver(self, post: _Post, number: int, index: int, peer: int) -> None:
        """Delivers a message if it is in the current round of the peer, which has posted it."""
        zone = "inter" if post.collects else self._groups[number].ring_group.zone
        queue = self._state[peer].queues[zone]
        if not queue or queue[0].collects != post.collects or (number, index) not in queue[0].messages:
            return
        if not self._is_posted(peer, queue[0]):
            return
        plan = self._plan(number, post.collects)
        message = plan.messages[index]
        name = f"rank {message.source}: {'collect' if post.collects else 'distribute'} message {index}"
        key = number, message.payload, message.step
        brought: set[int] = set()
        for before in (plan.messages[each] for each in message.after):
            if before.to != message.source:
                raise ScheduleError(f"{name}: forwards rows of messages {message.after}, which do not reach it")
            brought.update(range(before.start, before.stop))
        if message.after and not brought.issuperset(range(message.start, message.stop)):
            raise ScheduleError(f"{name}: forwards rows that messages {message.after} do not bring")
        rows = range(message.start, message.stop)
        if not post.collects:
            held = self._held.get((number, message.payload, message.source), Rows())
            if not message.after and not all(held[row] for row in rows):
                raise ScheduleError(f"{name}: sends rows that the rank does not hold")
            if message.is_final:
                self._held.setdefault((number, message.payload, message.to), Rows()).update(rows)
        elif message.is_final:
            destination = -1 if message.to_owner else message.step + 1
            sent = self._results[key]
            received = self._results.setdefault((number, message.payload, destination), {})
            for row in rows:
                received.setdefault(row, Rows()).update(sent[row])
        self._delivered.add((number, post.collects, index))

    def _run_task(self, rank: int, kind: TaskKind, number: int, index: int, step: int) -> bool:
        payload = self._groups[number].payloads[index]
        if kind == "compute":
            held = self._held.get((number, index, rank), Rows())
            return set(held) == set(range(payload.rows[step]))
        results = self._results.setdefault((number, index, step), {})
        arrived = all(results.get(row) for row in range(payload.rows[step]))
        if step and not arrived:
            return False
        for row in range(payload.rows[step]):
            results.setdefault(row, Rows())[payload.receivers[step]] += 1
        self._complete.add((number, index, step))
        return True

    def finish(self) -> None:
        """Raises if a message or task is left, or if a result is wrong."""
        for rank, state in enumerate(self._state):
            for zone, queue in state.queues.items():
                if queue:
                    raise ScheduleError(f"rank {rank}: deadlock: {len(queue)} {zone} round(s) left, first {queue[0]}")
            if state.tasks:
                _, kind, number, index, step = state.tasks[0]
                raise ScheduleError(
                    f"rank {rank}: deadlock: cannot {kind} of group {number}, payload {index}, ring step {step}"
                )
        for (number, index, rank), rows in self._held.items():
            repeated = [row for row, count in rows.items() if count != 1]
            if repeated:
                raise ScheduleError(
                    f"rank {rank}: group {number}, payload {index}: row {repeated[0]} arrives {rows[repeated[0]]} times"
                )
        for number, group in enumerate(self._groups):
            for index, payload in enumerate(group.payloads):
                results = self._results.get((number, index, -1), {})
                for row in range(payload.rows[0]) if group.collect else ():
                    expected = Rows(
                        position for step, position in enumerate(payload.receivers) if row < payload.rows[step]
                    )
                    if results.get(row) != expected:
                        raise ScheduleError(
                            f"group {number}, payload {index}: the owner gets results of {results.get(row)} for row "
                            f"{row}, not of {expected}"
                        )
                steps = range(len(payload.receivers))
                received = {chunk for step in steps for chunk in chunks_at(group.ring_group, payload, step)}
                if received != set(payload.chunks):
                    raise ScheduleError(
                        f"group {number}, payload {index}: chunks {received} are received, not {payload.chunks}"
                    )
