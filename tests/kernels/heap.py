"""Symmetric heap on the CPU: one arena per rank in shared memory that every process maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_overlap.comm.symmetric.transport import ArenaLayout

UNWRITTEN = 0x7FA5
"""Upper half of a NaN that no computation produces. It marks unwritten memory."""


def shared_tensor(file: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in shared memory; zero when the file is new."""
    return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=dtype).view(*shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a contiguous floating-point tensor, as integers."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def forget(tensor: torch.Tensor) -> None:
    """Fill `tensor` with the NaN pattern of unwritten memory."""
    bits(tensor).fill_(UNWRITTEN if tensor.element_size() == 2 else UNWRITTEN << 16)


def unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mask of unwritten elements."""
    return bits(tensor) == (UNWRITTEN if tensor.element_size() == 2 else UNWRITTEN << 16)


@dataclass
class Heap:
    """The arenas of all ranks, as one process has mapped them.

    Args:
        file: file of the shared memory.
        layout: layout of every arena.
    """

    file: Path
    layout: ArenaLayout

    def __post_init__(self) -> None:
        self._bytes = shared_tensor(self.file, (self.layout.num_ranks, self.layout.num_bytes), torch.uint8)

    def half(self, rank: int, epoch: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the gathered rows or the receive buffer of `rank` for operation `epoch`."""
        start = self.layout.slot(epoch)
        return self._bytes[rank, start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)

    def flags(self, rank: int, epoch: int) -> torch.Tensor:
        """Return the flags of `rank` for operation `epoch`."""
        start = self.layout.flags(epoch)
        return self._bytes[rank, start : start + 4 * self.layout.num_flags].view(torch.int32)

    def addresses(self, offset: int) -> torch.Tensor:
        """Return the addresses of `offset` in every arena in the mapping of this process: int64 `[R]`."""
        return torch.tensor([arena.data_ptr() + offset for arena in self._bytes])
