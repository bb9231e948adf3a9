"""A transport that is as late as its contract allows: nothing has landed before it is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_overlap.comm import Workspace
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.transport import Flight, Wire


class LateTransport:
    """Carries by gloo into hidden buffers, and shows a chunk only when it is waited for.

    Until then its slot is NaN, so that whoever reads early, or reads what was never waited for, gets NaN. The buffers
    of ops are NaN each time they are handed out, so that nothing is read that an earlier op left there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._inner = GlooTransport(group, workspace=Workspace(poison=True))
        self.rank, self.size = self._inner.rank, self._inner.size
        self.workspace = self._inner.workspace
        self.exposed_s = 0.0

    def begin(self, wires: Sequence[Wire], op: str) -> LateFlight:
        return LateFlight(self._inner, wires, op)

    def close(self) -> None:
        self._inner.close()


class LateFlight:
    def __init__(self, inner: GlooTransport, wires: Sequence[Wire], op: str) -> None:
        self._wires = wires
        self._hidden = [torch.full_like(wire.recv, float("nan")) for wire in wires]
        self._shown: set[int] = set()
        self._by_address = {wire.recv.data_ptr(): index for index, wire in enumerate(wires) if wire.recv.numel()}
        for wire in wires:
            wire.recv.fill_(float("nan"))
        # A forwarded chunk leaves from where it really landed: the transport may pass on what the op has not looked at.
        sends = [self._forwarded(wire) if wire.exchange.after_exchange is not None else wire.send for wire in wires]
        self._flight: Flight = inner.begin(
            [replace(wire, send=send, recv=recv) for wire, send, recv in zip(wires, sends, self._hidden, strict=True)],
            op,
        )

    def _forwarded(self, wire: Wire) -> torch.Tensor:
        """What is sent of a chunk, where it has really landed: all of it or a run of its numbers."""
        assert wire.exchange.after_exchange is not None
        shown, hidden = self._wires[wire.exchange.after_exchange].recv, self._hidden[wire.exchange.after_exchange]
        first = (wire.send.data_ptr() - shown.data_ptr()) // shown.element_size()
        assert 0 <= first <= hidden.numel() - wire.send.numel()
        return hidden.view(-1)[first : first + wire.send.numel()].view(wire.send.shape)

    def release(self, work_done: int) -> None:
        self._flight.release(work_done)

    def landed(self, exchange: int) -> bool:
        return exchange in self._shown

    def wait(self, exchange: int) -> None:
        self._flight.wait(exchange)
        self._shown.add(exchange)
        self._wires[exchange].recv.copy_(self._hidden[exchange])

    def finish(self) -> None:
        self._flight.finish()
