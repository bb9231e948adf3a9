"""Point-to-point messages over gloo: a sending thread, and a receiving one for each peer, beside the computation.

gloo gives no way to ask whether a message has landed, and a forwarded or ordered send must be posted by somebody
while the computing thread is inside a GEMM. Threads do both. They sleep in gloo, which lets go of the interpreter
lock, as torch's GEMMs do. Messages of one peer land in order; those of several share the link, so each peer needs a
thread of its own to see them land.

The computing thread posts nothing itself: gloo's own thread spins while somebody else is inside a send, and the
scheduler prefers it to one that computes all the time (a reduce-scatter of 60 ms took 9 ms more of CPU time).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from megatron_overlap.comm.buffers import Workspace
from megatron_overlap.comm.transport import TransportError, Wire, store_beside
from megatron_overlap.diagnostics.flight_recorder import Watch
from megatron_overlap.tracing.events import Trace

# A tag is 31 bits: this many exchanges in one op, and this many ops before tags repeat, long after they have landed.
_TAGS_PER_OP = 1 << 13
_NUM_OPS = 1 << 17
_GRACE_S = 5.0
"""What the threads are given, beyond the deadline, to say which message did not come."""


class GlooTransport:
    """See `Transport`. Owns a gloo group, a thread for sending and one for each peer, and a workspace.

    Args:
        group: the group whose ranks talk; a gloo group with the same ranks is made for the messages.
        timeout_s: deadline of one wait in seconds; None means that of `group`.
        workspace: where ops take their buffers.
        trace: gets the events of every flight; None records none.
        lane: which of several transports of these ranks this is.
        watch: notes what is on its way; None notes nothing.

    Raises:
        TransportError: not all ranks of the group came within the deadline.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_s: float | None = None,
        workspace: Workspace | None = None,
        trace: Trace | None = None,
        lane: str = "",
        watch: Watch | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.workspace = workspace if workspace is not None else Workspace()
        self.exposed_s = 0.0
        self.trace, self.lane, self.watch = trace, lane, watch
        self.ranks = dist.get_process_group_ranks(group)
        timeout = (
            timedelta(seconds=timeout_s) if timeout_s else group._get_backend(torch.device("cpu")).options._timeout
        )
        self.timeout_s = timeout.total_seconds()
        self._group = self._connect(group, timeout)
        # The first failure; nothing is said on a broken connection, so all that follow end with it at once.
        self.broken: TransportError | None = None
        self.progress = 0
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

    def _connect(self, group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroupGloo:
        try:
            return dist.ProcessGroupGloo(store_beside(group), self.rank, self.size, timeout)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.ranks[self.rank]} could not connect to all of ranks "
                f"{', '.join(map(str, self.ranks))} within {self.timeout_s:g} s: {_cause(error)}"
            ) from error

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
        trace, number = transport.trace, tag // _TAGS_PER_OP
        self._events = trace.flight(transport.ranks, transport.lane, number, op) if trace is not None else None
        self._record = None
        if transport.watch is not None:
            peers = sorted({transport.ranks[wire.exchange.source] for wire in wires})
            self._record = transport.watch.began(op, number, transport.lane, peers)
        group = transport._group
        # All receives are posted at once, so that gloo's sender never waits for the receiver's word. Both ends know a
        # message by the same number: the checker proves that it is the same exchange of both plans.
        self._receives: list[dist.Work | None] = []
        for index, (wire, landed) in enumerate(zip(wires, self._landed, strict=True)):
            try:
                work = None if landed else group.recv([wire.recv], wire.exchange.source, tag + index)
            except RuntimeError as error:
                self._fail(self._receiving(index), wire.exchange.source, error)
                raise self._told() from error
            self._receives.append(work)

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
        transport, num = self._transport, len(self._wires)
        if self._num_landed < num or self._num_posted < num:
            self._sleep(lambda: self._num_landed == num and self._num_posted == num)
        start = time.perf_counter()
        while self._sends:
            index, work = self._sends.popitem()
            try:
                work.wait()
            except RuntimeError as error:
                self._fail(self._sending(index), self._wires[index].exchange.to, error)
                raise self._told() from error
        self._stood_still(start)
        if self._record is not None and transport.watch is not None:
            transport.watch.ended(self._record)
        if self._events is not None:
            self._events.finished()

    def _sleep(self, ready: Callable[[], bool], exchange: int = 0) -> None:
        start, transport = time.perf_counter(), self._transport
        with self._changed:
            seen = transport.progress
            while not ready() and transport.broken is None:
                # Threads give up a message in time: this ends waits that no message would, such as one for a thread
                # that died. A link that is slow, and moves, is waited for.
                stuck = not self._changed.wait(transport.timeout_s + _GRACE_S) and transport.progress == seen
                if stuck and not ready() and transport.broken is None:
                    self._give_up(exchange)
                seen = transport.progress
        self._stood_still(start, exchange)
        if not ready():
            raise self._told()

    def _give_up(self, exchange: int) -> None:
        source = self._wires[exchange].exchange.source
        self._fail(self._receiving(exchange), source, RuntimeError("nothing has moved in all this time"))

    def _told(self) -> TransportError:
        """The failure with everything that is known, said once: by the computing thread."""
        error, watch = self._transport.broken, self._transport.watch
        assert error is not None
        if watch is not None and not error.explained:
            error.args = (watch.explain(str(error), error.peer),)
            error.explained = True
        return error

    def _receiving(self, index: int) -> str:
        owner, part = self._wires[index].exchange.recv
        return f"receive exchange {index} (chunk {part} of rank {self._transport.ranks[owner]}) from"

    def _sending(self, index: int) -> str:
        owner, part = self._wires[index].exchange.send
        return f"send exchange {index} (chunk {part} of rank {self._transport.ranks[owner]}) to"

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
                    self._fail(self._receiving(index), peer, error)
                    return
                if self._events is not None:
                    self._events.landed(index, peer, wire.recv.nbytes)
            with self._changed:
                self._landed[index] = True
                self._num_landed += 1
                self._transport.progress += 1
                self._changed.notify_all()

    @property
    def has_more_to_send(self) -> bool:
        """Whether messages have not been posted yet; a flight that failed posts no more."""
        return self._num_posted < len(self._wires) and self._transport.broken is None

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
            self._fail(self._sending(index), wire.exchange.to, error)
        with self._changed:
            self._num_posted += 1
            self._transport.progress += 1
            if self._num_posted == len(self._wires):
                self._changed.notify_all()

    def _fail(self, what: str, peer: int, error: RuntimeError) -> None:
        transport = self._transport
        with self._changed:
            if transport.broken is None:
                # The first failure is the cause; gloo closes the pair, and what else is on its way fails after it.
                transport.broken = TransportError(
                    f"{self._op}: rank {transport.ranks[transport.rank]} could not {what} "
                    f"rank {transport.ranks[peer]} within {transport.timeout_s:g} s: {_cause(error)}",
                    peer=transport.ranks[peer],
                )
            self._changed.notify_all()


def _cause(error: RuntimeError) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
