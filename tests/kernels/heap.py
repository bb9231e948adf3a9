"""A symmetric heap without a GPU: an arena a rank in memory that all processes share, addressed as a peer's is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_overlap.comm.symmetric.layout import ArenaLayout

UNWRITTEN = 0x7FA5
"""The upper half of a NaN that no computation makes: what nobody has written yet."""


def shared_tensor(file: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in shared memory; zero when the file is new."""
    return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=dtype).view(*shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a contiguous floating-point tensor, as integers."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def forget(tensor: torch.Tensor) -> None:
    """Makes `tensor` a poison: NaN, of a pattern that tells that it was never written."""
    bits(tensor).fill_(UNWRITTEN if tensor.element_size() == 2 else UNWRITTEN << 16)


def unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements were never written."""
    return bits(tensor) == (UNWRITTEN if tensor.element_size() == 2 else UNWRITTEN << 16)


@dataclass
class Heap:
    """The arenas of all ranks, as one process has mapped them.

    Args:
        file: where they are.
        layout: of every arena.
    """

    file: Path
    layout: ArenaLayout

    def __post_init__(self) -> None:
        self._bytes = shared_tensor(self.file, (self.layout.num_ranks, self.layout.num_bytes), torch.uint8)

    def half(self, rank: int, epoch: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Rank's gathered rows or landing for op `epoch`."""
        start = self.layout.slot(epoch)
        return self._bytes[rank, start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)

    def flags(self, rank: int, epoch: int) -> torch.Tensor:
        """Rank's flags of op `epoch`."""
        start = self.layout.flags(epoch)
        return self._bytes[rank, start : start + 4 * self.layout.num_flags].view(torch.int32)

    def addresses(self, offset: int) -> torch.Tensor:
        """The pointer table of `offset` in every arena: int64 `[R]`, in this process's own mapping."""
        return torch.tensor([arena.data_ptr() + offset for arena in self._bytes])
