"""Where rows are: those of this rank in its packed micro-batch, and those of a load in its buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from megatron_overlap.schedules.varlen import Plan, Ring
from megatron_overlap.schedules.varlen.ring_groups import Load, RingGroup

Place = Callable[[int, int], slice]
"""`place(ring, chunk)`: the rows of a chunk of the ring with this number in its ring_group."""


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows of one rank.

    Attributes:
        rings: rows of rings, which come first.
        starts: first row of each ring that this rank is in, by document.
        lengths: of whole documents, which follow.
    """

    rings: int
    starts: dict[int, int]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, index: int, rank: int) -> OwnRows:
        """Those of `rank` in pass `index`."""
        starts, row, part = {}, 0, plan.passes[index]
        for ring in part.rings:
            if rank in ring.ranks:
                starts[ring.document] = row
                row += ring.tokens(ring.ranks.index(rank))
        lengths = (plan.lengths[document] for document in part.local[rank])
        return cls(row, starts, tuple(length for length in lengths if length))

    def place(self, ring_group: RingGroup, place: int) -> Place:
        """Chunks of the member at `place`, which is this rank."""

        def rows(number: int, chunk: int) -> slice:
            ring = ring_group.rings[number]
            (a, b), (c, d) = ring.chunks(place)
            start = self.starts[ring.document]
            return slice(start, start + b - a) if chunk == place else slice(start + b - a, start + b - a + d - c)

        return rows


def place_in_load(ring_group: RingGroup, load: Load) -> Place:
    """Chunks in the buffer of a load: chunk by chunk, in each ring by ring."""
    starts: dict[tuple[int, int], int] = {}
    sizes = [(number, chunk) for chunk in load.chunks for number in range(len(ring_group.rings))]
    counts = [length(ring_group.rings[number], chunk) for number, chunk in sizes]
    for key, start in zip(sizes, accumulate(counts, initial=0), strict=False):
        starts[key] = start

    def rows(number: int, chunk: int) -> slice:
        start = starts[number, chunk]
        return slice(start, start + length(ring_group.rings[number], chunk))

    return rows


def length(ring: Ring, chunk: int) -> int:
    """Tokens of a chunk."""
    return ring.bounds[chunk + 1] - ring.bounds[chunk]


def join(slices: Sequence[slice]) -> list[slice]:
    """The same rows in as few runs as there are."""
    runs: list[slice] = []
    for rows in slices:
        if runs and runs[-1].stop == rows.start:
            runs[-1] = slice(runs[-1].start, rows.stop)
        elif rows.stop > rows.start:
            runs.append(rows)
    return runs


def pick(x: torch.Tensor, runs: Sequence[slice]) -> torch.Tensor:
    """These rows; a view where they are one run."""
    return x[runs[0]] if len(runs) == 1 else torch.cat([x[rows] for rows in runs])


def add(total: torch.Tensor, runs: Sequence[slice], term: torch.Tensor) -> None:
    """`total[runs] += term`, in the dtype of `total`."""
    row = 0
    for rows in runs:
        total[rows] += term[row : row + rows.stop - rows.start]
        row += rows.stop - rows.start


def merge(
    out: torch.Tensor, lse: torch.Tensor, runs: Sequence[slice], term: torch.Tensor, term_lse: torch.Tensor
) -> None:
    """Merges attention with more keys into `out[runs]` and `lse[runs]`, both wide."""
    row = 0
    for rows in runs:
        stop = row + rows.stop - rows.start
        old, new = lse[rows], term_lse[row:stop]
        # The share of the new keys in the sum of both: e^new / (e^old + e^new).
        out[rows].lerp_(term[row:stop].to(out.dtype), torch.sigmoid(new - old).unsqueeze(-1))
        lse[rows] = torch.logaddexp(old, new)
        row = stop
