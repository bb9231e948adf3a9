"""Transports with faults: one corrupts messages, one loses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.transport import P2PWork, Transfer, TransportOptions


class CorruptTransport:
    """Flips the highest exponent bit of the first number of some received messages.

    Args:
        group: the ranks.
        op: corrupts the messages of operations whose name contains it.
        every: corrupts one of so many messages; 0 corrupts none.
        timeout_s: deadline of one wait in seconds; None means the timeout of `group`.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, op: str = "", every: int = 1, timeout_s: float | None = None
    ) -> None:
        self._inner = GlooTransport(group, TransportOptions(timeout_s=timeout_s))
        self.rank, self.size = self._inner.rank, self._inner.size
        self.buffer_pool = self._inner.buffer_pool
        self.exposed_s = 0.0
        self.copy_engines = self.capturable = self.on_device = self.prepares = False
        self.collectives = None
        self._op, self._every, self._num_messages = op, every, 0
        self.corrupted = 0

    def begin(self, transfers: Sequence[Transfer], op: str) -> CorruptP2PWork:
        return CorruptP2PWork(self, self._inner.begin(transfers, op), transfers, op)

    def close(self) -> None:
        self._inner.close()

    def arrived(self, transfer: Transfer, op: str) -> None:
        """Count a received message, and corrupt it if it is due."""
        if not self._every or self._op not in op or not transfer.recv.numel():
            return
        self._num_messages += 1
        if self._num_messages % self._every:
            return
        number = transfer.recv.view(-1)[:1]
        bits = number.view({4: torch.int32, 2: torch.int16}[number.element_size()])
        bits.bitwise_xor_(1 << (8 * number.element_size() - 2))
        self.corrupted += 1


class CorruptP2PWork:
    def __init__(self, owner: CorruptTransport, inner: P2PWork, transfers: Sequence[Transfer], op: str) -> None:
        self._owner, self._inner, self._transfers, self._op = owner, inner, transfers, op
        self._completed: set[int] = set()
        self.mark_ready, self.wait_all = inner.mark_ready, inner.wait_all

    def is_completed(self, message: int) -> bool:
        return message in self._completed

    def wait(self, *messages: int) -> None:
        self._inner.wait(*messages)
        for message in messages:
            if message not in self._completed:
                self._completed.add(message)
                self._owner.arrived(self._transfers[message], self._op)


class LossyTransport(GlooTransport):
    """Rank 0 never sends the first message of an operation."""

    def begin(self, transfers: Sequence[Transfer], op: str) -> P2PWork:  # type: ignore[override]
        first, *others = transfers
        if self.rank == 0:
            first = replace(first, send=first.send[:0], extra_send=())
        return super().begin([first, *others], op)
