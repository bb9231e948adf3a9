"""Times on a CUDA device for a trace: pairs of CUDA events, read when the device has done them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_overlap.comm.transport import Wire
from megatron_overlap.tracing.events import FlightEvents, Kind, Trace


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two places of a stream, and what happened between them; `wire` is given for a message."""

    flight: FlightEvents
    kind: Kind
    exchange: int
    wire: Wire | None
    start: torch.cuda.Event
    stop: torch.cuda.Event


class CudaEvents:
    """Keeps pairs of timing events until the trace is taken, then puts them on the host's clock.

    A wait is what passes between an event before `wait_event` and one after it on the computing stream: the first is
    reached when the stream has computed all that was enqueued before.

    Args:
        trace: where the events go; taking it synchronises the device, so take it between steps.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._free: list[torch.cuda.Event] = []
        self._pairs: list[_Pair] = []
        trace.settle.append(self._settle)

    def flight(self, ranks: Sequence[int], lane: str, number: int, op: str) -> CudaFlightEvents:
        """Where the pairs of one flight go."""
        return CudaFlightEvents(self, self._trace.flight(ranks, lane, number, op))

    def mark(self) -> torch.cuda.Event:
        """An event at this place of the current stream."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def keep(self, pair: _Pair) -> None:
        """Keeps a pair until the device has reached its end."""
        self._pairs.append(pair)

    def _settle(self) -> None:
        if not self._pairs:
            return
        torch.cuda.synchronize()
        zero = self.mark()
        zero.synchronize()
        now = self._trace.clock()
        for pair in self._pairs:
            start, stop = (now - round(event.elapsed_time(zero) * 1e6) for event in (pair.start, pair.stop))
            if pair.wire is None:
                pair.flight.span(pair.kind, start, stop, pair.exchange)
            else:
                exchange = pair.wire.exchange
                if pair.wire.send.numel():
                    pair.flight.message(Kind.SENT, start, start, pair.exchange, exchange.to, pair.wire.send.nbytes)
                if pair.wire.recv.numel():
                    pair.flight.message(Kind.LANDED, start, stop, pair.exchange, exchange.source, pair.wire.recv.nbytes)
            self._free += [pair.start, pair.stop]
        self._pairs.clear()
        self._free.append(zero)


class CudaFlightEvents:
    """What one flight on a device adds to a trace."""

    def __init__(self, owner: CudaEvents, events: FlightEvents) -> None:
        self._owner, self._events = owner, events
        self._began = owner.mark()

    def mark(self) -> torch.cuda.Event:
        """An event at this place of the current stream."""
        return self._owner.mark()

    def waited(self, start: torch.cuda.Event, exchange: int) -> None:
        """The current stream stood still between `start` and here."""
        self._keep(Kind.WAIT, start, exchange)

    def moved(self, start: torch.cuda.Event, exchange: int, wire: Wire) -> None:
        """Both messages of an exchange went between `start` and here."""
        self._keep(Kind.LANDED, start, exchange, wire)

    def finished(self) -> None:
        """The flight ends here."""
        self._keep(Kind.OP, self._began)

    def _keep(self, kind: Kind, start: torch.cuda.Event, exchange: int = 0, wire: Wire | None = None) -> None:
        self._owner.keep(_Pair(self._events, kind, exchange, wire, start, self._owner.mark()))
