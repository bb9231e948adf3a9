"""Point-to-point messages as copies through symmetric memory: no kernel moves bytes, and no kernel waits.

A queue waits for a flag in memory without a kernel (`backend.Queue`), and clears it, so an operation enqueues the same
steps every time.

- A message between symmetric buffers (`Transfer.lands`) is one copy, from the tensor of the sender to that of the
  receiver. When an operation begins, the receiver sets a flag at each sender, after the present work of its computing
  queue: that no longer reads the buffer. The sender waits for it, copies, and sets a flag at the receiver, for which
  the computing queue of the receiver waits. All flags are those of the buffer (`heap`): one operation at a time uses a
  buffer.
- Any other message passes through a ring of the pair, in pieces, which the pair numbers 1, 2, ... in the order of
  operations and messages. Both ranks compute the place of a piece. The sender waits until earlier pieces in the same
  bytes are acknowledged. The receiver waits for the flag, copies the piece to the tensor, and acknowledges it; its
  computing queue waits for that copy. Rings and their flags are an arena of each rank:

      ring of source 0 | ring of source 1 | ... | flags [R, 256] | acknowledgements [R, 256]

A rank has one queue of sends and one of receives beside its computing queue. Sends run in the order of the plan, so
each uses the whole link.

A device may run several queues in one hardware queue, in the order of their calls. Every wait is for a step that a peer
enqueues at an earlier point of the program, so this order has no deadlock. On a device a message therefore never waits
for the acknowledgement of a message that this rank has not yet received from its side: the ring must hold both.

Queues note in host memory for which message they wait. A `Watchdog` reads the notes, and names the message and the peer
when no queue has moved for the deadline.
"""

import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import torch

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.symmetric.backend import ALIGNMENT, FlagStep, Note, Queue, SymmetricBackend, aligned
from megatron_overlap.comm.symmetric.heap import MAX_FLAGS, HeapPool, SymmetricBuffer
from megatron_overlap.comm.transport import DEFAULT_OPTIONS, Exchange, Transfer, TransportError, TransportOptions
from megatron_overlap.diagnostics.heartbeat import Watchdog
from megatron_overlap.schedules.plan import Message

_NUM_WORDS = 256
RING_BYTES = 64 * 1024 * 1024
"""Bytes of all rings of a rank. Messages in flight share a ring; those that do not fit wait for earlier ones."""
_SENDING, _RECEIVING, _COMPUTING = range(3)
_NUM_PIECES = 1 << 14
"""Waits of rings to remember: more than a host enqueues ahead of its device."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message that passes through a ring.

    Attributes:
        number: of this pair, from 1.
        begin: first byte, counted over all laps of the ring.
        place: offset in the arena of the receiver.
        content: the bytes of the tensor.
    """

    number: int
    begin: int
    place: int
    content: torch.Tensor


