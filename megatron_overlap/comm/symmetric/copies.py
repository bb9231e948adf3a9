"""Point-to-point messages as copies through symmetric memory: no kernel moves bytes, and no kernel waits.

Each rank has one arena, beside those of its symmetric buffers (`heap`):

    ring of source 0 | ring of source 1 | ... | flags [R, 256] | acknowledgements [R, 256] | ready words [R]

A message travels in pieces, which the pair of sender and receiver numbers 1, 2, ... in the order of operations and
messages. The sender copies a piece and writes its number to flag `piece % 256` of the receiver.

- A message between symmetric buffers (`Transfer.lands`) is one piece. It lands in the tensor of the receiver. When an
  operation begins, the receiver writes its count of such operations to the ready word at the sender: earlier work no
  longer reads the buffer. The sender waits for this count; the computing queue of the receiver waits for the flag.
- Any other message passes through the ring of the pair. Both ranks compute the place of a piece. The sender waits until
  earlier pieces in the same bytes are acknowledged. The receiver waits for the flag, copies the piece to the tensor,
  and acknowledges it; its computing queue waits for that copy.

A rank has one queue of sends and one of receives beside its computing queue. Sends run in the order of the plan, so
each uses the whole link. A queue waits for a word in memory without a kernel (`backend.Queue`).

A device may run several queues in one hardware queue, in the order of their calls. Every wait is for a step that a peer
enqueues at an earlier point of the program, so this order has no deadlock. On a device a message therefore never waits
for the acknowledgement of a message that this rank has not yet received from its side: the ring must hold both.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.symmetric.backend import SymmetricBackend
from megatron_overlap.comm.symmetric.heap import HeapPool
from megatron_overlap.comm.transport import Transfer, TransportError

_ALIGNMENT = 256
_NUM_WORDS = 256
RING_BYTES = 64 * 1024 * 1024
"""Bytes of all rings of a rank. Messages in flight share a ring; those that do not fit wait for earlier ones."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one message.

    Attributes:
        number: of this pair, from 1.
        begin: first byte, counted over all laps of the ring; None for a message between symmetric buffers.
        place: offset in the arena of the receiver, for a piece in the ring.
        content: the bytes of the tensor.
        lands: the bytes of the receiver, for a message between symmetric buffers.
    """

    number: int
    begin: int | None
    place: int
    content: torch.Tensor
    lands: torch.Tensor | None = None


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
            for content in tensor.view(-1).view(torch.uint8).split(self._num_bytes // 2 // _ALIGNMENT * _ALIGNMENT):
                if self._position % self._num_bytes + content.numel() > self._num_bytes:
                    self._position += self._num_bytes - self._position % self._num_bytes
                self._number += 1
                place = self._start + self._position % self._num_bytes
                pieces.append(Piece(self._number, self._position, place, content))
                self._position += -(-content.numel() // _ALIGNMENT) * _ALIGNMENT
        return pieces

    def direct(self, tensor: torch.Tensor, lands: torch.Tensor | None = None) -> Piece:
        """Return the next piece: all of `tensor`, which lands in the bytes `lands` of the receiver."""
        self._number += 1
        return Piece(self._number, None, 0, tensor.view(-1).view(torch.uint8), lands)

    def will_send(self, pieces: Sequence[Piece]) -> None:
        """Record pieces to send."""
        self._in_use.extend((piece.number, piece.begin) for piece in pieces if piece.begin is not None)
        self.not_sent.update(piece.number for piece in pieces)
        self.not_received.update(piece.number for piece in pieces)

    def replaced(self, piece: Piece) -> Iterator[int]:
        """Yield and forget the numbers of earlier pieces in the ring whose bytes or acknowledgement `piece` takes."""
        if piece.begin is None:
            return
        end, in_use = piece.begin + piece.content.numel(), self._in_use
        while in_use and (in_use[0][1] + self._num_bytes < end or in_use[0][0] + _NUM_WORDS <= piece.number):
            yield in_use.popleft()[0]


class CopyTransport:
    """See `Transport`. Every message is a copy into the memory of the receiver.

    Args:
        backend: symmetric memory of the ranks; the transport closes it.
        ring_bytes: bytes of the ring of one pair; the same on every rank. None divides `RING_BYTES` by the ranks.
        symmetric: messages between symmetric buffers do not pass through rings; the same on every rank.

    Raises:
        ValueError: `ring_bytes` is below 512.
    """

    def __init__(self, backend: SymmetricBackend, *, ring_bytes: int | None = None, symmetric: bool = True) -> None:
        ring_bytes = RING_BYTES // backend.size if ring_bytes is None else ring_bytes
        if ring_bytes < 2 * _ALIGNMENT:
            raise ValueError(f"ring_bytes: {ring_bytes}: must be at least {2 * _ALIGNMENT}")
        self.backend, self.rank, self.size = backend, backend.rank, backend.size
        self.exposed_s = 0.0
        self.copy_engines = backend.device.type == "cuda"
        self._ring_bytes = ring_bytes = ring_bytes // _ALIGNMENT * _ALIGNMENT
        words = 4 * self.size * (2 * _NUM_WORDS + 1)
        begin = self.size * ring_bytes
        self._arenas = backend.map(begin + words)
        self._heap = HeapPool(backend) if symmetric else None
        self.buffer_pool = self._heap or BufferPool()
        # Flags, then acknowledgements, then ready words.
        self._words = [arena[begin : begin + words].view(torch.int32) for arena in self._arenas]
        self._words[self.rank].zero_()
        self.sent = {peer: _Ring(self.rank * ring_bytes, ring_bytes) for peer in range(self.size)}
        self.received = {peer: _Ring(peer * ring_bytes, ring_bytes) for peer in range(self.size)}
        # Operations with messages between symmetric buffers, by peer.
        self.ready_to_receive, self.ready_to_send = Counter[int](), Counter[int]()
        self.sending, self.receiving = backend.queue(), backend.queue()
        # Operations that have messages to send, in order.
        self.works: list[CopyP2PWork] = []
        backend.barrier()

    def begin(self, transfers: Sequence[Transfer], op: str) -> "CopyP2PWork":
        self.works = [work for work in self.works if work.has_more_to_send]
        work = CopyP2PWork(self, transfers, op)
        self.works.append(work)
        work.mark_ready(0)
        return work

    def lands(self, transfer: Transfer) -> torch.Tensor | None:
        """The bytes of the receiver at which `transfer.send` lands; None for a message through the ring."""
        if self._heap is None or transfer.lands is None or transfer.extra_send or transfer.extra_recv:
            return None
        return self._heap.at(transfer.message.to, transfer.lands)

    def write_ready(self, sources: Sequence[int], free: object) -> None:
        """Enqueue the ready words of `sources`: receive buffers are free at the mark `free` of the computing queue."""
        self.receiving.after(free)
        for source in sources:
            self.ready_to_receive[source] += 1
            index = 2 * self.size * _NUM_WORDS + self.rank
            self.receiving.write(self._words[source], index, self.ready_to_receive[source])

    def wait_ready(self, peer: int, count: int) -> None:
        """Block later sends until the buffers of operation `count` are free at `peer`."""
        self.sending.wait(self._words[self.rank], 2 * self.size * _NUM_WORDS + peer, count)

    def send(self, sender: "CopyP2PWork", peer: int, piece: Piece) -> None:
        """Enqueue the copy of a piece of `sender` to `peer`."""
        queue, ring = self.sending, self.sent[peer]
        acknowledgements = self.size * _NUM_WORDS + peer * _NUM_WORDS
        self._require_sent(piece.number - _NUM_WORDS, sender, peer)  # it sets the same flag
        for earlier in ring.replaced(piece):
            self._require_sent(earlier, sender, peer)
            if self.copy_engines and earlier in ring.not_received:
                raise TransportError(self._too_small(peer, "an earlier one is not yet received"))
            queue.wait(self._words[self.rank], acknowledgements + earlier % _NUM_WORDS, earlier)
        ring.not_sent.discard(piece.number)
        place = slice(piece.place, piece.place + piece.content.numel())
        queue.copy(self._arenas[peer][place] if piece.lands is None else piece.lands, piece.content)
        queue.write(self._words[peer], self.rank * _NUM_WORDS + piece.number % _NUM_WORDS, piece.number)

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

    def receive(self, peer: int, pieces: Sequence[Piece], free: object) -> None:
        """Order the computing queue after the pieces of a message of `peer` whose tensor is free at the mark `free`."""
        own = self._words[self.rank]
        through_ring = [piece for piece in pieces if piece.begin is not None]
        queue = self.receiving if through_ring else self.backend.computing
        if through_ring:
            queue.after(free)
        for piece in pieces:
            index = piece.number % _NUM_WORDS
            queue.wait(own, peer * _NUM_WORDS + index, piece.number)
            if piece.begin is not None:
                queue.copy(piece.content, self._arenas[self.rank][piece.place : piece.place + piece.content.numel()])
                queue.write(self._words[peer], (self.size + self.rank) * _NUM_WORDS + index, piece.number)
        if through_ring:
            self.backend.computing.after(queue.mark())

    def close(self) -> None:
        """See `Transport.close`. Call it when no rank uses the memory any more."""
        self.buffer_pool.clear()
        self._arenas, self._words = [], []
        self.backend.close()


class CopyP2PWork:
    """See `P2PWork`. Enqueues a send when it is ready and the work that hides it is enqueued; receives in `wait`."""

    def __init__(self, transport: CopyTransport, transfers: Sequence[Transfer], op: str) -> None:
        self._transport, self._transfers, self._op = transport, transfers, op
        self._pieces_to_send: list[list[Piece]] = []
        self._pieces_to_receive: list[list[Piece]] = []
        self._sources: dict[int, None] = {}  # of messages between symmetric buffers, in the order of the plan
        self._ready: dict[int, int] = {}
        for transfer in transfers:
            sent, received = transport.sent[transfer.message.to], transport.received[transfer.message.source]
            lands = transport.lands(transfer)
            to_send = (transfer.send, *transfer.extra_send) if transfer.send.numel() else ()
            to_receive = (transfer.recv, *transfer.extra_recv) if transfer.recv.numel() else ()
            if lands is None:
                self._pieces_to_send.append(sent.pieces(to_send))
                self._pieces_to_receive.append(received.pieces(to_receive))
            else:
                self._pieces_to_send.append([sent.direct(tensor, lands) for tensor in to_send])
                self._pieces_to_receive.append([received.direct(tensor) for tensor in to_receive])
                self._sources.update(dict.fromkeys([transfer.message.source] * len(to_receive)))
                self._ready.update(dict.fromkeys([transfer.message.to] * len(to_send), 0))
            sent.will_send(self._pieces_to_send[-1])
        for peer in self._ready:
            transport.ready_to_send[peer] += 1
            self._ready[peer] = transport.ready_to_send[peer]
        self._num_sent = 0
        self._received = [False] * len(transfers)
        # Positions of the computing queue, by the work done there; the last one follows received rows.
        self._marks: list[tuple[int, object]] = []
        self._work_done = -1
        # Position after the last send.
        self._sent: object | None = None

    @property
    def has_more_to_send(self) -> bool:
        """Whether sends remain to be enqueued."""
        return self._num_sent < len(self._transfers)

    def send_ready(self) -> None:
        """Enqueue all sends that are ready, also before the work that hides them."""
        while self.has_more_to_send and self._may_send():
            self._send_next()

    def mark_ready(self, work_done: int) -> None:
        # First what the last work hides, with the positions before it.
        self._send_placed(work_done, self._work_done)
        left = self._transfers[self._num_sent :]
        # With one hardware queue, a mark that no message needs would delay later work until its queue reaches it.
        if self._work_done < 0 or any(self._work_done < each.message.after_work <= work_done for each in left):
            self._marks.append((work_done, self._transport.backend.computing.mark()))
            if self._sources:
                self._transport.write_ready(list(self._sources), self._marks[0][1])
                self._sources = {}
        self._work_done = max(self._work_done, work_done)
        self._send_placed(work_done, self._work_done)

    def _send_placed(self, enqueued: int, done: int) -> None:
        for transfer in self._transfers[self._num_sent :]:
            message = transfer.message
            forwarded = message.after_message
            if (self._transport.copy_engines and message.not_before > enqueued) or message.after_work > done:
                return
            if forwarded is not None and not self._received[forwarded]:
                return
            self._send_next()

    def _send_next(self) -> None:
        transport, message = self._transport, self._transfers[self._num_sent].message
        self._num_sent += 1
        if pieces := self._pieces_to_send[self._num_sent - 1]:
            queue = transport.sending
            if message.after_message is not None:
                queue.after(transport.backend.computing.mark())
            else:
                queue.after(next(mark for done, mark in self._marks if done >= message.after_work))
            if pieces[0].begin is None and (count := self._ready.pop(message.to, 0)):
                transport.wait_ready(message.to, count)
            for piece in pieces:
                transport.send(self, message.to, piece)
            self._sent = queue.mark()

    def is_completed(self, message: int) -> bool:
        return False

    def wait(self, message: int) -> None:
        # The receiver of an earlier message may be the rank that sends this one: first the sends before it.
        while self._num_sent <= message and self._may_send():
            self._send_next()
        if self._received[message]:
            return
        self._received[message] = True
        transport, source = self._transport, self._transfers[message].message.source
        try:
            if pieces := self._pieces_to_receive[message]:
                transport.receive(source, pieces, self._marks[0][1])
        except TransportError as error:
            ranks = transport.backend.ranks
            raise TransportError(
                f"{self._op}: rank {ranks[transport.rank]} could not receive message {message} from rank "
                f"{ranks[source]}: {error}",
                peer=ranks[source],
            ) from error
        ring = transport.sent[self._transfers[message].message.to]
        ring.not_received.difference_update(piece.number for piece in self._pieces_to_send[message])
        self._send_placed(self._work_done, self._work_done)
        if message == len(self._transfers) - 1 and not self.has_more_to_send:
            # Not in `wait_all`: with one hardware queue it would delay other messages behind the work since then.
            self._wait_sends()

    def _may_send(self) -> bool:
        message = self._transfers[self._num_sent].message
        forwarded = message.after_message
        return message.after_work <= self._work_done and (forwarded is None or self._received[forwarded])

    def wait_all(self) -> None:
        for message in range(len(self._transfers)):
            self.wait(message)
        self.send_ready()
        assert not self.has_more_to_send, "a message was never marked ready"
        self._wait_sends()

    def _wait_sends(self) -> None:
        # Not the whole queue: it may have later operations, which wait for what the peers receive after this one.
        if self._sent is not None:
            self._transport.backend.computing.after(self._sent)
            self._sent = None
