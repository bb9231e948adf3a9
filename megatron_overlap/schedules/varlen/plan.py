"""A partition as data: which tokens of which document are on which rank, in which pass, in which ring; and its cost."""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal, NamedTuple

from megatron_overlap.schedules.varlen.topology import FS_PER_US, CostModel, Topology

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
        return self.bounds[chunk + 1] - self.bounds[chunk]

    def chunks(self, position: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Start and stop of the early and of the late chunk of the member at `position`; either may be empty."""
        late = 2 * len(self.ranks) - 1 - position
        return (self.bounds[position], self.bounds[position + 1]), (self.bounds[late], self.bounds[late + 1])

    def tokens(self, position: int) -> int:
        return sum(stop - start for start, stop in self.chunks(position))

    def pairs(self, position: int) -> int:
        """Query-key pairs of causal attention for the queries of the member at `position`."""
        return sum((b * (b + 1) - a * (a + 1)) // 2 for a, b in self.chunks(position))


def make_ring(document: int, shares: Sequence[tuple[int, int]], topology: Topology) -> Ring:
    """The ring of a whole document that is cut into shares: (rank, tokens), ranks ascending, tokens above 0."""
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


@dataclass(frozen=True, eq=False)
class Plan:
    """The placement of every token of a batch during attention. Compares by identity, as a fast cache key.

    Attributes:
        method: name of the planner, a key of `partition.METHODS`.
        lengths: tokens of each document of the batch.
        topology, cost, capacity: arguments of the planner, see `partition`.
        passes: in execution order; `partition` and `ring_over_all` make one.
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


class Load(NamedTuple):
    """Modelled load of one rank in one pass: attention time and message time in femtoseconds, and tokens."""

    attention_fs: int
    message_fs: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly a plan uses its ranks.

    A balance is the mean load divided by the largest load; 1 is perfect. Over several stages it is the sum of the means
    divided by the sum of the largest loads.

    Attributes:
        attention, tokens: balance of attention time, and of tokens.
        compute: balance of attention and linear layers, if the linear layers use the attention layout.
        lower_bound_us: total attention time divided by the number of ranks. No plan takes less.
        attention_us: sum over stages of the largest attention time.
        step_us: sum over stages of the largest step time. The step time of a rank is the longer of its attention and
            its messages, or their sum where the plan uses an all-gather.
        message_us: sum over stages of the largest message time.
    """

    attention: float
    compute: float
    tokens: float
    lower_bound_us: float
    attention_us: float
    step_us: float
    message_us: float


def loads(plan: Plan, index: int) -> list[Load]:
    """The load of every rank in pass `index`. Each ring member receives all chunks that it does not hold."""
    cost, topology, lengths = plan.cost, plan.topology, plan.lengths
    part, message = plan.passes[index], [0] * topology.ranks
    whole = {length: cost.attention_fs(length * (length + 1) // 2, length) for length in set(lengths)}
    attention = [sum(whole[lengths[document]] for document in documents) for documents in part.local]
    for ring in part.rings:
        hops, inter = len(ring.ranks) - 1, ring.zone == "inter"
        for position, rank in enumerate(ring.ranks):
            tokens = ring.tokens(position)
            attention[rank] += cost.attention_fs(ring.pairs(position), tokens)
            message[rank] += cost.ring_fs(ring.length - tokens, hops, topology, inter=inter)
    return list(map(Load, attention, message, plan.tokens(index)))


def balance(plan: Plan) -> Balance:
    """The balance and the modelled times of a plan."""
    ranks, linear = plan.topology.ranks, plan.cost.linear_fs
    peaks, sums = [0] * 5, [0] * 5
    # A ring overlaps its messages with attention. An all-gather completes before attention starts.
    both = max if plan.exchange == "ring" else operator.add
    for _, group in groupby(range(len(plan.passes)), key=lambda index: plan.passes[index].stage):
        attention, message, tokens = [0] * ranks, [0] * ranks, [0] * ranks
        for index in group:
            for rank, load in enumerate(loads(plan, index)):
                attention[rank] += load.attention_fs
                message[rank] += load.message_fs
                tokens[rank] += load.tokens
        compute = [a + linear * t for a, t in zip(attention, tokens, strict=True)]
        step = list(map(both, attention, message))
        for number, values in enumerate((attention, compute, tokens, step, message)):
            peaks[number] += max(values)
            sums[number] += sum(values)
    ratios = [total / (ranks * peak) if peak else 1.0 for total, peak in zip(sums, peaks, strict=True)]
    return Balance(
        attention=ratios[0],
        compute=ratios[1],
        tokens=ratios[2],
        lower_bound_us=sums[0] / ranks / FS_PER_US,
        attention_us=peaks[0] / FS_PER_US,
        step_us=peaks[3] / FS_PER_US,
        message_us=peaks[4] / FS_PER_US,
    )


def describe(plan: Plan, *, ranks: int = 16) -> str:
    """A plan of one pass as text: balance, zones, and the first `ranks` ranks."""
    result, topology, table, (part,) = balance(plan), plan.topology, loads(plan, 0), plan.passes
    lines = [
        f"{plan.method}: {len(plan.lengths)} documents, {sum(plan.lengths)} tokens on {topology.ranks} ranks "
        f"({topology.nodes} x {topology.devices_per_node}), at most {plan.capacity} tokens per rank",
        f"attention {result.attention_us:.0f} us modelled, lower bound {result.lower_bound_us:.0f} us; balance "
        f"{result.attention:.3f}, with linear layers {result.compute:.3f}, of tokens {result.tokens:.3f}; "
        f"messages {result.message_us:.0f} us",
        _describe_zones(part),
    ]
    for rank, load in enumerate(table[:ranks]):
        member = [ring for ring in part.rings if rank in ring.ranks]
        cut = ", ".join(f"{ring.document}/{len(ring.ranks)}" for ring in member[:6])
        more = f" and {len(member) - 6} more" if len(member) > 6 else ""
        lines.append(
            f"  rank {rank}: {load.tokens} tokens, attention {load.attention_fs / FS_PER_US:.0f} us, "
            f"{len(part.local[rank])} whole documents" + (f", rings (document/ranks) {cut}{more}" if member else "")
        )
    if len(table) > ranks:
        lines.append(f"  ... {len(table) - ranks} more ranks")
    return "\n".join(lines)


def _describe_zones(part: Pass) -> str:
    texts = [f"{sum(map(len, part.local))} whole documents"]
    for zone in ("intra", "inter"):
        sizes = Counter(len(ring.ranks) for ring in part.rings if ring.zone == zone)
        if sizes:
            rings = ", ".join(f"{count} x {size}" for size, count in sorted(sizes.items()))
            texts.append(f"{zone}-node rings (count x ranks): {rings}")
    return "; ".join(texts)
