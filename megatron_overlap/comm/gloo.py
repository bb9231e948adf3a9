"""Point-to-point messages over gloo: a sending thread, and a receiving one for each peer, beside the computation.

gloo gives no way to ask whether a message has landed, and a forwarded or ordered send must be posted by somebody
while the computing thread is inside a GEMM. Threads do both. They sleep in gloo, which lets go of the interpreter
lock, as torch's GEMMs do. Messages of one peer land in order; those of several share the link, so each peer needs a
thread of its own to see them land.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from megatron_overlap.comm.transport import TransportError, Wire, store_beside
from megatron_overlap.comm.workspace import Workspace
from megatron_overlap.events import Trace

# A tag is 31 bits: this many exchanges in one op, and this many ops before tags repeat, long after they have landed.
_TAGS_PER_OP = 1 << 13
_NUM_OPS = 1 << 17


class GlooTransport:
    """See `Transport`. Owns a gloo group, a thread for sending and one for each peer, and a workspace.

    Args:
        group: the group whose ranks talk; a gloo group with the same ranks is made for the messages.
        timeout_s: deadline of one wait in seconds; None means that of `group`.
        workspace: where ops take their buffers.
        trace: gets the events of every flight; None records none.
        lane: which of several transports of these ranks this is.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_s: float | None = None,
        workspace: Workspace | None = None,
        trace: Trace | None = None,
        lane: str = "",
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.workspace = workspace if workspace is not None else Workspace()
        self.exposed_s = 0.0
        self.trace, self.lane = trace, lane
        self.ranks = dist.get_process_group_ranks(group)
        timeout = (
            timedelta(seconds=timeout_s) if timeout_s else group._get_backend(torch.device("cpu")).options._timeout
        )
        self.timeout_s = timeout.total_seconds()
        self._group = dist.ProcessGroupGloo(store_beside(group), self.rank, self.size, timeout)
        self._op = 0
        # Guards every flight; told of whatever one of them may wait for.
        self.changed = threading.Condition()
        self._sending: list[GlooFlight] = []
        self._closed = False
        self._receivers: dict[int, SimpleQueue[GlooFlight | None]] = {
            peer: SimpleQueue() for peer in range(self.size) if peer != self.rank
        }
        self._threads = [
            threading.Thread(target=self._receive, args=(peer,), name=f"megatron_overlap_receive_{peer}", daemon=True)
            for peer in self._receivers
        ]
        self._threads.append(threading.Thread(target=self._send, name="megatron_overlap_send", daemon=True))
        for thread in self._threads:
            thread.start()

    def begin(self, wires: Sequence[Wire], op: str) -> GlooFlight:
        """See `Transport.begin`."""
        if len(wires) > _TAGS_PER_OP:
            raise ValueError(f"{op}: {len(wires)} exchanges: at most {_TAGS_PER_OP}; use fewer chunks per rank")
        self._op = (self._op + 1) % _NUM_OPS
        flight = GlooFlight(self, wires, op, self._op * _TAGS_PER_OP)
        for peer in {wire.exchange.source for wire in wires}:
            self._receivers[peer].put(flight)
        with self.changed:
            self._sending.append(flight)
            self.changed.notify_all()
        return flight

    def close(self) -> None:
        """See `Transport.close`. Messages still on their way are given up with the group."""
        for queue in self._receivers.values():
            queue.put(None)
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        for thread in self._threads:
            # A thread that waits for a dead peer ends with the group's deadline; it is a daemon and holds up nobody.
            thread.join(timeout=1.0)
        self.workspace.clear()

    def _receive(self, peer: int) -> None:
        """A receiving thread's life: the messages of one peer, flight by flight."""
        while (flight := self._receivers[peer].get()) is not None:
            flight.receive_from(peer)

    def _send(self) -> None:
        """The sending thread's life: the messages of each flight in order, those of the oldest flight first.

        A younger flight's messages go past an older one that has none ready, such as a ring that waits for a chunk.
        Nothing is waited for here but the next message to be ready: a send may have to wait until its taker has begun
        the same op, and that may depend on another message of this rank.
        """
        while True:
            with self.changed:
                while (flight := self._next_to_send()) is None and not self._closed:
                    self.changed.wait()
            if flight is None:
                return
            flight.send_next()

    def _next_to_send(self) -> GlooFlight | None:
        self._sending = [flight for flight in self._sending if flight.has_more_to_send]
        return next((flight for flight in self._sending if flight.may_send), None)


