"""One transfer between nodes over several network cards (Zeppelin, arXiv 2509.21841, section 4.2).

A transfer from one rank to one rank of another node uses one card while the node's other cards may be idle. Routed, it
is cut in lanes, one a card: the source dispatches each lane to a proxy beside that card, the proxies send in parallel,
and on the other side proxies hand their lanes to the destination, which combines them. Cut further in pieces, the three
stages overlap. It costs two trips inside the nodes, so that it is used for a transfer only where the cost model says
that it wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_overlap.schedules.varlen.topology import Topology

Stage = Literal["dispatch", "wire", "combine"]
_PIECES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Lane:
    """Bytes `start` to `stop` of a transfer, and the ranks they go through; a proxy may be the end itself."""

    nic: int
    proxy: int
    far_proxy: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Hop:
    """One message: bytes `start` to `stop` from rank `source` to rank `to`. `after` is the index of the hop that brings
    them to `source`; None where they are there from the start."""

    stage: Stage
    source: int
    to: int
    start: int
    stop: int
    after: int | None


@dataclass(frozen=True, slots=True)
class Route:
    """How one transfer travels.

    Attributes:
        source: rank that has the bytes.
        to: rank that wants them.
        num_bytes: how many.
        lanes: one, from end to end, where the transfer goes directly.
        pieces: each lane is sent in so many messages.
        direct_us: modelled time over one card.
        routed_us: modelled time as planned; `direct_us` where the transfer goes directly.
    """

    source: int
    to: int
    num_bytes: int
    lanes: tuple[Lane, ...]
    pieces: int
    direct_us: float
    routed_us: float

    @property
    def routed(self) -> bool:
        return len(self.lanes) > 1

    def hops(self) -> tuple[Hop, ...]:
        """All messages, piece by piece: each rank may post its own in this order, and none precedes its `after`."""
        hops: list[Hop] = []
        for piece in range(self.pieces):
            for lane in self.lanes:
                size = lane.stop - lane.start
                start = lane.start + size * piece // self.pieces
                stop = lane.start + size * (piece + 1) // self.pieces
                if start == stop:
                    continue
                stages: tuple[tuple[Stage, int, int], ...] = (
                    ("dispatch", self.source, lane.proxy),
                    ("wire", lane.proxy, lane.far_proxy),
                    ("combine", lane.far_proxy, self.to),
                )
                after = None
                for stage, source, to in stages:
                    if source != to:
                        hops.append(Hop(stage, source, to, start, stop, after))
                        after = len(hops) - 1
        return tuple(hops)

    def describe(self) -> str:
        """The route as text."""
        what = f"{self.num_bytes} bytes, rank {self.source} to {self.to}"
        if not self.routed:
            return f"{what}: direct, {self.direct_us:.1f} us modelled"
        lanes = "; ".join(
            f"card {lane.nic}: {self.source} > {lane.proxy} > {lane.far_proxy} > {self.to} [{lane.start}:{lane.stop}]"
            for lane in self.lanes
        )
        times = f"{self.routed_us:.1f} us modelled, direct {self.direct_us:.1f}"
        return f"{what}: {len(self.lanes)} lanes of {self.pieces} piece(s), {times}: {lanes}"


def plan_route(source: int, to: int, num_bytes: int, topology: Topology, *, cards: int | None = None) -> Route:
    """Plan one transfer.

    Equal to `to.buffer[:num_bytes] = source.buffer[:num_bytes]`, whatever the route.

    Args:
        source: rank that has the bytes.
        to: rank that wants them.
        num_bytes: how many.
        topology: nodes, cards, bandwidths; `topology.routing` False forbids routes.
        cards: of a node that it may use at most, where others use the rest; None: all of them.

    Returns:
        The route; direct inside a node, and where routing does not win.

    Raises:
        ValueError: a rank is not one of the topology, or a count is wrong.
    """
    for name, rank in (("source", source), ("to", to)):
        if not 0 <= rank < topology.ranks:
            raise ValueError(f"{name}: {rank}: give a rank below {topology.ranks}")
    if num_bytes < 0 or (cards is not None and cards < 1):
        raise ValueError(f"num_bytes: {num_bytes}, cards: {cards}: give at least 0 and 1")
    inside = topology.node_of(source) == topology.node_of(to)
    gbps = topology.intra_gbps if inside else topology.inter_gbps
    direct_us = (topology.intra_latency_us if inside else topology.inter_latency_us) + num_bytes / gbps / 1e3
    if source == to:
        direct_us = 0.0
    direct = (Lane(topology.nic_of(source), source, to, 0, num_bytes),)
    usable = len(_cards(topology))
    cards = usable if cards is None else min(cards, usable)
    if inside or not topology.routing or cards < 2:
        return Route(source, to, num_bytes, direct, 1, direct_us, direct_us)
    routed_us, pieces = min((_routed_us(num_bytes, cards, pieces, topology), pieces) for pieces in _PIECES)
    if routed_us >= direct_us:
        return Route(source, to, num_bytes, direct, 1, direct_us, direct_us)
    return Route(source, to, num_bytes, _lanes(source, to, num_bytes, cards, topology), pieces, direct_us, routed_us)


def _routed_us(num_bytes: int, cards: int, pieces: int, topology: Topology) -> float:
    """Three stages, pipelined: the first piece takes all of them, the others follow at the slowest one's pace."""
    lane_bytes = num_bytes / cards / pieces
    trip_us = topology.intra_latency_us + lane_bytes * (cards - 1) / topology.intra_gbps / 1e3
    wire_us = topology.inter_latency_us + lane_bytes / topology.inter_gbps / 1e3
    return trip_us + wire_us + trip_us + (pieces - 1) * max(trip_us, wire_us)


def _lanes(source: int, to: int, num_bytes: int, cards: int, topology: Topology) -> tuple[Lane, ...]:
    """The source's own card first: it needs no dispatch. The same card on both sides: switches come in rails."""
    usable = _cards(topology)
    own = usable.index(topology.nic_of(source))
    lanes = []
    for number in range(cards):
        nic = usable[(own + number) % len(usable)]
        start, stop = num_bytes * number // cards, num_bytes * (number + 1) // cards
        lanes.append(Lane(nic, _beside(nic, source, topology), _beside(nic, to, topology), start, stop))
    return tuple(lanes)


def _cards(topology: Topology) -> list[int]:
    """Cards with a device beside them: the only ones a device can send through."""
    return sorted({topology.nic_of(rank) for rank in range(topology.devices_per_node)})


def _beside(nic: int, rank: int, topology: Topology) -> int:
    """The rank itself where the card is its own, else the first device of its node beside the card."""
    if topology.nic_of(rank) == nic:
        return rank
    first = topology.node_of(rank) * topology.devices_per_node
    return next(other for other in range(first, first + topology.devices_per_node) if topology.nic_of(other) == nic)
