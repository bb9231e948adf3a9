"""Expert parallelism: dispatch, expert computation and combine of one rank, by chunks of rows of one source rank.

    compute  own | step 0 | own | step 1 | ... | last step | own
    link     dispatch 0 | dispatch 1 | ... | combine 0 | combine 1 | ... | combine last

A step computes one received chunk, or several in large groups. Its results are sent back while the next step is
computed. Own rows need no message. They are computed while no chunk is ready: some before the first step, the rest
while the last results are sent. FasterMoE (PPoPP 2022, section 4.2) computes all own rows first, which exposes the last
combine.

Each pair of ranks cuts the rows between them by the counts of that pair, which both know. The number of messages of a
pair depends on the number of ranks alone, so both ranks number a message alike without global counts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from megatron_overlap.schedules.gather_scatter import check_rank
from megatron_overlap.schedules.heuristics import MIN_CHUNK_ROWS
from megatron_overlap.schedules.plan import Chunk, Message, check_positive

MAX_CHUNKS = 4
"""Approximate number of chunks of a rank in each direction, and largest number of pieces of its own rows. Own rows hide
the first and the last message, so more chunks hide little, and each reads the weights of its experts again. With 4 of
256 rows a forward takes 0.82 of the time with 8 of 128, forward + backward 0.96 (two CPU hosts, bf16, AMX)."""
MAX_STEPS = 6
"""Largest number of steps of a pass. A step of few rows needs as many kernels and weights as one of many, and its GEMMs
leave most of a GPU idle. On H100s, simulated, EP16 of Qwen3-30B-A3B takes 0.82 of the stock time with 5 steps and 1.00
with a step for each of 15 messages, EP64 of `configs/gpu/deepseek_v3_like_pp10_ep64` 0.67 with 6 steps and 0.84."""
FEW_ROWS = 512
"""Rows of an expert from one rank: a step with fewer on average gathers the rows of its messages by expert. GEMMs of
more rows fill a GPU, and the copies take longer than larger GEMMs save (simulated H100s)."""
MIN_PIECE_ROWS = 64
"""Smallest value of `min_rows`. A GEMM of fewer rows is slow and may round differently."""

Counts = Sequence[Sequence[int]]
"""Rows by peer and by expert of the rank that computes them."""


class Segment(NamedTuple):
    """Consecutive rows of one local expert: `start` and `stop` in the tokens or in the expert rows of this rank."""

    expert: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


Segments = tuple[Segment, ...]


def joined(segments: Iterable[Segment]) -> Segments:
    """The same rows in as few segments as possible, if segments that follow one another are neighbours."""
    made = list[Segment]()
    for each in segments:
        if made and (made[-1].expert, made[-1].stop) == each[:2]:
            made[-1] = made[-1]._replace(stop=each.stop)
        else:
            made.append(each)
    return tuple(made)


def rows_by_expert(segments: Iterable[Segment]) -> Counter[int]:
    """The rows of each expert, in the order of its first segment."""
    counts = Counter[int]()
    for each in segments:
        counts[each.expert] += each.rows
    return counts


@dataclass(frozen=True, slots=True)
class ExpertMessage:
    """One chunk of tokens that this rank sends and one that it receives in dispatch. In combine the results return.

    Attributes:
        to: rank whose experts compute the chunk that this rank sends.
        source: rank that gets the results of the chunk that this rank receives.
        sent: rows of the tokens of this rank; no segments where the pair has fewer chunks.
        received: expert rows of this rank.
        arrives: first row of the received chunk among the received rows.
        lands: first row of the sent chunk among the received rows of `to`.
        returns: first token of the received chunk among the tokens of `source`.
    """

    to: int
    source: int
    sent: Segments
    received: Segments
    arrives: int
    lands: int
    returns: int

    @property
    def num_received(self) -> int:
        return _rows(self.received)


type RowGroup = tuple[int, ...]
"""Numbers of received segments, sorted by expert and number."""


def is_one_run(group: RowGroup) -> bool:
    """Whether the segments of a group follow one another in the received rows. Those of one message do."""
    return all(number + 1 == following for number, following in pairwise(group))


class ExpertStep(NamedTuple):
    """Messages that a rank awaits together, to compute their rows. NCCL sends them in one call, the results in another.

    Attributes:
        messages: their numbers.
        received: their expert rows, in groups that one GEMM for each expert computes.
        own_before: own pieces that are computed before this step.
    """

    messages: range
    received: tuple[RowGroup, ...]
    own_before: int


class OwnPiece(NamedTuple):
    """Rows of this rank for its own experts: the same segments as rows of the tokens and as expert rows."""

    tokens: Segments
    rows: Segments


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Messages and computation of one rank in one pass. Immutable.

    Tokens are sorted by rank and local expert of their destination. Expert rows are sorted by local expert, and for
    each expert by source rank. Received rows are those of other ranks, the next rank first: in order of the tokens
    there, so that a chunk is one piece of memory on both ranks. If each pair of ranks has one chunk, those of a step
    follow one another, the last message first.

    Attributes:
        num_tokens: rows that this rank sends, with its own rows.
        num_received: received rows.
        most_tokens, most_received: the largest number of a rank; 0 without `totals`, as `lands` and `returns` are.
        experts: the expert rows of each local expert.
        messages: one per peer and part.
        received: the expert rows of the messages, in the order of the received rows.
        steps: of the computation of received rows.
    """

    num_ranks: int
    rank: int
    num_tokens: int
    num_received: int
    most_tokens: int
    most_received: int
    experts: Segments
    messages: tuple[ExpertMessage, ...]
    received: Segments
    steps: tuple[ExpertStep, ...]
    own: tuple[OwnPiece, ...]

    @property
    def num_rows(self) -> int:
        """Expert rows."""
        return self.experts[-1].stop

    @property
    def transfers(self) -> tuple[Message, ...]:
        """The messages of the transports: all of dispatch, then all of combine, which leave in the same order."""
        rank, count, messages = self.rank, len(self.steps), self.messages
        numbered = [(call, k, messages[k]) for call, step in enumerate(self.steps) for k in step.messages]
        dispatch = [Message(Chunk(rank, k), m.to, Chunk(m.source, k), m.source, call=call) for call, k, m in numbered]
        combine = [
            Message(Chunk(rank, k), m.source, Chunk(m.to, k), m.to, call + 1, call=count + call)
            for call, k, m in ((call, k + len(messages), m) for call, k, m in numbered)
        ]
        return (*dispatch, *combine)


