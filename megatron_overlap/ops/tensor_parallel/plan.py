"""How an overlapped linear layer cuts its rows into messages and orders them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.schedules import ChunkLayout, Plan, all_gather_plan, all_reduce_plan, reduce_scatter_plan
from megatron_overlap.schedules.gather_scatter import Gathers
from megatron_overlap.schedules.heuristics import (
    MAX_MESSAGES,
    MIN_CHUNK_ROWS,
    default_chunks,
    default_pattern,
    most_parts,
)
from megatron_overlap.schedules.plan import Pattern, Split

# A part of an MLP is two GEMMs and an activation. Small parts cost more there than in one linear layer (1024 rows: 8 %
# with 4 parts, 2 % with 2 parts), and large parts hide as much, with more computation for each message.
MIN_MLP_ROWS = 256

RowCollective = Literal["all_gather", "reduce_scatter"]
"""The collectives of sequence parallelism, where ranks own rows."""


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How one operation is cut and ordered; the same on every rank of the group.

    Attributes:
        pattern: `direct` or `ring`; `serial` sends the same messages without overlap. None is the device default.
        chunks_per_rank: messages per slice of a rank; None chooses by the number of rows and their bytes.
        split: `all` computes chunk by chunk, `edge` only where a chunk is exposed; None chooses by the device.
        add_in_place: an all-reduce waits and adds at the positions in the plan; otherwise after messages have arrived.
            None chooses by the device.
        save_gathered: column-parallel forward saves the gathered input for the weight gradient; otherwise backward
            gathers it again.
    """

    pattern: Pattern | None = None
    chunks_per_rank: int | None = None
    split: Split | None = None
    save_gathered: bool = False
    add_in_place: bool | None = None

    def schedule(
        self, collective: RowCollective, transport: Transport, num_rows: int, row_bytes: int, device: torch.device
    ) -> tuple[Plan, ChunkLayout]:
        """The schedule of one rank for `num_rows` gathered rows of `row_bytes` each, and the rows of its chunks."""
        return _schedule(self, collective, transport.size, transport.rank, num_rows, row_bytes, device.type)

    def all_reduce_schedule(
        self,
        transport: Transport,
        num_rows: int,
        device: torch.device,
        gathers: Gathers,
        smallest: int = MIN_CHUNK_ROWS,
    ) -> Plan:
        """The schedule of one rank for an all-reduce of `num_rows` rows, in parts of at least `smallest` rows.

        Raises:
            ValueError: the pattern is `ring`.
        """
        chunks = self.chunks_per_rank
        if chunks is None:
            # A part is one GEMM over the rows of all owners.
            chunks = most_parts(MAX_MESSAGES, num_rows, smallest, "both")
        split = self.split or "edge"
        return _all_reduce_schedule(transport.size, transport.rank, chunks, self.pattern or "direct", split, gathers)


@lru_cache(maxsize=256)
def _schedule(
    plan: LinearPlan, collective: RowCollective, size: int, rank: int, num_rows: int, row_bytes: int, device: str
) -> tuple[Plan, ChunkLayout]:
    chunks = plan.chunks_per_rank
    if chunks is None:
        chunks = default_chunks(collective, size, num_rows, row_bytes)
    # On the CPU, arrived chunks are merged into one GEMM. On a GPU a query for arrival would synchronise.
    split = plan.split or ("all" if device == "cpu" else "edge")
    build = all_gather_plan if collective == "all_gather" else reduce_scatter_plan
    pattern = plan.pattern or default_pattern(device)
    schedule = build(size, rank, chunks_per_rank=chunks, pattern=pattern, split=split)
    return schedule, schedule.layout(num_rows)


@lru_cache(maxsize=256)
def _all_reduce_schedule(
    size: int, rank: int, chunks_per_rank: int, pattern: Pattern, split: Split, gathers: Gathers
) -> Plan:
    return all_reduce_plan(size, rank, chunks_per_rank=chunks_per_rank, pattern=pattern, split=split, gathers=gathers)
