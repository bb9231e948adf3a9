"""Builder of the overlapped all-reduce after a GEMM: a reduce-scatter and an all-gather in parts, one behind the other.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013) claims plain tensor parallelism by its tail-free reduce-scatter. The
gather of the sums behind it, part by part, is our own.
"""

from __future__ import annotations

from typing import Literal

from megatron_overlap.schedules.gather_scatter import validate
from megatron_overlap.schedules.layout import Chunk
from megatron_overlap.schedules.plan import Message, Pattern, Plan, Split, Work

Gathers = Literal["between", "after"]
Run = tuple[Chunk, ...]


def all_reduce_plan(
    num_ranks: int,
    rank: int,
    *,
    chunks_per_rank: int = 1,
    pattern: Pattern = "direct",
    split: Split = "edge",
    gathers: Gathers = "between",
) -> Plan:
    """Schedule of `y = all_reduce(x @ w.T)` for one rank; rows are numbered by `PartLayout`.

    Every chunk is sent to its owner, who adds all of them and sends the sum to everybody. Part p's partial sums travel
    while part p+1 is computed, and its whole sums while part p+2 is. The last part's own rows are computed last: of all
    messages only that part's sums cannot leave before the last GEMM ends.

    Args:
        num_ranks: size of the group, 1 to 64.
        rank: this rank in the group.
        chunks_per_rank: number of parts.
        pattern: `direct`, or `serial`, which is `direct` after one GEMM over all rows.
        split: `edge` makes a part by one GEMM, but cuts the first part, before which nothing can be sent, and the last
            one, after which sums still have to be; `all` makes every owner's rows by a GEMM of their own.
        gathers: `between` sends sums as soon as they can be made; `after` sends all of them after the last partial
            sum, for a caller who has more to compute then.

    Raises:
        ValueError: an argument is out of range.
    """
    validate(num_ranks, rank, chunks_per_rank, pattern, split)
    if pattern == "ring":
        raise ValueError("pattern: ring: an all-reduce has no ring schedule; use direct")
    if gathers not in ("between", "after"):
        raise ValueError(f"gathers: {gathers}: use between or after")
    messages: list[Message] = []
    work: list[Work] = []
    distances = range(1, num_ranks)
    parts = range(chunks_per_rank)
    made: dict[Chunk, int] = {}
    partial_sums: dict[int, tuple[int, ...]] = {}

    def compute(runs: list[Run]) -> None:
        for run in runs:
            work.append(Work(run))
            made.update(dict.fromkeys(run, len(work)))

    def send_partial_sums(part: int) -> None:
        first = len(messages)
        for distance in distances:
            to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
            chunk = Chunk(to, part)
            messages.append(Message(chunk, to, Chunk(rank, part), source, after_work=made[chunk]))
        partial_sums[part] = tuple(range(first, len(messages)))

    def add_and_send_sums(part: int) -> None:
        if num_ranks > 1:
            work.append(Work((), adds=partial_sums[part]))
        for distance in distances:
            to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
            messages.append(Message(Chunk(rank, part), to, Chunk(source, part), source, after_work=len(work)))

    if pattern == "serial":
        compute([tuple(Chunk(owner, part) for part in parts for owner in range(num_ranks))])
    waiting = 0
    for part in parts:
        runs, own = ([], []) if pattern == "serial" else _runs(num_ranks, rank, part, chunks_per_rank, split)
        compute(runs)
        send_partial_sums(part)
        # One part late: the link always has a message to carry while the sum before it is made.
        if part > 0 and gathers == "between" and pattern != "serial":
            add_and_send_sums(waiting)
            waiting += 1
        compute(own)
    for part in parts[waiting:]:
        add_and_send_sums(part)
    return Plan("all_reduce", pattern, num_ranks, rank, chunks_per_rank, tuple(messages), tuple(work))


def _runs(num_ranks: int, rank: int, part: int, num_parts: int, split: Split) -> tuple[list[Run], list[Run]]:
    """The GEMMs of one part, those before its partial sums leave and those after: runs of rows, own rows last."""
    own = Chunk(rank, part)
    above = tuple(Chunk(owner, part) for owner in range(rank + 1, num_ranks))
    below = tuple(Chunk(owner, part) for owner in range(rank))
    if split == "all":
        return [(chunk,) for chunk in above + below], [(own,)]
    if part == 0:
        runs = [above[:1], above[1:], below] if above else [below[:1], below[1:]]
    elif part == num_parts - 1:
        runs = [above, below]
    else:
        return [(*below, own, *above)], []
    return [run for run in runs if run], [(own,)]
