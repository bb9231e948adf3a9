"""Builds the tail-free plans of an all-gather before a GEMM, and of a reduce-scatter or an all-reduce after a GEMM.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013), sections on all-gather + GEMM and GEMM + reduce-scatter. The paper
sends whole slices around a ring. Here a slice is cut into `chunks_per_rank` messages, so at most one sub-slice is
exposed. The direct pattern sends each chunk to its destination without forwarding. The paper applies its tail-free
reduce-scatter to plain tensor parallelism; this project adds the all-gather of the sums, part by part.

Messages between the hosts of a group pass along rails of ranks with the same local index:

    host 0: 0 1 2 3        rank r has local index r % P on host r // P;
    host 1: 4 5 6 7        the rails are 0 4, 1 5, ...: inter-node messages stay on a rail

Each row is sent once to every other host, and all ranks use their inter-node links equally. An intra-node method then
gathers or sums the rows of the rails.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Literal, Self

from megatron_overlap.schedules.plan import Chunk, ChunkLayout, Message, Pattern, Plan, Split, Work, check_positive

MAX_RANKS = 64
Gathers = Literal["between", "after"]
Run = tuple[Chunk, ...]


def check_rank(num_ranks: int, rank: int) -> None:
    """Raise a `ValueError` if the size of the group, or a rank in it, is out of range."""
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"num_ranks: {num_ranks}: must be 1 to {MAX_RANKS}; use a smaller group")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank: {rank}: must be 0 to {num_ranks - 1}")


def _validate(num_ranks: int, rank: int, chunks_per_rank: int, pattern: str, split: str, slices_per_gemm: int) -> None:
    check_rank(num_ranks, rank)
    check_positive(chunks_per_rank=chunks_per_rank)
    if slices_per_gemm > 1 and (chunks_per_rank > 1 or pattern != "direct"):
        raise ValueError(f"slices_per_gemm: {slices_per_gemm}: needs pattern direct and chunks_per_rank 1")
    if pattern not in ("ring", "direct", "serial"):
        raise ValueError(f"pattern: {pattern}: use ring, direct or serial")
    if split not in ("edge", "all"):
        raise ValueError(f"split: {split}: use edge or all")


def all_gather_plan(
    num_ranks: int,
    rank: int,
    *,
    chunks_per_rank: int = 1,
    pattern: Pattern = "direct",
    split: Split = "all",
    slices_per_gemm: int = 1,
) -> Plan:
    """Return the plan of `y = all_gather(x_shard) @ w.T` for one rank: own rows first, then slices in arrival order.

    The own slice needs no message, so its GEMM hides the first messages. Both patterns deliver slices in the order r-1,
    r-2, ..., r+1; if slices share a GEMM, in that of `_exchanges`. No message is pending during the last GEMM.

    Args:
        num_ranks: size of the group, 1 to 64.
        rank: this rank in the group.
        chunks_per_rank: messages per slice.
        pattern: `ring` forwards each chunk to r+1 (neighbour links). `direct` sends own chunks to r+1, r+2, ... in
            order (switches). `serial` sends like `direct` and runs one GEMM after all messages are received: the
            decomposed collective without overlap, for attribution.
        split: `all` computes every remote slice chunk by chunk. `edge` cuts only the last slice, the only exposed one:
            the other slices use one large GEMM each.
        slices_per_gemm: the most remote slices that one GEMM computes, rounded down to a power of two that divides
            `num_ranks`. Above 1 only with pattern `direct` and one chunk per rank.

    Raises:
        ValueError: an argument is out of range.
    """
    _validate(num_ranks, rank, chunks_per_rank, pattern, split, slices_per_gemm)
    messages: list[Message] = []
    work = [Work(tuple(Chunk(rank, part) for part in range(chunks_per_rank)))]
    received: dict[Chunk, int] = {}
    following, preceding = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    exchanges = _exchanges(num_ranks, rank, slices_per_gemm)
    for exchange in exchanges:
        for to, owner in exchange:
            for part in range(chunks_per_rank):
                chunk, number = Chunk(owner, part), len(messages)
                received[chunk] = number
                if pattern == "ring":
                    after = (number - chunks_per_rank,) if number >= chunks_per_rank else ()
                    sent = Chunk((owner + 1) % num_ranks, part)
                    messages.append(Message(sent, following, chunk, preceding, after_messages=after))
                else:
                    messages.append(Message(Chunk(rank, part), to, chunk, owner))
        owners = [owner for _, owner in exchange]
        for chunks in _gemms(owners, chunks_per_rank, split == "all" or exchange is exchanges[-1]):
            work.append(Work(chunks, needs=tuple(sorted(received[chunk] for chunk in chunks))))
    if pattern == "serial" and num_ranks > 1:
        all_chunks = tuple(Chunk(owner, part) for owner in range(num_ranks) for part in range(chunks_per_rank))
        work = [Work(all_chunks, needs=tuple(range(len(messages))))]
    return Plan("all_gather", pattern, num_ranks, rank, chunks_per_rank, _placed(messages, work), tuple(work))


def reduce_scatter_plan(
    num_ranks: int,
    rank: int,
    *,
    chunks_per_rank: int = 1,
    pattern: Pattern = "direct",
    split: Split = "all",
    slices_per_gemm: int = 1,
) -> Plan:
    """Return the plan of `y_shard = reduce_scatter(x @ w.T)` for one rank: rows of other owners first, own rows last.

    Every message may be sent before the last GEMM starts, so the GEMM of the own slice hides the pending messages.

    Args:
        num_ranks, rank, chunks_per_rank, slices_per_gemm: see `all_gather_plan`.
        pattern: `ring` sends a running partial sum from r to r+1 and computes r-1, r-2, ..., r. `direct` sends each
            partial sum to its owner, which adds all of them, and computes r+1, r+2, ..., r. `serial` sends like
            `direct` after one GEMM over all rows.
        split: `all` computes every remote slice chunk by chunk. `edge` cuts only the first slice, so that sending
            starts early.

    Raises:
        ValueError: an argument is out of range.
    """
    _validate(num_ranks, rank, chunks_per_rank, pattern, split, slices_per_gemm)
    messages: list[Message] = []
    work: list[Work] = []
    received: dict[Chunk, int] = {}
    ring = pattern == "ring"
    following, preceding = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    exchanges = _exchanges(num_ranks, rank, slices_per_gemm)
    for exchange in exchanges:
        peers = {source if ring else to: (to, source) for to, source in exchange}
        for chunks in _gemms(list(peers), chunks_per_rank, split == "all" or exchange is exchanges[0]):
            work.append(Work(chunks, adds=tuple(received[chunk] for chunk in chunks if chunk in received)))
            for owner, (to, source) in peers.items():
                for chunk in (chunk for chunk in chunks if chunk.owner == owner):
                    if ring:
                        incoming = Chunk((owner - 1) % num_ranks, chunk.part)
                        received[incoming] = len(messages)
                        messages.append(Message(chunk, following, incoming, preceding, after_work=len(work)))
                    else:
                        messages.append(Message(chunk, to, Chunk(rank, chunk.part), source, after_work=len(work)))
    own = tuple(Chunk(rank, part) for part in range(chunks_per_rank))
    work.append(Work(own, adds=tuple(received[chunk] for chunk in own if chunk in received)))
    if pattern == "serial" and num_ranks > 1:
        work = [Work(tuple(Chunk(owner, part) for owner in range(num_ranks) for part in range(chunks_per_rank)))]
        messages = [Message(m.send, m.to, m.recv, m.source, after_work=1) for m in messages]
    if pattern != "ring" and messages:
        work.append(Work((), adds=tuple(range(len(messages)))))
    return Plan("reduce_scatter", pattern, num_ranks, rank, chunks_per_rank, _placed(messages, work), tuple(work))


def _placed(messages: list[Message], work: list[Work], *, alone: Collection[int] = ()) -> tuple[Message, ...]:
    """Return the messages with `not_before`: after the GEMM that hides them.

    A message that depends on a GEMM follows the next GEMM. Any other message follows the work before the one that waits
    for it. Messages that are ready together are one call, but those of `alone`; they must be the same on all ranks.
    """
    first_use = {k: index for index in reversed(range(len(work))) for k in (*work[index].needs, *work[index].adds)}
    placed, place = list[Message](), 0
    for k, message in enumerate(messages):
        if message.after_work:
            place = max(place, message.after_work + any(each.chunks for each in work[message.after_work :]))
        else:
            place = max(place, first_use.get(k, 0))
        placed.append(replace(message, not_before=place))
    keys = [(k in alone and k, each.after_work, each.not_before, each.after_messages) for k, each in enumerate(placed)]
    lengths = [len(list(call)) for _, call in groupby(keys)]
    calls = [number for number, length in enumerate(lengths) for _ in range(length)]
    return tuple(replace(message, call=call) for message, call in zip(placed, calls, strict=True))


def _exchanges(num_ranks: int, rank: int, slices_per_gemm: int) -> list[list[tuple[int, int]]]:
    """Return for each message the rank to send to and the rank to receive from, grouped by the GEMM of their rows.

    With one slice per GEMM, rank r sends to r+1, r+2, ... and receives from r-1, r-2, .... With several, the ranks are
    divided into blocks of that many consecutive ranks. The first GEMMs have the rows of 1, 2, 4, ... other ranks of the
    own block; each later GEMM has the rows of one other block. All ranks have the same number of GEMMs. At each
    place in this order, all ranks send to different ranks.
    """
    size = max(2**bits for bits in range(slices_per_gemm.bit_length()) if num_ranks % 2**bits == 0)
    block, index = divmod(rank, size)

    def exchange(distance: int, others: range) -> list[tuple[int, int]]:
        to, source = ((block + each) * size % num_ranks for each in (distance, -distance))
        return [(to + (index ^ other), source + (index ^ other)) for other in others]

    outside = [exchange(distance, range(size)) for distance in range(1, num_ranks // size)]
    inside = [exchange(0, range(2**bits, 2 ** (bits + 1))) for bits in range(size.bit_length() - 1)]
    return inside + outside


def _gemms(owners: Sequence[int], num_parts: int, cut: bool) -> list[Run]:
    """The rows of each GEMM of one group."""
    chunks = tuple(Chunk(owner, part) for owner in sorted(owners) for part in range(num_parts))
    return [(chunk,) for chunk in chunks] if cut and len(owners) == 1 else [chunks]


def all_reduce_plan(
    num_ranks: int,
    rank: int,
    *,
    chunks_per_rank: int = 1,
    pattern: Pattern = "direct",
    split: Split = "edge",
    gathers: Gathers = "between",
    slices_per_gemm: int = 1,
) -> Plan:
    """Return the plan of `y = all_reduce(x @ w.T)` for one rank. `PartLayout` defines the rows of each chunk.

    Each rank sends every chunk to its owner. The owner adds the partial sums and sends the sum to all ranks. Own rows
    of the last part are computed last: only the sums of that part are sent after the last GEMM.

    Args:
        num_ranks, rank: see `all_gather_plan`.
        chunks_per_rank: number of parts.
        pattern: `direct`; or `serial`, which sends the same messages after one GEMM over all rows.
        split: `edge` computes a part in one GEMM, except the first part, so that sending starts early, and the last
            part, whose sums are exposed. Partial sums of part p are sent during the GEMM of part p+1, and its sums
            during the GEMM of part p+2. `all` runs one GEMM per owner and part. Sums of part p alternate with the
            partial sums of part p+1.
        gathers: `between` sends sums as soon as they are ready. `after` sends all sums after the last partial sum, for
            a caller that overlaps them with later computation.
        slices_per_gemm: the most other owners whose rows one GEMM computes, as in `all_gather_plan`, with split `all`.
            Above 1 only with one part.

    Raises:
        ValueError: an argument is out of range.
    """
    _validate(num_ranks, rank, chunks_per_rank, pattern, split, slices_per_gemm)
    if pattern == "ring":
        raise ValueError("pattern: ring: an all-reduce has no ring schedule; use direct")
    if gathers not in ("between", "after"):
        raise ValueError(f"gathers: {gathers}: use between or after")
    messages: list[Message] = []
    work: list[Work] = []
    exchanges = _exchanges(num_ranks, rank, slices_per_gemm)
    peers = [peer for exchange in exchanges for peer in exchange]
    parts = range(chunks_per_rank)
    made: dict[Chunk, int] = {}
    partial_sums: dict[int, list[int]] = {part: [] for part in parts}

    def compute(runs: list[Run]) -> None:
        for run in runs:
            work.append(Work(run))
            made.update(dict.fromkeys(run, len(work)))

    def send_sums(part: int, to_and_from: list[tuple[int, int]]) -> None:
        if terms := partial_sums.pop(part, ()):
            work.append(Work((), adds=tuple(terms)))
        for to, source in to_and_from:
            messages.append(Message(Chunk(rank, part), to, Chunk(source, part), source, after_work=len(work)))

    if pattern == "serial":
        compute([tuple(Chunk(owner, part) for part in parts for owner in range(num_ranks))])
    # Sums are sent one part late: the link then has partial sums to transfer while the owner adds.
    late = gathers == "between" and pattern != "serial"
    for part in parts:
        runs, own = ([], []) if pattern == "serial" else _runs(num_ranks, rank, part, chunks_per_rank)
        steps = [(runs, peers)]
        if pattern != "serial" and split == "all":
            steps = [([tuple(Chunk(to, part) for to, _ in sorted(each))], each) for each in exchanges]
            own = [(Chunk(rank, part),)]
        for runs_of_step, peers_of_step in steps:
            compute(runs_of_step)
            for to, source in peers_of_step:
                chunk = Chunk(to, part)
                partial_sums[part].append(len(messages))
                messages.append(Message(chunk, to, Chunk(rank, part), source, after_work=made[chunk]))
            if late and part > 0:
                send_sums(part - 1, peers_of_step)
        compute(own)
    for part in parts[-1:] if late else parts:
        send_sums(part, peers)
    # With split `edge` the GEMMs of the ranks differ.
    alone = {k for k, message in enumerate(messages) if message.send.owner != rank} if split == "edge" else ()
    placed = _placed(messages, work, alone=() if pattern == "serial" else alone)
    return Plan("all_reduce", pattern, num_ranks, rank, chunks_per_rank, placed, tuple(work))


def _runs(num_ranks: int, rank: int, part: int, num_parts: int) -> tuple[list[Run], list[Run]]:
    """Return the GEMMs of one part with split `edge`: those before its partial sums are sent, then the own rows."""
    own = Chunk(rank, part)
    above = tuple(Chunk(owner, part) for owner in range(rank + 1, num_ranks))
    below = tuple(Chunk(owner, part) for owner in range(rank))
    if part == 0:
        runs = [above[:1], above[1:], below] if above else [below[:1], below[1:]]
    elif part == num_parts - 1:
        runs = [above, below]
    else:
        return [(*below, own, *above)], []
    return [run for run in runs if run], [(own,)]


@dataclass(frozen=True, slots=True)
class Nodes:
    """Placement of the ranks of a group: `per_node` consecutive ranks on each of `num_nodes` hosts."""

    num_nodes: int
    per_node: int

    @classmethod
    def of(cls, hosts: Sequence[str]) -> Self:
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
        return self.num_nodes * self.per_node

    def node(self, rank: int) -> int:
        return rank // self.per_node

    def members(self, node: int) -> range:
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
    rail = range(rank % nodes.per_node, nodes.num_ranks, nodes.per_node)
    messages = []
    for m in plan.messages:
        send, recv = Chunk(rail[m.send.owner], 0), Chunk(rail[m.recv.owner], 0)
        # The GEMMs of the next node hide the sums, and are many: with one hardware queue sums precede them.
        place = m.after_work or m.not_before
        messages.append(replace(m, send=send, to=rail[m.to], recv=recv, source=rail[m.source], not_before=place))
    return replace(plan, messages=tuple(messages))
