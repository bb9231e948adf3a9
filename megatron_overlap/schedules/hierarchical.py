"""A group whose ranks lie on several hosts: what travels between hosts, along rails of ranks with the same place.

    host 0: 0 1 2 3        rank r is at place r % P of host r // P;
    host 1: 4 5 6 7        a rail is 0 4, or 1 5, ...: messages between hosts run along it

Each row leaves its host once for every other host, and all ranks' links to other hosts are used alike. Inside a host
the rows of a rail are then gathered, or summed, by whatever is fast there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_overlap.schedules.gather_scatter import all_gather_plan, reduce_scatter_plan
from megatron_overlap.schedules.layout import Chunk, ChunkLayout
from megatron_overlap.schedules.plan import Message, Plan


@dataclass(frozen=True, slots=True)
class Nodes:
    """How the ranks of a group lie on hosts: `per_node` ranks in a row on each of `num_nodes`.

    Raises:
        ValueError: a count is below one.
    """

    num_nodes: int
    per_node: int

    def __post_init__(self) -> None:
        for name in ("num_nodes", "per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}: must be at least 1")

    @classmethod
    def of(cls, hosts: Sequence[str]) -> Nodes:
        """From the name of each rank's host, in the order of the ranks.

        Raises:
            ValueError: hosts have different numbers of ranks, or the ranks of a host are not consecutive.
        """
        names = list(dict.fromkeys(hosts))
        counts = [hosts.count(name) for name in names]
        if len(set(counts)) > 1:
            told = ", ".join(f"{count} on {name}" for name, count in zip(names, counts, strict=True))
            raise ValueError(f"the hosts of the group have different numbers of its ranks: {told}")
        if list(hosts) != [name for name in names for _ in range(counts[0])]:
            raise ValueError("the ranks of a host are not consecutive in the group")
        return cls(len(names), counts[0])

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return self.num_nodes * self.per_node

    def node(self, rank: int) -> int:
        """The host that `rank` is on."""
        return rank // self.per_node

    def place(self, rank: int) -> int:
        """The place of `rank` on its host."""
        return rank % self.per_node

    def members(self, node: int) -> range:
        """The ranks on host `node`."""
        return range(node * self.per_node, (node + 1) * self.per_node)

    def rows(self, num_rows: int, node: int) -> tuple[int, int]:
        """Start and stop row of what the ranks of host `node` own together.

        Cut over its ranks alone these rows give the same shards as all rows cut over the group.
        """
        layout = ChunkLayout(num_rows, self.num_ranks)
        members = self.members(node)
        return layout.shard(members[0])[0], layout.shard(members[-1])[1]

    def gather(self, rank: int) -> Plan:
        """What rank `rank` sends and receives, and in which order hosts' rows are there: own ones first.

        A direct plan over hosts. Owners in its chunks are hosts in `work`, and ranks in `messages`.
        """
        return _gather(self, rank)

    def scatter(self, rank: int) -> Plan:
        """In which order hosts' rows are computed, own ones last, and what is sent then; as `gather`."""
        return _scatter(self, rank)


# Every call of an op asks for its plan.
@lru_cache(maxsize=64)
def _gather(nodes: Nodes, rank: int) -> Plan:
    return _along_rail(all_gather_plan(nodes.num_nodes, nodes.node(rank)), nodes, rank)


@lru_cache(maxsize=64)
def _scatter(nodes: Nodes, rank: int) -> Plan:
    return _along_rail(reduce_scatter_plan(nodes.num_nodes, nodes.node(rank)), nodes, rank)


def _along_rail(plan: Plan, nodes: Nodes, rank: int) -> Plan:
    def on_rail(node: int) -> int:
        return node * nodes.per_node + nodes.place(rank)

    def of_rank(message: Message) -> Message:
        return replace(
            message,
            send=Chunk(on_rail(message.send.owner), 0),
            to=on_rail(message.to),
            recv=Chunk(on_rail(message.recv.owner), 0),
            source=on_rail(message.source),
        )

    return replace(plan, messages=tuple(map(of_rank, plan.messages)))
