"""Problem that workers and the test share: operands from a seed, row layout, shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from megatron_overlap.comm.symmetric.transport import ArenaLayout, gathered_bytes
from megatron_overlap.schedules import Chunk, ChunkLayout
from tests.kernels.heap import Heap, shared_tensor


def _fenced(matrix: torch.Tensor) -> torch.Tensor:
    """Return a copy of `matrix` with NaN after its end, to detect out-of-bounds reads."""
    buffer = torch.full((matrix.numel() + 4096,), torch.nan, dtype=matrix.dtype)
    fenced = buffer[: matrix.numel()].view(matrix.shape)
    return fenced.copy_(matrix)


@dataclass(frozen=True)
class Problem:
    """`rows` gathered rows over `ranks`, a GEMM of depth `k` to `n` columns.

    Attributes:
        transposed: B is a transposed weight, as in a forward; otherwise a weight, as in a dgrad.
        programs: blocks of the persistent grid.
        block: rows, columns and depth of a GEMM tile.
    """

    folder: Path
    ranks: int
    rows: int
    n: int
    k: int
    parts: int
    dtype: torch.dtype
    transposed: bool = True
    bias: bool = False
    programs: int = 1
    block: int = 16
    max_polls: int = 300_000

    def __getstate__(self) -> dict[str, object]:
        # Do not pickle the heap: each process maps the memory.
        return {key: value for key, value in self.__dict__.items() if key != "heap"}

    @property
    def layout(self) -> ChunkLayout:
        return ChunkLayout(self.rows, self.ranks, self.parts)

    @property
    def slot_rows(self) -> int:
        return -(-self.rows // self.ranks)

    @cached_property
    def heap(self) -> Heap:
        widest = max(self.n, self.k)
        half = gathered_bytes(self.rows, self.ranks, widest, self.dtype.itemsize)
        return Heap(self.folder / "heap", ArenaLayout(self.ranks, half))

    def operands(self, rank: int, epoch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A `[rows, k]`, B `[k, n]` and bias `[n]` of one rank."""
        generator = torch.Generator().manual_seed(epoch * 64 + rank)
        a, w, bias = (
            torch.randn(shape, generator=generator).to(self.dtype)
            for shape in ((self.rows, self.k), (self.n, self.k), (self.n,))
        )
        return a, _fenced(w).t() if self.transposed else _fenced(w.t()), bias

    def gathered(self, epoch: int) -> torch.Tensor:
        """The gathered rows: the shard of each rank is cut from its own A."""
        shards = [self.operands(rank, epoch)[0][slice(*self.layout.shard(rank))] for rank in range(self.ranks)]
        return torch.cat(shards)

    def out(self, rank: int) -> torch.Tensor:
        """Rank's output in shared memory, so that the test can read when it is written: `[rows, n]`."""
        return shared_tensor(self.folder / f"out{rank}", (self.rows, self.n), self.dtype)

    def looks(self) -> torch.Tensor:
        """Return the number of reads of each flag by each rank in this epoch."""
        return shared_tensor(self.folder / "looks", (self.ranks, self.heap.layout.num_flags), torch.int32)

    def staged_rows(self, source: int, owner: int) -> torch.Tensor:
        """Return the staging copy of the receive buffer of `owner` that `source` writes to."""
        shape = (self.ranks, self.slot_rows, self.n)
        return shared_tensor(self.folder / f"way{source}-{owner}", shape, self.dtype)

    def staged_flags(self, source: int, owner: int) -> torch.Tensor:
        """Return the staging copy of the flags of `owner` that `source` sets."""
        return shared_tensor(self.folder / f"flags{source}-{owner}", (self.heap.layout.num_flags,), torch.int32)

    def in_slot(self, owner: int, part: int) -> slice:
        """Return the rows of a chunk inside a slot of the receive buffer of its owner."""
        return slice(*self.layout.rows_in_shard(Chunk(owner, part)))
