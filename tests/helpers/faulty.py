"""A transport that corrupts what arrives: one bit, or one number, of chosen messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_overlap.comm import BufferPool
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.transport import P2PWork, Transfer


class CorruptTransport:
    """Carries by gloo, and flips the highest bit of the exponent of one number of a message before it is looked at.

    Args:
        group: the ranks.
        op: whose messages are corrupted: those whose op's name contains it.
        every: so many of them are let through before one is corrupted; 0 corrupts none.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, op: str = "", every: int = 1, timeout_s: float | None = None
    ) -> None:
        self._inner = GlooTransport(group, timeout_s=timeout_s, buffer_pool=BufferPool())
        self.rank, self.size = self._inner.rank, self._inner.size
        self.buffer_pool = self._inner.buffer_pool
        self.exposed_s = 0.0
        self._op, self._every, self._seen = op, every, 0
        self.corrupted = 0

    def begin(self, transfers: Sequence[Transfer], op: str) -> CorruptP2PWork:
        return CorruptP2PWork(self, self._inner.begin(transfers, op), transfers, op)

    def close(self) -> None:
        self._inner.close()

    def arrived(self, transfer: Transfer, op: str) -> None:
        """Corrupts the message, if it is its turn."""
        if not self._every or self._op not in op or not transfer.recv.numel():
            return
        self._seen += 1
        if self._seen % self._every:
            return
        number = transfer.recv.view(-1)[:1]
        bits = number.view({4: torch.int32, 2: torch.int16}[number.element_size()])
        bits.bitwise_xor_(1 << (8 * number.element_size() - 2))
        self.corrupted += 1


class CorruptP2PWork:
    def __init__(self, owner: CorruptTransport, inner: P2PWork, transfers: Sequence[Transfer], op: str) -> None:
        self._owner, self._inner, self._transfers, self._op = owner, inner, transfers, op
        self._shown: set[int] = set()
        self.mark_ready, self.wait_all = inner.mark_ready, inner.wait_all

    def is_completed(self, message: int) -> bool:
        return message in self._shown

    def wait(self, message: int) -> None:
        self._inner.wait(message)
        if message not in self._shown:
            self._shown.add(message)
            self._owner.arrived(self._transfers[message], self._op)