class GlooFlight:
    """See `Flight`."""

    def __init__(self, transport: GlooTransport, wires: Sequence[Wire], op: str, tag: int) -> None:
        self._transport = transport
        self._wires = wires
        self._op = op
        self._tag = tag
        self._changed = transport.changed
        self._work_done = 0
        self._landed = [wire.recv.numel() == 0 for wire in wires]
        self._num_landed = 0
        self._num_posted = 0
        self._sends: dict[int, dist.Work] = {}
        self._error: TransportError | None = None
        trace, number = transport.trace, tag // _TAGS_PER_OP
        self._events = trace.flight(transport.ranks, transport.lane, number, op) if trace is not None else None
        group = transport._group
        # All receives are posted at once, so that gloo's sender never waits for the receiver's word. Both ends know a
        # message by the same number: the checker proves that it is the same exchange of both plans.
        self._receives = [
            None if landed else group.recv([wire.recv], wire.exchange.source, tag + index)
            for index, (wire, landed) in enumerate(zip(wires, self._landed, strict=True))
        ]

    def release(self, work_done: int) -> None:
        """See `Flight.release`."""
        with self._changed:
            self._work_done = work_done
            self._changed.notify_all()

    def landed(self, exchange: int) -> bool:
        """See `Flight.landed`."""
        return self._landed[exchange]

    def wait(self, exchange: int) -> None:
        """See `Flight.wait`."""
        if not self._landed[exchange]:
            self._sleep(lambda: self._landed[exchange], exchange)

    def finish(self) -> None:
        """See `Flight.finish`."""
        num = len(self._wires)
        if self._num_landed < num or self._num_posted < num:
            self._sleep(lambda: self._num_landed == num and self._num_posted == num)
        start = time.perf_counter()
        while self._sends:
            index, work = self._sends.popitem()
            try:
                work.wait()
            except RuntimeError as error:
                raise self._fail(f"send exchange {index} to", self._wires[index].exchange.to, error) from error
        self._stood_still(start)
        if self._events is not None:
            self._events.finished()

    def _sleep(self, ready: Callable[[], bool], exchange: int = 0) -> None:
        start = time.perf_counter()
        with self._changed:
            while not ready() and self._error is None:
                self._changed.wait()
        self._stood_still(start, exchange)
        if self._error is not None:
            raise self._error

    def _stood_still(self, start_s: float, exchange: int = 0) -> None:
        """Counts the time from `start_s` until now as exposed."""
        took_s = time.perf_counter() - start_s
        self._transport.exposed_s += took_s
        if self._events is not None:
            self._events.waited(self._events.now() - round(took_s * 1e9), exchange)

    def receive_from(self, peer: int) -> None:
        """A receiving thread's part: the messages of one peer."""
        for index, wire in enumerate(self._wires):
            if wire.exchange.source != peer:
                continue
            work = self._receives[index]
            if work is not None:
                try:
                    work.wait()
                except RuntimeError as error:
                    self._fail(f"receive exchange {index} from", peer, error)
                    return
                if self._events is not None:
                    self._events.landed(index, peer, wire.recv.nbytes)
            with self._changed:
                self._landed[index] = True
                self._num_landed += 1
                self._changed.notify_all()

    @property
    def has_more_to_send(self) -> bool:
        """Whether messages have not been posted yet; a flight that failed posts no more."""
        return self._num_posted < len(self._wires) and self._error is None

    @property
    def may_send(self) -> bool:
        """Whether what the next message carries is there."""
        exchange = self._wires[self._num_posted].exchange
        forwarded = exchange.after_exchange
        return exchange.after_work <= self._work_done and (forwarded is None or self._landed[forwarded])

    def send_next(self) -> None:
        """The sending thread's part: posts the next message."""
        index = self._num_posted
        wire = self._wires[index]
        try:
            if wire.send.numel():
                if self._events is not None:
                    self._events.sent(index, wire.exchange.to, wire.send.nbytes)
                self._sends[index] = self._transport._group.send([wire.send], wire.exchange.to, self._tag + index)
        except RuntimeError as error:
            self._fail(f"send exchange {index} to", wire.exchange.to, error)
        with self._changed:
            self._num_posted += 1
            if self._num_posted == len(self._wires):
                self._changed.notify_all()

    def _fail(self, what: str, peer: int, error: RuntimeError) -> TransportError:
        transport = self._transport
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        with self._changed:
            # The first failure is the cause; gloo closes the pair, and the other thread fails after it.
            self._error = self._error or TransportError(
                f"{self._op}: rank {transport.ranks[transport.rank]} could not {what} "
                f"rank {transport.ranks[peer]} within {transport.timeout_s:g} s: {cause}"
            )
            self._changed.notify_all()
            return self._error
