"""Point-to-point messages as copies through symmetric memory: no kernel moves bytes, and no kernel waits.

A queue waits for a flag in memory without a kernel (`backend.Queue`), and clears it, so an operation enqueues the same
steps every time.

- A message between symmetric buffers (`Transfer.lands`) is a copy from each tensor of the sender to that of the
  receiver. When an operation begins, the receiver sets a flag at each sender, after the present work of its computing
  queue: that no longer reads the buffer. The sender waits for it, copies, and sets a flag at the receiver, for which
  the computing queue of the receiver waits. All flags are those of the buffer (`heap`): one operation at a time uses a
  buffer.
- Any other message passes through a ring of the pair (`rings`).

A rank has one queue of sends and one of receives beside its computing queue. Sends run in the order of the plan, so
each uses the whole link.

A device may run several queues in one hardware queue, in the order of their calls. Every wait is for a step that a peer
enqueues at an earlier point of the program, so this order has no deadlock.

A CUDA graph may capture operations between symmetric buffers, because they leave all flags as they found them. It keeps
the dependencies of steps, and not the order of their calls: during a capture every wait therefore depends on all flags
that this rank sets earlier in the program. Not yet run on several GPUs.

Queues note in host memory for which message they wait (`backend.Waits`). A `Watchdog` reads the notes, and names the
message and the peer when no queue has moved for the deadline.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.symmetric.backend import FlagStep, SymmetricBackend, Wait, Waits
from megatron_overlap.comm.symmetric.heap import MAX_FLAGS, HeapPool, SymmetricBuffer
from megatron_overlap.comm.symmetric.rings import Piece, Rings
from megatron_overlap.comm.transport import DEFAULT_OPTIONS, Exchange, Transfer, TransportError, TransportOptions
from megatron_overlap.diagnostics.heartbeat import Watchdog
from megatron_overlap.schedules.plan import Message


@dataclass(slots=True)
class _Message:
    """A message, and the prepared steps of one between symmetric buffers.

    Attributes:
        not_before: as of `plan` on a device; 0 on a host, where the queues need no order of calls.
        sends, recvs: the tensors; none in a direction without bytes.
        own_rows: start and stop of `sends` in the own rows of a call; None: the tensors are those of `sends`.
        lands: the tensors of the receiver; none for a message through a ring.
        free: waits until the buffer of the receiver is free, or those of all receivers; None if an earlier message of
            the operation does.
        sent: sets the flag of the receiver.
        flag: the wait for the flag; None if the message has no bytes or passes through a ring.
        received: it waits for the flag.
    """

    plan: Message
    after_work: int
    not_before: int
    sends: tuple[torch.Tensor, ...]
    recvs: tuple[torch.Tensor, ...]
    own_rows: tuple[int, int] | None = None
    lands: tuple[torch.Tensor, ...] = ()
    free: object | None = None
    sent: object | None = None
    flag: FlagStep | None = None
    received: object | None = None


@dataclass(slots=True)
class _Messages:
    """The messages of operation `op`, in the order of the plan.

    Attributes:
        through_ring: whether a message passes through a ring: the operation is prepared again each time.
        buffers_are_free: sets the flags of the senders; None without messages between symmetric buffers.
        waits_together: no message passes through a ring or `forwards`: one call of the driver may wait for several.
        received: waits for the flags of several messages, by their numbers.
        marks: values of `Message.after_work`, ascending, from 0.
        forwards: whether a message sends what an earlier one receives.
    """

    op: str
    all: list[_Message] = field(default_factory=list)
    through_ring: bool = False
    buffers_are_free: object | None = None
    waits_together: bool = False
    received: dict[tuple[int, ...], object] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)
    forwards: bool = False


class CopyTransport:
    """See `Transport`. Every message is a copy into the memory of the receiver.

    Args:
        backend: symmetric memory of the ranks; the transport closes it.
        options: deadline of a wait, and flight recorder. Without a deadline there is no watchdog.
        ring_bytes: of `Rings`.
        symmetric: messages between symmetric buffers do not pass through rings; the same on every rank.

    Raises:
        ValueError: `ring_bytes` is below 512.
    """

    prepares = capturable = True
    collectives = None

    def __init__(
        self,
        backend: SymmetricBackend,
        options: TransportOptions = DEFAULT_OPTIONS,
        *,
        ring_bytes: int | None = None,
        symmetric: bool = True,
    ) -> None:
        self.backend, self.rank, self.size = backend, backend.rank, backend.size
        self.exposed_s = 0.0
        self.copy_engines = self.on_device = backend.device.type == "cuda"
        self._heap = HeapPool(backend) if symmetric else None
        self.buffer_pool = self._heap or BufferPool()
        self.sending, self.receiving = backend.queue(), backend.queue()
        self.waits = Waits(on_device=self.on_device)
        self.rings = Rings(backend, ring_bytes, self.sending, self.receiving, self.waits)
        self._num_begun = 0
        # What the watchdog has found. Every later operation raises it.
        self.broken: TransportError | None = None
        self._timeout_s, self._flight_recorder = options.timeout_s, options.flight_recorder
        backend.barrier()
        self._watchdog: Watchdog | None = None
        if options.timeout_s is not None:
            self._watchdog = Watchdog(options.timeout_s, self._waiting, self._report)

    def begin(self, transfers: Sequence[Transfer], op: str) -> "CopyP2PWork":
        if self.broken is not None:
            raise self.broken
        self._num_begun += 1
        repeated, own = (transfers.repeated, transfers.own) if isinstance(transfers, Exchange) else (None, None)
        messages: _Messages | None = None if repeated is None else repeated.prepared.get(op)
        if messages is None:
            messages = self._prepared(transfers, own, op)
            if repeated is not None and not messages.through_ring:
                repeated.prepared[op] = messages
        captured = self.backend.is_capturing()
        if captured:
            self._begin_captured(messages, op)
        begun = self.backend.computing.mark()
        work = CopyP2PWork(self, messages, own, begun, captured)
        if messages.through_ring:
            self.rings.begin(work)
        into = transfers.into if isinstance(transfers, Exchange) else None
        if messages.buffers_are_free is not None or into is not None:
            # Beside the computation: on a device each flag is a copy.
            self.receiving.after(begun)
        if messages.buffers_are_free is not None:
            self.receiving.run(messages.buffers_are_free)
            if captured:
                self.sending.after(self.receiving.mark())
        if into is not None:
            assert own is not None
            self.receiving.copy(into, own)
            work.own_copied = self.receiving.mark()
        work.mark_ready(0)
        return work

    def _begin_captured(self, messages: _Messages, op: str) -> None:
        if messages.through_ring or self._heap is None:
            raise TransportError(
                f"{op}: a CUDA graph is being captured, and a message is not between symmetric buffers; run the "
                "operation outside the graph"
            )
        self._heap.captured = True
        # A replay runs no Python: without this the watchdog would take repeated replays for one that does not move.
        self.waits.count_replay(self.backend.computing)

    def _prepared(self, transfers: Sequence[Transfer], own: torch.Tensor | None, op: str) -> _Messages:
        """The messages of `transfers`. On both ranks of a pair, the same messages are between symmetric buffers."""
        messages, computing, sending = _Messages(op, marks=[0]), self.backend.computing, self.sending
        repeats = isinstance(transfers, Exchange)
        num_sent, num_received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        free = list[FlagStep]()
        awaited = list[tuple[_Message, list[FlagStep]]]()
        for index, transfer in enumerate(transfers):
            plan = transfer.message
            sends = (transfer.send, *transfer.extra_send) if transfer.send.numel() else ()
            recvs = (transfer.recv, *transfer.extra_recv) if transfer.recv.numel() else ()
            message = _Message(plan, plan.after_work, plan.not_before if self.on_device else 0, sends, recvs)
            messages.all.append(message)
            messages.marks.append(plan.after_work)
            messages.forwards = messages.forwards or plan.after_message is not None
            buffer = self._buffer_between(transfer)
            to, source = (plan.to, id(buffer)), (plan.source, id(buffer))
            # Both ranks of a message have the same count: a plan sends the messages of all pairs in turn.
            if buffer is None or num_sent[to] == MAX_FLAGS or num_received[source] == MAX_FLAGS:
                messages.through_ring = messages.through_ring or bool(sends or recvs)
                continue
            words = buffer.words
            if sends:
                message.own_rows = None if own is None else _rows_of(own, transfer.send)
                if message.own_rows is not None:
                    message.sends = ()  # they must not keep the own rows of this call
                assert transfer.lands is not None
                places = (transfer.lands, *transfer.extra_lands)
                message.lands = tuple(_at(buffer.data[plan.to], place) for place in places)
                if not num_sent[to]:
                    wait = Wait(op, index, plan, "its buffer is not free")
                    note = self.waits.note(Waits.SENDING, wait, repeats=repeats)
                    awaited.append((message, [FlagStep(words[self.rank], buffer.free(plan.to), False, note)]))
                flag = buffer.flag(self.rank, num_sent[to])
                message.sent = sending.prepare([FlagStep(words[plan.to], flag, sets=True)])
                num_sent[to] += 1
            if recvs:
                flag = buffer.flag(plan.source, num_received[source])
                note = self.waits.note(Waits.COMPUTING, Wait(op, index, plan), repeats=repeats)
                message.flag = FlagStep(words[self.rank], flag, False, note)
                message.received = computing.prepare([message.flag])
                if not num_received[source]:
                    free.append(FlagStep(words[plan.source], buffer.free(self.rank), sets=True))
                num_received[source] += 1
        if all(message.after_work for message, _ in awaited):
            # The work before the first message hides the waits: one call of the driver.
            awaited = awaited[:1] and [(awaited[0][0], [step for _, steps in awaited for step in steps])]
        for message, steps in awaited:
            message.free = sending.prepare(steps)
        messages.buffers_are_free = self.receiving.prepare(free) if free else None
        messages.waits_together = not (messages.through_ring or messages.forwards)
        messages.marks = sorted(set(messages.marks))
        return messages

    def _buffer_between(self, transfer: Transfer) -> SymmetricBuffer | None:
        """The symmetric buffer in which `transfer` lands; None for a message through the ring."""
        if self._heap is None or transfer.lands is None or len(transfer.extra_lands) != len(transfer.extra_send):
            return None
        return self._heap.buffer_of(transfer.lands)

    def _waiting(self) -> tuple[int, ...] | None:
        """The waits of the queues and the operations begun and replayed; None if no queue waits for a peer."""
        numbers = self.waits.numbers()
        return (*numbers, self._num_begun, self.waits.num_replayed()) if any(numbers) else None

    def _report(self, waiting: tuple[int, ...]) -> None:
        """Print which messages are late, and let later operations raise it. The computing thread may be blocked."""
        ranks, waits = self.backend.ranks, self.waits.of(waiting[:-2])
        peer = ranks[waits[0].peer]
        text = (
            f"{waits[0].op}: within {self._timeout_s:g} s rank {ranks[self.rank]} could not "
            f"{', and not '.join(wait.text(ranks) for wait in waits)}; look at the log of rank {peer}, or raise "
            "overlap.timeout_s if it is only slow"
        )
        if self._flight_recorder is not None:
            text = self._flight_recorder.explain(text, peer)
        self.broken = TransportError(text, peer=peer)
        self.broken.explained = True
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """See `Transport.close`. Call it when no rank uses the memory any more."""
        if self._watchdog is not None:
            self._watchdog.close()
        self.buffer_pool.clear()
        self.rings.close()
        self.backend.close()


def _at(data: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of another rank, with the bytes `data` of a buffer, at the place of `tensor` in the own buffer."""
    start = tensor.storage_offset() * tensor.itemsize
    return data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _rows_of(own: torch.Tensor, send: torch.Tensor) -> tuple[int, int] | None:
    """Start and stop of the rows `send` of `own`; None if `send` is no part of it."""
    if send.untyped_storage()._cdata != own.untyped_storage()._cdata:
        return None
    start = (send.storage_offset() - own.storage_offset()) // own.stride(0)
    return start, start + send.shape[0]


