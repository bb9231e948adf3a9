"""What the ranks of a group tell each other beside the training: a few numbers or words at a time, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


class HostCollectives:
    """Some ranks, over a gloo group of their own: no device queue and no other collective is in the way.

    Every method is a collective: all ranks call the same one in the same order. Over gloo because what is exchanged is
    on the host, whatever the device.

    Args:
        store: shared by exactly these ranks.
        rank: this one.
        size: how many there are.
        timeout_s: deadline of an message.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._lines = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))

    def numbers(self, own: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, by rank: as many from each, and the same list on all, bit by bit.

        Raises:
            RuntimeError: a rank did not answer in time.
        """
        if not own:
            return [[] for _ in range(self.size)]
        mine = torch.tensor(own, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._lines.allgather([found], [mine]).wait()
        return [row.tolist() for row in found]

    def words(self, own: str) -> list[str]:
        """The text of every rank, by rank.

        Raises:
            RuntimeError: a rank did not answer in time.
        """
        mine = own.encode()
        sizes = [int(size) for (size,) in self.numbers([len(mine)])]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else padded[:0]
        found = [torch.empty_like(padded) for _ in range(self.size)]
        self._lines.allgather([found], [padded]).wait()
        return [bytes(text[:size].tolist()).decode() for text, size in zip(found, sizes, strict=True)]

    def align(self) -> None:
        """Returns when all ranks are here.

        Raises:
            RuntimeError: a rank did not come in time.
        """
        self._lines.barrier().wait()
