"""A transport with the latest arrivals that the contract allows: a message appears when the caller waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import BufferPool
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.transport import P2PWork, Transfer


class PoisonedPool(BufferPool):
    """Fills every buffer that it gives out with NaN (integers: the largest value)."""

    def take(self, *args: Any, **options: Any) -> torch.Tensor:
        buffer = super().take(*args, **options)
        return buffer.fill_(float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)


def poisoned_transport(group: dist.ProcessGroup) -> GlooTransport:
    """Return a transport over gloo whose buffers are those of a `PoisonedPool`."""
    transport = GlooTransport(group)
    transport.buffer_pool = PoisonedPool()
    return transport


class LateTransport:
    """Receives over gloo into hidden buffers, and copies a message to its buffer when the caller waits for it.

    Until then the buffer holds NaN, so that a caller that reads without a wait reads NaN. The buffer pool fills buffers
    with NaN as well, so that no caller reads results of an earlier operation.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._inner = poisoned_transport(group)
        self.rank, self.size = self._inner.rank, self._inner.size
        self.buffer_pool = self._inner.buffer_pool
        self.exposed_s = 0.0
        self.copy_engines = self.capturable = self.on_device = self.prepares = False
        self.collectives = None

    def begin(self, transfers: Sequence[Transfer], op: str) -> LateP2PWork:
        return LateP2PWork(self._inner, transfers, op, together=self.on_device)

    def close(self) -> None:
        self._inner.close()


class LateP2PWork:
    """`together`: `wait_all` delivers all messages, as on a device; otherwise the caller waits for each before."""

    def __init__(self, inner: GlooTransport, transfers: Sequence[Transfer], op: str, *, together: bool = False) -> None:
        self._together = together
        self._recvs = [(transfer.recv, *transfer.extra_recv) for transfer in transfers]
        self._memories: dict[int, torch.UntypedStorage] = {}
        self._hidden = [tuple(map(self._hide, recvs)) for recvs in self._recvs]
        self._completed: set[int] = set()
        for recvs in self._recvs:
            for recv in recvs:
                recv.fill_(float("nan"))
        self._p2p_work: P2PWork = inner.begin(
            [
                replace(transfer, send=send, extra_send=tuple(extra_send), recv=recv, extra_recv=tuple(extra_recv))
                for transfer, (recv, *extra_recv) in zip(transfers, self._hidden, strict=True)
                for send, *extra_send in [self._sends(transfer)]
            ],
            op,
        )

    def _hide(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor's place in a copy of its memory that only this class sees; it is NaN at first."""
        storage, empty = tensor.untyped_storage(), tensor.new_empty(0)
        memory = self._memories.get(storage.data_ptr())
        if memory is None:
            memory = self._memories[storage.data_ptr()] = torch.UntypedStorage(storage.nbytes())
            empty.set_(memory, 0, (storage.nbytes() // tensor.itemsize,)).fill_(float("nan"))  # type: ignore[call-overload]
        hidden: torch.Tensor = tensor.new_empty(0).set_(
            memory,  # type: ignore[call-overload]
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        return hidden

    def _sends(self, transfer: Transfer) -> list[torch.Tensor]:
        """Return the tensors to send: forwarded rows are in the hidden memory."""
        sends = [transfer.send, *transfer.extra_send]
        return list(map(self._hide, sends)) if transfer.message.after_messages else sends

    def mark_ready(self, work_done: int) -> None:
        self._p2p_work.mark_ready(work_done)

    def is_completed(self, message: int) -> bool:
        return message in self._completed

    def wait(self, *messages: int) -> None:
        self._p2p_work.wait(*messages)
        self._completed.update(messages)
        for message in messages:
            for recv, hidden in zip(self._recvs[message], self._hidden[message], strict=True):
                recv.copy_(hidden)

    def wait_all(self) -> None:
        for message in range(len(self._recvs)) if self._together else ():
            if message not in self._completed:
                self.wait(message)
        self._p2p_work.wait_all()
