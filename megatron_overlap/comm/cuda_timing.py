"""Times of messages and waits on a CUDA device for a trace, measured with pairs of CUDA events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_overlap.comm.transport import Transfer
from megatron_overlap.tracing.events import Kind, Trace, WorkEvents


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two positions of a stream and the interval between them; `transfer` is set for a message."""

    p2p_work: WorkEvents
    kind: Kind
    message: int
    transfer: Transfer | None
    start: torch.cuda.Event
    stop: torch.cuda.Event


class CudaEvents:
    """Collects pairs of timing events until the trace is taken, then converts them to the host's clock.

    A wait is the time between an event before `wait_event` and one after it on the computing stream. The stream reaches
    the first event when it has executed all earlier work.

    Args:
        trace: receives the events. Taking it synchronises the device, so take it between steps.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._free: list[torch.cuda.Event] = []
        self._pairs: list[_Pair] = []
        trace.settle.append(self._settle)

    def operation(self, ranks: Sequence[int], channel: str, number: int, op: str) -> CudaWorkEvents:
        """Return the recorder of one operation."""
        return CudaWorkEvents(self, self._trace.operation(ranks, channel, number, op))

    def mark(self) -> torch.cuda.Event:
        """Record and return an event on the current stream."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def store(self, pair: _Pair) -> None:
        """Store a pair until the trace is taken."""
        self._pairs.append(pair)

    def _settle(self) -> None:
        if not self._pairs:
            return
        torch.cuda.synchronize()
        reference = self.mark()
        reference.synchronize()
        now = self._trace.clock()
        for pair in self._pairs:
            start, stop = (now - round(event.elapsed_time(reference) * 1e6) for event in (pair.start, pair.stop))
            if pair.transfer is None:
                pair.p2p_work.span(pair.kind, start, stop, pair.message)
            else:
                message = pair.transfer.message
                if pair.transfer.send.numel():
                    pair.p2p_work.message(Kind.SENT, start, start, pair.message, message.to, pair.transfer.send_bytes)
                if pair.transfer.recv.numel():
                    pair.p2p_work.message(
                        Kind.RECEIVED, start, stop, pair.message, message.source, pair.transfer.recv_bytes
                    )
            self._free += [pair.start, pair.stop]
        self._pairs.clear()
        self._free.append(reference)


class CudaWorkEvents:
    """Records the events of one operation on a device."""

    def __init__(self, owner: CudaEvents, events: WorkEvents) -> None:
        self._owner, self._events = owner, events
        self._began = owner.mark()

    def mark(self) -> torch.cuda.Event:
        """Record and return an event on the current stream."""
        return self._owner.mark()

    def waited(self, start: torch.cuda.Event, message: int) -> None:
        """Record a wait of the current stream from `start` until now."""
        self._store(Kind.WAIT, start, message)

    def moved(self, start: torch.cuda.Event, message: int, transfer: Transfer) -> None:
        """Record the send and the receive of a message between `start` and now."""
        self._store(Kind.RECEIVED, start, message, transfer)

    def finished(self) -> None:
        """Record the end of the operation."""
        self._store(Kind.OP, self._began)

    def _store(self, kind: Kind, start: torch.cuda.Event, message: int = 0, transfer: Transfer | None = None) -> None:
        self._owner.store(_Pair(self._events, kind, message, transfer, start, self._owner.mark()))
