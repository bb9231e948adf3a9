"""What others do with the same batch, in the same plan format: one engine runs them all."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from megatron_overlap.schedules.varlen.hybrid import schedule
from megatron_overlap.schedules.varlen.partition import CapacityError, check_lengths, check_room, partition
from megatron_overlap.schedules.varlen.plan import Exchange, Pass, Plan, Ring, make_ring
from megatron_overlap.schedules.varlen.topology import CostModel, Topology


class Planner(Protocol):
    """What every method of `METHODS` is."""

    def __call__(
        self, lengths: Sequence[int], topology: Topology, *, capacity: int, cost: CostModel | None
    ) -> Plan: ...


def ring_over_all(lengths: Sequence[int], topology: Topology, *, capacity: int, cost: CostModel | None = None) -> Plan:
    """Every document over every rank, zigzag; keys and values go round one ring (TransformerEngine's p2p).

    Documents are packed into passes in the order of the batch. No padding: TransformerEngine pads each document to a
    multiple of twice the ranks, which would only make this baseline slower.

    Raises:
        CapacityError: a document is longer than one pass of all ranks.
        ValueError: see `partition`.
    """
    return _cut_all("ring", "ring", lengths, topology, capacity, cost)


def all_gather(lengths: Sequence[int], topology: Topology, *, capacity: int, cost: CostModel | None = None) -> Plan:
    """The same layout, but every rank gathers all keys and values and then computes (all-gather context parallelism).

    Raises:
        CapacityError: a document is longer than one pass of all ranks.
        ValueError: see `partition`.
    """
    return _cut_all("all_gather", "all_gather", lengths, topology, capacity, cost)


def packing(lengths: Sequence[int], topology: Topology, *, capacity: int, cost: CostModel | None = None) -> Plan:
    """No context parallelism: whole documents, longest first, to the rank with fewest tokens; a new pass once full.

    Raises:
        CapacityError: a document is longer than a rank holds.
        ValueError: see `partition`.
    """
    check_lengths(lengths, capacity)
    longest = max(lengths, default=0)
    if longest > capacity:
        raise CapacityError(
            f"lengths: document {lengths.index(longest)} has {longest} tokens, one rank holds {capacity}: packing "
            "cannot cut it; raise capacity or use another method"
        )
    left = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    left = [document for document in left if lengths[document]]
    passes: list[Pass] = []
    while left or not passes:
        heap = [(0, rank) for rank in range(topology.ranks)]
        local: list[list[int]] = [[] for _ in heap]
        later = []
        for document in left:
            tokens, rank = heap[0]
            if tokens + lengths[document] > capacity:
                later.append(document)
                continue
            local[rank].append(document)
            heapq.heapreplace(heap, (tokens + lengths[document], rank))
        passes.append(Pass(tuple(map(tuple, local)), (), len(passes)))
        left = later
    return Plan("packing", tuple(lengths), topology, cost or CostModel(), capacity, tuple(passes))


def hybrid(lengths: Sequence[int], topology: Topology, *, capacity: int, cost: CostModel | None = None) -> Plan:
    """Megatron-Core's hybrid context parallelism: groups of a power of two ranks, one document a pass.

    The schedule is `schedules.varlen.hybrid`'s. Ranks meet after each of its stages.

    Raises:
        CapacityError: a document is longer than one pass of all ranks.
        ValueError: see `partition`; or the number of ranks is not a power of two.
    """
    check_room(lengths, topology, capacity)
    if topology.ranks & (topology.ranks - 1):
        raise ValueError(f"ranks: {topology.ranks}: hybrid context parallelism needs a power of two")
    passes: list[Pass] = []
    for stage, groups in enumerate(schedule(lengths, topology.ranks, capacity)):
        for turn in range(max(len(group.documents) for group in groups)):
            local: list[tuple[int, ...]] = [()] * topology.ranks
            rings = []
            for group in groups:
                if turn >= len(group.documents):
                    continue
                document = group.documents[turn]
                if len(group.ranks) == 1 or lengths[document] == 1:
                    local[group.ranks[0]] = (document,)
                else:
                    rings.append(_even_ring(document, lengths[document], group.ranks, 0, topology))
            passes.append(Pass(tuple(local), tuple(rings), stage))
    return Plan("hybrid", tuple(lengths), topology, cost or CostModel(), capacity, tuple(passes))


METHODS: Mapping[str, Planner] = MappingProxyType(
    {
        "balanced": partition,
        "ring": ring_over_all,
        "all_gather": all_gather,
        "hybrid": hybrid,
        "packing": packing,
    }
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

    def close() -> None:
        passes.append(Pass(tuple(map(tuple, whole)), tuple(rings), len(passes)))
        rings.clear()
        for documents in whole:
            documents.clear()

    everyone = range(topology.ranks)
    for document, length in enumerate(lengths):
        if not length:
            continue
        if tokens + length > room:
            close()
            tokens = 0
        if length == 1 or topology.ranks == 1:
            whole[tokens % topology.ranks].append(document)
        else:
            rings.append(_even_ring(document, length, everyone, tokens, topology))
        tokens += length
    if tokens or not passes:
        close()
    return Plan(name, tuple(lengths), topology, cost or CostModel(), capacity, tuple(passes), exchange)


def _even_ring(document: int, length: int, ranks: Sequence[int], first: int, topology: Topology) -> Ring:
    """A ring of equal shares. What is left over goes to the members from number `first` on, one token each, so that the
    shares of many documents add up evenly when each goes on where the last one ended."""
    size = len(ranks)
    share, extra = divmod(length, size)
    counts = [share + ((place - first) % size < extra) for place in range(size)]
    return make_ring(document, [(rank, n) for rank, n in zip(ranks, counts, strict=True) if n], topology)
