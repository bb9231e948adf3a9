"""Which rows and which heads of an attention every rank has, before and after a sequence-to-head all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_overlap.schedules.layout import _cut

Run = tuple[int, int]
"""Start and stop."""


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Which rows of the whole sequence every rank has while the sequence is split.

    Rows are never padded: ranks may have different numbers of them, and a message is as long as its rows.

    Attributes:
        runs: for each rank the runs of consecutive positions that it holds, in the order in which it holds them; all
            ranks have the same number of runs, and some of them may be empty.

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
    def contiguous(cls, num_rows: int, num_ranks: int) -> SequenceLayout:
        """One run a rank, in rank order; where a division leaves a remainder the first ranks have a row more."""
        return cls(tuple((_cut(num_rows, num_ranks, rank),) for rank in range(num_ranks)))

    @classmethod
    def zigzag(cls, num_rows: int, num_ranks: int) -> SequenceLayout:
        """Rank i holds pieces i and 2N-1-i of 2N, as Megatron's context parallelism splits a sequence."""
        pieces = 2 * num_ranks
        return cls(
            tuple(
                (_cut(num_rows, pieces, rank), _cut(num_rows, pieces, pieces - 1 - rank)) for rank in range(num_ranks)
            )
        )

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> SequenceLayout:
        """One run a rank, in rank order, of the given lengths."""
        starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
        return cls(tuple(((start, start + length),) for start, length in zip(starts, lengths, strict=True)))

    @property
    def num_ranks(self) -> int:
        """Ranks that share the sequence."""
        return len(self.runs)

    @property
    def num_runs(self) -> int:
        """Runs that each rank has."""
        return len(self.runs[0])

    @property
    def num_rows(self) -> int:
        """Length of the whole sequence."""
        return max(stop for own in self.runs for _, stop in own)

    def rows_of(self, rank: int) -> int:
        """Number of rows that `rank` holds."""
        return sum(stop - start for start, stop in self.runs[rank])

    def local_runs(self, rank: int) -> tuple[Run, ...]:
        """The runs of `rank` as places in what it holds."""
        found, position = [], 0
        for start, stop in self.runs[rank]:
            found.append((position, position + stop - start))
            position += stop - start
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the attention kernel inside a head group: `queries` heads that share `keys` evenly.

    Attributes:
        queries: query heads, numbered over the whole layer.
        keys: key/value heads; each serves `len(queries) / len(keys)` consecutive query heads.
        home: the head group whose message brought these key/value heads.
    """

    queries: Run
    keys: Run
    home: int


@dataclass(frozen=True)
class HeadLayout:
    """Which heads every rank attends to, in which head group.

    Where key/value heads can be dealt out evenly to ranks and groups, a group is one run of heads over all ranks, and
    rank j has its j-th part: the heads of a group are then consecutive rows of the QKV weight and consecutive columns
    of the output weight. Otherwise a rank has one run of query heads, cut into groups, and a key/value head that
    several groups of a rank need travels with the first of them.

    Attributes:
        num_heads: query heads, Hq.
        num_kv_heads: key/value heads, Hkv.
        num_ranks: N.
        num_groups: G, groups that each rank's heads are cut into.

    Raises:
        ValueError: the numbers do not divide each other as they must.
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
                f"num_groups: {self.num_groups}: a rank has only {self.num_heads // self.num_ranks} query heads"
            )

    @property
    def queries_per_key(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def aligned(self) -> bool:
        """Whether a group is one run of heads over all ranks, with key/value heads of its own."""
        return self.num_kv_heads % (self.num_ranks * self.num_groups) == 0

    @property
    def shares_keys(self) -> bool:
        """Whether a key/value head is needed by more than one rank."""
        return self.num_kv_heads % self.num_ranks != 0

    def queries(self, rank: int, group: int) -> Run:
        """Query heads of `rank` in `group`."""
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
        """Of these, the ones that no earlier group needed: they travel with this group's queries."""
        start, stop = self.keys(rank, group)
        if not self.aligned and group > 0:
            start = max(start, self.keys(rank, group - 1)[1])
        return start, stop

    def last_keys(self, rank: int, group: int) -> Run:
        """Of these, the ones that no later group needs: their gradient is complete after this group."""
        start, stop = self.keys(rank, group)
        if not self.aligned and group < self.num_groups - 1:
            stop = min(stop, self.keys(rank, group + 1)[0])
        return start, stop

    @cached_property
    def _homes(self) -> dict[tuple[int, int], int]:
        """The group that brings a key/value head to a rank."""
        return {
            (rank, head): group
            for rank in range(self.num_ranks)
            for group in range(self.num_groups)
            for head in range(*self.first_keys(rank, group))
        }

    def calls(self, rank: int, group: int) -> tuple[Call, ...]:
        """The attention calls of `rank` in `group`: as few as the sharing of key/value heads allows."""
        first, last = self.queries(rank, group)
        ratio = self.queries_per_key
        found: list[Call] = []
        for head in range(*self.keys(rank, group)):
            queries = max(first, head * ratio), min(last, (head + 1) * ratio)
            home = self._homes[rank, head]
            before = found[-1] if found else None
            if before is not None and before.home == home:
                each = (before.queries[1] - before.queries[0]) // (before.keys[1] - before.keys[0])
                if each == queries[1] - queries[0]:
                    found[-1] = Call((before.queries[0], queries[1]), (before.keys[0], head + 1), home)
                    continue
            found.append(Call(queries, (head, head + 1), home))
        return tuple(found)
