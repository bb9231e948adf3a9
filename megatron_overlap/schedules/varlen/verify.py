"""Plays the program of all ranks together and proves it, or names what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_overlap.schedules.varlen.message_order import Trip
from megatron_overlap.schedules.varlen.messages import visits_of, works_of
from megatron_overlap.schedules.varlen.program import Turn
from megatron_overlap.schedules.varlen.ring_groups import chunks_at
from megatron_overlap.schedules.verify import ScheduleError

Rows = Counter[int]


@dataclass(frozen=True, slots=True)
class ProgramProof:
    """What playing a program showed.

    Attributes:
        messages: of all ranks, those to proxies included.
        routed: of these, to proxies.
    """

    messages: int
    routed: int


@dataclass(slots=True)
class _Post:
    """An exchange that waits in a rank's queue."""

    turn: int
    back: bool
    send: int | None
    recv: int | None


@dataclass(slots=True)
class _Rank:
    queues: dict[str, list[_Post]] = field(default_factory=lambda: {"inter": [], "intra": []})
    tasks: list[tuple[str, int, int, int]] = field(default_factory=list)
    """What it still has to do, in order: visit or work, of a turn, load and step."""


def check(turns: Sequence[Turn], ranks: int) -> ProgramProof:
    """Plays the program as lazily as ranks may be, on the strictest transport.

    A message is played as a rendezvous: every rank has one queue for its messages between nodes and one for those
    inside, and each exchange holds up the later ones of its queue until it is done. A rank stands still for each visit
    in order, and passes results on only after all visits. What runs under these rules runs where ranks are quicker and
    transports have buffers.

    Proved: every row of a load reaches each visit once and whole; no rank sends rows that it does not hold, or a result
    before it and those of all visits before are made; every home gets from each visit of each row its result once;
    nothing deadlocks; every message that is sent is received.

    Args:
        turns: of one pass.
        ranks: of the machine.

    Raises:
        ScheduleError: naming the rank and the message at fault.
    """
    state = [_Rank() for _ in range(ranks)]
    for back in (False, True):
        for number, turn in enumerate(turns):
            trip = turn.back if back else turn.out
            for rank in range(ranks) if trip else ():
                queue = state[rank].queues["inter" if turn.ring_group.zone == "inter" else "intra"]
                queue += [_Post(number, back, *pair) for pair in trip.exchanges(rank)]  # type: ignore[union-attr]
    for what in ("visit", "work"):
        for number, turn in enumerate(turns):
            for place, rank in enumerate(turn.ring_group.ranks):
                if what == "visit":
                    visits = visits_of(turn.loads, turn.out, place, rank)
                else:
                    visits = works_of(turn.loads, turn.back, place, rank) if turn.back else []
                state[rank].tasks += [(what, number, load, step) for load, step, _ in visits]
    play = _Play(turns, state)
    while any(play.advance(rank) for rank in range(ranks)):
        pass
    play.finish()
    trips: list[Trip] = [trip for turn in turns for trip in (turn.out, turn.back) if trip]
    messages = [message for trip in trips for message in trip.messages]
    return ProgramProof(len(messages), sum(not message.ends for message in messages))


