"""Ring groups: rings over the same ranks, and the rows that their members send each other.

All rings of a pass over the same ranks form one ring group, whose rings share their messages. A ring of G ranks has 2G
chunks; the member at position i owns chunks i and 2G-1-i. Pass-KV sends the keys and values of a chunk to the members
whose queries see them. Pass-Q sends its queries to the members whose keys they see.

Both travel down the ring: from position i to i-1, ..., 0, G-1, ..., i+1. With pass-KV an early chunk goes all the way
round and a late chunk only to position 0, because no query of a later position sees it. With pass-Q the roles are
exchanged. A full ring group therefore sends a quarter fewer rows than an all-gather.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_overlap.schedules.varlen.plan import Pass, Ring, Zone

Passing = Literal["kv", "q"]


@dataclass(frozen=True, slots=True)
class RingGroup:
    """The rings of a pass over the same ranks."""

    ranks: tuple[int, ...]
    rings: tuple[Ring, ...]
    zone: Zone

    def rows(self, chunk: int) -> int:
        """Rows of a chunk, summed over all rings."""
        return sum(ring.chunk_length(chunk) for ring in self.rings)

    def chunks_of(self, position: int) -> tuple[int, int]:
        """The early and the late chunk of a position."""
        return position, 2 * len(self.ranks) - 1 - position


@dataclass(frozen=True, slots=True)
class Payload:
    """Chunks of one owner that travel around the ring in the same messages.

    Attributes:
        owner: position of the owner of the rows.
        chunks: chunks in the order of the buffer: the chunk with the most receivers first.
        receivers: positions in the order in which they receive the payload. Ring step i is at `receivers[i]`.
        rows: `rows[i]` is the number of rows that `receivers[i]` gets: a prefix of the buffer.
    """

    owner: int
    chunks: tuple[int, ...]
    receivers: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Query chunks and key chunks of one call of the attention kernel.

    The same single chunk if `causal`; otherwise every query sees every key.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool


def ring_groups(part: Pass) -> tuple[RingGroup, ...]:
    """The ring groups of a pass: inter-node groups first, then in the order of their first rings."""
    found: dict[tuple[int, ...], list[Ring]] = {}
    for ring in part.rings:
        found.setdefault(ring.ranks, []).append(ring)
    result = [RingGroup(ranks, tuple(rings), rings[0].zone) for ranks, rings in found.items()]
    return tuple(sorted(result, key=lambda ring_group: ring_group.zone != "inter"))


def blocks(ring: Ring, queries: Sequence[int], keys: Sequence[int]) -> list[Block]:
    """The kernel calls that together compute each visible pair of a query and a key once; both lists ascend.

    Causal blocks come first: they initialise the result of every query.
    """
    causal: list[Block] = []
    full: dict[tuple[int, ...], list[int]] = {}
    for key in keys:
        if not ring.chunk_length(key):
            continue
        if key in queries:
            causal.append(Block((key,), (key,), True))
        later = tuple(query for query in queries if query > key and ring.chunk_length(query))
        if later:
            full.setdefault(later, []).append(key)
    return causal + [Block(queries, tuple(keys), False) for queries, keys in full.items()]


def payloads(ring_group: RingGroup, passing: Passing) -> tuple[Payload, ...]:
    """The payloads of a ring group, by owner: one, or two if the receivers of its chunks are not nested."""
    size, chunks_of = len(ring_group.ranks), ring_group.chunks_of
    filled = [any(ring.chunk_length(chunk) for ring in ring_group.rings) for chunk in range(2 * size)]

    def is_needed(travelling: int, local: int) -> bool:
        query, key = (local, travelling) if passing == "kv" else (travelling, local)
        return query >= key and filled[query] and filled[key]

    def receivers_of(chunk: int, owner: int) -> tuple[int, ...]:
        others = ((owner - step) % size for step in range(1, size))
        return tuple(position for position in others if any(is_needed(chunk, own) for own in chunks_of(position)))

    result = []
    for owner in range(size):
        paths = [(receivers_of(chunk, owner), chunk) for chunk in chunks_of(owner)]
        paths = sorted((item for item in paths if item[0]), key=lambda item: (-len(item[0]), item[1]))
        nested = len(paths) == 2 and paths[0][0][: len(paths[1][0])] == paths[1][0]
        for group in [paths] if nested else [[item] for item in paths]:
            receivers = group[0][0]
            rows = tuple(
                sum(ring_group.rows(chunk) for path, chunk in group if len(path) > step)
                for step in range(len(receivers))
            )
            result.append(Payload(owner, tuple(chunk for _, chunk in group), receivers, rows))
    return tuple(result)


def chunks_at(ring_group: RingGroup, payload: Payload, step: int) -> tuple[int, ...]:
    """The chunks of a payload that the receiver of ring step `step` gets, ascending."""
    left, found = payload.rows[step], []
    for chunk in payload.chunks:
        if left > 0:
            found.append(chunk)
            left -= ring_group.rows(chunk)
    return tuple(sorted(found))
