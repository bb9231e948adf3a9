"""How an overlapped linear layer cuts and orders its messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.schedules import Plan, all_gather_plan, all_reduce_plan, reduce_scatter_plan
from megatron_overlap.schedules.all_reduce import Gathers
from megatron_overlap.schedules.heuristics import (
    MAX_MESSAGES,
    MIN_CHUNK_ROWS,
    default_chunks,
    default_pattern,
    most_parts,
)
from megatron_overlap.schedules.plan import Pattern, Split

# Through an MLP a part's rows pass two GEMMs and an activation, where small ones lose more (1024 rows: 4 parts 8 %, 2
# parts 2 %), and larger ones hide as much: there is more to compute beside each message.
MIN_MLP_ROWS = 256

RowCollective = Literal["all_gather", "reduce_scatter"]
"""The collectives of sequence parallelism, where ranks own rows."""


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """The choice for one op: the same on every rank of the group.

    Attributes:
        pattern: `direct` or `ring`; `serial` is the same messages without overlap. None is the device's usual one.
        chunks_per_rank: messages a rank's slice is cut into; None chooses by the number of rows and their bytes.
        split: `all` computes chunk by chunk, `edge` only where a chunk is exposed; None chooses by the device.
        add_in_place: an all-reduce adds at the places that its plan names, and waits there; otherwise when messages
            have landed. None chooses by the device.
        save_gathered: column-parallel forward keeps the gathered input for wgrad instead of gathering it again.
    """

    pattern: Pattern | None = None
    chunks_per_rank: int | None = None
    split: Split | None = None
    save_gathered: bool = False
    add_in_place: bool | None = None

    def schedule(
        self, collective: RowCollective, transport: Transport, num_rows: int, row_bytes: int, device: torch.device
    ) -> Plan:
        """The schedule of one rank for `num_rows` gathered rows of `row_bytes` each."""
        chunks = self.chunks_per_rank
        if chunks is None:
            chunks = default_chunks(collective, transport.size, num_rows, row_bytes)
        # On the CPU what has landed is merged into one GEMM; on a GPU that cannot be asked without a synchronisation.
        split = self.split or ("all" if device.type == "cpu" else "edge")
        pattern = self.pattern or default_pattern(device.type)
        return _schedule(collective, transport.size, transport.rank, chunks, pattern, split)

    def all_reduce_schedule(
        self,
        transport: Transport,
        num_rows: int,
        device: torch.device,
        gathers: Gathers,
        smallest: int = MIN_CHUNK_ROWS,
    ) -> Plan:
        """The schedule of one rank for an all-reduce of `num_rows` rows, in parts of `smallest` rows or more.

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
    collective: RowCollective, size: int, rank: int, chunks_per_rank: int, pattern: Pattern, split: Split
) -> Plan:
    build = all_gather_plan if collective == "all_gather" else reduce_scatter_plan
    return build(size, rank, chunks_per_rank=chunks_per_rank, pattern=pattern, split=split)


@lru_cache(maxsize=256)
def _all_reduce_schedule(
    size: int, rank: int, chunks_per_rank: int, pattern: Pattern, split: Split, gathers: Gathers
) -> Plan:
    return all_reduce_plan(size, rank, chunks_per_rank=chunks_per_rank, pattern=pattern, split=split, gathers=gathers)
