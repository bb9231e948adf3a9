"""A partition as data: which tokens of which document are on which rank, in which pass, in which ring. Immutable."""

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
    """One document cut over G ranks in zigzag order: `ranks[i]` holds chunk i and chunk 2G-1-i of the 2G chunks.

    Attributes:
        document: index in the batch.
        ranks: members in ring order; members of one node are adjacent.
        bounds: 2G + 1 offsets; chunk c is `bounds[c]` to `bounds[c + 1]`. Chunks c and 2G-1-c differ by at most one
            token.
        zone: `intra` if all members are on one node, else `inter`.
    """

    document: int
    ranks: tuple[int, ...]
    bounds: tuple[int, ...]
    zone: Zone

    @property
    def length(self) -> int:
        return self.bounds[-1]

    def chunk_length(self, chunk: int) -> int:
        """Tokens of a chunk."""
        return self.bounds[chunk + 1] - self.bounds[chunk]

    def chunks(self, position: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Start and stop of the early and of the late chunk of the member at `position`; either may be empty."""
        late = 2 * len(self.ranks) - 1 - position
        return (self.bounds[position], self.bounds[position + 1]), (self.bounds[late], self.bounds[late + 1])

    def tokens(self, position: int) -> int:
        """Tokens of the member at `position`."""
        (a, b), (c, d) = self.chunks(position)
        return b - a + d - c

    def pairs(self, position: int) -> int:
        """Query-key pairs of causal attention for the queries of the member at `position`."""
        return sum((b * (b + 1) - a * (a + 1)) // 2 for a, b in self.chunks(position))


def make_ring(document: int, shares: Sequence[tuple[int, int]], topology: Topology) -> Ring:
    """Returns the ring of a document that is cut into shares.

    Args:
        document: index in the batch.
        shares: (rank, tokens) of each member, ranks ascending, tokens above 0. The shares cover the whole document.
        topology: determines the zone of the ring.
    """
    early = [-(-tokens // 2) for _, tokens in shares]
    late = [tokens // 2 for _, tokens in reversed(shares)]
    ranks = tuple(rank for rank, _ in shares)
    zone: Zone = "intra" if topology.node_of(ranks[0]) == topology.node_of(ranks[-1]) else "inter"
    return Ring(document, ranks, tuple(accumulate(early + late, initial=0)), zone)


@dataclass(frozen=True, slots=True)
class Pass:
    """One packed micro-batch per rank.

    Attributes:
        local: for each rank the documents that it holds whole, in packing order.
        rings: documents cut over several ranks. The tokens of a rank are those of its rings in this order, each ring's
            early chunk before its late chunk, followed by its local documents.
        stage: passes of one stage run without a barrier between them; all ranks meet at the end of a stage.
    """

    local: tuple[tuple[int, ...], ...]
    rings: tuple[Ring, ...]
    stage: int


@dataclass(frozen=True)
class Plan:
    """The placement of every token of a batch during attention.

    Attributes:
        method: name of the planner, a key of `baselines.METHODS`.
        lengths: tokens of each document of the batch.
        topology: nodes, devices and links.
        cost: the cost model that the planner used.
        capacity: tokens that a rank may hold in one pass.
        passes: in execution order.
        exchange: how ring members obtain the keys and values of each other.
    """

    method: str
    lengths: tuple[int, ...]
    topology: Topology
    cost: CostModel
    capacity: int
    passes: tuple[Pass, ...]
    exchange: Exchange = "ring"

    def pieces(self, index: int, rank: int) -> Iterator[Piece]:
        """The tokens of `rank` in pass `index`, in the order of its packed micro-batch."""
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
            for position, rank in enumerate(ring.ranks):
                counts[rank] += ring.tokens(position)
        return counts
