"""A partition as data: which tokens of which document are on which rank, in which pass, in which ring. Immutable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from megatron_overlap.schedules.varlen.topology import CostModel, Topology

Zone = Literal["local", "intra", "inter"]
Exchange = Literal["ring", "all_gather"]


class Piece(NamedTuple):
    """Tokens `start` to `stop` of a document, together on one rank."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Ring:
    """One document cut over several ranks, zigzag: `ranks[i]` holds chunk i and chunk 2G-1-i of the 2G chunks.

    Attributes:
        document: index in the batch.
        ranks: members in the order of the ring; those of a node stand together.
        bounds: 2G + 1 offsets; chunk c is `bounds[c]` to `bounds[c + 1]`. Chunks c and 2G-1-c differ by one token at
            most.
        zone: whether the ring stays inside a node.
    """

    document: int
    ranks: tuple[int, ...]
    bounds: tuple[int, ...]
    zone: Zone

    @property
    def length(self) -> int:
        return self.bounds[-1]

    def chunks(self, place: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The early and the late chunk of the member at `place`, as offsets; either may be empty."""
        late = 2 * len(self.ranks) - 1 - place
        return (self.bounds[place], self.bounds[place + 1]), (self.bounds[late], self.bounds[late + 1])

    def tokens(self, place: int) -> int:
        (a, b), (c, d) = self.chunks(place)
        return b - a + d - c

    def pairs(self, place: int) -> int:
        """Queries times the keys they see, of the member at `place`."""
        return sum((b * (b + 1) - a * (a + 1)) // 2 for a, b in self.chunks(place))


def make_ring(document: int, shares: Sequence[tuple[int, int]], topology: Topology) -> Ring:
    """The ring of a document that is cut in shares.

    Args:
        document: index in the batch.
        shares: (rank, tokens) of each member, ranks ascending, tokens above 0; together the whole document.
        topology: tells whether the ring leaves its node.
    """
    early = [-(-tokens // 2) for _, tokens in shares]
    late = [tokens // 2 for _, tokens in reversed(shares)]
    ranks = tuple(rank for rank, _ in shares)
    zone: Zone = "intra" if topology.node_of(ranks[0]) == topology.node_of(ranks[-1]) else "inter"
    return Ring(document, ranks, tuple(accumulate(early + late, initial=0)), zone)


@dataclass(frozen=True, slots=True)
class Pass:
    """What runs together: one packed micro-batch per rank.

    Attributes:
        local: for each rank the documents it holds whole, in the order in which they are packed.
        rings: documents cut over several ranks. A rank's tokens are those of its rings in this order, each the early
            chunk and then the late one, and then its local documents.
        stage: passes of one stage follow each other with no barrier; all ranks meet at the end of a stage.
    """

    local: tuple[tuple[int, ...], ...]
    rings: tuple[Ring, ...]
    stage: int


@dataclass(frozen=True)
class Plan:
    """Where every token of a batch is during attention.

    Attributes:
        method: who made it.
        lengths: tokens of each document of the batch.
        topology: the machine.
        cost: the cost model it was made with.
        capacity: tokens a rank may hold in one pass.
        passes: in order.
        exchange: how ring members get each other's keys and values.
    """

    method: str
    lengths: tuple[int, ...]
    topology: Topology
    cost: CostModel
    capacity: int
    passes: tuple[Pass, ...]
    exchange: Exchange = "ring"

    def pieces(self, index: int, rank: int) -> Iterator[Piece]:
        """The tokens of `rank` in pass `index`, in the order in which they lie in its packed micro-batch."""
        part = self.passes[index]
        for ring in part.rings:
            if rank in ring.ranks:
                for start, stop in ring.chunks(ring.ranks.index(rank)):
                    if stop > start:
                        yield Piece(ring.document, start, stop)
        for document in part.local[rank]:
            yield Piece(document, 0, self.lengths[document])

    def tokens(self, index: int) -> list[int]:
        """Tokens of every rank in pass `index`."""
        part = self.passes[index]
        counts = [sum(map(self.lengths.__getitem__, documents)) for documents in part.local]
        for ring in part.rings:
            for place, rank in enumerate(ring.ranks):
                counts[rank] += ring.tokens(place)
        return counts

    def describe(self, *, ranks: int = 16) -> str:
        """The plan as text: balance, zones, and the first `ranks` ranks of every pass."""
        from megatron_overlap.schedules.varlen.balance import describe

        return describe(self, ranks)
