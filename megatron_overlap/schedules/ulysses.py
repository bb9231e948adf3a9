"""Ulysses attention: rows and heads of every rank, and the schedule of both all-to-alls and the attention between.

Source: DeepSpeed-Ulysses (arXiv 2309.14509). Flash-Overlap / CommFuse (arXiv 2604.24013) mentions the overlap of its
all-to-alls with the attention of other heads without a schedule. The order below is that of this project.

    compute  produce 0 .. G-1 | attend 0 | attend 1 | ... | attend G-1 | consume 0 .. G-1
    link               in 0 | in 1 | ... | in G-1 | out 0 | ... | out G-1

The link starts when the first piece is produced and ends with the results of the last group. All inbound pieces are
sent first, so the link never waits for an attention while another piece is ready. Only `attend g` needs `in g`.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, product
from typing import Literal, NamedTuple, Self

from megatron_overlap.schedules.gather_scatter import check_rank
from megatron_overlap.schedules.plan import Chunk, Message, _cut

MAX_CALLS = 16
"""Most calls of NCCL for the first group of heads. The messages of a call arrive together."""

Run = tuple[int, int]
"""Start and stop."""


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """The rows of the whole sequence that each rank holds.

    Attributes:
        runs: for each rank the runs of consecutive positions that it holds, in memory order. All ranks have the same
            number of runs; a run may be empty. Rows are never padded.

    Raises:
        ValueError: the runs do not cover a sequence exactly once.
    """

    runs: tuple[tuple[Run, ...], ...]

    def __post_init__(self) -> None:
        if not self.runs or len({len(own) for own in self.runs}) != 1:
            raise ValueError(f"runs: {self.runs}: every rank must have the same number of runs, at least one")
        position = 0
        for start, stop in sorted(run for own in self.runs for run in own):
            if start != position or stop < start:
                raise ValueError(f"runs: {self.runs}: position {position} must be held once")
            position = stop

    @classmethod
    def contiguous(cls, num_rows: int, num_ranks: int) -> Self:
        """One run per rank, in rank order. The first ranks hold one row more if the division has a remainder."""
        return cls(tuple((_cut(num_rows, num_ranks, rank),) for rank in range(num_ranks)))

    @classmethod
    def zigzag(cls, num_rows: int, num_ranks: int) -> Self:
        """Rank i holds pieces i and 2N-1-i of 2N, as Megatron's context parallelism splits a sequence."""
        pieces = [_cut(num_rows, 2 * num_ranks, index) for index in range(2 * num_ranks)]
        return cls(tuple((pieces[rank], pieces[-1 - rank]) for rank in range(num_ranks)))

    @property
    def num_ranks(self) -> int:
        return len(self.runs)

    @property
    def num_runs(self) -> int:
        return len(self.runs[0])

    @property
    def num_rows(self) -> int:
        return max(stop for own in self.runs for _, stop in own)

    def rows_of(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.runs[rank])

    def local_runs(self, rank: int) -> tuple[Run, ...]:
        """The runs of `rank` as rows of its local tensor."""
        return tuple(pairwise(accumulate((stop - start for start, stop in self.runs[rank]), initial=0)))


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the attention kernel inside a head group.

    Attributes:
        queries: query heads, numbered over the whole layer.
        keys: key/value heads; equally many consecutive query heads share each.
        source_group: the head group whose message contains these key/value heads.
    """

    queries: Run
    keys: Run
    source_group: int


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The heads of every rank, by head group.

    If key/value heads divide evenly over ranks and groups, a group is one run of heads over all ranks, and rank j owns
    its j-th part. The heads of a group are then consecutive rows of the QKV weight and consecutive columns of the
    output weight. Otherwise each rank owns one run of query heads, cut into groups. A key/value head that several
    groups of a rank need is sent with the first of them.

    Raises:
        ValueError: a number is below 1, or the numbers do not divide each other.
    """

    num_heads: int
    num_kv_heads: int
    num_ranks: int
    num_groups: int = 1

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.num_ranks, self.num_groups) < 1:
            raise ValueError(f"{self}: every number must be at least 1")
        if self.num_heads % self.num_ranks:
            raise ValueError(f"num_heads: {self.num_heads}: must be a multiple of the {self.num_ranks} ranks")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: {self.num_kv_heads}: must divide num_heads {self.num_heads}")
        if self.num_groups > self.num_heads // self.num_ranks:
            raise ValueError(
                f"num_groups: {self.num_groups}: each rank has only {self.num_heads // self.num_ranks} query heads"
            )

    @property
    def queries_per_key(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def aligned(self) -> bool:
        """Whether a group is one run of heads over all ranks, and shares no key/value head with another group."""
        return self.num_kv_heads % (self.num_ranks * self.num_groups) == 0

    @property
    def shares_keys(self) -> bool:
        """Whether a key/value head is needed by more than one rank."""
        return self.num_kv_heads % self.num_ranks != 0

    def queries(self, rank: int, group: int) -> Run:
        per_rank = self.num_heads // self.num_ranks
        if self.aligned:
            size = per_rank // self.num_groups
            start = (group * self.num_ranks + rank) * size
            return start, start + size
        start, stop = _cut(per_rank, self.num_groups, group)
        return rank * per_rank + start, rank * per_rank + stop

    def keys(self, rank: int, group: int) -> Run:
        """Key/value heads that the query heads of `rank` in `group` need."""
        start, stop = self.queries(rank, group)
        return start // self.queries_per_key, (stop - 1) // self.queries_per_key + 1

    def first_keys(self, rank: int, group: int) -> Run:
        """The heads of `keys` that no earlier group needs: they are sent with the queries of this group."""
        start, stop = self.keys(rank, group)
        if not self.aligned and group > 0:
            start = max(start, self.keys(rank, group - 1)[1])
        return start, stop

    def last_keys(self, rank: int, group: int) -> Run:
        """The heads of `keys` that no later group needs: their gradient is complete after this group."""
        start, stop = self.keys(rank, group)
        if not self.aligned and group < self.num_groups - 1:
            stop = min(stop, self.keys(rank, group + 1)[0])
        return start, stop

    def calls(self, rank: int, group: int) -> tuple[Call, ...]:
        """The attention calls of `rank` in `group`, as few as the sharing of key/value heads permits."""
        first, last = self.queries(rank, group)
        ratio = self.queries_per_key

        def kind(head: int) -> tuple[int, int]:
            """The head group that is sent with a key/value head, and the number of query heads."""
            source_group = next(each for each in range(group, -1, -1) if head in range(*self.first_keys(rank, each)))
            return source_group, min(last, (head + 1) * ratio) - max(first, head * ratio)

        found = []
        for (source_group, _), heads in groupby(range(*self.keys(rank, group)), kind):
            run = [*heads]
            start, stop = run[0], run[-1] + 1
            found.append(Call((max(first, start * ratio), min(last, stop * ratio)), (start, stop), source_group))
        return tuple(found)


Direction = Literal["in", "out"]
Step = Literal["produce", "attend", "consume"]
AllToAllPattern = Literal["direct", "serial"]


class Piece(NamedTuple):
    """The content of one message: run `run` of the rows of rank `rows`, for the heads of rank `heads` in `group`."""

    direction: Direction
    group: int
    heads: int
    rows: int
    run: int


@dataclass(frozen=True, slots=True)
class HeadMessage:
    """One piece to send and one piece to receive, posted together. See `schedules.plan.Message`."""

    send: Piece
    to: int
    recv: Piece
    source: int
    after_work: int
    call: int

    def message(self, index: int) -> Message:
        """The message in the format of the transports."""
        send, recv = Chunk(self.send.rows, index), Chunk(self.recv.rows, index)
        return Message(send, self.to, recv, self.source, self.after_work, call=self.call)


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of computation.

    Attributes:
        step: `produce` computes the own rows for the heads of `peers`; `attend` computes attention of the own heads
            over all rows; `consume` reads the own rows of the results for the heads of `peers`.
        needs: messages that must be received first.
    """

    step: Step
    group: int
    peers: tuple[int, ...]
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AllToAllPlan:
    """Messages and computation of one rank in one pass of Ulysses attention. Immutable."""

    num_ranks: int
    rank: int
    num_groups: int
    num_runs: int
    messages: tuple[HeadMessage, ...]
    work: tuple[Task, ...]


def ulysses_plan(
    num_ranks: int, rank: int, *, num_groups: int = 1, num_runs: int = 1, pattern: AllToAllPattern = "direct"
) -> AllToAllPlan:
    """The schedule of one pass for one rank.

    Args:
        num_ranks, rank: see `all_gather_plan`.
        num_groups: head groups.
        num_runs: runs of rows that each rank holds, see `SequenceLayout`; one message each.
        pattern: `direct` as in the diagram above; `serial` runs one phase after another (produce, send, attend, send,
            consume), so both all-to-alls are fully exposed. Benchmarks use it to measure the overlap.

    Raises:
        ValueError: an argument is out of range.
    """
    check_rank(num_ranks, rank)
    if pattern not in ("direct", "serial"):
        raise ValueError(f"pattern: {pattern}: use direct or serial")
    # The own heads come last: they need no message.
    peers = tuple((rank + distance) % num_ranks for distance in range(1, num_ranks + 1))
    sources = tuple((rank - distance) % num_ranks for distance in range(num_ranks))
    work: list[Task] = []
    produced: dict[tuple[int, int], int] = {}
    for group in range(num_groups):
        # The first group is produced piece by piece, because the link is idle until its first piece is ready.
        for part in [(peer,) for peer in peers] if group == 0 else [peers]:
            work.append(Task("produce", group, part))
            produced.update(((group, peer), len(work)) for peer in part)
    all_produced = len(work)
    attended = [all_produced + group + 1 for group in range(num_groups)]
    if pattern == "serial":
        produced, attended = dict.fromkeys(produced, all_produced), [attended[-1]] * num_groups
    messages: list[HeadMessage] = []
    received = defaultdict[tuple[Direction, int, int], list[int]](list)
    directions: tuple[Direction, ...] = ("in", "out")
    call = 0
    for direction in directions:
        for group in range(num_groups):
            # Only the first group is produced piece by piece. A device consumes results by group.
            per_call = num_ranks if direction == "out" or group else -(-(num_ranks - 1) // MAX_CALLS)
            for number, (to, source) in enumerate(zip(peers[:-1], sources[1:], strict=True)):
                call += number % per_call == 0
                after = produced[group, to] if direction == "in" else attended[group]
                for run in range(num_runs):
                    received[direction, group, source].append(len(messages))
                    if direction == "in":
                        send, recv = Piece(direction, group, to, rank, run), Piece(direction, group, rank, source, run)
                    else:
                        send, recv = Piece(direction, group, rank, to, run), Piece(direction, group, source, rank, run)
                    messages.append(HeadMessage(send, to, recv, source, after, call))

    def needed(direction: Direction, group: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        groups, ranks = (range(num_groups), sources) if pattern == "serial" else ((group,), ranks)
        return tuple(k for each in groups for source in ranks for k in received[direction, each, source])

    for group in range(num_groups):
        work.append(Task("attend", group, (rank,), needed("in", group, sources)))
    for group, source in product(range(num_groups), sources):
        work.append(Task("consume", group, (source,), needed("out", group, (source,))))
    return AllToAllPlan(num_ranks, rank, num_groups, num_runs, tuple(messages), tuple(work))
