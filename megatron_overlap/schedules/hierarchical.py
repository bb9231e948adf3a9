"""Plans of the inter-node messages of a group that spans several hosts, along rails of ranks with the same local index.

    host 0: 0 1 2 3        rank r has local index r % P on host r // P;
    host 1: 4 5 6 7        the rails are 0 4, 1 5, ...: inter-node messages stay on a rail

Each row is sent once to every other host, and all ranks use their inter-node links equally. An intra-node method then
gathers or sums the rows of the rails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_overlap.schedules.gather_scatter import all_gather_plan, reduce_scatter_plan
from megatron_overlap.schedules.layout import Chunk, ChunkLayout
from megatron_overlap.schedules.plan import Message, Plan


@dataclass(frozen=True, slots=True)
class Nodes:
    """Placement of the ranks of a group: `per_node` consecutive ranks on each of `num_nodes` hosts.

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
        """Return the placement for the host name of each rank, in rank order.

        Raises:
            ValueError: hosts have different numbers of ranks, or the ranks of a host are not consecutive.
        """
        names = list(dict.fromkeys(hosts))
        counts = [hosts.count(name) for name in names]
        if len(set(counts)) > 1:
            found = ", ".join(f"{count} on {name}" for name, count in zip(names, counts, strict=True))
            raise ValueError(f"the hosts of the group have different numbers of its ranks: {found}")
        if list(hosts) != [name for name in names for _ in range(counts[0])]:
            raise ValueError("the ranks of a host are not consecutive in the group")
        return cls(len(names), counts[0])

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the group."""
        return self.num_nodes * self.per_node

    def node(self, rank: int) -> int:
        """Return the host of `rank`."""
        return rank // self.per_node

    def place(self, rank: int) -> int:
        """Return the local index of `rank` on its host."""
        return rank % self.per_node

    def members(self, node: int) -> range:
        """Return the ranks on host `node`."""
        return range(node * self.per_node, (node + 1) * self.per_node)

    def rows(self, num_rows: int, node: int) -> tuple[int, int]:
        """Return the start and stop row of the shards of all ranks on host `node`.

        `ChunkLayout` of these rows over the ranks of the host gives the same shards as the layout of the whole group.
        """
        layout = ChunkLayout(num_rows, self.num_ranks)
        members = self.members(node)
        return layout.shard(members[0])[0], layout.shard(members[-1])[1]

    def gather(self, rank: int) -> Plan:
        """Return the direct all-gather plan over hosts for `rank`: rows of the own host first.

        The owner of a chunk is a host in `work` and a rank in `messages`.
        """
        return _along_rail(all_gather_plan, self, rank)

    def scatter(self, rank: int) -> Plan:
        """Return the direct reduce-scatter plan over hosts for `rank`: own rows last. Owners as in `gather`."""
        return _along_rail(reduce_scatter_plan, self, rank)


# Cached, because every call of an operation requests its plan.
@lru_cache(maxsize=128)
def _along_rail(build: Callable[[int, int], Plan], nodes: Nodes, rank: int) -> Plan:
    plan = build(nodes.num_nodes, nodes.node(rank))

    def on_rail(node: int) -> int:
        return node * nodes.per_node + nodes.place(rank)

    def of_rank(message: Message) -> Message:
        return replace(
            message,
            send=Chunk(on_rail(message.send.owner), 0),
            to=on_rail(message.to),
            recv=Chunk(on_rail(message.recv.owner), 0),
            source=on_rail(message.source),
            # The GEMMs of the next node hide the sums, and are many: with one hardware queue sums precede them.
            not_before=message.after_work or message.not_before,
        )

    return replace(plan, messages=tuple(map(of_rank, plan.messages)))
