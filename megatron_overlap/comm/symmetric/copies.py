"""Point-to-point messages as copies through symmetric memory: no kernel moves bytes, and no kernel waits.

A queue waits for a flag in memory without a kernel (`backend.Queue`), and clears it, so an operation enqueues the same
steps every time.

A message lands in a symmetric buffer of the receiver (`Transfer.lands`). It is a copy of each of its tensors. When
an operation begins, the receiver sets a flag at each sender, after the present work of its computing queue: that no
longer reads the buffer. The sender waits for it, copies, and sets a flag at the receiver, for which the computing queue
of the receiver waits. Or the sender sets a flag, and the receiver copies from a symmetric buffer of the sender
(`Transfer.reads`). All flags are those of the buffer (`heap`): one operation at a time uses a buffer.

A rank has one queue of sends and one of receives beside its computing queue. Each runs messages in the order of the
plan, so that each uses the whole link.

A device may run several queues in one hardware queue, in the order of their calls. Every wait is for a step that a peer
enqueues at an earlier point of the program, so this order has no deadlock.

A CUDA graph may capture operations, because they leave all flags as they found them. It keeps the dependencies of
steps, and not the order of their calls: during a capture every wait therefore depends on all flags that this rank sets
earlier in the program. Not yet run on several GPUs.

Queues note in host memory for which message they wait (`backend.Waits`). A `Watchdog` reads the notes, and names the
message and the peer when no queue has moved for the deadline.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import torch

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.symmetric.backend import FlagStep, SymmetricBackend, Wait, Waits
from megatron_overlap.comm.symmetric.heap import MAX_FLAGS, HeapPool, SymmetricBuffer
from megatron_overlap.comm.transport import (
    DEFAULT_OPTIONS,
    Exchange,
    Transfer,
    TransportError,
    TransportOptions,
    message_text,
)
from megatron_overlap.diagnostics.heartbeat import Watchdog
from megatron_overlap.schedules.plan import Message


@dataclass(slots=True)
class _Message:
    """A message and its prepared steps.

    Attributes:
        not_before: as of `plan` on a device; 0 on a host, where the queues need no order of calls.
        own_rows: start and stop of the rows of a call that go to `lands` of the receiver, or come from `reads`.
        copies: tensors of the receiver and what they get, of a message without own rows.
        free: waits until the buffer of the receiver is free, or those of all receivers; None if an earlier message of
            the operation does.
        sent: sets the flag of the receiver. Of messages that receivers copy, the second sets the flags of all later
            ones after the same work.
        flag: the wait of the computing queue for the flag; None if this rank receives no bytes, or copies them itself.
        reads: where this rank copies from, at the sender.
        arrived: waits for the flag before that copy.
    """

    plan: Message
    after_work: int
    not_before: int
    own_rows: tuple[int, int] | None = None
    lands: torch.Tensor | None = None
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    free: object | None = None
    sent: object | None = None
    flag: FlagStep | None = None
    reads: torch.Tensor | None = None
    arrived: object | None = None


@dataclass(slots=True)
class _Messages:
    """The messages of operation `op`, in the order of the plan.

    Attributes:
        buffers_are_free: sets the flags of the senders; None if this rank receives nothing.
        received: waits for the flags of messages, by their numbers; None without flags.
        runs_of_own: start and stop of consecutive own rows of a call: one run each, unless messages share rows.
        marks: values of `Message.after_work`, ascending, from 0.
        forwards: whether a message sends what an earlier one receives.
        reads: the messages whose bytes this rank copies itself.
    """

    op: str
    all: list[_Message] = field(default_factory=list)
    buffers_are_free: object | None = None
    received: dict[tuple[int, ...], object | None] = field(default_factory=dict)
    runs_of_own: list[tuple[int, int]] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    forwards: bool = False
    reads: set[int] = field(default_factory=set)


class CopyTransport:
    """See `Transport`. Every message is a copy into the memory of the receiver.

    Args:
        backend: symmetric memory of the ranks; the transport closes it.
        options: deadline of a wait, and flight recorder. Without a deadline there is no watchdog.
    """

    prepares = capturable = True
    collectives = None

    def __init__(self, backend: SymmetricBackend, options: TransportOptions = DEFAULT_OPTIONS) -> None:
        self.backend, self.rank, self.size = backend, backend.rank, backend.size
        self.exposed_s = 0.0
        self.copy_engines = self.on_device = backend.device.type == "cuda"
        self._heap = HeapPool(backend)
        self.buffer_pool: BufferPool = self._heap
        self.sending, self.receiving = backend.queue(), backend.queue()
        self.waits = Waits(on_device=self.on_device)
        self._num_begun = 0
        # What the watchdog has found. Every later operation raises it.
        self.broken: TransportError | None = None
        self._timeout_s, self._flight_recorder = options.timeout_s, options.flight_recorder
        backend.barrier()
        self._watchdog: Watchdog | None = None
        if options.timeout_s is not None:
            self._watchdog = Watchdog(options.timeout_s, self._waiting, self._report)

    def begin(self, transfers: Sequence[Transfer], op: str) -> "CopyP2PWork":
        """See `Transport.begin`.

        Raises:
            TransportError: a message lands in no symmetric buffer, there are too many, or an earlier one was late.
        """
        if self.broken is not None:
            raise self.broken
        self._num_begun += 1
        repeated, own = (transfers.repeated, transfers.own) if isinstance(transfers, Exchange) else (None, None)
        messages: _Messages | None = None if repeated is None else repeated.prepared.get(op)
        if messages is None:
            messages = self._prepared(transfers, own, op)
            if repeated is not None:
                repeated.prepared[op] = messages
        captured = self.backend.is_capturing()
        if captured:
            self._heap.captured = True
            # A replay runs no Python: without this the watchdog would take repeated replays for one that does not move.
            self.waits.count_replay(self.backend.computing)
        begun = self.backend.computing.mark()
        into, cut = (transfers.into, transfers.cut) if isinstance(transfers, Exchange) else (None, {})
        work = CopyP2PWork(self, messages, own, cut, begun, captured)
        if messages.buffers_are_free is not None or messages.reads or into is not None:
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

    def _prepared(self, transfers: Sequence[Transfer], own: torch.Tensor | None, op: str) -> _Messages:
        messages, computing, sending = _Messages(op, marks=[0]), self.backend.computing, self.sending
        repeats = isinstance(transfers, Exchange)
        num_sent, num_received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        free = list[FlagStep]()
        awaited = list[tuple[_Message, list[FlagStep]]]()
        announced = dict[int, list[tuple[_Message, FlagStep]]]()  # by the work before the rows that peers read
        for index, transfer in enumerate(transfers):
            plan = transfer.message
            sends = transfer.send.numel() > 0
            message = _Message(plan, plan.after_work, plan.not_before if self.on_device else 0)
            messages.all.append(message)
            messages.marks.append(plan.after_work)
            messages.forwards = messages.forwards or plan.after_message is not None
            if not sends and not transfer.recv.numel():
                continue
            buffer = self._buffer_of(transfer, index, op)
            words, to, source = buffer.words, (plan.to, id(buffer)), (plan.source, id(buffer))
            sent = FlagStep(words[plan.to], buffer.flag(self.rank, num_sent[to]), sets=True)
            if sends and transfer.reads is not None:
                announced.setdefault(plan.after_work, []).append((message, sent))
            elif sends:
                assert transfer.lands is not None
                places = (transfer.lands, *transfer.extra_lands)
                lands = [_at(buffer.data[plan.to], place) for place in places]
                message.own_rows = None if own is None else _rows_of(own, transfer.send)
                if message.own_rows is None:
                    message.copies = tuple(zip(lands, (transfer.send, *transfer.extra_send), strict=True))
                else:  # the message must not keep the own rows of this call
                    (message.lands,) = lands
                if not num_sent[to]:
                    wait = Wait(op, index, plan, "its buffer is not free")
                    note = self.waits.note(Waits.SENDING, wait, repeats=repeats)
                    awaited.append((message, [FlagStep(words[self.rank], buffer.free(plan.to), False, note)]))
                message.sent = sending.prepare([sent])
            num_sent[to] += sends
            if transfer.recv.numel():
                flag = buffer.flag(plan.source, num_received[source])
                queue = Waits.COMPUTING if transfer.reads is None else Waits.RECEIVING
                note = self.waits.note(queue, Wait(op, index, plan), repeats=repeats)
                arrives = FlagStep(words[self.rank], flag, False, note)
                if transfer.reads is not None:
                    assert own is not None, "rows that this rank copies itself are rows of the call"
                    message.own_rows = _rows_of(own, transfer.recv)
                    messages.reads.add(index)
                    message.reads = _at(buffer.data[plan.source], transfer.reads)
                    message.arrived = self.receiving.prepare([arrives])
                else:
                    message.flag = arrives
                if transfer.reads is None and not num_received[source]:
                    free.append(FlagStep(words[plan.source], buffer.free(self.rank), sets=True))
                num_received[source] += 1
        if max((*num_sent.values(), *num_received.values()), default=0) > MAX_FLAGS:
            raise TransportError(f"{op}: more than {MAX_FLAGS} messages between two ranks; use fewer chunks")
        if all(message.after_work for message, _ in awaited):
            # The work before the first message hides the waits: one call of the driver.
            awaited = awaited[:1] and [(awaited[0][0], [step for _, steps in awaited for step in steps])]
        for message, steps in awaited:
            message.free = sending.prepare(steps)
        for (message, step), *others in announced.values():
            # The first copy need not wait for the flags of the others.
            message.sent = sending.prepare([step])
            if others:
                others[0][0].sent = sending.prepare([step for _, step in others])
        messages.buffers_are_free = self.receiving.prepare(free) if free else None
        flags = {(index,): [each.flag] for index, each in enumerate(messages.all) if each.flag is not None}
        messages.received = {numbers: computing.prepare(steps) for numbers, steps in flags.items()}
        messages.marks = sorted(set(messages.marks))
        if own is not None:
            own_sent = [message.own_rows for message in messages.all if message.own_rows is not None]
            messages.runs_of_own = list(pairwise(sorted({0, own.shape[0], *chain.from_iterable(own_sent)})))
        return messages

    def _buffer_of(self, transfer: Transfer, number: int, op: str) -> SymmetricBuffer:
        """The symmetric buffer in which message `number` lands, or from which the receiver copies it."""
        place = transfer.lands if transfer.reads is None else transfer.reads
        complete = place is not None and len(transfer.extra_lands) == len(transfer.extra_send)
        buffer = self._heap.buffer_of(place) if complete and place is not None else None
        if buffer is None:
            what = message_text(transfer.message, number, self.backend.ranks, sends=transfer.send.numel() > 0)
            raise TransportError(f"{op}: cannot {what}: it lands in no symmetric buffer; use overlap.transport: nccl")
        return buffer

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
        self,
        transport: CopyTransport,
        messages: _Messages,
        own: torch.Tensor | None,
        cut: dict[tuple[int, int], torch.Tensor],
        begun: object,
        captured: bool,
    ) -> None:
        self._transport, self._messages, self._own, self._op = transport, messages.all, own, messages.op
        self._runs_of_own = messages.runs_of_own
        self._own_rows = cut
        self._waits_for = messages.received
        self._computing, self._sending = transport.backend.computing, transport.sending
        self._receiving, self._reads = transport.receiving, messages.reads
        self._forwards, self._num_messages = messages.forwards, len(messages.all)
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

    def _send_before(self, stop: int) -> None:
        """Enqueues the sends that are ready, up to message `stop`, also before the work that hides them."""
        while self._num_sent < stop and self._may_send():
            self._send_next()

    def _may_send(self) -> bool:
        message = self._messages[self._num_sent]
        forwarded = message.plan.after_message
        return message.after_work <= self._work_done and (forwarded is None or self._received[forwarded])

    def _send_next(self) -> None:
        number, queue = self._num_sent, self._sending
        self._num_sent = number + 1
        message = self._messages[number]
        if message.sent is not None:
            if message.free is not None:
                queue.run(message.free)
            # After the work that produces it.
            forwards = self._forwards and message.plan.after_message is not None
            mark = self._computing.mark() if forwards else self._marks[message.after_work]
            if mark is not self._sends_after:
                queue.after(mark)
                self._sends_after = mark
            if message.lands is not None and message.own_rows is not None:
                queue.copy(message.lands, self._rows_of_call(message.own_rows))
            for lands, send in message.copies:
                queue.copy(lands, send)
            queue.run(message.sent)
            self._has_sent = True
        if message.reads is not None:
            assert message.own_rows is not None
            if self._captured:
                self._receiving.after(queue.mark())
            self._receiving.run(message.arrived)
            self._receiving.copy(self._rows_of_call(message.own_rows), message.reads)
        if self._num_sent == self._num_messages and self._has_sent:
            self._sent = queue.mark()

    def _rows_of_call(self, rows: tuple[int, int]) -> torch.Tensor:
        assert self._own is not None
        if not self._own_rows:
            # For the host, one call of torch's dispatcher for all rows costs less than one for each.
            runs = self._runs_of_own
            sizes = [stop - start for start, stop in runs]
            cut = (self._own,) if len(runs) == 1 else torch.unsafe_split_with_sizes(self._own, sizes)
            self._own_rows = dict(zip(runs, cut, strict=True))
        found = self._own_rows.get(rows)
        return self._own[slice(*rows)] if found is None else found

    def is_completed(self, message: int) -> bool:
        return False

    def wait(self, *messages: int) -> None:
        if not self._forwards:
            self._wait(messages)
            return
        for message in messages:
            self._wait((message,))
            self._send_placed(self._work_done, self._work_done)

    def _wait(self, messages: tuple[int, ...]) -> None:
        """Waits for messages in one call of the driver."""
        last = messages[0] if len(messages) == 1 else max(messages, default=-1)
        # The receiver of an earlier message may be the rank that sends this one: first the sends before it.
        if self._num_sent <= last:
            self._send_before(last + 1)
        done, waiting = self._received, messages
        if any(map(done.__getitem__, messages)):
            waiting = tuple(each for each in messages if not done[each])
        if not waiting:
            return
        for each in waiting:
            done[each] = True
        self._num_waited += len(waiting)
        if waiting not in self._waits_for:
            flags = [flag for flag in (self._messages[each].flag for each in waiting) if flag is not None]
            self._waits_for[waiting] = self._computing.prepare(flags) if flags else None
        received = self._waits_for[waiting]
        try:
            if received is not None:
                if self._captured:
                    self._computing.after(self._sending.mark())
                self._computing.run(received)
            if not self._reads.isdisjoint(waiting):
                self._computing.after(self._receiving.mark())
        except TransportError as error:
            raise self._not_received(error) from error
        if last == self._num_messages - 1 and self._num_sent == self._num_messages:
            # Not in `wait_all`: with one hardware queue it would delay other messages behind the work since then.
            self._wait_sends()

    def _not_received(self, error: TransportError) -> TransportError:
        """The error of a failed wait: on a host the queue names the message."""
        ranks, waits = self._transport.backend.ranks, self._transport.waits
        found = waits.of(waits.numbers()[Waits.RECEIVING :])
        what = found[0].text(ranks) if found else "receive its messages"
        text = f"{self._op}: rank {ranks[self._transport.rank]} could not {what}: {error}"
        return TransportError(text, peer=ranks[found[0].peer] if found else -1)

    def wait_all(self) -> None:
        if self._num_waited < self._num_messages:
            self.wait(*(each for each in range(self._num_messages) if not self._received[each]))
        self._send_before(self._num_messages)
        assert self._num_sent == self._num_messages, "a message was never marked ready"
        self._wait_sends()
        if self.own_copied is not None:
            self._computing.after(self.own_copied)
            self.own_copied = None

    def _wait_sends(self) -> None:
        # Not the whole queue: it may have later operations, which wait for what the peers receive after this one.
        if self._sent is not None:
            self._computing.after(self._sent)
            self._sent = None
