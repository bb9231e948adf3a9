"""The messages of a circle: who sends which rows of which load to whom, in which round.

A load goes from its home to its visits, one after the other (`out`). Where the visits make something of it, partial
gradients or partial results, that travels the same way, one visit behind, grows at each, and ends at home (`back`). A
message between nodes may take several network cards (`varlen.routing`): its rows are cut in lanes and pieces, which go
through proxies. Rounds order the messages: in a round every rank sends one message and receives one, at most, and what
a message forwards has come in an earlier round. Posted in the order of rounds they cannot deadlock, on no transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_overlap.varlen.circles import Load
from megatron_overlap.varlen.remap import Remap
from megatron_overlap.varlen.routing import Route

Router = Callable[[int, int, int], Route]
"""`router(source, to, rows)`: how a message travels."""


@dataclass(frozen=True, slots=True)
class Message:
    """Rows `start` to `stop` of a load.

    Attributes:
        source: rank that sends.
        to: rank that receives.
        load: index of the load.
        step: out: the visit it is for. Back: the visit that made it.
        start: first row.
        stop: row after the last.
        round: number of its exchange on both ends.
        after: index of the message that brings its rows to `source`; None: `source` makes them.
        ends: `to` is who it is for; otherwise a proxy.
        home: it is for the load's home.
    """

    source: int
    to: int
    load: int
    step: int
    start: int
    stop: int
    round: int
    after: int | None
    ends: bool
    home: bool = False


@dataclass(frozen=True, slots=True)
class Trip:
    """The messages of one flight, none before the one it is after."""

    messages: tuple[Message, ...]

    def exchanges(self, rank: int) -> list[tuple[int | None, int | None]]:
        """What `rank` sends and receives in each round, as indexes of messages; empty where it does neither."""
        found: dict[int, list[int | None]] = {}
        for index, message in enumerate(self.messages):
            for end, place in ((message.source, 0), (message.to, 1)):
                if end == rank:
                    found.setdefault(message.round, [None, None])[place] = index
        none: list[int | None] = [None, None]
        return [(*found.get(number, none),) for number in range(max(found) + 1)] if found else []  # type: ignore[misc]


class _Rounds:
    """Gives every message the first round in which both its ends are free."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._busy: set[tuple[int, int, bool]] = set()

    def send(
        self,
        path: Sequence[int],
        load: int,
        step: int,
        rows: tuple[int, int],
        after: int | None,
        *,
        earliest: int = 0,
        home: bool = False,
    ) -> int:
        """Adds the messages along a path of ranks; returns the index of the last one."""
        for hop, (source, to) in enumerate(zip(path, path[1:], strict=False)):
            number = earliest if after is None else max(earliest, self.messages[after].round + 1)
            while (source, number, True) in self._busy or (to, number, False) in self._busy:
                number += 1
            self._busy |= {(source, number, True), (to, number, False)}
            ends = hop == len(path) - 2
            self.messages.append(Message(source, to, load, step, *rows, number, after, ends, home))
            after = len(self.messages) - 1
        assert after is not None
        return after


def out_trip(loads: Sequence[Load], ranks: Sequence[int], router: Router) -> Trip:
    """The way of all loads from their homes to their visits."""
    rounds = _Rounds()
    last: dict[tuple[int, tuple[int, int]], int] = {}
    cuts = [_cuts(load, ranks, router) for load in loads]
    for step in range(len(ranks) - 1):
        for index, load in enumerate(loads):
            if step >= len(load.visits):
                continue
            source = ranks[load.visits[step - 1] if step else load.home]
            paths = _paths(router(source, ranks[load.visits[step]], load.rows[step]), len(cuts[index]))
            for part, path in zip(cuts[index], paths, strict=True):
                rows = part[0], min(part[1], load.rows[step])
                if rows[0] < rows[1]:
                    key = index, part
                    last[key] = rounds.send(path, index, step, rows, last.get(key))
    return Trip(tuple(rounds.messages))


