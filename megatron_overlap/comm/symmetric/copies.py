"""Point-to-point messages as copies through symmetric memory: no kernel moves bytes, and no kernel waits.

Each rank has one arena:

    ring of source 0 | ring of source 1 | ... | flags [R sources, 256] | acknowledgements [R receivers, 256]

A message travels in pieces, which the pair of sender and receiver numbers 1, 2, ... in the order of operations and
messages. Both compute the place of a piece in the ring of the sender in the receiver's arena.

- Sender: waits until earlier pieces in the same bytes are acknowledged, copies the piece, and writes its number to flag
  `piece % 256` of the receiver.
- Receiver: waits for the flag on its computing queue, copies the piece to the tensor of the message, and writes the
  number to its acknowledgement at the sender.

Sends run on one copying queue for each peer, so a slow receiver delays no other. A queue waits for a word in memory
without a kernel (`backend.Queue`). Not yet run on a GPU.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.symmetric.backend import Queue, SymmetricBackend
from megatron_overlap.comm.transport import Transfer, TransportError

_ALIGNMENT = 256
_NUM_WORDS = 256
RING_BYTES = 64 * 1024 * 1024
"""Bytes of the ring of one pair. Messages in flight share it; those that do not fit wait for earlier ones."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one tensor in a ring.

    Attributes:
        number: of this pair, from 1.
        begin: first byte, counted over all laps of the ring.
        place: offset in the ring.
        content: the bytes of the tensor.
    """

    number: int
    begin: int
    place: int
    content: torch.Tensor


class _Ring:
    """Numbers the pieces of one direction of a pair; sender and receiver get the same numbers and places."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._number = self._position = 0
        # Number and first byte of pieces in the order of their numbers, and the numbers of those that are not enqueued.
        self._in_use: deque[tuple[int, int]] = deque()
        self.not_sent: set[int] = set()

    def pieces(self, tensors: Sequence[torch.Tensor]) -> list[Piece]:
        """Return the next pieces: those of `tensors`."""
        pieces = []
        for tensor in tensors:
            for content in tensor.view(-1).view(torch.uint8).split(self._num_bytes // 2 // _ALIGNMENT * _ALIGNMENT):
                if self._position % self._num_bytes + content.numel() > self._num_bytes:
                    self._position += self._num_bytes - self._position % self._num_bytes
                self._number += 1
                pieces.append(Piece(self._number, self._position, self._position % self._num_bytes, content))
                self._position += -(-content.numel() // _ALIGNMENT) * _ALIGNMENT
        return pieces

    def will_send(self, pieces: Sequence[Piece]) -> None:
        """Record pieces to send."""
        self._in_use.extend((piece.number, piece.begin) for piece in pieces)
        self.not_sent.update(piece.number for piece in pieces)

    def replaced(self, piece: Piece) -> Iterator[int]:
        """Yield and forget the numbers of the earlier pieces whose bytes or flag `piece` takes."""
        end, in_use = piece.begin + piece.content.numel(), self._in_use
        while in_use and (in_use[0][1] + self._num_bytes < end or in_use[0][0] + _NUM_WORDS <= piece.number):
            yield in_use.popleft()[0]


class CopyTransport:
    """See `Transport`. Every message is a copy into the memory of the receiver and one from there to its tensor.

    Args:
        backend: symmetric memory of the ranks; the transport closes it.
        ring_bytes: bytes of the ring of one pair; the same on every rank.

    Raises:
        ValueError: `ring_bytes` is below 512.
    """

    def __init__(self, backend: SymmetricBackend, *, ring_bytes: int = RING_BYTES) -> None:
        if ring_bytes < 2 * _ALIGNMENT:
            raise ValueError(f"ring_bytes: {ring_bytes}: must be at least {2 * _ALIGNMENT}")
        self.backend, self.rank, self.size = backend, backend.rank, backend.size
        self.buffer_pool, self.exposed_s = BufferPool(), 0.0
        self._ring_bytes = ring_bytes = ring_bytes // _ALIGNMENT * _ALIGNMENT
        words = self.size * _NUM_WORDS
        self._arenas = backend.map(self.size * ring_bytes + 2 * 4 * words)
        # Flags, then acknowledgements.
        self._words = [arena[self.size * ring_bytes :].view(torch.int32) for arena in self._arenas]
        self._words[self.rank].zero_()
        self.sent = {peer: _Ring(ring_bytes) for peer in range(self.size)}
        self.received = {peer: _Ring(ring_bytes) for peer in range(self.size)}
        self.queues: dict[int, Queue] = {peer: backend.queue() for peer in range(self.size) if peer != self.rank}
        # Operations that have messages to send, in order.
        self.works: list[CopyP2PWork] = []
        backend.barrier()

    def begin(self, transfers: Sequence[Transfer], op: str) -> "CopyP2PWork":
        self.works = [work for work in self.works if work.has_more_to_send]
        work = CopyP2PWork(self, transfers, op)
        self.works.append(work)
        work.mark_ready(0)
        return work

    def send(self, sender: "CopyP2PWork", peer: int, piece: Piece) -> None:
        """Enqueue the copy of a piece of `sender` to `peer`."""
        queue, ring = self.queues[peer], self.sent[peer]
        acknowledgements = self.size * _NUM_WORDS + peer * _NUM_WORDS
        for earlier in ring.replaced(piece):
            if earlier in ring.not_sent:
                for work in takewhile(lambda work: work is not sender, self.works):
                    work.send_ready()
            if earlier in ring.not_sent:
                raise TransportError(
                    f"the ring to rank {self.backend.ranks[peer]} has {self._ring_bytes} bytes, too few for the "
                    "messages in flight: an earlier one is not ready; use a larger ring_bytes"
                )
            queue.wait(self._words[self.rank], acknowledgements + earlier % _NUM_WORDS, earlier)
        ring.not_sent.discard(piece.number)
        queue.copy(self._slot(peer, self.rank, piece), piece.content)
        queue.write(self._words[peer], self.rank * _NUM_WORDS + piece.number % _NUM_WORDS, piece.number)

    def receive(self, peer: int, piece: Piece) -> None:
        """Enqueue the wait for a piece of `peer` and its copy on the computing queue."""
        computing = self.backend.computing
        computing.wait(self._words[self.rank], peer * _NUM_WORDS + piece.number % _NUM_WORDS, piece.number)
        computing.copy(piece.content, self._slot(self.rank, peer, piece))
        acknowledgement = self.size * _NUM_WORDS + self.rank * _NUM_WORDS + piece.number % _NUM_WORDS
        computing.write(self._words[peer], acknowledgement, piece.number)

    def _slot(self, owner: int, source: int, piece: Piece) -> torch.Tensor:
        start = source * self._ring_bytes + piece.place
        return self._arenas[owner][start : start + piece.content.numel()]

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
        for transfer in transfers:
            sent, received = transport.sent[transfer.message.to], transport.received[transfer.message.source]
            to_send = (transfer.send, *transfer.extra_send) if transfer.send.numel() else ()
            to_receive = (transfer.recv, *transfer.extra_recv) if transfer.recv.numel() else ()
            self._pieces_to_send.append(sent.pieces(to_send))
            self._pieces_to_receive.append(received.pieces(to_receive))
            sent.will_send(self._pieces_to_send[-1])
        self._num_sent = 0
        # On the host no hardware queue is shared with the computation.
        self._placed = transport.backend.device.type == "cuda"
        self._received = [False] * len(transfers)
        # Positions of the computing queue, by the work done there; the last one follows received rows.
        self._marks: list[tuple[int, object]] = []
        self._work_done = -1
        # Position after the last send to each peer.
        self._sent: dict[int, object] = {}

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
        if work_done > self._work_done:
            self._marks.append((work_done, self._transport.backend.computing.mark()))
            self._work_done = work_done
        self._send_placed(work_done, self._work_done)

    def _send_placed(self, enqueued: int, done: int) -> None:
        for transfer in self._transfers[self._num_sent :]:
            message = transfer.message
            forwarded = message.after_message
            if (self._placed and message.not_before > enqueued) or message.after_work > done:
                return
            if forwarded is not None and not self._received[forwarded]:
                return
            self._send_next()

    def _send_next(self) -> None:
        transport, message = self._transport, self._transfers[self._num_sent].message
        self._num_sent += 1
        if pieces := self._pieces_to_send[self._num_sent - 1]:
            queue = transport.queues[message.to]
            if message.after_message is not None:
                queue.after(transport.backend.computing.mark())
            else:
                queue.after(next(mark for done, mark in self._marks if done >= message.after_work))
            for piece in pieces:
                transport.send(self, message.to, piece)
            self._sent[message.to] = queue.mark()

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
            for piece in self._pieces_to_receive[message]:
                transport.receive(source, piece)
        except TransportError as error:
            ranks = transport.backend.ranks
            raise TransportError(
                f"{self._op}: rank {ranks[transport.rank]} could not receive message {message} from rank "
                f"{ranks[source]}: {error}",
                peer=ranks[source],
            ) from error
        self._send_placed(self._work_done, self._work_done)

    def _may_send(self) -> bool:
        message = self._transfers[self._num_sent].message
        forwarded = message.after_message
        return message.after_work <= self._work_done and (forwarded is None or self._received[forwarded])

    def wait_all(self) -> None:
        for message in range(len(self._transfers)):
            self.wait(message)
        self.send_ready()
        assert not self.has_more_to_send, "a message was never marked ready"
        # Not the whole queues: they may have later operations, which wait for what the peers receive after this one.
        for mark in self._sent.values():
            self._transport.backend.computing.after(mark)
