"""Builds the plan of an all-reduce that overlaps the GEMM before it: a reduce-scatter and an all-gather per part.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013) applies its tail-free reduce-scatter to plain tensor parallelism.
This project adds the all-gather of the sums, part by part.
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
    """Return the plan of `y = all_reduce(x @ w.T)` for one rank. `PartLayout` defines the rows of each chunk.

    Each rank sends every chunk to its owner. The owner adds the partial sums and sends the sum to all ranks. Partial
    sums of part p are sent during the GEMM of part p+1, and its sums during the GEMM of part p+2. Own rows of the last
    part are computed last: only the sums of that part are sent after the last GEMM.

    Args:
        num_ranks: size of the group, 1 to 64.
        rank: this rank in the group.
        chunks_per_rank: number of parts.
        pattern: `direct`; or `serial`, which sends the same messages after one GEMM over all rows.
        split: `edge` computes a part in one GEMM, except the first part, so that sending starts early, and the last
            part, whose sums are exposed. `all` runs one GEMM per owner and part.
        gathers: `between` sends sums as soon as they are ready. `after` sends all sums after the last partial sum, for
            a caller that overlaps them with later computation.

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
    next_sum = 0
    for part in parts:
        runs, own = ([], []) if pattern == "serial" else _runs(num_ranks, rank, part, chunks_per_rank, split)
        compute(runs)
        send_partial_sums(part)
        # Send sums one part late: the link then has partial sums to transfer while the owner adds.
        if part > 0 and gathers == "between" and pattern != "serial":
            add_and_send_sums(next_sum)
            next_sum += 1
        compute(own)
    for part in parts[next_sum:]:
        add_and_send_sums(part)
    return Plan("all_reduce", pattern, num_ranks, rank, chunks_per_rank, tuple(messages), tuple(work))


def _runs(num_ranks: int, rank: int, part: int, num_parts: int, split: Split) -> tuple[list[Run], list[Run]]:
    """Return the GEMMs of one part, as runs of rows: those before its partial sums are sent, then the own rows."""
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
