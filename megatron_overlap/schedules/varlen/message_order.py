"""Routes transfers over NICs, and assigns every message of one operation to a round: the order of posting on each rank.

A direct transfer between two ranks of different nodes uses one NIC while the other NICs of the node may be idle. A
routed transfer (Zeppelin, arXiv 2509.21841, section 4.2) is split over NICs, where the cost model predicts a gain. The
source dispatches each share to a proxy rank next to the NIC, the proxies send in parallel, and the proxies of the other
node pass their shares to the destination.

The messages of one round do not depend on each other: a message has a later round than the messages that bring its
rows. Posting in the order of rounds therefore cannot deadlock on any transport. NCCL carries the messages of a rank in
one round in one call, so a rank makes at most as many calls as there are hops on the longest path of a payload.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from megatron_overlap.schedules.varlen.topology import Topology

type Paths = tuple[tuple[int, ...], ...]
"""For each share of a transfer the ranks that it passes, from the source to the destination."""


class Message(NamedTuple):
    """Rows `start` to `stop` of the payload with index `payload`, sent from rank `source` to rank `to`.

    Attributes:
        step: the ring step that receives the rows; for results, the ring step that computed them.
        after: indices of the messages that bring the rows to `source`; none if `source` holds or computes them.
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
    after: tuple[int, ...]
    is_final: bool
    to_owner: bool = False


@dataclass(frozen=True, eq=False)
class MessagePlan:
    """The messages of all ranks of one operation. A message comes after the messages that it depends on."""

    messages: tuple[Message, ...]

    @cached_property
    def _of_ranks(self) -> dict[int, list[int]]:
        found = defaultdict[int, list[int]](list)
        for index, message in enumerate(self.messages):
            found[message.source].append(index)
            found[message.to].append(index)
        return found

    def of(self, rank: int) -> Sequence[int]:
        """Indices of the messages that `rank` sends or receives, ascending."""
        return self._of_ranks.get(rank, ())


@dataclass(slots=True)
class MessageBuilder:
    """Builds the messages that carry rows of `row_bytes` bytes from rank to rank."""

    topology: Topology
    row_bytes: int
    _messages: list[Message] = field(default_factory=list)

    def paths(self, source: int, to: int, rows: int) -> Paths:
        """The paths of `rows` rows: without proxies inside a node, and where routing is not modelled to be faster."""
        topology, num_bytes = self.topology, rows * self.row_bytes
        if topology.routing and topology.is_inter(source, to):
            paths = _paths_over_nics(source, to, topology)
            direct_us = topology.inter_latency_us + num_bytes / topology.inter_gbps / 1e3
            if _routed_us(num_bytes, len(paths), topology) < direct_us:
                return paths
        return ((source, to),)

    def transfer(
        self,
        source: int,
        to: int,
        payload: int,
        step: int,
        rows: tuple[int, int],
        *,
        after: Sequence[int] = (),
        needs: Sequence[int] = (),
        to_owner: bool = False,
    ) -> list[int]:
        """Adds the messages of one transfer; returns the indices of those that reach its destination.

        Args:
            rows: first row, and the row after the last; none if they are equal.
            after: indices of the messages that bring the rows to `source`, and maybe others; empty if it holds them.
            needs: indices of the messages that `source` receives before it computes the rows.
        """
        first, num_rows, arrive = rows[0], rows[1] - rows[0], list[int]()
        paths = self.paths(source, to, num_rows)
        bounds = [first + num_rows * share // len(paths) for share in range(len(paths) + 1)]
        for path, (start, stop) in zip(paths, pairwise(bounds), strict=True):
            if start == stop:
                continue
            brings = tuple(k for k in after if self._messages[k].start < stop and start < self._messages[k].stop)
            earlier = brings or needs
            for sender, receiver in pairwise(path):
                number = 1 + max((self._messages[k].round for k in earlier), default=-1)
                is_final = receiver == to
                self._messages.append(
                    Message(sender, receiver, payload, step, start, stop, number, brings, is_final, to_owner)
                )
                earlier = brings = (len(self._messages) - 1,)
            arrive.append(len(self._messages) - 1)
        return arrive

    def build(self) -> MessagePlan:
        """The messages of all transfers."""
        return MessagePlan(tuple(self._messages))


def _routed_us(num_bytes: int, nics: int, topology: Topology) -> float:
    """Modelled time of the three stages of a routed transfer, one after another."""
    local_us = topology.intra_latency_us + num_bytes * (nics - 1) / nics / topology.intra_gbps / 1e3
    return local_us + topology.inter_latency_us + num_bytes / nics / topology.inter_gbps / 1e3 + local_us


@lru_cache(maxsize=1024)
def _paths_over_nics(source: int, to: int, topology: Topology) -> Paths:
    """The paths of the shares of a routed transfer, one share per NIC."""
    # NICs with an adjacent device: a device can send only through these.
    usable = sorted({topology.nic_of(rank) for rank in range(topology.devices_per_node)})
    # The NIC next to the source comes first: it needs no dispatch. A path uses the NIC of the same number on both
    # nodes, because rail-optimised switches connect these.
    own, paths = usable.index(topology.nic_of(source)), []
    for nic in usable[own:] + usable[:own]:
        proxies = _proxy_of(nic, source, topology), _proxy_of(nic, to, topology)
        # A proxy may be the source or the destination itself.
        paths.append(tuple(dict.fromkeys((source, *proxies, to))))
    return tuple(paths)


def _proxy_of(nic: int, rank: int, topology: Topology) -> int:
    """`rank` if the NIC is adjacent to it, else the first adjacent device of its node."""
    if topology.nic_of(rank) == nic:
        return rank
    first = topology.node_of(rank) * topology.devices_per_node
    return next(other for other in range(first, first + topology.devices_per_node) if topology.nic_of(other) == nic)