def back_trip(loads: Sequence[Load], ranks: Sequence[int], router: Router) -> Trip:
    """The way of what the visits make of all loads: from each visit to the next, and home from a chunk's last."""
    rounds = _Rounds()
    ready: dict[tuple[int, int], int] = {}
    cuts = [_cuts(load, ranks, router) for load in loads]
    for step in range(len(ranks) - 1):
        for index, load in enumerate(loads):
            if step >= len(load.visits):
                continue
            source, here = ranks[load.visits[step]], load.rows[step]
            onward = load.rows[step + 1] if step + 1 < len(load.visits) else 0
            trips = [(ranks[load.home], onward, here, True)]
            if onward:
                trips.insert(0, (ranks[load.visits[step + 1]], 0, onward, False))
            for to, first, stop, home in trips:
                paths = _paths(router(source, to, stop - first), len(cuts[index]))
                for part, path in zip(cuts[index], paths, strict=True):
                    rows = max(part[0], first), min(part[1], stop)
                    if rows[0] >= rows[1]:
                        continue
                    earliest = ready.get((index, step), 0)
                    sent = rounds.send(path, index, step, rows, None, earliest=earliest, home=home)
                    if not home:
                        arrival = rounds.messages[sent].round + 1
                        ready[index, step + 1] = max(ready.get((index, step + 1), 0), arrival)
    return Trip(tuple(rounds.messages))


def remap_trip(moves: Remap) -> Trip:
    """The way of the rows of a remap: one load a move, each from its source straight to its goal."""
    rounds = _Rounds()
    for index, move in enumerate(moves.moves):
        rounds.send((move.source, move.to), index, 0, (0, move.rows), None)
    return Trip(tuple(rounds.messages))


class Visit(NamedTuple):
    """A visit that a rank receives, and the rounds that bring what it needs."""

    load: int
    step: int
    rounds: tuple[int, ...]


def visits_of(loads: Sequence[Load], trip: Trip, place: int, rank: int) -> list[Visit]:
    """The visits of a place, in the order in which an out trip brings them."""
    needs = _of_place(loads, place)
    for message in trip.messages:
        if message.to == rank and message.ends and (message.load, message.step) in needs:
            needs[message.load, message.step].append(message.round)
    return _by_arrival(needs)


def works_of(loads: Sequence[Load], trip: Trip, place: int, rank: int) -> list[Visit]:
    """The same visits in the order in which a back trip passes on what they made; its rounds are in this order too."""
    needs = _of_place(loads, place)
    for message in trip.messages:
        if message.to == rank and message.ends and not message.home:
            needs[message.load, message.step + 1].append(message.round)
    return _by_arrival(needs)


def _of_place(loads: Sequence[Load], place: int) -> dict[tuple[int, int], list[int]]:
    return {
        (index, step): []
        for index, load in enumerate(loads)
        for step, visit in enumerate(load.visits)
        if visit == place
    }


def _by_arrival(needs: dict[tuple[int, int], list[int]]) -> list[Visit]:
    found = [Visit(load, step, tuple(sorted(rounds))) for (load, step), rounds in needs.items()]
    return sorted(found, key=lambda visit: (max(visit.rounds, default=-1), visit.load))


def _cuts(load: Load, ranks: Sequence[int], router: Router) -> list[tuple[int, int]]:
    """The rows of a load, cut as the way between nodes that takes most lanes and pieces asks for."""
    total, most = load.rows[0], 1
    stops = [ranks[load.home], *(ranks[place] for place in load.visits)]
    for source, to, rows in zip(stops, stops[1:], load.rows, strict=False):
        route = router(source, to, rows)
        most = max(most, len(route.lanes) * route.pieces)
    bounds = [total * part // most for part in range(most + 1)]
    return [part for part in zip(bounds, bounds[1:], strict=False) if part[0] < part[1]]


def _paths(route: Route, parts: int) -> list[list[int]]:
    """The ranks that each part goes through: parts take the lanes in turn."""
    paths = []
    for part in range(parts):
        lane = route.lanes[part % len(route.lanes)]
        path = [route.source]
        for rank in (lane.proxy, lane.far_proxy, route.to):
            if rank != path[-1]:
                path.append(rank)
        paths.append(path)
    return paths
