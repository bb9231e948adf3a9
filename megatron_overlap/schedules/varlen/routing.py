"""Routes one transfer between nodes over several NICs (Zeppelin, arXiv 2509.21841, section 4.2).

A direct transfer between two ranks of different nodes uses one NIC while the other NICs of the node may be idle. A
routed transfer is split over NICs. The source dispatches each share to a proxy rank next to the NIC, the proxies send
in parallel, and the proxies of the other node pass their shares to the destination. Each share is cut further into
pieces, so that the three stages overlap. Routing adds two messages inside the nodes. It is used only where the cost
model predicts a gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_overlap.schedules.varlen.topology import Topology

Stage = Literal["dispatch", "inter_node", "combine"]
_PIECES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class NicPath:
    """The share of a transfer that uses one NIC: bytes `start` to `stop`, and the ranks that they pass.

    A proxy may be the source or the destination itself.
    """

    nic: int
    proxy: int
    far_proxy: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Hop:
    """One message: bytes `start` to `stop` from rank `source` to rank `to`.

    `after` is the index of the hop that brings the bytes to `source`; None at the source of the route.
    """

    stage: Stage
    source: int
    to: int
    start: int
    stop: int
    after: int | None


@dataclass(frozen=True, slots=True)
class Route:
    """The route of one transfer.

    Attributes:
        source: rank that holds the bytes.
        to: rank that receives them.
        num_bytes: bytes of the transfer.
        nic_paths: one path per NIC; a direct transfer has one, without proxies.
        pieces: number of messages of each path.
        direct_us: modelled time over one NIC.
        routed_us: modelled time as planned; equal to `direct_us` for a direct transfer.
    """

    source: int
    to: int
    num_bytes: int
    nic_paths: tuple[NicPath, ...]
    pieces: int
    direct_us: float
    routed_us: float

    @property
    def routed(self) -> bool:
        return len(self.nic_paths) > 1

    def hops(self) -> tuple[Hop, ...]:
        """All messages, piece by piece. Each rank may post its own in this order; none precedes its `after`."""
        hops: list[Hop] = []
        for piece in range(self.pieces):
            for path in self.nic_paths:
                size = path.stop - path.start
                start = path.start + size * piece // self.pieces
                stop = path.start + size * (piece + 1) // self.pieces
                if start == stop:
                    continue
                stages: tuple[tuple[Stage, int, int], ...] = (
                    ("dispatch", self.source, path.proxy),
                    ("inter_node", path.proxy, path.far_proxy),
                    ("combine", path.far_proxy, self.to),
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
        paths = "; ".join(
            f"NIC {path.nic}: {self.source} > {path.proxy} > {path.far_proxy} > {self.to} [{path.start}:{path.stop}]"
            for path in self.nic_paths
        )
        times = f"{self.routed_us:.1f} us modelled, direct {self.direct_us:.1f}"
        return f"{what}: {len(self.nic_paths)} NICs, {self.pieces} piece(s) each, {times}: {paths}"


def plan_route(source: int, to: int, num_bytes: int, topology: Topology, *, max_nics: int | None = None) -> Route:
    """Plans one transfer. Every route equals `to.buffer[:num_bytes] = source.buffer[:num_bytes]`.

    Args:
        source: rank that holds the bytes.
        to: rank that receives them.
        num_bytes: bytes of the transfer.
        topology: nodes, NICs and bandwidths; `topology.routing` False makes every transfer direct.
        max_nics: NICs of a node that the transfer may use; None is all.

    Returns:
        The route. It is direct inside a node, and where routing is not modelled to be faster.

    Raises:
        ValueError: a rank is not in the topology, or a count is out of range.
    """
    for name, rank in (("source", source), ("to", to)):
        if not 0 <= rank < topology.ranks:
            raise ValueError(f"{name}: {rank}: give a rank below {topology.ranks}")
    if num_bytes < 0 or (max_nics is not None and max_nics < 1):
        raise ValueError(f"num_bytes: {num_bytes}, max_nics: {max_nics}: give at least 0 and 1")
    inside = topology.node_of(source) == topology.node_of(to)
    gbps = topology.intra_gbps if inside else topology.inter_gbps
    direct_us = (topology.intra_latency_us if inside else topology.inter_latency_us) + num_bytes / gbps / 1e3
    if source == to:
        direct_us = 0.0
    direct = (NicPath(topology.nic_of(source), source, to, 0, num_bytes),)
    usable = len(_usable_nics(topology))
    nics = usable if max_nics is None else min(max_nics, usable)
    if inside or not topology.routing or nics < 2:
        return Route(source, to, num_bytes, direct, 1, direct_us, direct_us)
    routed_us, pieces = min((_routed_us(num_bytes, nics, pieces, topology), pieces) for pieces in _PIECES)
    if routed_us >= direct_us:
        return Route(source, to, num_bytes, direct, 1, direct_us, direct_us)
    return Route(source, to, num_bytes, _nic_paths(source, to, num_bytes, nics, topology), pieces, direct_us, routed_us)


def _routed_us(num_bytes: int, nics: int, pieces: int, topology: Topology) -> float:
    """Modelled time of three pipelined stages: the first piece passes all three, the rest follow at the slowest."""
    piece_bytes = num_bytes / nics / pieces
    local_us = topology.intra_latency_us + piece_bytes * (nics - 1) / topology.intra_gbps / 1e3
    inter_us = topology.inter_latency_us + piece_bytes / topology.inter_gbps / 1e3
    return local_us + inter_us + local_us + (pieces - 1) * max(local_us, inter_us)


def _nic_paths(source: int, to: int, num_bytes: int, nics: int, topology: Topology) -> tuple[NicPath, ...]:
    """The NIC next to the source comes first: it needs no dispatch.

    A path uses the NIC of the same number on both nodes, because rail-optimised switches connect these.
    """
    usable = _usable_nics(topology)
    own = usable.index(topology.nic_of(source))
    paths = []
    for number in range(nics):
        nic = usable[(own + number) % len(usable)]
        start, stop = num_bytes * number // nics, num_bytes * (number + 1) // nics
        paths.append(NicPath(nic, _proxy_of(nic, source, topology), _proxy_of(nic, to, topology), start, stop))
    return tuple(paths)


def _usable_nics(topology: Topology) -> list[int]:
    """NICs with an adjacent device. A device can send only through these."""
    return sorted({topology.nic_of(rank) for rank in range(topology.devices_per_node)})


def _proxy_of(nic: int, rank: int, topology: Topology) -> int:
    """`rank` if the NIC is adjacent to it, else the first adjacent device of its node."""
    if topology.nic_of(rank) == nic:
        return rank
    first = topology.node_of(rank) * topology.devices_per_node
    return next(other for other in range(first, first + topology.devices_per_node) if topology.nic_of(other) == nic)
