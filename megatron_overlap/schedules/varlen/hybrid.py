"""The schedule of Megatron-Core's hybrid context parallelism, as its `BalancedCPScheduler` (0.19) behaves.

A document runs on the smallest power of two of ranks whose capacity holds it. A stage forms groups of ranks, longest
documents first; a group runs its documents one after another, and all ranks meet at the end of the stage. A stage ends
where nothing can be placed, or where loads are within 5 % of each other after the group size has changed. Then the last
document of the most loaded group goes back as long as that makes the loads more even, and groups are doubled, the
smallest first, until no rank is idle. Work is length squared over ranks, linear layers do not count.

One difference: after a group is doubled, Megatron takes its load for that of its first document; here it is recomputed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_SLACK = 0.05


@dataclass(slots=True)
class Group:
    """Ranks that run documents together, one after another."""

    ranks: range
    documents: list[int] = field(default_factory=list)


def schedule(lengths: Sequence[int], ranks: int, capacity: int) -> list[list[Group]]:
    """The stages of a batch.

    Args:
        lengths: tokens of each document, none longer than all ranks hold. Empty documents are left out.
        ranks: a power of two.
        capacity: tokens of one document that a rank holds.
    """
    left = [document for document in range(len(lengths)) if lengths[document]]
    left.sort(key=lengths.__getitem__, reverse=True)
    stages: list[list[Group]] = []
    while left or not stages:
        groups, left = _stage(lengths, left, ranks, capacity)
        stages.append(groups)
    return stages


def _needed(length: int, capacity: int) -> int:
    return 1 << max(0, (-(-length // capacity) - 1).bit_length())


def _stage(
    lengths: Sequence[int], documents: Sequence[int], ranks: int, capacity: int
) -> tuple[list[Group], list[int]]:
    """One stage, and the documents that are left for the next."""
    buckets = _buckets(lengths, documents, capacity)
    groups: list[Group] = []
    work: dict[int, float] = {}
    free = ranks
    first_size = _needed(lengths[documents[0]], capacity) if documents else 1
    may_stop = False

    def cost(document: int, size: int) -> float:
        return lengths[document] ** 2 / size

    while any(buckets):
        choice = None
        for bucket in buckets:
            if bucket:
                size = _needed(lengths[bucket[0]], capacity)
                if free >= size or any(len(group.ranks) == size for group in groups):
                    choice = bucket, size
                    break
        if choice is None:
            break
        bucket, size = choice
        if free >= size:
            groups.append(Group(range(ranks - free, ranks - free + size)))
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
        if may_stop and any(buckets) and high - low <= _SLACK * high:
            break

    left = [document for bucket in buckets for document in bucket]
    while not free and len(groups) > 1:
        worst = max(work, key=lambda i: (work[i], -i))
        high, low = work[worst], min(work.values())
        held = groups[worst].documents
        if high - low <= _SLACK * high or len(held) < 2:
            break
        after = dict(work)
        after[worst] -= cost(held[-1], len(groups[worst].ranks))
        if max(after.values()) - min(after.values()) >= high - low:
            break
        left.append(held.pop())
        work = after
    return _without_idle(groups, ranks), left


def _without_idle(groups: list[Group], ranks: int) -> list[Group]:
    """Double the smallest groups until every rank has work; groups keep their order and stay contiguous."""
    sizes = [len(group.ranks) for group in groups]
    while sizes and sum(sizes) < ranks:
        smallest = min(range(len(sizes)), key=lambda i: (sizes[i], i))
        sizes[smallest] += min(sizes[smallest], ranks - sum(sizes))
    start, result = 0, []
    for group, size in zip(groups, sizes, strict=True):
        result.append(Group(range(start, start + size), group.documents))
        start += size
    return result or [Group(range(ranks))]


def _buckets(lengths: Sequence[int], documents: Sequence[int], capacity: int) -> list[deque[int]]:
    """Documents in order, cut into runs of about equal work, as many as there are group sizes."""
    if not documents:
        return []
    count = len({_needed(lengths[document], capacity) for document in documents})
    work = [lengths[document] ** 2 / _needed(lengths[document], capacity) for document in documents]
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
