"""Routes transfers over NICs, and assigns every message of one P2PWork to a round: the order of posting on each rank.

A direct transfer between two ranks of different nodes uses one NIC while the other NICs of the node may be idle. A
routed transfer (Zeppelin, arXiv 2509.21841, section 4.2) is split over NICs, where the cost model predicts a gain. The
source dispatches each share to a proxy rank next to the NIC, the proxies send in parallel, and the proxies of the other
node pass their shares to the destination. Each share is cut into pieces, so that the three stages overlap.

In one round a rank sends at most one message and receives at most one. A forwarded message has a later round than the
message that brings its rows. Posting in the order of rounds therefore cannot deadlock on any transport. Rounds follow
the modelled order in which the links deliver the rows: in a stream a message that is not ready delays all later ones.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from megatron_overlap.schedules.varlen.topology import FS_PER_US, Topology

_PIECES = (1, 2, 4, 8, 16, 32)
_Port = tuple[bool, int, int]
"""One direction of a link end: whether it sends, its node (-1 inside a node), its NIC or rank."""


class Message(NamedTuple):
    """Rows `start` to `stop` of the payload with index `payload`, sent from rank `source` to rank `to`.

    Attributes:
        step: the ring step that receives the rows; for results, the ring step that computed them.
        round: number of the message on both ranks.
        after: index of the message that brings the rows to `source`; None if `source` holds or computes them.
        is_final: `to` is the destination; otherwise `to` is a proxy that forwards the rows.
        to_owner: the rows are results for the owner of the payload.
    """

    source: int
    to: int
    payload: int
    step: int
    start: int
    stop: int
    round: int
    after: int | None
    is_final: bool
    to_owner: bool = False


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """The messages of one P2PWork of all ranks. A message comes after the message that it forwards."""

    messages: tuple[Message, ...]

    def rounds(self, rank: int) -> list[tuple[int | None, int | None]]:
        """Index of the message that `rank` sends and of the message that it receives in each round, or None.

        All ranks have the same number of rounds: messages of a later plan have the same numbers on both ranks.
        """
        sent = {message.round: index for index, message in enumerate(self.messages) if message.source == rank}
        received = {message.round: index for index, message in enumerate(self.messages) if message.to == rank}
        num_rounds = 1 + max((message.round for message in self.messages), default=-1)
        return [(sent.get(number), received.get(number)) for number in range(num_rounds)]


@dataclass(frozen=True, slots=True)
class Route:
    """The route of one transfer.

    Attributes:
        paths: for each NIC the ranks that its share passes, from the source to the destination. A direct transfer has
            one path of two ranks.
        pieces: number of messages of each share.
        modelled_us: modelled time.
    """

    paths: tuple[tuple[int, ...], ...]
    pieces: int
    modelled_us: float


@dataclass(slots=True)
class MessageScheduler:
    """Collects messages with rows of `row_bytes`, then assigns their rounds.

    A transfer uses at most `max_nics` NICs of a node; None is all.
    """

    topology: Topology
    row_bytes: int
    max_nics: int | None = None
    _sent: list[Message] = field(default_factory=list)
    _needs: list[Sequence[int]] = field(default_factory=list)
    """The messages that must arrive before a message leaves."""

    def route(self, source: int, to: int, rows: int) -> Route:
        """The route of `rows` rows: direct inside a node, and where routing is not modelled to be faster."""
        topology, num_bytes = self.topology, rows * self.row_bytes
        gbps, latency_us = topology.link(source, to)
        direct = Route(((source, to),), 1, latency_us + num_bytes / gbps / 1e3)
        # NICs with an adjacent device: a device can send only through these.
        usable = sorted({topology.nic_of(rank) for rank in range(topology.devices_per_node)})
        nics = len(usable) if self.max_nics is None else min(self.max_nics, len(usable))
        if not topology.is_inter(source, to) or not topology.routing or nics < 2:
            return direct
        routed_us, pieces = min((_routed_us(num_bytes, nics, pieces, topology), pieces) for pieces in _PIECES)
        if routed_us >= direct.modelled_us:
            return direct
        # The NIC next to the source comes first: it needs no dispatch. A path uses the NIC of the same number on both
        # nodes, because rail-optimised switches connect these.
        own = usable.index(topology.nic_of(source))
        paths = []
        for number in range(nics):
            nic = usable[(own + number) % len(usable)]
            proxies = _proxy_of(nic, source, topology), _proxy_of(nic, to, topology)
            # A proxy may be the source or the destination itself.
            paths.append(tuple(dict.fromkeys((source, *proxies, to))))
        return Route(tuple(paths), pieces, routed_us)

    def add(
        self,
        path: Sequence[int],
        payload: int,
        step: int,
        rows: tuple[int, int],
        *,
        after: int | None = None,
        needs: Sequence[int] = (),
        to_owner: bool = False,
    ) -> int:
        """Adds one message for each hop of a path of ranks; returns the index of the last one.

        Args:
            rows: first row, and the row after the last.
            after: index of the message that brings the rows to `path[0]`; None if `path[0]` computes them.
            needs: messages that `path[0]` receives before it computes the rows; used if `after` is None.
        """
        for hop, (source, to) in enumerate(zip(path, path[1:], strict=False)):
            self._needs.append(needs if after is None else (after,))
            is_final = hop == len(path) - 2
            self._sent.append(Message(source, to, payload, step, *rows, 0, after, is_final, to_owner))
            after = len(self._sent) - 1
        assert after is not None
        return after

    def schedule(self) -> MessagePlan:
        """Returns all messages with their rounds: a list schedule over the ports of all links.

        A free port takes the ready message with the longest remaining path.
        """
        sent, time_fs = self._sent, list(map(self._time_fs, self._sent))
        followers, left_fs = _followers(self._needs, [sum(both) for both in time_fs])
        ports = {(m.source, m.to): self._ports(m.source, m.to) for m in sent}
        missing = [len(needs) for needs in self._needs]
        rounds, earliest, ready_fs = ([0] * len(sent) for _ in range(3))
        sends, receives = defaultdict[int, int](int), defaultdict[int, int](int)
        free_fs = defaultdict[_Port, int](int)
        waiting = defaultdict[_Port, list[tuple[int, int]]](list)
        # Events are (time, message, None) when a message becomes ready, or (time, no_message, port) when a port becomes
        # free. At equal times the port events come last.
        no_message = len(sent)
        events: list[tuple[int, int, _Port | None]] = [(0, n, None) for n, count in enumerate(missing) if not count]
        while events:
            now_fs, index, out_port = heappop(events)
            if out_port is None:
                out_port = ports[sent[index].source, sent[index].to][0]
                heappush(waiting[out_port], (-left_fs[index], index))
                heappush(events, (max(now_fs, free_fs[out_port]), no_message, out_port))
                continue
            if free_fs[out_port] > now_fs or not waiting[out_port]:
                continue
            _, index = heappop(waiting[out_port])
            source, to = sent[index].source, sent[index].to
            in_port, (on_link_fs, latency_fs) = ports[source, to][1], time_fs[index]
            end_fs = free_fs[out_port] = free_fs[in_port] = max(now_fs, free_fs[in_port]) + on_link_fs
            heappush(events, (end_fs, no_message, out_port))
            number = rounds[index] = max(earliest[index], sends[source], receives[to])
            sends[source] = receives[to] = number + 1
            for follower in followers[index]:
                # Comparisons instead of `max`: this loop dominates, and a call costs more than the comparison.
                if ready_fs[follower] < end_fs + latency_fs:
                    ready_fs[follower] = end_fs + latency_fs
                if earliest[follower] <= number:
                    earliest[follower] = number + 1
                missing[follower] -= 1
                if not missing[follower]:
                    heappush(events, (ready_fs[follower], follower, None))
        return MessagePlan(tuple(m._replace(round=number) for m, number in zip(sent, rounds, strict=True)))

    def _time_fs(self, message: Message) -> tuple[int, int]:
        """Modelled time for which a message occupies its link, and its latency after that."""
        gbps, latency_us = self.topology.link(message.source, message.to)
        num_bytes = (message.stop - message.start) * self.row_bytes
        return num_bytes * round(1e6 / gbps), round(latency_us * FS_PER_US)

    def _ports(self, source: int, to: int) -> tuple[_Port, _Port]:
        """Both ends of the link: the ports of two devices of a node, or of two NICs."""
        topology = self.topology
        if not topology.is_inter(source, to):
            return (True, -1, source), (False, -1, to)
        sends, receives = ((topology.node_of(rank), topology.nic_of(rank)) for rank in (source, to))
        return (True, *sends), (False, *receives)


def _routed_us(num_bytes: int, nics: int, pieces: int, topology: Topology) -> float:
    """Modelled time of three pipelined stages: the first piece passes all three, the rest follow at the slowest."""
    piece_bytes = num_bytes / nics / pieces
    local_us = topology.intra_latency_us + piece_bytes * (nics - 1) / topology.intra_gbps / 1e3
    inter_us = topology.inter_latency_us + piece_bytes / topology.inter_gbps / 1e3
    return local_us + inter_us + local_us + (pieces - 1) * max(local_us, inter_us)


def _proxy_of(nic: int, rank: int, topology: Topology) -> int:
    """`rank` if the NIC is adjacent to it, else the first adjacent device of its node."""
    if topology.nic_of(rank) == nic:
        return rank
    first = topology.node_of(rank) * topology.devices_per_node
    return next(other for other in range(first, first + topology.devices_per_node) if topology.nic_of(other) == nic)


def _followers(needs: Sequence[Sequence[int]], time_fs: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """For each message the messages that need it, and the time of the longest path that starts with it."""
    followers: list[list[int]] = [[] for _ in needs]
    left_fs = [0] * len(needs)
    for index in range(len(needs) - 1, -1, -1):
        left_fs[index] += time_fs[index]
        for need in needs[index]:
            followers[need].append(index)
            if left_fs[need] < left_fs[index]:
                left_fs[need] = left_fs[index]
    return followers, left_fs
