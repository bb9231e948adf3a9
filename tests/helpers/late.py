"""A transport that is as late as its contract allows: nothing has landed before it is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_overlap.comm import BufferPool
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.transport import P2PWork, Transfer


class LateTransport:
    """Carries by gloo into hidden buffers, and shows a chunk only when it is waited for.

    Until then its slot is NaN, so that whoever reads early, or reads what was never waited for, gets NaN. The buffers
    of ops are NaN each time they are handed out, so that nothing is read that an earlier op left there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._inner = GlooTransport(group, buffer_pool=BufferPool(poison=True))
        self.rank, self.size = self._inner.rank, self._inner.size
        self.buffer_pool = self._inner.buffer_pool
        self.exposed_s = 0.0

    def begin(self, transfers: Sequence[Transfer], op: str) -> LateP2PWork:
        return LateP2PWork(self._inner, transfers, op)

    def close(self) -> None:
        self._inner.close()


class LateP2PWork:
    def __init__(self, inner: GlooTransport, transfers: Sequence[Transfer], op: str) -> None:
        self._transfers = transfers
        self._hidden = [torch.full_like(transfer.recv, float("nan")) for transfer in transfers]
        self._shown: set[int] = set()
        self._by_address = {
            transfer.recv.data_ptr(): index for index, transfer in enumerate(transfers) if transfer.recv.numel()
        }
        for transfer in transfers:
            transfer.recv.fill_(float("nan"))
        # A forwarded chunk leaves from where it really landed: the transport may pass on what the op has not looked at.
        sends = [
            self._forwarded(transfer) if transfer.message.after_message is not None else transfer.send
            for transfer in transfers
        ]
        self._p2p_work: P2PWork = inner.begin(
            [
                replace(transfer, send=send, recv=recv)
                for transfer, send, recv in zip(transfers, sends, self._hidden, strict=True)
            ],
            op,
        )

    def _forwarded(self, transfer: Transfer) -> torch.Tensor:
        """What is sent of a chunk, where it has really landed: all of it or a run of its numbers."""
        assert transfer.message.after_message is not None
        shown, hidden = (
            self._transfers[transfer.message.after_message].recv,
            self._hidden[transfer.message.after_message],
        )
        first = (transfer.send.data_ptr() - shown.data_ptr()) // shown.element_size()
        assert 0 <= first <= hidden.numel() - transfer.send.numel()
        return hidden.view(-1)[first : first + transfer.send.numel()].view(transfer.send.shape)

    def mark_ready(self, work_done: int) -> None:
        self._p2p_work.mark_ready(work_done)

    def is_completed(self, message: int) -> bool:
        return message in self._shown

    def wait(self, message: int) -> None:
        self._p2p_work.wait(message)
        self._shown.add(message)
        self._transfers[message].recv.copy_(self._hidden[message])

    def wait_all(self) -> None:
        self._p2p_work.wait_all()
