"""The messages of one p2p_work, and the order in which every rank posts its own.

A rank's messages have rounds: in one it sends one message and receives one, at most, and what a message forwards has
come in an earlier round. Posted in the order of rounds they cannot deadlock, on no transport.

On a stream nothing passes what was posted before it, so a message whose rows are not there yet holds up all that
follow. Rounds are therefore given in the order in which the links are modelled to have brought what a message carries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from megatron_overlap.schedules.varlen.routing import Route, plan_route
from megatron_overlap.schedules.varlen.topology import FS_PER_US, Topology

_Port = tuple[bool, int, int]
"""One direction of a link's end: whether it sends, its node (-1: inside one), its card or rank."""


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
    """The messages of one p2p_work, none before the one it is after."""

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


@dataclass(frozen=True, slots=True)
class Links:
    """What messages of some kind take.

    Attributes:
        topology: nodes and cards.
        row_bytes: of one row.
        cards: see `plan_route`.
    """

    topology: Topology
    row_bytes: int
    cards: int | None = None

    def route(self, source: int, to: int, rows: int) -> Route:
        """How rows travel."""
        return plan_route(source, to, rows * self.row_bytes, self.topology, cards=self.cards)

    def takes_fs(self, source: int, to: int, rows: int) -> tuple[int, int]:
        """Modelled time for which a message keeps its link busy, and for which it is on its way after that."""
        topology = self.topology
        inside = topology.node_of(source) == topology.node_of(to)
        gbps = topology.intra_gbps if inside else topology.inter_gbps
        latency_us = topology.intra_latency_us if inside else topology.inter_latency_us
        return rows * self.row_bytes * round(1e6 / gbps), round(latency_us * FS_PER_US)

    def ports(self, source: int, to: int) -> tuple[_Port, _Port]:
        """The two ends of the link: that of a device inside its node, or of a card between nodes."""
        topology = self.topology
        nodes = topology.node_of(source), topology.node_of(to)
        if nodes[0] == nodes[1]:
            return (True, -1, source), (False, -1, to)
        return (True, nodes[0], topology.nic_of(source)), (False, nodes[1], topology.nic_of(to))


class _Sent(NamedTuple):
    """A message that has no round yet; `needs` are those before it."""

    source: int
    to: int
    load: int
    step: int
    rows: tuple[int, int]
    after: int | None
    ends: bool
    home: bool
    needs: Sequence[int]


class Rounds:
    """Collects the messages of a trip, and orders them."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._sent: list[_Sent] = []

    def send(
        self,
        path: Sequence[int],
        load: int,
        step: int,
        rows: tuple[int, int],
        *,
        after: int | None = None,
        needs: Sequence[int] = (),
        home: bool = False,
    ) -> int:
        """Adds the messages along a path of ranks; returns the index of the last one.

        Args:
            after: index of the message that brings the rows to the first rank; None: that rank makes them,
            needs: from these messages.
        """
        for hop, (source, to) in enumerate(zip(path, path[1:], strict=False)):
            needs = needs if after is None else (after,)
            self._sent.append(_Sent(source, to, load, step, rows, after, hop == len(path) - 2, home, needs))
            after = len(self._sent) - 1
        assert after is not None
        return after

    def trip(self) -> Trip:
        """All messages with their rounds: a list schedule over the ports of all links.

        A port that is free takes, of the messages that are ready, the one behind which most is still to travel.
        """
        sent, takes_fs = self._sent, [self._links.takes_fs(m.source, m.to, m.rows[1] - m.rows[0]) for m in self._sent]
        followers, left_fs = _followers(sent, [sum(both) for both in takes_fs])
        ports = {(m.source, m.to): self._links.ports(m.source, m.to) for m in sent}
        missing = [len(m.needs) for m in sent]
        rounds, earliest, ready_fs = ([0] * len(sent) for _ in range(3))
        sends, receives = defaultdict[int, int](int), defaultdict[int, int](int)
        free_fs = defaultdict[_Port, int](int)
        waiting = defaultdict[_Port, list[tuple[int, int]]](list)
        # Times at which a message is ready, or a port may be free; at the same time ports come last.
        nobody = len(sent)
        events: list[tuple[int, int, _Port | None]] = [(0, n, None) for n, count in enumerate(missing) if not count]
        while events:
            now_fs, index, leaves = heappop(events)
            if leaves is None:
                leaves = ports[sent[index].source, sent[index].to][0]
                heappush(waiting[leaves], (-left_fs[index], index))
                heappush(events, (max(now_fs, free_fs[leaves]), nobody, leaves))
                continue
            if free_fs[leaves] > now_fs or not waiting[leaves]:
                continue
            _, index = heappop(waiting[leaves])
            source, to = sent[index].source, sent[index].to
            reaches, (on_link_fs, latency_fs) = ports[source, to][1], takes_fs[index]
            end_fs = free_fs[leaves] = free_fs[reaches] = max(now_fs, free_fs[reaches]) + on_link_fs
            heappush(events, (end_fs, nobody, leaves))
            number = rounds[index] = max(earliest[index], sends[source], receives[to])
            sends[source] = receives[to] = number + 1
            for follower in followers[index]:
                # No `max` here: a sum of many parts has many followers, and calls take most of the time.
                if ready_fs[follower] < end_fs + latency_fs:
                    ready_fs[follower] = end_fs + latency_fs
                if earliest[follower] <= number:
                    earliest[follower] = number + 1
                missing[follower] -= 1
                if not missing[follower]:
                    heappush(events, (ready_fs[follower], follower, None))
        pairs = zip(sent, rounds, strict=True)
        return Trip(
            tuple(Message(m.source, m.to, m.load, m.step, *m.rows, n, m.after, m.ends, m.home) for m, n in pairs)
        )


def _followers(sent: Sequence[_Sent], takes_fs: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Who needs each message, and how long what is left of the way takes from it on."""
    followers: list[list[int]] = [[] for _ in sent]
    left_fs = [0] * len(sent)
    for index in range(len(sent) - 1, -1, -1):
        left_fs[index] += takes_fs[index]
        for need in sent[index].needs:
            followers[need].append(index)
            if left_fs[need] < left_fs[index]:
                left_fs[need] = left_fs[index]
    return followers, left_fs
