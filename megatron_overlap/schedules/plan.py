"""Plan of one rank: the division of rows into chunks, and its messages and its computation in order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

Small = Literal["first", "last", "both"]
"""Which parts of a slice are small: those whose message or GEMM is exposed."""


class Chunk(NamedTuple):
    """Content of one message: sub-slice `part` of the shard of rank `owner`."""

    owner: int
    part: int


def _cut(length: int, pieces: int, index: int) -> tuple[int, int]:
    """Return start and stop of piece `index` of `length`. The first pieces get the remainder."""
    size, extra = divmod(length, pieces)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def part_weights(parts: int, small: Small) -> tuple[int, ...]:
    """Return the relative sizes of the parts, which double from the small end or ends up to a factor of 4.

    One part is exposed: the GEMM after the last message of a gather, or the GEMM before the first message of a scatter.
    A small part there reduces the exposed time without more messages. The GEMMs of the other parts stay fast.
    """
    if small == "both":
        return tuple(2 ** min(part, parts - 1 - part, 2) for part in range(parts))
    weights = tuple(2 ** min(max(0, part - 1), 2) for part in range(parts))
    return weights if small == "first" else weights[::-1]


def _cut_parts(length: int, parts: int, index: int, small: Small | None) -> tuple[int, int]:
    if small is None:
        return _cut(length, parts, index)
    bounds = (0, *accumulate(part_weights(parts, small)))
    return length * bounds[index] // bounds[-1], length * bounds[index + 1] // bounds[-1]


def check_positive(**arguments: int) -> None:
    """Raise a `ValueError` that names the first argument below one."""
    for name, value in arguments.items():
        if value < 1:
            raise ValueError(f"{name}: {value}: must be at least 1")


@dataclass(frozen=True, slots=True)
class _Layout:
    num_rows: int
    num_ranks: int
    chunks_per_rank: int = 1
    _rows: dict[Chunk, tuple[int, int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def rows(self, chunk: Chunk) -> tuple[int, int]:
        """Return the start and stop row of `chunk`."""
        found = self._rows.get(chunk)
        if found is None:
            found = self._rows[chunk] = self._rows_of(chunk)
        return found

    def _rows_of(self, chunk: Chunk) -> tuple[int, int]:
        raise NotImplementedError

    def num_chunk_rows(self, chunk: Chunk) -> int:
        """Return the number of rows of `chunk`; may be 0."""
        start, stop = self.rows(chunk)
        return stop - start


@dataclass(frozen=True, slots=True)
class ChunkLayout(_Layout):
    """Row bounds of every shard and chunk of a `[num_rows, ...]` activation.

    Shard `owner` is a contiguous run of rows, in rank order, as in Megatron's sequence parallelism. A shard is cut into
    `chunks_per_rank` contiguous parts with the sizes of `part_weights`. If an equal division leaves a remainder, the
    first pieces are one row longer. A piece may be empty: sender and receiver both compute this and skip the message.
    """

    small: Small | None = None

    def shard(self, owner: int) -> tuple[int, int]:
        """Return the start and stop row of the shard of `owner`."""
        return _cut(self.num_rows, self.num_ranks, owner)

    def shard_rows(self, owner: int) -> int:
        """Return the number of rows that `owner` owns."""
        start, stop = self.shard(owner)
        return stop - start

    def _rows_of(self, chunk: Chunk) -> tuple[int, int]:
        first, last = self.shard(chunk.owner)
        start, stop = _cut_parts(last - first, self.chunks_per_rank, chunk.part, self.small)
        return first + start, first + stop

    def rows_in_shard(self, chunk: Chunk) -> tuple[int, int]:
        """Return the start and stop row of `chunk`, relative to the first row of its owner's shard."""
        first, _ = self.shard(chunk.owner)
        start, stop = self.rows(chunk)
        return start - first, stop - first


@dataclass(frozen=True, slots=True)
class PartLayout(_Layout):
    """Row bounds of every chunk of a `[num_rows, ...]` activation in an all-reduce, where no rank owns a shard.

    The rows are cut into `chunks_per_rank` parts, with small parts at both ends (`part_weights`). Each part is cut into
    one chunk per owner, in rank order. A part is one run of rows, so one GEMM computes it. The first chunks of a part
    get the remainder.

    Attributes:
        longest: rows of the longest chunk, by part.
    """

    longest: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        longest = tuple(self.num_chunk_rows(Chunk(0, part)) for part in range(self.chunks_per_rank))
        object.__setattr__(self, "longest", longest)

    def _rows_of(self, chunk: Chunk) -> tuple[int, int]:
        first, last = _cut_parts(self.num_rows, self.chunks_per_rank, chunk.part, "both")
        start, stop = _cut(last - first, self.num_ranks, chunk.owner)
        return first + start, first + stop


Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]
Pattern = Literal["ring", "direct", "serial"]
Split = Literal["edge", "all"]


@dataclass(frozen=True, slots=True)
class Message:
    """One chunk to send and one chunk to receive, posted together. A rank posts its messages in plan order.

    Attributes:
        send: the chunk that is sent.
        to: rank that receives it.
        recv: the chunk that is received. In a reduce-scatter it is a partial sum of that chunk. In an all-reduce it is
            a partial sum of an own chunk, or the complete sum of a chunk of another owner.
        source: rank that sends it.
        after_work: the send may start when `work[:after_work]` is done; 0 means at once.
        after_messages: earlier messages whose received rows this send forwards.
        not_before: a transport on a device enqueues the message when `work[:not_before]` is enqueued. With one hardware
            queue (CUDA_DEVICE_MAX_CONNECTIONS=1) work that is enqueued after a message starts after it.
        call: one call of NCCL, or one batch of copies, carries consecutive messages with the same number; None: alone.
        tag: number of the message on both ranks; None: its place in the plan, which is the same on both.
    """

    send: Chunk
    to: int
    recv: Chunk
    source: int
    after_work: int = 0
    after_messages: tuple[int, ...] = ()
    not_before: int = 0
    call: int | None = None
    tag: int | None = None


def end_of_call(messages: Sequence[Message], first: int) -> int:
    """The number of the first message after the call that begins with message `first`."""
    stop = first + 1
    while stop < len(messages) and messages[first].call is not None and messages[stop].call == messages[first].call:
        stop += 1
    return stop


def num_before_last_call(messages: Sequence[Message]) -> int:
    """How many messages precede those of the last call."""
    return sum(message.call != messages[-1].call for message in messages)


@dataclass(frozen=True, slots=True)
class Work:
    """One unit of computation: a GEMM over the rows of `chunks`, and the partial sums that are added to its result.

    Attributes:
        chunks: chunks whose rows are one contiguous run, in row order: consecutive parts of one owner, or consecutive
            owners (in an all-reduce of one part). Empty if the unit only adds. A serial plan has one unit with all
            chunks.
        needs: messages that must be received before the GEMM reads its input (all-gather).
        adds: messages whose partial sums are added after the GEMM (reduce-scatter and all-reduce).
    """

    chunks: tuple[Chunk, ...]
    needs: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Messages and computation of one rank in one overlapped collective. Immutable."""

    collective: Collective
    pattern: Pattern
    num_ranks: int
    rank: int
    chunks_per_rank: int
    messages: tuple[Message, ...]
    work: tuple[Work, ...]

    def layout(self, num_rows: int) -> ChunkLayout:
        """Return the row bounds of every chunk. A gather has a small last part, a scatter a small first part."""
        small: Small = "last" if self.collective == "all_gather" else "first"
        return ChunkLayout(num_rows, self.num_ranks, self.chunks_per_rank, small)
