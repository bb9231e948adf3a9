"""How the rows of a gathered activation are divided over ranks and sub-slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Chunk(NamedTuple):
    """What one message carries: sub-slice `part` of the shard that rank `owner` owns."""

    owner: int
    part: int


def _cut(length: int, pieces: int, index: int) -> tuple[int, int]:
    """Start and stop of piece `index` when `length` is cut so that the first pieces take the remainder."""
    size, extra = divmod(length, pieces)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def _check_counts(num_rows: int, num_ranks: int, chunks_per_rank: int) -> None:
    if num_rows < 0:
        raise ValueError(f"num_rows: {num_rows}: must not be negative")
    if num_ranks < 1:
        raise ValueError(f"num_ranks: {num_ranks}: must be at least 1")
    if chunks_per_rank < 1:
        raise ValueError(f"chunks_per_rank: {chunks_per_rank}: must be at least 1")


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Row bounds of every shard and chunk of a `[num_rows, ...]` activation.

    Shard `owner` is a contiguous run of rows, in rank order, as in Megatron's sequence parallelism; a shard is cut
    into `chunks_per_rank` contiguous parts. Where a division leaves a remainder the first pieces are one row longer,
    and a piece may be empty: both ends of a message know it, so an empty one is not sent.

    Raises:
        ValueError: a count is below one, or `num_rows` is negative.
    """

    num_rows: int
    num_ranks: int
    chunks_per_rank: int = 1

    def __post_init__(self) -> None:
        _check_counts(self.num_rows, self.num_ranks, self.chunks_per_rank)

    def shard(self, owner: int) -> tuple[int, int]:
        """Start and stop row of the shard of `owner`."""
        return _cut(self.num_rows, self.num_ranks, owner)

    def shard_rows(self, owner: int) -> int:
        """Number of rows that `owner` owns."""
        start, stop = self.shard(owner)
        return stop - start

    def rows(self, chunk: Chunk) -> tuple[int, int]:
        """Start and stop row of `chunk` in the gathered activation."""
        first, last = self.shard(chunk.owner)
        start, stop = _cut(last - first, self.chunks_per_rank, chunk.part)
        return first + start, first + stop

    def rows_in_shard(self, chunk: Chunk) -> tuple[int, int]:
        """Start and stop row of `chunk` counted from the first row of its owner's shard."""
        first, _ = self.shard(chunk.owner)
        start, stop = self.rows(chunk)
        return start - first, stop - first

    def num_chunk_rows(self, chunk: Chunk) -> int:
        """Number of rows of `chunk`; 0 when the shard has fewer rows than parts."""
        start, stop = self.rows(chunk)
        return stop - start


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Row bounds of every chunk of a `[num_rows, ...]` activation that no rank owns: an all-reduce cuts it as it likes.

    The rows are first cut into `chunks_per_rank` parts, and each part into one chunk per owner, in rank order: a part
    is one run of rows, so that one GEMM makes all of it. Remainders go to the first pieces, as in `ChunkLayout`.

    Raises:
        ValueError: a count is below one, or `num_rows` is negative.
    """

    num_rows: int
    num_ranks: int
    chunks_per_rank: int = 1

    def __post_init__(self) -> None:
        _check_counts(self.num_rows, self.num_ranks, self.chunks_per_rank)

    def rows(self, chunk: Chunk) -> tuple[int, int]:
        """Start and stop row of `chunk`."""
        first, last = _cut(self.num_rows, self.chunks_per_rank, chunk.part)
        start, stop = _cut(last - first, self.num_ranks, chunk.owner)
        return first + start, first + stop

    def num_chunk_rows(self, chunk: Chunk) -> int:
        """Number of rows of `chunk`; may be 0."""
        start, stop = self.rows(chunk)
        return stop - start
