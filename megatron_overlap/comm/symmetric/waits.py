"""The waits of the queues of a rank for its peers. The host can read them while the queues are blocked."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_overlap.comm.symmetric.backend import Note
from megatron_overlap.schedules.plan import Message

SENDING, RECEIVING, COMPUTING = range(3)
"""The queues of a rank, which are positions of words in `Waits`."""
_NUM_ONCE = 1 << 14
"""Waits that are enqueued once to remember: more than a host enqueues ahead of its device."""


class Wait(NamedTuple):
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


class Waits:
    """The waits of the queues of this rank. The host can read them while the queues are blocked.

    The words are in host memory: with one hardware queue a copy from the device would wait behind the queue of sends.
    """

    def __init__(self, *, on_device: bool) -> None:
        pinned = on_device and torch.cuda.is_available()
        self._words = torch.zeros(3, dtype=torch.int32, pin_memory=pinned)
        self._by_number: dict[int, Wait] = {}
        self._num_repeated = self._num_once = 0

    def note(self, queue: int, wait: Wait, *, repeats: bool) -> Note:
        """Return the note of a wait that is enqueued again and again, or once."""
        if repeats:
            self._num_repeated += 1
            number = _NUM_ONCE + self._num_repeated
        else:
            self._num_once = self._num_once % _NUM_ONCE + 1
            number = self._num_once
        self._by_number[number] = wait
        return Note(self._words, queue, number)

    def numbers(self) -> tuple[int, ...]:
        """Numbers of the present waits by queue; 0: the queue does not wait for a peer."""
        return tuple(self._words.tolist())

    def of(self, numbers: Sequence[int]) -> list[Wait]:
        """The waits with these numbers."""
        return [self._by_number[number] for number in numbers if number]
