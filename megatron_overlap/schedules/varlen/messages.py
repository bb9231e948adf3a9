"""The messages of a ring_group: who sends which rows of which load to whom, in which round.

A load goes from its home to its visits, one after the other (`out`). Where the visits make something of it, partial
gradients or partial results, that travels the same way, one visit behind, grows at each, and ends at home (`back`). A
message between nodes may take several network cards (`schedules.varlen.routing`): its rows are cut in lanes and
pieces, which go
through proxies. `schedules.varlen.message_order` orders the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_overlap.schedules.varlen.message_order import Links, Rounds, Trip
from megatron_overlap.schedules.varlen.rebalance import Remap
from megatron_overlap.schedules.varlen.ring_groups import Load
from megatron_overlap.schedules.varlen.routing import Route
from megatron_overlap.schedules.varlen.topology import Topology


def out_trip(loads: Sequence[Load], ranks: Sequence[int], links: Links) -> Trip:
    """The way of all loads from their homes to their visits."""
    rounds = Rounds(links)
    last: dict[tuple[int, tuple[int, int]], int] = {}
    cuts = [_cuts(load, ranks, links) for load in loads]
    for step in range(len(ranks) - 1):
        for index, load in enumerate(loads):
            if step >= len(load.visits):
                continue
            source = ranks[load.visits[step - 1] if step else load.home]
            paths = _paths(links.route(source, ranks[load.visits[step]], load.rows[step]), len(cuts[index]))
            for part, path in zip(cuts[index], paths, strict=True):
                rows = part[0], min(part[1], load.rows[step])
                if rows[0] < rows[1]:
                    key = index, part
                    last[key] = rounds.send(path, index, step, rows, after=last.get(key))
    return rounds.trip()


def back_trip(loads: Sequence[Load], ranks: Sequence[int], links: Links) -> Trip:
    """The way of what the visits make of all loads: from each visit to the next, and home from a chunk's last."""
    rounds = Rounds(links)
    arrivals: dict[tuple[int, int], list[int]] = {}
    cuts = [_cuts(load, ranks, links) for load in loads]
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
                paths = _paths(links.route(source, to, stop - first), len(cuts[index]))
                for part, path in zip(cuts[index], paths, strict=True):
                    rows = max(part[0], first), min(part[1], stop)
                    if rows[0] >= rows[1]:
                        continue
                    needs = arrivals.get((index, step), ())
                    sent = rounds.send(path, index, step, rows, needs=needs, home=home)
                    if not home:
                        arrivals.setdefault((index, step + 1), []).append(sent)
    return rounds.trip()


def remap_trip(moves: Remap) -> Trip:
    """The way of the rows of a remap: one load a move, each from its source straight to its goal."""
    # All rows are there from the start, so that the links' speed decides nothing.
    rounds = Rounds(Links(Topology(1, len(moves.before)), row_bytes=1))
    for index, move in enumerate(moves.moves):
        rounds.send((move.source, move.to), index, 0, (0, move.rows))
    return rounds.trip()


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


def _cuts(load: Load, ranks: Sequence[int], links: Links) -> list[tuple[int, int]]:
    """The rows of a load, cut as the way between nodes that takes most lanes and pieces asks for."""
    total, most = load.rows[0], 1
    stops = [ranks[load.home], *(ranks[place] for place in load.visits)]
    for source, to, rows in zip(stops, stops[1:], load.rows, strict=False):
        route = links.route(source, to, rows)
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
