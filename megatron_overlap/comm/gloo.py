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
from queue import SimpleQueue

import torch
import torch.distributed as dist

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.connection import connect_gloo, store_beside
from megatron_overlap.comm.transport import Transfer, TransportError
from megatron_overlap.diagnostics.flight_recorder import FlightRecorder
from megatron_overlap.tracing.events import Trace

# A tag is 31 bits: this many messages in one op, and this many ops before tags repeat, long after they have landed.
_TAGS_PER_OP = 1 << 13
_NUM_OPS = 1 << 17
_GRACE_S = 5.0
"""What the threads are given, beyond the deadline, to say which message did not come."""


class GlooTransport:
    """See `Transport`. Owns a gloo group, a thread for sending and one for each peer, and a buffer_pool.

    Args:
        group: the group whose ranks talk; a gloo group with the same ranks is made for the messages.
        timeout_s: deadline of one wait in seconds; None means that of `group`.
        buffer_pool: where ops take their buffers.
        trace: gets the events of every p2p_work; None records none.
        channel: which of several transports of these ranks this is.
        flight_recorder: notes what is on its way; None notes nothing.

    Raises:
        TransportError: not all ranks of the group came within the deadline.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_s: float | None = None,
        buffer_pool: BufferPool | None = None,
        trace: Trace | None = None,
        channel: str = "",
        flight_recorder: FlightRecorder | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.buffer_pool = buffer_pool if buffer_pool is not None else BufferPool()
        self.exposed_s = 0.0
        self.trace, self.channel, self.flight_recorder = trace, channel, flight_recorder
        self.ranks = dist.get_process_group_ranks(group)
        self.timeout_s = timeout_s or group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        self._group = self._connect(group)
        # The first failure; nothing is said on a broken connection, so all that follow end with it at once.
        self.broken: TransportError | None = None
        self.progress = 0
        self._op = 0
        # Guards every p2p_work; told of whatever one of them may wait for.
        self.changed = threading.Condition()
        self._sending: list[GlooP2PWork] = []
        self._closed = False
        self._receivers: dict[int, SimpleQueue[GlooP2PWork | None]] = {
            peer: SimpleQueue() for peer in range(self.size) if peer != self.rank
        }
        self._threads = [
            threading.Thread(target=self._receive, args=(peer,), name=f"megatron_overlap_receive_{peer}", daemon=True)
            for peer in self._receivers
        ]
        self._threads.append(threading.Thread(target=self._send, name="megatron_overlap_send", daemon=True))
        for thread in self._threads:
            thread.start()

    def _connect(self, group: dist.ProcessGroup) -> dist.ProcessGroupGloo:
        try:
            return connect_gloo(store_beside(group), self.rank, self.size, self.timeout_s)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.ranks[self.rank]} could not connect to all of ranks "
                f"{', '.join(map(str, self.ranks))} within {self.timeout_s:g} s: {_cause(error)}"
            ) from error

    def begin(self, transfers: Sequence[Transfer], op: str) -> GlooP2PWork:
        """See `Transport.begin`."""
        if len(transfers) > _TAGS_PER_OP:
            raise ValueError(f"{op}: {len(transfers)} messages: at most {_TAGS_PER_OP}; use fewer chunks per rank")
        self._op = (self._op + 1) % _NUM_OPS
        p2p_work = GlooP2PWork(self, transfers, op, self._op * _TAGS_PER_OP)
        for peer in {transfer.message.source for transfer in transfers}:
            self._receivers[peer].put(p2p_work)
        with self.changed:
            self._sending.append(p2p_work)
            self.changed.notify_all()
        return p2p_work

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
        self.buffer_pool.clear()

    def _receive(self, peer: int) -> None:
        """A receiving thread's life: the messages of one peer, p2p_work by p2p_work."""
        while (p2p_work := self._receivers[peer].get()) is not None:
            p2p_work.receive_from(peer)

    def _send(self) -> None:
        """The sending thread's life: the messages of each p2p_work in order, those of the oldest p2p_work first.

        A younger p2p_work's messages go past an older one that has none ready, such as a ring that waits for a chunk.
        Nothing is waited for here but the next message to be ready: a send may have to wait until its taker has begun
        the same op, and that may depend on another message of this rank.
        """
        while True:
            with self.changed:
                while (p2p_work := self._next_to_send()) is None and not self._closed:
                    self.changed.wait()
            if p2p_work is None:
                return
            p2p_work.send_next()

    def _next_to_send(self) -> GlooP2PWork | None:
        self._sending = [p2p_work for p2p_work in self._sending if p2p_work.has_more_to_send]
        return next((p2p_work for p2p_work in self._sending if p2p_work.may_send), None)


