"""Rings in symmetric memory: how a message of any shape passes from rank to rank, in pieces.

The ranks of a pair number the pieces 1, 2, ... in the order of operations and messages. Both ranks compute the place of
a piece. The sender waits until earlier pieces in the same bytes are acknowledged. The receiver waits for the flag,
copies the piece to the tensor, and acknowledges it; its computing queue waits for that copy. Rings and their flags are
an arena of each rank:

    ring of source 0 | ring of source 1 | ... | flags [R, 256] | acknowledgements [R, 256]

A device may run several queues in one hardware queue, in the order of their calls. A send must therefore never wait
for a receive that the peer enqueues later. On a device the ring must hold all messages to a peer whose counterparts
from that peer are not yet received; a smaller one is an error.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch

from megatron_overlap.comm.symmetric.backend import ALIGNMENT, FlagStep, Queue, SymmetricBackend, Wait, Waits, aligned
from megatron_overlap.comm.transport import TransportError
from megatron_overlap.schedules.plan import Message

RING_BYTES = 64 * 1024 * 1024
"""Bytes of all rings of a rank. Messages in flight share a ring; those that do not fit wait for earlier ones."""
_NUM_WORDS = 256


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


class Sender(Protocol):
    """An operation that sends through rings."""

    @property
    def has_more_to_send(self) -> bool:
        """Whether sends remain to be enqueued."""

    def send_ready(self) -> None:
        """Enqueue all sends that are ready, also before the work that hides them."""


class Rings:
    """The rings of a rank: to each peer in the arena of the peer, and from each peer in the own arena.

    Args:
        num_bytes: of the ring of one pair; the same on every rank. None divides `RING_BYTES` by the ranks.
        waits: describes the waits of both queues.

    Raises:
        ValueError: `num_bytes` is below 512.
    """

    def __init__(
        self, backend: SymmetricBackend, num_bytes: int | None, sending: Queue, receiving: Queue, waits: Waits
    ) -> None:
        num_bytes = RING_BYTES // backend.size if num_bytes is None else num_bytes
        if num_bytes < 2 * ALIGNMENT:
            raise ValueError(f"ring_bytes: {num_bytes}: must be at least {2 * ALIGNMENT}")
        self.backend, self.rank, self.size = backend, backend.rank, backend.size
        self.on_device = backend.device.type == "cuda"
        self._sending, self._receiving, self._waits = sending, receiving, waits
        self._num_bytes = num_bytes = num_bytes // ALIGNMENT * ALIGNMENT
        begin, words = self.size * num_bytes, 8 * self.size * _NUM_WORDS
        self._arenas = backend.map(begin + words)
        # Flags, then acknowledgements.
        self._words = [arena[begin : begin + words].view(torch.int32) for arena in self._arenas]
        self.sent = {peer: _Ring(self.rank * num_bytes, num_bytes) for peer in range(self.size)}
        self.received = {peer: _Ring(peer * num_bytes, num_bytes) for peer in range(self.size)}
        # Operations that have messages to send, in order.
        self._senders: list[Sender] = []

    def begin(self, sender: Sender) -> None:
        """Record an operation after earlier ones."""
        self._senders = [earlier for earlier in self._senders if earlier.has_more_to_send]
        self._senders.append(sender)

    def pieces(
        self, message: Message, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]
    ) -> tuple[list[Piece], list[Piece]]:
        """Return the pieces to send and to receive of the next message."""
        sent, received = self.sent[message.to].pieces(sends), self.received[message.source].pieces(recvs)
        self.sent[message.to].will_send(sent)
        return sent, received

    def send(self, sender: Sender, wait: Wait, piece: Piece) -> None:
        """Enqueue the copy of a piece of `sender`.

        `wait` describes its wait for the acknowledgement of an earlier piece, if there is one.
        """
        queue, peer = self._sending, wait.peer
        ring = self.sent[peer]
        for earlier in ring.replaced(piece):
            self._require_sent(earlier, sender, peer)
            if self.on_device and earlier in ring.not_received:
                raise TransportError(self._too_small(peer, "an earlier one is not yet received"))
            acknowledgement = (self.size + peer) * _NUM_WORDS + earlier % _NUM_WORDS
            note = self._waits.note(Waits.SENDING, wait, repeats=False)
            _run(queue, FlagStep(self._words[self.rank], acknowledgement, False, note))
        ring.not_sent.discard(piece.number)
        queue.copy(self._arenas[peer][piece.place : piece.place + piece.content.numel()], piece.content)
        _run(queue, FlagStep(self._words[peer], self.rank * _NUM_WORDS + piece.number % _NUM_WORDS, sets=True))

    def _require_sent(self, number: int, sender: Sender, peer: int) -> None:
        ring = self.sent[peer]
        if number in ring.not_sent:
            for earlier in takewhile(lambda earlier: earlier is not sender, self._senders):
                earlier.send_ready()
        if number in ring.not_sent:
            raise TransportError(self._too_small(peer, "an earlier one is not ready"))

    def _too_small(self, peer: int, reason: str) -> str:
        return (
            f"the ring to rank {self.backend.ranks[peer]} has {self._num_bytes} bytes, too few for the "
            f"messages in flight: {reason}; use a larger ring_bytes"
        )

    def receive(self, wait: Wait, pieces: Sequence[Piece], free: object) -> None:
        """Order the computing queue after the pieces of a message whose tensor is free at the mark `free`."""
        queue, peer = self._receiving, wait.peer
        queue.after(free)
        for piece in pieces:
            index = piece.number % _NUM_WORDS
            note = self._waits.note(Waits.RECEIVING, wait, repeats=False)
            _run(queue, FlagStep(self._words[self.rank], peer * _NUM_WORDS + index, False, note))
            queue.copy(piece.content, self._arenas[self.rank][piece.place : piece.place + piece.content.numel()])
            _run(queue, FlagStep(self._words[peer], (self.size + self.rank) * _NUM_WORDS + index, sets=True))
        self.backend.computing.after(queue.mark())

    def was_received(self, peer: int, pieces: Sequence[Piece]) -> None:
        """Record that this rank has received the message beside which `pieces` are sent to `peer`."""
        self.sent[peer].not_received.difference_update(piece.number for piece in pieces)

    def close(self) -> None:
        """Drop the memory."""
        self._arenas, self._words = [], []


def _run(queue: Queue, step: FlagStep) -> None:
    queue.run(queue.prepare([step]))
