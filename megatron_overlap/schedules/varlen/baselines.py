"""Other placements of a batch in the same plan format, for comparison: one engine executes them all."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from megatron_overlap.schedules.varlen.partition import check_room, partition
from megatron_overlap.schedules.varlen.plan import Exchange, Pass, Plan, Ring, make_ring
from megatron_overlap.schedules.varlen.topology import CostModel, Topology


def ring_over_all(lengths: Sequence[int], topology: Topology, *, capacity: int, cost: CostModel | None = None) -> Plan:
    """Every document over every rank in zigzag order, pass-KV around one ring (TransformerEngine's `p2p`).

    Documents fill passes in batch order. There is no padding: TransformerEngine pads each document to a multiple of
    twice the number of ranks, which would only make this baseline slower.

    Raises:
        CapacityError: a document is longer than one pass of all ranks.
        ValueError: see `partition`.
    """
    return _cut_all("ring", "ring", lengths, topology, capacity, cost)


def all_gather(lengths: Sequence[int], topology: Topology, *, capacity: int, cost: CostModel | None = None) -> Plan:
    """The layout of `ring_over_all`, but every rank gathers all keys and values before it computes.

    Raises:
        CapacityError: a document is longer than one pass of all ranks.
        ValueError: see `partition`.
    """
    return _cut_all("all_gather", "all_gather", lengths, topology, capacity, cost)


METHODS: Mapping[str, Callable[..., Plan]] = MappingProxyType(
    {"balanced": partition, "ring": ring_over_all, "all_gather": all_gather}
)


def _cut_all(
    name: str, exchange: Exchange, lengths: Sequence[int], topology: Topology, capacity: int, cost: CostModel | None
) -> Plan:
    check_room(lengths, topology, capacity)
    room = topology.ranks * capacity
    passes: list[Pass] = []
    rings: list[Ring] = []
    whole: list[list[int]] = [[] for _ in range(topology.ranks)]
    tokens = 0

    def close_pass() -> None:
        passes.append(Pass(tuple(map(tuple, whole)), tuple(rings), len(passes)))
        rings.clear()
        for documents in whole:
            documents.clear()

    for document, length in enumerate(lengths):
        if not length:
            continue
        if tokens + length > room:
            close_pass()
            tokens = 0
        if length == 1 or topology.ranks == 1:
            whole[tokens % topology.ranks].append(document)
        else:
            rings.append(even_ring(document, length, range(topology.ranks), tokens, topology))
        tokens += length
    if tokens or not passes:
        close_pass()
    return Plan(name, tuple(lengths), topology, cost or CostModel(), capacity, tuple(passes), exchange)


def even_ring(document: int, length: int, ranks: Sequence[int], first: int, topology: Topology) -> Ring:
    """A ring of equal shares. The remainder goes, one token each, to the members from number `first` on.

    If each document continues where the previous one ended, the shares of many documents add up evenly.
    """
    size = len(ranks)
    share, extra = divmod(length, size)
    counts = [share + ((position - first) % size < extra) for position in range(size)]
    return make_ring(document, [(rank, n) for rank, n in zip(ranks, counts, strict=True) if n], topology)
