"""Rings over the same ranks, and what their members have to show each other.

Rings of a pass over the same ranks form a ring_group: their messages travel together. A ring of G ranks has 2G chunks;
place i holds chunks i and 2G-1-i. What travels is either the keys and values of a chunk, to the places whose queries
see it, or its queries, to the places whose keys they see. Both go down the ring: from place i to i-1, ..., 0, G-1, ...,
i+1. An early chunk's keys go all the way round, a late chunk's only to place 0: nobody behind it sees them. Of queries
it is the other way round. So a quarter of the messages of a full ring_group is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_overlap.schedules.varlen.plan import Pass, Ring, Zone

Side = Literal["keys", "queries"]
"""What travels round a ring: keys and values to the queries, or queries to the keys and values."""


@dataclass(frozen=True, slots=True)
class RingGroup:
    """Rings of a pass over the same ranks."""

    ranks: tuple[int, ...]
    rings: tuple[Ring, ...]
    zone: Zone

    def rows(self, chunk: int) -> int:
        """Rows of a chunk of all rings."""
        return sum(ring.bounds[chunk + 1] - ring.bounds[chunk] for ring in self.rings)

    def chunks_of(self, place: int) -> tuple[int, int]:
        """The early and the late chunk of a place."""
        return place, 2 * len(self.ranks) - 1 - place


@dataclass(frozen=True, slots=True)
class Load:
    """What one place shows to others, in one message from each to the next.

    Attributes:
        home: place that holds it.
        chunks: its chunks, what travels farthest first.
        visits: places in the order in which they see it.
        rows: rows that `visits[i]` sees: those of the first of `chunks`.
    """

    home: int
    chunks: tuple[int, ...]
    visits: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Chunks of queries that are attended with chunks of keys in one call of a kernel.

    Attributes:
        queries: chunks.
        keys: chunks.
        masked: not every query sees every key; then there is one chunk of each.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    masked: bool


def ring_groups(part: Pass) -> tuple[RingGroup, ...]:
    """The ring_groups of a pass, those between nodes first, else in the order of their first rings."""
    found: dict[tuple[int, ...], list[Ring]] = {}
    for ring in part.rings:
        found.setdefault(ring.ranks, []).append(ring)
    result = [RingGroup(ranks, tuple(rings), rings[0].zone) for ranks, rings in found.items()]
    return tuple(sorted(result, key=lambda ring_group: ring_group.zone != "inter"))


def reaches(ring: Ring, queries: int, keys: int, window: int | None) -> bool:
    """Whether some query of a chunk sees some key of a chunk."""
    bounds = ring.bounds
    if queries < keys or bounds[queries] == bounds[queries + 1] or bounds[keys] == bounds[keys + 1]:
        return False
    return window is None or bounds[queries] - (bounds[keys + 1] - 1) <= window


def blocks(ring: Ring, queries: Sequence[int], keys: Sequence[int], window: int | None) -> list[Block]:
    """All that the queries of some chunks see of the keys of some chunks, each pair of a query and a key once.

    Args:
        ring: whose chunks they are.
        queries: chunks, ascending.
        keys: chunks, ascending.
        window: keys that a query sees before its own; None is all.
    """
    bounds = ring.bounds
    masked: list[Block] = []
    full: dict[tuple[int, ...], list[int]] = {}
    for key in keys:
        seen_by = [query for query in queries if reaches(ring, query, key, window)]
        whole = tuple(
            query
            for query in seen_by
            if query > key and (window is None or bounds[query + 1] - 1 - bounds[key] <= window)
        )
        if whole:
            full.setdefault(whole, []).append(key)
        masked += [Block((query,), (key,), True) for query in seen_by if query not in whole]
    # The square of a chunk with itself comes first: it is there from the start, and gives every query a result.
    masked.sort(key=lambda block: block.queries != block.keys)
    return masked + [Block(queries, tuple(keys), False) for queries, keys in full.items()]


def loads(ring_group: RingGroup, side: Side, window: int | None) -> tuple[Load, ...]:
    """What travels in a ring_group: one load a place, or two where its chunks take different ways; by place."""
    size = len(ring_group.ranks)
    held = [any(ring.bounds[chunk] < ring.bounds[chunk + 1] for ring in ring_group.rings) for chunk in range(2 * size)]

    def meet(travelling: int, resting: int) -> bool:
        query, key = (resting, travelling) if side == "keys" else (travelling, resting)
        if query < key or not (held[query] and held[key]):
            return False
        return window is None or any(reaches(ring, query, key, window) for ring in ring_group.rings)

    def way(chunk: int, home: int) -> tuple[int, ...]:
        others = ((home - step) % size for step in range(1, size))
        return tuple(place for place in others if any(meet(chunk, own) for own in ring_group.chunks_of(place)))

    result = []
    for home in range(size):
        ways = [(way(chunk, home), chunk) for chunk in ring_group.chunks_of(home)]
        ways = sorted((item for item in ways if item[0]), key=lambda item: (-len(item[0]), item[1]))
        together = len(ways) == 2 and ways[0][0][: len(ways[1][0])] == ways[1][0]
        for group in [ways] if together else [[item] for item in ways]:
            visits = group[0][0]
            rows = tuple(
                sum(ring_group.rows(chunk) for way_, chunk in group if len(way_) > step) for step in range(len(visits))
            )
            result.append(Load(home, tuple(chunk for _, chunk in group), visits, rows))
    return tuple(result)


def chunks_at(ring_group: RingGroup, load: Load, step: int) -> tuple[int, ...]:
    """The chunks of a load that its visit number `step` sees, ascending."""
    left, found = load.rows[step], []
    for chunk in load.chunks:
        if left > 0:
            found.append(chunk)
            left -= ring_group.rows(chunk)
    return tuple(sorted(found))
