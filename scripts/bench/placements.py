"""Placements of other systems in the plan format, for comparison with `megatron_overlap.schedules.varlen.partition`."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_overlap.schedules.varlen.partition import METHODS as OWN_METHODS
from megatron_overlap.schedules.varlen.partition import CapacityError, even_ring
from megatron_overlap.schedules.varlen.plan import Pass, Plan
from megatron_overlap.schedules.varlen.topology import CostModel, Topology

_HYBRID_SLACK = 0.05


def packing(lengths: Sequence[int], topology: Topology, *, capacity: int, cost: CostModel | None = None) -> Plan:
    """No context parallelism: whole documents, longest first, each to the rank with the fewest tokens.

    Documents that do not fit go to the next pass.

    Raises:
        CapacityError: a document is longer than the capacity of a rank.
    """
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
    """Megatron-Core's hybrid context parallelism: groups of a power of two ranks, one document per group and pass.

    See `hybrid_stages` for the schedule. All ranks meet at the end of a stage.

    Raises:
        CapacityError: a document is longer than all ranks hold in a pass.
        ValueError: the number of ranks is not a power of two.
    """
    longest, room = max(lengths, default=0), topology.ranks * capacity
    if longest > room:
        raise CapacityError(f"lengths: document {lengths.index(longest)} has {longest} tokens, all ranks hold {room}")
    if topology.ranks & (topology.ranks - 1):
        raise ValueError(f"ranks: {topology.ranks}: hybrid context parallelism needs a power of two")
    passes: list[Pass] = []
    for stage, groups in enumerate(hybrid_stages(lengths, topology.ranks, capacity)):
        for number in range(max(len(group.documents) for group in groups)):
            local: list[tuple[int, ...]] = [()] * topology.ranks
            rings = []
            for group in groups:
                if number >= len(group.documents):
                    continue
                document = group.documents[number]
                if len(group.ranks) == 1 or lengths[document] == 1:
                    local[group.ranks[0]] = (document,)
                else:
                    rings.append(even_ring(document, lengths[document], group.ranks, 0, topology))
            passes.append(Pass(tuple(local), tuple(rings), stage))
    return Plan("hybrid", tuple(lengths), topology, cost or CostModel(), capacity, tuple(passes))


@dataclass(slots=True)
class HybridGroup:
    """Ranks that process documents together, one after another."""

    ranks: range
    documents: list[int] = field(default_factory=list)


def hybrid_stages(lengths: Sequence[int], ranks: int, capacity: int) -> list[list[HybridGroup]]:
    """The stages of a batch, equal to those of Megatron-Core's `BalancedCPScheduler` (0.19).

    A document runs on the smallest power of two of ranks whose capacity holds it. A stage forms groups of ranks,
    longest documents first. It ends when no document can be placed, or when the loads are within 5 % of each other
    after the group size has changed. Then the last document of the most loaded group is removed while that makes the
    loads more even, and groups are doubled, the smallest first, until no rank is idle. The work of a document is its
    length squared divided by its ranks; linear layers do not count.

    One difference: after it doubles a group, Megatron takes the load of the first document as that of the group. This
    function recomputes it.

    Args:
        lengths: tokens of each document, none longer than all ranks hold. Empty documents are left out.
        ranks: a power of two.
        capacity: tokens of one document that a rank holds.
    """
    left = [document for document in range(len(lengths)) if lengths[document]]
    left.sort(key=lengths.__getitem__, reverse=True)
    stages: list[list[HybridGroup]] = []
    while left or not stages:
        groups, left = _hybrid_stage(lengths, left, ranks, capacity)
        stages.append(groups)
    return stages


def _num_ranks_for(length: int, capacity: int) -> int:
    return 1 << max(0, (-(-length // capacity) - 1).bit_length())


def _hybrid_stage(
    lengths: Sequence[int], documents: Sequence[int], ranks: int, capacity: int
) -> tuple[list[HybridGroup], list[int]]:
    """One stage, and the documents that are left for the next."""
    buckets = _hybrid_buckets(lengths, documents, capacity)
    groups: list[HybridGroup] = []
    work: dict[int, float] = {}
    free = ranks
    first_size = _num_ranks_for(lengths[documents[0]], capacity) if documents else 1
    may_stop = False

    def cost(document: int, size: int) -> float:
        return lengths[document] ** 2 / size

    while any(buckets):
        selected = None
        for bucket in buckets:
            if bucket:
                size = _num_ranks_for(lengths[bucket[0]], capacity)
                if free >= size or any(len(group.ranks) == size for group in groups):
                    selected = bucket, size
                    break
        if selected is None:
            break
        bucket, size = selected
        if free >= size:
            groups.append(HybridGroup(range(ranks - free, ranks - free + size)))
            free -= size
            index = len(groups) - 1
            work[index] = 0.0
        else:
            index = min((i for i, group in enumerate(groups) if len(group.ranks) == size), key=lambda i: (work[i], i))
        document = bucket.popleft()
        groups[index].documents.append(document)
        work[index] += cost(document, size)
        may_stop = may_stop or size < first_size
        high, low = max(work.values()), 0.0 if free else min(work.values())
        if may_stop and any(buckets) and high - low <= _HYBRID_SLACK * high:
            break

    left = [document for bucket in buckets for document in bucket]
    while not free and len(groups) > 1:
        worst = max(work, key=lambda i: (work[i], -i))
        high, low = work[worst], min(work.values())
        held = groups[worst].documents
        if high - low <= _HYBRID_SLACK * high or len(held) < 2:
            break
        after = dict(work)
        after[worst] -= cost(held[-1], len(groups[worst].ranks))
        if max(after.values()) - min(after.values()) >= high - low:
            break
        left.append(held.pop())
        work = after
    return _without_idle_ranks(groups, ranks), left


def _without_idle_ranks(groups: list[HybridGroup], ranks: int) -> list[HybridGroup]:
    """Doubles the smallest groups until every rank has work; groups keep their order and stay contiguous."""
    sizes = [len(group.ranks) for group in groups]
    while sizes and sum(sizes) < ranks:
        smallest = min(range(len(sizes)), key=lambda i: (sizes[i], i))
        sizes[smallest] += min(sizes[smallest], ranks - sum(sizes))
    start, result = 0, []
    for group, size in zip(groups, sizes, strict=True):
        result.append(HybridGroup(range(start, start + size), group.documents))
        start += size
    return result or [HybridGroup(range(ranks))]


def _hybrid_buckets(lengths: Sequence[int], documents: Sequence[int], capacity: int) -> list[deque[int]]:
    """Documents in order, cut into runs of about equal work, as many as there are group sizes."""
    if not documents:
        return []
    count = len({_num_ranks_for(lengths[document], capacity) for document in documents})
    work = [lengths[document] ** 2 / _num_ranks_for(lengths[document], capacity) for document in documents]
    target = sum(work) / count
    buckets: list[deque[int]] = []
    current: deque[int] = deque()
    load = 0.0
    for index, document in enumerate(documents):
        remaining = count - len(buckets)
        if current and (load + work[index] > 1.1 * target or len(documents) - index <= remaining - len(buckets)):
            buckets.append(current)
            current, load = deque(), 0.0
        current.append(document)
        load += work[index]
    buckets.append(current)
    return buckets


METHODS = {**OWN_METHODS, "hybrid": hybrid, "packing": packing}
"""All planners, by the name of their plans."""