def max_parts(num_ranks: int) -> int:
    """Largest number of chunks of one pair of ranks: about `MAX_CHUNKS` messages of a rank in each direction."""
    return -(-MAX_CHUNKS // max(1, num_ranks - 1))


def expert_plan(
    rank: int,
    sent: Counts,
    received: Counts,
    *,
    totals: Counts | None = None,
    parts: int | None = None,
    min_rows: int = MIN_CHUNK_ROWS,
    compute_per_message: float = 1.0,
    filler_rows: float = 0.0,
) -> ExpertPlan:
    """The schedule of one pass for one rank.

    Args:
        rank: this rank in the group.
        sent: for each rank, the tokens of this rank for each local expert of that rank.
        received: for each rank, its tokens for each local expert of this rank; `received[rank]` is `sent[rank]`.
        totals: for each rank, the tokens that it sends to each rank. None: the places of chunks at peers are unknown.
        parts: chunks of one pair of ranks; the same on every rank. None uses `max_parts`.
        min_rows: smallest number of rows of a chunk, unless the pair has fewer. A cut inside the rows of an expert
            leaves at least this number, and at least half a chunk, on both sides. The same on every rank.
        compute_per_message: time to compute one row over the time to send one row, from the cost model. It places the
            own pieces on devices that cannot ask whether a message is complete.
        filler_rows: other computation before the first chunk, in rows.

    Raises:
        ValueError: an argument is out of range, or the counts do not fit each other.
    """
    num_ranks = len(sent)
    check_rank(num_ranks, rank)
    parts = max_parts(num_ranks) if parts is None else parts
    check_positive(parts=parts)
    if min_rows < MIN_PIECE_ROWS:
        raise ValueError(f"min_rows: {min_rows}: must be at least {MIN_PIECE_ROWS}")
    if len(received) != len(sent) or len({len(counts) for counts in (*sent, *received)}) != 1 or not sent[0]:
        raise ValueError("sent, received: both must have a row for each rank and a column for each local expert")
    if min(min(counts) for counts in (*sent, *received)) < 0:
        raise ValueError("sent, received: counts must not be negative")
    if list(sent[rank]) != list(received[rank]):
        raise ValueError(f"received: {list(received[rank])} rows of rank {rank} itself: it sends {list(sent[rank])}")
    ranks, num_experts = range(num_ranks), len(sent[0])
    if totals is None:
        lands, returns, most_tokens, most_received = [0] * num_ranks, [0] * num_ranks, 0, 0
    else:
        if [*totals[rank]] != [*map(sum, sent)] or [counts[rank] for counts in totals] != [*map(sum, received)]:
            raise ValueError(f"totals: the rows and columns of rank {rank} must be the sums of sent and received")
        lands = [sum(totals[(to + step) % num_ranks][to] for step in range(1, (rank - to) % num_ranks)) for to in ranks]
        returns = [sum(counts[:rank]) for counts in totals]
        most_tokens = max(map(sum, totals))
        most_received = max(sum(column) - column[to] for to, column in enumerate(zip(*totals, strict=True)))
    bounds = list(accumulate(chain.from_iterable(sent), initial=0))
    tokens = [bounds[first : first + num_experts] for first in range(0, len(bounds) - 1, num_experts)]
    bounds_by_expert = list(accumulate(chain.from_iterable(zip(*received, strict=True)), initial=0))
    rows = [bounds_by_expert[source::num_ranks] for source in range(num_ranks)]
    sent_chunks = [_cut(counts, first, parts, min_rows) for counts, first in zip(sent, tokens, strict=True)]
    received_chunks = [_cut(counts, first, parts, min_rows) for counts, first in zip(received, rows, strict=True)]
    # Own rows send no message, so their pieces do not depend on the number of ranks.
    own_tokens, own_rows = (_cut(sent[rank], first, MAX_CHUNKS, min_rows) for first in (tokens[rank], rows[rank]))
    own = tuple(map(OwnPiece, own_tokens, own_rows))
    peers = [((rank + step) % num_ranks, (rank - step) % num_ranks) for step in range(1, num_ranks)]
    # Part by part, so that no rank receives from one peer alone for long.
    order = [(part, to, source) for part in range(parts) for to, source in peers]
    # The next rank first.
    sources = [to for to, _ in peers]
    firsts = list(accumulate((sum(received[each]) for each in sources), initial=0))
    arrives, num_received, messages = dict(zip(sources, firsts, strict=False)), firsts[-1], []
    for part, to, source in order:
        leaving, chunk = _at(sent_chunks[to], part), _at(received_chunks[source], part)
        message = ExpertMessage(to, source, leaving, chunk, arrives[source], lands[to], returns[source])
        messages.append(message)
        arrives[source] += message.num_received
        returns[source] += message.num_received
        lands[to] += _rows(leaving)
    size = max(1, -(-len(messages) // MAX_STEPS))
    numbers = [range(first, min(first + size, len(messages))) for first in range(0, len(messages), size)]
    arriving = [sum(messages[k].num_received for k in each) for each in numbers]
    before = _own_before(arriving, own_rows, compute_per_message, filler_rows)
    # Numbers of the segments of each message: sources follow one another, and of each source its parts.
    by_place = sorted(range(len(messages)), key=lambda k: messages[k].arrives)
    segments = tuple(chain.from_iterable(messages[k].received for k in by_place))
    stops = accumulate((len(messages[k].received) for k in by_place), initial=0)
    segments_of = {k: range(*bounds) for k, bounds in zip(by_place, pairwise(stops), strict=True)}
    steps = [
        ExpertStep(each, _grouped([segments_of[k] for k in each], segments), count)
        for each, count in zip(numbers, before, strict=True)
    ]
    experts = tuple(map(Segment, range(num_experts), rows[0], rows[0][1:]))
    sizes = bounds[-1], num_received, most_tokens, most_received
    return ExpertPlan(num_ranks, rank, *sizes, experts, tuple(messages), segments, tuple(steps), own)


def _grouped(messages: Sequence[Sequence[int]], segments: Segments) -> tuple[RowGroup, ...]:
    """The segments of the messages of a step: one group, or one for each message if that saves copies of many rows."""
    group = tuple(sorted(chain.from_iterable(messages), key=lambda number: (segments[number].expert, number)))
    rows = sum(segments[number].rows for number in group)
    if rows < FEW_ROWS * len(group) or is_one_run(group):
        return (group,) if group else ()
    return tuple(tuple(numbers) for numbers in messages if numbers)


def _cut(counts: Sequence[int], starts: Sequence[int], parts: int, min_rows: int) -> list[Segments]:
    """Cuts the rows of one pair of ranks into at most `parts` chunks of about equal size; see `expert_plan`.

    `starts` are the first rows for each expert in the tensor.
    """
    bounds = list(accumulate(counts, initial=0))
    total = bounds[-1]
    chunks = min(parts, max(1, total // min_rows))
    if chunks == 1:  # of each pair in a large group
        whole = tuple(
            Segment(expert, starts[expert], starts[expert] + rows) for expert, rows in enumerate(counts) if rows
        )
        return [whole] if whole else []
    least = max(min_rows, total // chunks // 2)
    edges = sorted({0, total} | {_snapped(total * index // chunks, bounds, least) for index in range(1, chunks)})
    return [
        tuple(
            Segment(expert, first + max(begin - start, 0), first + min(end, stop) - start)
            for expert, (first, start, stop) in enumerate(zip(starts, bounds, bounds[1:], strict=False))
            if max(begin, start) < min(end, stop)
        )
        for begin, end in pairwise(edges)
    ]


def _snapped(bound: int, bounds: list[int], least: int) -> int:
    """`bound`, or the nearer end of the rows of its expert if `bound` leaves fewer than `least` of them on a side."""
    for start, stop in pairwise(bounds):
        if start < bound < stop and min(bound - start, stop - bound) < least:
            return start if bound - start <= stop - bound else stop
    return bound


def _own_before(
    received: Sequence[int], own: Sequence[Segments], compute_per_message: float, filler_rows: float
) -> list[int]:
    """For each step with so many rows, the own pieces before it, if a link delivers the rows of one at a time."""
    counts, done = [], 0
    now, arrival = filler_rows * compute_per_message, 0.0
    for rows in received:
        arrival += rows
        while rows and done < len(own) and now < arrival:
            now += _rows(own[done]) * compute_per_message
            done += 1
        now = max(now, arrival) + rows * compute_per_message
        counts.append(done)
    return counts


def _at(chunks: list[Segments], part: int) -> Segments:
    return chunks[part] if part < len(chunks) else ()


def _rows(segments: Segments) -> int:
    return sum(segment.rows for segment in segments)
