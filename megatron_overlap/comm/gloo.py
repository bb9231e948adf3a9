"""Point-to-point messages over gloo: one sending thread, and one receiving thread for each peer.

gloo cannot report whether a message has arrived, and forwarded or ordered sends must be posted while the computing
thread is inside a GEMM. Threads do both. They sleep inside gloo without the interpreter lock, as torch's GEMMs do.
Messages of one peer arrive in order. Messages of several peers share the link, so that each peer has a thread.

The computing thread posts no sends: gloo's own thread spins during a send, and the scheduler prefers it to a thread
that computes all the time (measured: 9 ms more CPU time for a reduce-scatter of 60 ms).
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import torch.distributed as dist

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.host_group import cause_of, connect_gloo, store_beside, timeout_of
from megatron_overlap.comm.transport import DEFAULT_OPTIONS, Transfer, TransportError, TransportOptions, message_text
from megatron_overlap.diagnostics.consistency import ranks_text
from megatron_overlap.tracing import WorkEvents

# A tag has 31 bits: messages of one operation, and operations before tags repeat.
_TAGS_PER_OP, _NUM_OPS = 1 << 13, 1 << 17
_GRACE_S = 5.0
"""Time beyond the deadline in which the threads may report which message failed."""


class GlooTransport:
    """See `Transport`. Owns a gloo group, a sending thread, a receiving thread for each peer, and a buffer pool.

    Raises:
        TransportError: a rank did not connect within the deadline.
    """

    copy_engines = on_device = capturable = prepares = False
    collectives = None

    def __init__(self, group: dist.ProcessGroup, options: TransportOptions = DEFAULT_OPTIONS) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.buffer_pool = BufferPool()
        self.exposed_s = 0.0
        self.trace, self.channel, self.flight_recorder = options.trace, options.channel, options.flight_recorder
        self.ranks = dist.get_process_group_ranks(group)
        self.timeout_s = options.timeout_s or timeout_of(group)
        self._group = self._connect(group)
        # The first failure. Every later wait raises it at once.
        self.broken: TransportError | None = None
        self.progress = 0
        self._num_ops = 0
        # Guards the state of every operation; notified of every change of it.
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
        # A thread that returns from gloo while the interpreter ends aborts the process.
        atexit.register(self.close)

    def _connect(self, group: dist.ProcessGroup) -> dist.ProcessGroupGloo:
        try:
            return connect_gloo(store_beside(group), self.rank, self.size, self.timeout_s)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.ranks[self.rank]} could not connect to all of ranks {ranks_text(self.ranks)} "
                f"within {self.timeout_s:g} s: {cause_of(error)}"
            ) from error

    def begin(self, transfers: Sequence[Transfer], op: str) -> GlooP2PWork:
        if len(transfers) > _TAGS_PER_OP:
            raise ValueError(f"{op}: {len(transfers)} messages: at most {_TAGS_PER_OP}; use fewer chunks per rank")
        self._num_ops += 1
        p2p_work = GlooP2PWork(self, transfers, op, self._num_ops)
        for peer in {transfer.message.source for transfer in transfers}:
            self._receivers[peer].put(p2p_work)
        with self.changed:
            self._sending.append(p2p_work)
            self.changed.notify_all()
        return p2p_work

    def close(self) -> None:
        """See `Transport.close`. Abandons messages in flight."""
        atexit.unregister(self.close)
        with self.changed:
            closed, self._closed = self._closed, True
            self.changed.notify_all()
        for queue in self._receivers.values():
            queue.put(None)
        for thread in self._threads:
            # A thread that waits for a dead peer ends at the deadline of the group; it is a daemon thread.
            thread.join(timeout=1.0)
        self.buffer_pool.clear()
        if not closed and not any(thread.is_alive() for thread in self._threads):
            # Joins gloo's own threads.
            del self._group

    def _receive(self, peer: int) -> None:
        """Main function of a receiving thread: receives the messages of one peer, operation by operation."""
        while (p2p_work := self._receivers[peer].get()) is not None:
            p2p_work.receive_from(peer)

    def _send(self) -> None:
        """Main function of the sending thread: posts the messages of each operation in order, oldest operation first.

        Messages of a younger operation overtake an older operation without a ready message, such as a ring that waits
        for a chunk. The thread never waits for a send: the receiver may begin its operation only after it has received
        another message of this rank.
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

    def __init__(self, transport: GlooTransport, transfers: Sequence[Transfer], op: str, number: int) -> None:
        self._transport, self._transfers, self._op = transport, transfers, op
        self._tag = tag = number % _NUM_OPS * _TAGS_PER_OP
        self._changed = transport.changed
        self._received = [transfer.recv.numel() == 0 for transfer in transfers]
        self._work_done = self._num_received = self._num_posted = 0
        self._sends: dict[int, list[dist.Work]] = {}
        trace = transport.trace
        self._events = WorkEvents(trace, transport.ranks, transport.channel, number, op) if trace is not None else None
        self._record = None
        if transport.flight_recorder is not None:
            peers = sorted({transport.ranks[transfer.message.source] for transfer in transfers})
            self._record = transport.flight_recorder.began(op, number, transport.channel, peers)
        group = transport._group
        # All receives are posted at once, so that gloo's sender never waits for the receiver. Both ranks use the same
        # number for a message: `tests/schedules` proves that their plans agree.
        self._numbers = [
            index if transfer.message.tag is None else transfer.message.tag for index, transfer in enumerate(transfers)
        ]
        self._receives: list[list[dist.Work]] = []
        for index, (transfer, received) in enumerate(zip(transfers, self._received, strict=True)):
            source = transfer.message.source
            # gloo matches messages of equal tags in order.
            tensors = () if received else (transfer.recv, *transfer.extra_recv)
            try:
                number = tag + self._numbers[index]
                self._receives.append([group.recv([tensor], source, number) for tensor in tensors])
            except RuntimeError as error:
                self._fail(index, error)
                raise self._failure() from error

    def mark_ready(self, work_done: int) -> None:
        with self._changed:
            self._work_done = work_done
            self._changed.notify_all()

    def is_completed(self, message: int) -> bool:
        return self._received[message]

    def wait(self, *messages: int) -> None:
        for message in messages:
            if not self._received[message]:
                self._wait_until(partial(self._received.__getitem__, message), message)

    def wait_all(self) -> None:
        transport, num = self._transport, len(self._transfers)
        if self._num_received < num or self._num_posted < num:
            self._wait_until(lambda: self._num_received == num and self._num_posted == num)
        start = time.perf_counter()
        while self._sends:
            index, works = self._sends.popitem()
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self._fail(index, error, sends=True)
                raise self._failure() from error
        self._count_exposed(start)
        if self._record is not None and transport.flight_recorder is not None:
            transport.flight_recorder.ended(self._record)
        if self._events is not None:
            self._events.finished()

    def _wait_until(self, ready: Callable[[], bool], message: int = 0) -> None:
        start, transport = time.perf_counter(), self._transport
        with self._changed:
            seen = transport.progress
            while not ready() and transport.broken is None:
                # The threads report a failed message at the deadline. This ends waits that no thread would end, such as
                # after a thread has died. A slow link that makes progress extends the wait.
                stuck = not self._changed.wait(transport.timeout_s + _GRACE_S) and transport.progress == seen
                if stuck and not ready() and transport.broken is None:
                    self._fail(message, RuntimeError("no message made progress"))
                seen = transport.progress
        self._count_exposed(start, message)
        if not ready():
            raise self._failure()

    def _failure(self) -> TransportError:
        """Return the first failure; the first call adds the explanation of the flight recorder."""
        error, flight_recorder = self._transport.broken, self._transport.flight_recorder
        assert error is not None
        if flight_recorder is not None and not error.explained:
            error.args = (flight_recorder.explain(str(error), error.peer),)
            error.explained = True
        return error

    def _count_exposed(self, start_s: float, message: int = 0) -> None:
        """Count the time from `start_s` until now as exposed."""
        took_s = time.perf_counter() - start_s
        self._transport.exposed_s += took_s
        if self._events is not None:
            self._events.waited(self._events.now() - round(took_s * 1e9), message)

    def receive_from(self, peer: int) -> None:
        """Receive the messages of one peer; runs on its receiving thread."""
        for index, transfer in enumerate(self._transfers):
            if transfer.message.source != peer:
                continue
            if self._receives[index]:
                try:
                    for work in self._receives[index]:
                        work.wait()
                except RuntimeError as error:
                    self._fail(index, error)
                    return
                if self._events is not None:
                    self._events.received(self._numbers[index], peer, transfer.recv_bytes)
            with self._changed:
                self._received[index] = True
                self._num_received += 1
                self._transport.progress += 1
                self._changed.notify_all()

    @property
    def has_more_to_send(self) -> bool:
        """Whether messages remain to be posted; a failed operation posts no more."""
        return self._num_posted < len(self._transfers) and self._transport.broken is None

    @property
    def may_send(self) -> bool:
        """Whether the send buffer of the next message is complete."""
        message = self._transfers[self._num_posted].message
        forwarded = message.after_messages
        return message.after_work <= self._work_done and all(self._received[each] for each in forwarded)

    def send_next(self) -> None:
        """Post the next message; runs on the sending thread."""
        index = self._num_posted
        transfer = self._transfers[index]
        try:
            if transfer.send.numel():
                to, number = transfer.message.to, self._numbers[index]
                if self._events is not None:
                    self._events.sent(number, to, transfer.send_bytes)
                group, tag = self._transport._group, self._tag + number
                tensors = transfer.send, *transfer.extra_send
                self._sends[index] = [group.send([tensor], to, tag) for tensor in tensors]
        except RuntimeError as error:
            self._fail(index, error, sends=True)
        with self._changed:
            self._num_posted += 1
            self._transport.progress += 1
            if self._num_posted == len(self._transfers):
                self._changed.notify_all()

    def _fail(self, index: int, error: RuntimeError, *, sends: bool = False) -> None:
        transport, message = self._transport, self._transfers[index].message
        with self._changed:
            if transport.broken is None:
                # The first failure is the cause: gloo then closes the connection, and other messages fail as well.
                what = message_text(message, index, transport.ranks, sends=sends)
                transport.broken = TransportError(
                    f"{self._op}: rank {transport.ranks[transport.rank]} could not {what} "
                    f"within {transport.timeout_s:g} s: {cause_of(error)}",
                    peer=transport.ranks[message.to if sends else message.source],
                )
            self._changed.notify_all()