class GlooP2PWork:
    """See `P2PWork`."""

    def __init__(self, transport: GlooTransport, transfers: Sequence[Transfer], op: str, tag: int) -> None:
        self._transport = transport
        self._transfers = transfers
        self._op = op
        self._tag = tag
        self._changed = transport.changed
        self._work_done = 0
        self._landed = [transfer.recv.numel() == 0 for transfer in transfers]
        self._num_landed = 0
        self._num_posted = 0
        self._sends: dict[int, dist.Work] = {}
        trace, number = transport.trace, tag // _TAGS_PER_OP
        self._events = trace.operation(transport.ranks, transport.channel, number, op) if trace is not None else None
        self._record = None
        if transport.flight_recorder is not None:
            peers = sorted({transport.ranks[transfer.message.source] for transfer in transfers})
            self._record = transport.flight_recorder.began(op, number, transport.channel, peers)
        group = transport._group
        # All receives are posted at once, so that gloo's sender never waits for the receiver's word. Both ends know a
        # message by the same number: the checker proves that it is the same message of both plans.
        self._receives: list[dist.Work | None] = []
        for index, (transfer, landed) in enumerate(zip(transfers, self._landed, strict=True)):
            try:
                work = None if landed else group.recv([transfer.recv], transfer.message.source, tag + index)
            except RuntimeError as error:
                self._fail(self._receiving(index), transfer.message.source, error)
                raise self._told() from error
            self._receives.append(work)

    def mark_ready(self, work_done: int) -> None:
        """See `P2PWork.mark_ready`."""
        with self._changed:
            self._work_done = work_done
            self._changed.notify_all()

    def is_completed(self, message: int) -> bool:
        """See `P2PWork.is_completed`."""
        return self._landed[message]

    def wait(self, message: int) -> None:
        """See `P2PWork.wait`."""
        if not self._landed[message]:
            self._sleep(lambda: self._landed[message], message)

    def wait_all(self) -> None:
        """See `P2PWork.wait_all`."""
        transport, num = self._transport, len(self._transfers)
        if self._num_landed < num or self._num_posted < num:
            self._sleep(lambda: self._num_landed == num and self._num_posted == num)
        start = time.perf_counter()
        while self._sends:
            index, work = self._sends.popitem()
            try:
                work.wait()
            except RuntimeError as error:
                self._fail(self._sending(index), self._transfers[index].message.to, error)
                raise self._told() from error
        self._stood_still(start)
        if self._record is not None and transport.flight_recorder is not None:
            transport.flight_recorder.ended(self._record)
        if self._events is not None:
            self._events.finished()

    def _sleep(self, ready: Callable[[], bool], message: int = 0) -> None:
        start, transport = time.perf_counter(), self._transport
        with self._changed:
            seen = transport.progress
            while not ready() and transport.broken is None:
                # Threads give up a message in time: this ends waits that no message would, such as one for a thread
                # that died. A link that is slow, and moves, is waited for.
                stuck = not self._changed.wait(transport.timeout_s + _GRACE_S) and transport.progress == seen
                if stuck and not ready() and transport.broken is None:
                    self._give_up(message)
                seen = transport.progress
        self._stood_still(start, message)
        if not ready():
            raise self._told()

    def _give_up(self, message: int) -> None:
        source = self._transfers[message].message.source
        self._fail(self._receiving(message), source, RuntimeError("nothing has moved in all this time"))

    def _told(self) -> TransportError:
        """The failure with everything that is known, said once: by the computing thread."""
        error, flight_recorder = self._transport.broken, self._transport.flight_recorder
        assert error is not None
        if flight_recorder is not None and not error.explained:
            error.args = (flight_recorder.explain(str(error), error.peer),)
            error.explained = True
        return error

    def _receiving(self, index: int) -> str:
        owner, part = self._transfers[index].message.recv
        return f"receive message {index} (chunk {part} of rank {self._transport.ranks[owner]}) from"

    def _sending(self, index: int) -> str:
        owner, part = self._transfers[index].message.send
        return f"send message {index} (chunk {part} of rank {self._transport.ranks[owner]}) to"

    def _stood_still(self, start_s: float, message: int = 0) -> None:
        """Counts the time from `start_s` until now as exposed."""
        took_s = time.perf_counter() - start_s
        self._transport.exposed_s += took_s
        if self._events is not None:
            self._events.waited(self._events.now() - round(took_s * 1e9), message)

    def receive_from(self, peer: int) -> None:
        """A receiving thread's part: the messages of one peer."""
        for index, transfer in enumerate(self._transfers):
            if transfer.message.source != peer:
                continue
            work = self._receives[index]
            if work is not None:
                try:
                    work.wait()
                except RuntimeError as error:
                    self._fail(self._receiving(index), peer, error)
                    return
                if self._events is not None:
                    self._events.received(index, peer, transfer.recv.nbytes)
            with self._changed:
                self._landed[index] = True
                self._num_landed += 1
                self._transport.progress += 1
                self._changed.notify_all()

    @property
    def has_more_to_send(self) -> bool:
        """Whether messages have not been posted yet; a p2p_work that failed posts no more."""
        return self._num_posted < len(self._transfers) and self._transport.broken is None

    @property
    def may_send(self) -> bool:
        """Whether what the next message carries is there."""
        message = self._transfers[self._num_posted].message
        forwarded = message.after_message
        return message.after_work <= self._work_done and (forwarded is None or self._landed[forwarded])

    def send_next(self) -> None:
        """The sending thread's part: posts the next message."""
        index = self._num_posted
        transfer = self._transfers[index]
        try:
            if transfer.send.numel():
                if self._events is not None:
                    self._events.sent(index, transfer.message.to, transfer.send.nbytes)
                self._sends[index] = self._transport._group.send(
                    [transfer.send], transfer.message.to, self._tag + index
                )
        except RuntimeError as error:
            self._fail(self._sending(index), transfer.message.to, error)
        with self._changed:
            self._num_posted += 1
            self._transport.progress += 1
            if self._num_posted == len(self._transfers):
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