class _Play:
    def __init__(self, turns: Sequence[Turn], state: list[_Rank]) -> None:
        self._turns, self._state = turns, state
        self._held: dict[tuple[int, int, int], Rows] = {}
        """Rows of a load that a visit or its home has, by turn, load and rank."""
        self._passed: set[tuple[int, bool, int]] = set()
        self._made: dict[tuple[int, int, int], dict[int, Rows]] = {}
        """Places whose result is in each row, by turn, load and the visit that has it; -1 is home."""
        self._worked: set[tuple[int, int, int]] = set()
        for number, turn in enumerate(turns):
            for index, load in enumerate(turn.loads):
                self._held[number, index, turn.ring_group.ranks[load.home]] = Rows(range(load.rows[0]))

    def advance(self, rank: int) -> bool:
        """Does what a rank can do; whether that was anything."""
        moved = False
        for queue in self._state[rank].queues.values():
            while queue and self._exchange(rank, queue[0]):
                queue.pop(0)
                moved = True
        tasks = self._state[rank].tasks
        while tasks and self._task(rank, *tasks[0]):
            tasks.pop(0)
            moved = True
        return moved

    def _exchange(self, rank: int, post: _Post) -> bool:
        """Tries both directions; whether both are done."""
        trip = self._trip(post)
        for index in (post.send, post.recv):
            if index is None or (post.turn, post.back, index) in self._passed:
                continue
            message = trip.messages[index]
            self._meets(post, index, message.to if rank == message.source else message.source)
        return all(index is None or (post.turn, post.back, index) in self._passed for index in (post.send, post.recv))

    def _trip(self, post: _Post) -> Trip:
        turn = self._turns[post.turn]
        trip = turn.back if post.back else turn.out
        assert trip is not None
        return trip

    def _meets(self, post: _Post, index: int, peer: int) -> None:
        """Passes a message if the peer's queue has come to it and its rows are there."""
        zone = self._turns[post.turn].ring_group.zone
        queue = self._state[peer].queues["inter" if zone == "inter" else "intra"]
        if not queue or (queue[0].turn, queue[0].back) != (post.turn, post.back):
            return
        if index not in (queue[0].send, queue[0].recv):
            return
        message = self._trip(post).messages[index]
        name = f"rank {message.source}: {'back' if post.back else 'out'} message {index}"
        key = post.turn, message.load, message.step
        if message.after is not None:
            before = self._trip(post).messages[message.after]
            if (post.turn, post.back, message.after) not in self._passed:
                return
            if before.to != message.source or before.start > message.start or before.stop < message.stop:
                raise ScheduleError(f"{name}: forwards what message {message.after} did not bring")
        elif post.back and key not in self._worked:
            return
        rows = range(message.start, message.stop)
        if not post.back:
            has = self._held.get((post.turn, message.load, message.source), Rows())
            if message.after is None and not all(has[row] for row in rows):
                raise ScheduleError(f"{name}: sends rows that it does not hold")
            if message.ends:
                self._held.setdefault((post.turn, message.load, message.to), Rows()).update(rows)
        elif message.ends:
            end = -1 if message.home else message.step + 1
            mine = self._made[key]
            there = self._made.setdefault((post.turn, message.load, end), {})
            for row in rows:
                there.setdefault(row, Rows()).update(mine[row])
        self._passed.add((post.turn, post.back, index))

    def _task(self, rank: int, what: str, number: int, index: int, step: int) -> bool:
        turn = self._turns[number]
        load = turn.loads[index]
        if what == "visit":
            has = self._held.get((number, index, rank), Rows())
            return set(has) == set(range(load.rows[step]))
        mine = self._made.setdefault((number, index, step), {})
        arrived = all(mine.get(row) for row in range(load.rows[step]))
        if step and not arrived:
            return False
        for row in range(load.rows[step]):
            mine.setdefault(row, Rows())[load.visits[step]] += 1
        self._worked.add((number, index, step))
        return True

    def finish(self) -> None:
        """Raises if anything is left, or came out wrong."""
        for rank, state in enumerate(self._state):
            for zone, queue in state.queues.items():
                if queue:
                    raise ScheduleError(f"rank {rank}: deadlock: {len(queue)} {zone} exchange(s) left, at {queue[0]}")
            if state.tasks:
                raise ScheduleError(f"rank {rank}: deadlock: waits for {state.tasks[0]}")
        for (number, index, rank), rows in self._held.items():
            twice = [row for row, count in rows.items() if count != 1]
            if twice:
                raise ScheduleError(f"rank {rank}: turn {number}, load {index}: row {twice[0]} came {rows[twice[0]]} x")
        for number, turn in enumerate(self._turns):
            for index, load in enumerate(turn.loads):
                homes = self._made.get((number, index, -1), {})
                for row in range(load.rows[0]) if turn.back else ():
                    wanted = Rows(place for step, place in enumerate(load.visits) if row < load.rows[step])
                    if homes.get(row) != wanted:
                        raise ScheduleError(f"turn {number}, load {index}: row {row} came home with {homes.get(row)}")
                seen = {chunk for step in range(len(load.visits)) for chunk in chunks_at(turn.ring_group, load, step)}
                if seen != set(load.chunks):
                    raise ScheduleError(f"turn {number}, load {index}: chunks {seen} were seen, not {load.chunks}")