class _Ring:
    """Numbers the pieces of one direction of a pair; sender and receiver get the same numbers and places."""

    def __init__(self, start: int, num_bytes: int) -> None:
        self._start, self._num_bytes = start, num_bytes
        self._number = self._position = 0
        # Number and first byte of pieces in the order of their numbers, and the numbers of those that are not enqueued.
        self._in_use: deque[tuple[int, int]] = deque()
        self.not_sent: set[int] = set()
        # Numbers of pieces of messages for which no `wait` has been called on this rank, nor on the peer.
        self.not_received: set[int] = set()

    def pieces(self, tensors: Sequence[torch.Tensor]) -> list[Piece]:
        """Return the next pieces: those of `tensors`."""
        pieces = []
        for tensor in tensors:
            for content in tensor.view(-1).view(torch.uint8).split(self._num_bytes // 2 // ALIGNMENT * ALIGNMENT):
                if self._position % self._num_bytes + content.numel() > self._num_bytes:
                    self._position += self._num_bytes - self._position % self._num_bytes
                self._number += 1
                place = self._start + self._position % self._num_bytes
                pieces.append(Piece(self._number, self._position, place, content))
                self._position += aligned(content.numel())
        return pieces

    def will_send(self, pieces: Sequence[Piece]) -> None:
        """Record pieces to send."""
        self._in_use.extend((piece.number, piece.begin) for piece in pieces)
        self.not_sent.update(piece.number for piece in pieces)
        self.not_received.update(piece.number for piece in pieces)

    def replaced(self, piece: Piece) -> Iterator[int]:
        """Yield and forget the numbers of earlier pieces whose bytes or acknowledgement `piece` takes."""
        end, in_use = piece.begin + piece.content.numel(), self._in_use
        while in_use and (in_use[0][1] + self._num_bytes < end or in_use[0][0] + _NUM_WORDS <= piece.number):
            yield in_use.popleft()[0]


@dataclass(slots=True)
class _Message:
    """A message, and the prepared steps of one between symmetric buffers.

    Attributes:
        plan: chunks, peers and order.
        after_work: as of `plan`.
        not_before: as of `plan` on a device; 0 on a host, where the queues need no order of calls.
        sends: the tensors; of a message between symmetric buffers one or none.
        recvs: as `sends`.
        own_rows: start and stop of `sends` in the own rows of a call; None: the tensor is the same in every call.
        lands: the tensor of the receiver; None for a message through a ring.
        free: waits until the buffer of the receiver is free; None after the first message of an operation to it.
        sent: sets the flag of the receiver.
        received: waits for the flag; None if the message has no bytes.
    """

    plan: Message
    after_work: int
    not_before: int
    sends: tuple[torch.Tensor, ...]
    recvs: tuple[torch.Tensor, ...]
    own_rows: tuple[int, int] | None = None
    lands: torch.Tensor | None = None
    free: object | None = None
    sent: object | None = None
    received: object | None = None


@dataclass(slots=True)
class _Messages:
    """The messages of an operation.

    Attributes:
        all: in the order of the plan.
        through_ring: whether a message passes through a ring: the operation is prepared again each time.
        buffers_are_free: sets the flags of the senders; None without messages between symmetric buffers.
        marks: values of `Message.after_work`, ascending, from 0.
        forwards: whether a message sends what an earlier one receives.
    """

    all: list[_Message] = field(default_factory=list)
    through_ring: bool = False
    buffers_are_free: object | None = None
    marks: list[int] = field(default_factory=list)
    forwards: bool = False


class _Wait(NamedTuple):
    """A wait for a peer.

    Attributes:
        op: name of the operation.
        number: of the message in its plan.
        message: chunks and peers.
        reason: why the rank cannot send `message`; empty if it receives it.
    """

    op: str
    number: int
    message: Message
    reason: str = ""

    @property
    def peer(self) -> int:
        """The rank that the wait is for, in the group."""
        return self.message.to if self.reason else self.message.source

    def text(self, ranks: Sequence[int]) -> str:
        """What the rank could not do, with global ranks."""
        (owner, part), peer = self.message.send if self.reason else self.message.recv, ranks[self.peer]
        chunk = f"message {self.number} (chunk {part} of rank {ranks[owner]})"
        if self.reason:
            return f"send {chunk} to rank {peer}: {self.reason}"
        return f"receive {chunk} from rank {peer}: it has not arrived"


class _Waits:
    """The waits of the queues of this rank. The host can read them while the queues are blocked.

    The words are in host memory: with one hardware queue a copy from the device would wait behind the queue of sends.
    """

    def __init__(self, *, on_device: bool) -> None:
        pinned = on_device and torch.cuda.is_available()
        self._words = torch.zeros(3, dtype=torch.int32, pin_memory=pinned)
        self._by_number: dict[int, _Wait] = {}
        self._num_repeated = self._num_once = 0

    def note(self, queue: int, wait: _Wait, *, repeats: bool) -> Note:
        """Return the note of a wait that is enqueued again and again, or once."""
        if repeats:
            self._num_repeated += 1
            number = _NUM_PIECES + self._num_repeated
        else:
            self._num_once = self._num_once % _NUM_PIECES + 1
            number = self._num_once
        self._by_number[number] = wait
        return Note(self._words, queue, number)

    def numbers(self) -> tuple[int, ...]:
        """Numbers of the present waits by queue; 0: the queue does not wait for a peer."""
        return tuple(self._words.tolist())

    def of(self, numbers: Sequence[int]) -> list[_Wait]:
        """The waits with these numbers."""
        return [self._by_number[number] for number in numbers if number]


class CopyTransport:
    """See `Transport`. Every message is a copy into the memory of the receiver.

    Args:
        backend: symmetric memory of the ranks; the transport closes it.
        options: deadline of a wait, and flight recorder. Without a deadline there is no watchdog.
        ring_bytes: bytes of the ring of one pair; the same on every rank. None divides `RING_BYTES` by the ranks.
        symmetric: messages between symmetric buffers do not pass through rings; the same on every rank.

    Raises:
        ValueError: `ring_bytes` is below 512.
    """

    prepares = True

    def __init__(
        self,
        backend: SymmetricBackend,
        options: TransportOptions = DEFAULT_OPTIONS,
        *,
        ring_bytes: int | None = None,
        symmetric: bool = True,
    ) -> None:
        ring_bytes = RING_BYTES // backend.size if ring_bytes is None else ring_bytes
        if ring_bytes < 2 * ALIGNMENT:
            raise ValueError(f"ring_bytes: {ring_bytes}: must be at least {2 * ALIGNMENT}")
        self.backend, self.rank, self.size = backend, backend.rank, backend.size
        self.exposed_s = 0.0
        self.copy_engines = self.on_device = backend.device.type == "cuda"
        self._ring_bytes = ring_bytes = ring_bytes // ALIGNMENT * ALIGNMENT
        begin, words = self.size * ring_bytes, 8 * self.size * _NUM_WORDS
        self._arenas = backend.map(begin + words)
        self._heap = HeapPool(backend) if symmetric else None
        self.buffer_pool = self._heap or BufferPool()
        # Flags, then acknowledgements.
        self._words = [arena[begin : begin + words].view(torch.int32) for arena in self._arenas]
        self.sent = {peer: _Ring(self.rank * ring_bytes, ring_bytes) for peer in range(self.size)}
        self.received = {peer: _Ring(peer * ring_bytes, ring_bytes) for peer in range(self.size)}
        self.sending, self.receiving = backend.queue(), backend.queue()
        # Operations that have messages to send through rings, in order.
        self.works: list[CopyP2PWork] = []
        self.waits = _Waits(on_device=self.on_device)
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
        begun = self.backend.computing.mark()
        work = CopyP2PWork(self, messages, own, op, begun)
        if messages.through_ring:
            self.works = [earlier for earlier in self.works if earlier.has_more_to_send]
            self.works.append(work)
        if messages.buffers_are_free is not None:
            # Beside the computation: on a device each flag is a copy.
            self.receiving.after(begun)
            self.receiving.run(messages.buffers_are_free)
        work.mark_ready(0)
        return work

    def _prepared(self, transfers: Sequence[Transfer], own: torch.Tensor | None, op: str) -> _Messages:
        """The messages of `transfers`. On both ranks of a pair, the same messages are between symmetric buffers."""
        messages, computing, sending = _Messages(marks=[0]), self.backend.computing, self.sending
        num_sent, num_received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        free: list[FlagStep] = []
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
            # At each message of a plan, a rank has sent as many to `to` as it has received from `source`.
            if buffer is None or num_sent[to] == MAX_FLAGS or num_received[source] == MAX_FLAGS:
                messages.through_ring = messages.through_ring or bool(sends or recvs)
                continue
            words = buffer.words
            if sends:
                message.own_rows = None if own is None else _rows_of(own, transfer.send)
                if message.own_rows is not None:
                    message.sends = ()  # they must not keep the own rows of this call
                assert transfer.lands is not None
                message.lands = _at(buffer.data[plan.to], transfer.lands)
                if not num_sent[to]:
                    wait = _Wait(op, index, plan, "its buffer is not free")
                    note = self.waits.note(_SENDING, wait, repeats=True)
                    message.free = sending.prepare([FlagStep(words[self.rank], buffer.free(plan.to), False, note)])
                flag = buffer.flag(self.rank, num_sent[to])
                message.sent = sending.prepare([FlagStep(words[plan.to], flag, sets=True)])
                num_sent[to] += 1
            if recvs:
                flag = buffer.flag(plan.source, num_received[source])
                note = self.waits.note(_COMPUTING, _Wait(op, index, plan), repeats=True)
                message.received = computing.prepare([FlagStep(words[self.rank], flag, False, note)])
                if not num_received[source]:
                    free.append(FlagStep(words[plan.source], buffer.free(self.rank), sets=True))
                num_received[source] += 1
        messages.buffers_are_free = self.receiving.prepare(free) if free else None
        messages.marks = sorted(set(messages.marks))
        return messages

    def _buffer_between(self, transfer: Transfer) -> SymmetricBuffer | None:
        """The symmetric buffer in which `transfer` lands; None for a message through the ring."""
        if self._heap is None or transfer.lands is None or transfer.extra_send or transfer.extra_recv:
            return None
        return self._heap.buffer_of(transfer.lands)

    def send(self, sender: "CopyP2PWork", wait: _Wait, piece: Piece) -> None:
        """Enqueue the copy of a piece of `sender`. It may wait for the acknowledgement of an earlier piece: `wait`."""
        queue, peer = self.sending, wait.peer
        ring = self.sent[peer]
        for earlier in ring.replaced(piece):
            self._require_sent(earlier, sender, peer)
            if self.on_device and earlier in ring.not_received:
                raise TransportError(self._too_small(peer, "an earlier one is not yet received"))
            acknowledgement = (self.size + peer) * _NUM_WORDS + earlier % _NUM_WORDS
            note = self.waits.note(_SENDING, wait, repeats=False)
            _run(queue, FlagStep(self._words[self.rank], acknowledgement, False, note))
        ring.not_sent.discard(piece.number)
        queue.copy(self._arenas[peer][piece.place : piece.place + piece.content.numel()], piece.content)
        _run(queue, FlagStep(self._words[peer], self.rank * _NUM_WORDS + piece.number % _NUM_WORDS, sets=True))

    def _require_sent(self, number: int, sender: "CopyP2PWork", peer: int) -> None:
        ring = self.sent[peer]
        if number in ring.not_sent:
            for work in takewhile(lambda work: work is not sender, self.works):
                work.send_ready()
        if number in ring.not_sent:
            raise TransportError(self._too_small(peer, "an earlier one is not ready"))

    def _too_small(self, peer: int, reason: str) -> str:
        return (
            f"the ring to rank {self.backend.ranks[peer]} has {self._ring_bytes} bytes, too few for the "
            f"messages in flight: {reason}; use a larger ring_bytes"
        )

    def receive(self, wait: _Wait, pieces: Sequence[Piece], free: object) -> None:
        """Order the computing queue after the pieces of a message whose tensor is free at the mark `free`."""
        queue, peer = self.receiving, wait.peer
        queue.after(free)
        for piece in pieces:
            index = piece.number % _NUM_WORDS
            note = self.waits.note(_RECEIVING, wait, repeats=False)
            _run(queue, FlagStep(self._words[self.rank], peer * _NUM_WORDS + index, False, note))
            queue.copy(piece.content, self._arenas[self.rank][piece.place : piece.place + piece.content.numel()])
            _run(queue, FlagStep(self._words[peer], (self.size + self.rank) * _NUM_WORDS + index, sets=True))
        self.backend.computing.after(queue.mark())

    def _waiting(self) -> tuple[int, ...] | None:
        """The waits of the queues and the operations begun; None if no queue waits for a peer."""
        numbers = self.waits.numbers()
        return (*numbers, self._num_begun) if any(numbers) else None

    def _report(self, waiting: tuple[int, ...]) -> None:
        """Print which messages are late, and let later operations raise it. The computing thread may be blocked."""
        ranks, waits = self.backend.ranks, self.waits.of(waiting[:-1])
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
        self._arenas, self._words = [], []
        self.backend.close()


def _run(queue: Queue, step: FlagStep) -> None:
    queue.run(queue.prepare([step]))


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
        self, transport: CopyTransport, messages: _Messages, own: torch.Tensor | None, op: str, begun: object
    ) -> None:
        self._transport, self._messages, self._own, self._op = transport, messages.all, own, op
        self._computing, self._sending = transport.backend.computing, transport.sending
        self._forwards, self._num_messages = messages.forwards, len(messages.all)
        self._pieces_to_send: list[list[Piece]] = []
        self._pieces_to_receive: list[list[Piece]] = []
        if messages.through_ring:
            self._number_pieces()
        self._num_sent = 0
        self._received = [False] * self._num_messages
        # Positions of the computing queue, by the work done there, and the number of those that are taken.
        self._marks = {0: begun}
        self._marked_work, self._num_marked = messages.marks, 1
        self._work_done = 0
        # The mark that the queue of sends follows, and the position after the last send.
        self._sends_after: object = ...
        self._has_sent = False
        self._sent: object | None = None

    def _number_pieces(self) -> None:
        for message in self._messages:
            sent, received = self._transport.sent[message.plan.to], self._transport.received[message.plan.source]
            self._pieces_to_send.append(sent.pieces(message.sends if message.sent is None else ()))
            self._pieces_to_receive.append(received.pieces(message.recvs if message.received is None else ()))
            sent.will_send(self._pieces_to_send[-1])

    @property
    def has_more_to_send(self) -> bool:
        """Whether sends remain to be enqueued."""
        return self._num_sent < self._num_messages

    def send_ready(self) -> None:
        """Enqueue all sends that are ready, also before the work that hides them."""
        while self.has_more_to_send and self._may_send():
            self._send_next()

    def mark_ready(self, work_done: int) -> None:
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
        if message.lands is not None:
            self._order_sends(message)
            if message.free is not None:
                queue.run(message.free)
            source = message.sends[0] if message.own_rows is None else self._rows_of_call(*message.own_rows)
            queue.copy(message.lands, source)
            queue.run(message.sent)
            self._has_sent = True
        elif self._pieces_to_send and (pieces := self._pieces_to_send[number]):
            self._order_sends(message)
            wait = _Wait(self._op, number, message.plan, "it has not taken an earlier message")
            for piece in pieces:
                self._transport.send(self, wait, piece)
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

    def wait(self, message: int) -> None:
        # The receiver of an earlier message may be the rank that sends this one: first the sends before it.
        while self._num_sent <= message and self._may_send():
            self._send_next()
        if self._received[message]:
            return
        self._received[message] = True
        received = self._messages[message].received
        try:
            if received is not None:
                self._computing.run(received)
            elif self._pieces_to_receive and (pieces := self._pieces_to_receive[message]):
                self._transport.receive(_Wait(self._op, message, self._messages[message].plan), pieces, self._marks[0])
        except TransportError as error:
            raise self._not_received(message, error) from error
        if self._pieces_to_send:
            ring = self._transport.sent[self._messages[message].plan.to]
            ring.not_received.difference_update(piece.number for piece in self._pieces_to_send[message])
        if self._forwards:
            self._send_placed(self._work_done, self._work_done)
        if message == self._num_messages - 1 and not self.has_more_to_send:
            # Not in `wait_all`: with one hardware queue it would delay other messages behind the work since then.
            self._wait_sends()

    def _not_received(self, message: int, error: TransportError) -> TransportError:
        transport, source = self._transport, self._messages[message].plan.source
        ranks = transport.backend.ranks
        text = f"{self._op}: rank {ranks[transport.rank]} could not receive message {message} from rank {ranks[source]}"
        return TransportError(f"{text}: {error}", peer=ranks[source])

    def _may_send(self) -> bool:
        message = self._messages[self._num_sent]
        forwarded = message.plan.after_message
        return message.after_work <= self._work_done and (forwarded is None or self._received[forwarded])

    def wait_all(self) -> None:
        for message, received in enumerate(self._received):
            if not received:
                self.wait(message)
        self.send_ready()
        assert not self.has_more_to_send, "a message was never marked ready"
        self._wait_sends()

    def _wait_sends(self) -> None:
        # Not the whole queue: it may have later operations, which wait for what the peers receive after this one.
        if self._sent is not None:
            self._computing.after(self._sent)
            self._sent = None