class CopyP2PWork:
    """See `P2PWork`. Enqueues a send when it is ready and the work that hides it is enqueued; receives in `wait`."""

    def __init__(
        self, transport: CopyTransport, messages: _Messages, own: torch.Tensor | None, begun: object, captured: bool
    ) -> None:
        self._transport, self._messages, self._own, self._op = transport, messages.all, own, messages.op
        self._waits_for = messages.received if messages.waits_together else None
        self._computing, self._sending = transport.backend.computing, transport.sending
        self._forwards, self._num_messages = messages.forwards, len(messages.all)
        self._pieces_to_send: list[list[Piece]] = []
        self._pieces_to_receive: list[list[Piece]] = []
        for message in messages.all if messages.through_ring else ():
            sends = message.sends if message.sent is None else ()
            recvs = message.recvs if message.received is None else ()
            to_send, to_receive = transport.rings.pieces(message.plan, sends, recvs)
            self._pieces_to_send.append(to_send)
            self._pieces_to_receive.append(to_receive)
        self._captured, self._num_sent = captured, 0
        self._received, self._num_waited = [False] * self._num_messages, 0
        # Positions of the computing queue, by the work done there, and the number of those that are taken.
        self._marks = {0: begun}
        self._marked_work, self._num_marked = messages.marks, 1
        self._work_done = 0
        # The mark that the queue of sends follows, and the position after the last send.
        self._sends_after: object = ...
        self._has_sent = False
        self._sent: object | None = None
        # The position of the receiving queue after the copy of the own rows.
        self.own_copied: object | None = None

    @property
    def has_more_to_send(self) -> bool:
        return self._num_sent < self._num_messages

    def send_ready(self) -> None:
        while self.has_more_to_send and self._may_send():
            self._send_next()

    def mark_ready(self, work_done: int) -> None:
        if self._num_sent < self._num_messages:
            # First what the last work hides, with the positions before it.
            self._send_placed(work_done, self._work_done)
        if work_done <= self._work_done:
            return
        self._work_done = work_done
        works, num_marked = self._marked_work, self._num_marked
        # With one hardware queue, a mark that no message needs would delay later work until its queue reaches it.
        if num_marked < len(works) and works[num_marked] <= work_done:
            mark = self._computing.mark()
            while num_marked < len(works) and works[num_marked] <= work_done:
                self._marks[works[num_marked]] = mark
                num_marked += 1
            self._num_marked = num_marked
            self._send_placed(work_done, work_done)

    def _send_placed(self, enqueued: int, done: int) -> None:
        while self._num_sent < self._num_messages:
            message = self._messages[self._num_sent]
            if message.after_work > done or message.not_before > enqueued or self._forwards and not self._may_send():
                return
            self._send_next()

    def _send_next(self) -> None:
        number, queue = self._num_sent, self._sending
        self._num_sent = number + 1
        message = self._messages[number]
        if message.lands:
            if message.free is not None:
                queue.run(message.free)
            self._order_sends(message)
            sends = message.sends if message.own_rows is None else (self._rows_of_call(*message.own_rows),)
            for lands, send in zip(message.lands, sends, strict=True):
                queue.copy(lands, send)
            queue.run(message.sent)
            self._has_sent = True
        elif self._pieces_to_send and (pieces := self._pieces_to_send[number]):
            self._order_sends(message)
            wait = Wait(self._op, number, message.plan, "it has not taken an earlier message")
            for piece in pieces:
                self._transport.rings.send(self, wait, piece)
            self._has_sent = True
        if self._num_sent == self._num_messages and self._has_sent:
            self._sent = queue.mark()

    def _order_sends(self, message: _Message) -> None:
        """Order later sends after the work that produces this one."""
        forwards = self._forwards and message.plan.after_message is not None
        mark = self._computing.mark() if forwards else self._marks[message.after_work]
        if mark is not self._sends_after:
            self._sending.after(mark)
            self._sends_after = mark

    def _rows_of_call(self, start: int, stop: int) -> torch.Tensor:
        assert self._own is not None
        return self._own if stop - start == self._own.shape[0] else self._own[start:stop]

    def is_completed(self, message: int) -> bool:
        return False

    def wait(self, *messages: int) -> None:
        if self._waits_for is not None and len(messages) > 1 and not any(self._received[each] for each in messages):
            self._wait_together(messages)
        else:
            for message in messages:
                self._wait(message)

    def _wait_together(self, messages: tuple[int, ...]) -> None:
        """Waits for messages between symmetric buffers in one call of the driver."""
        assert self._waits_for is not None
        last = max(messages)
        while self._num_sent <= last and self._may_send():
            self._send_next()
        received = self._waits_for.get(messages)
        if received is None:
            flags = [flag for flag in (self._messages[each].flag for each in messages) if flag is not None]
            received = self._waits_for[messages] = self._computing.prepare(flags)
        for each in messages:
            self._received[each] = True
        self._num_waited += len(messages)
        if self._captured:
            self._computing.after(self._sending.mark())
        try:
            self._computing.run(received)
        except TransportError as error:
            raise self._not_received(error) from error
        if last == self._num_messages - 1 and not self.has_more_to_send:
            self._wait_sends()

    def _wait(self, message: int) -> None:
        # The receiver of an earlier message may be the rank that sends this one: first the sends before it.
        while self._num_sent <= message and self._may_send():
            self._send_next()
        if self._received[message]:
            return
        self._received[message] = True
        self._num_waited += 1
        received = self._messages[message].received
        try:
            if received is not None:
                if self._captured:
                    self._computing.after(self._sending.mark())
                self._computing.run(received)
            elif self._pieces_to_receive and (pieces := self._pieces_to_receive[message]):
                wait = Wait(self._op, message, self._messages[message].plan)
                self._transport.rings.receive(wait, pieces, self._marks[0])
        except TransportError as error:
            raise self._not_received(error, message) from error
        if self._pieces_to_send:
            self._transport.rings.was_received(self._messages[message].plan.to, self._pieces_to_send[message])
        if self._forwards:
            self._send_placed(self._work_done, self._work_done)
        if message == self._num_messages - 1 and not self.has_more_to_send:
            # Not in `wait_all`: with one hardware queue it would delay other messages behind the work since then.
            self._wait_sends()

    def _not_received(self, error: TransportError, message: int | None = None) -> TransportError:
        ranks, peer, what = self._transport.backend.ranks, -1, "its messages"
        if message is not None:
            peer = ranks[self._messages[message].plan.source]
            what = f"message {message} from rank {peer}"
        text = f"{self._op}: rank {ranks[self._transport.rank]} could not receive {what}"
        return TransportError(f"{text}: {error}", peer=peer)

    def _may_send(self) -> bool:
        message = self._messages[self._num_sent]
        forwarded = message.plan.after_message
        return message.after_work <= self._work_done and (forwarded is None or self._received[forwarded])

    def wait_all(self) -> None:
        if self._num_waited < self._num_messages:
            self.wait(*(each for each in range(self._num_messages) if not self._received[each]))
        self.send_ready()
        assert not self.has_more_to_send, "a message was never marked ready"
        self._wait_sends()
        if self.own_copied is not None:
            self._computing.after(self.own_copied)
            self.own_copied = None

    def _wait_sends(self) -> None:
        # Not the whole queue: it may have later operations, which wait for what the peers receive after this one.
        if self._sent is not None:
            self._computing.after(self._sent)
            self._sent = None
