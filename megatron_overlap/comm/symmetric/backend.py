"""What symmetric memory is made of: arenas that all ranks address, and queues that move bytes beside the kernels.

Two exist: `cuda_fabric`, peers' memory and copy engines; `host_fabric`, memory shared by processes on one host, for
kernels in Triton's interpreter. The protocol over them is one: `comm.symmetric.transport`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Queue(Protocol):
    """Work in order, beside the caller: a CUDA stream, or a thread."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies; either side may be a peer's."""

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        """Writes `words[index] = value`, visible to all ranks after everything before it in this queue."""

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        """What comes behind it starts when `words[index] >= value`; `words` is own memory."""


class Fabric(Protocol):
    """Memory of the ranks of one group.

    Attributes:
        rank: this rank in the group.
        size: ranks of the group.
        ranks: the ranks' global numbers.
        device: where the memory is.
        computing: the queue that kernels are on; its writes come behind them.
        copying: a queue of its own, without the help of any processor that computes.
        capability: ten times the compute capability, for the choice of tile shapes.
        num_sms: blocks that run at one time.
        max_polls: looks at a flag before a kernel gives up.
    """

    rank: int
    size: int
    ranks: Sequence[int]
    device: torch.device
    computing: Queue
    copying: Queue
    capability: int
    num_sms: int
    max_polls: int

    def map(self, num_bytes: int) -> list[torch.Tensor]:
        """A new arena of `num_bytes` on every rank, uint8, as this rank addresses each. All ranks call it.

        What is in it is undefined. The arenas before it may go.
        """

    def barrier(self) -> None:
        """Returns when all ranks are here and have nothing under way."""

    def fork(self) -> None:
        """What is put into `copying` from here on starts behind what `computing` holds now."""

    def join(self) -> None:
        """What is put into `computing` from here on starts behind what `copying` holds now."""

    def objection(self) -> str:
        """What speaks against starting an op now; empty if nothing does."""

    def close(self) -> None:
        """Lets all memory go."""
