"""The waits of the queues of a rank for its peers. The host can read them while the queues are blocked."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_overlap.comm.symmetric.backend import Note, Queue
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
    """Numbers the waits of a rank, and has the number of the present wait of each queue.

    They are in host memory: with one hardware queue a copy from the device would wait behind the queue of sends.
    """

    def __init__(self, *, on_device: bool) -> None:
        pinned = on_device and torch.cuda.is_available()
        # By queue; then the number of operations that replays have begun, which the device counts.
        self._words = torch.zeros(4, dtype=torch.int32, pin_memory=pinned)
        self._num_replayed = torch.zeros(1, dtype=torch.int32, device="cuda" if pinned else "cpu")
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

    def count_replay(self, computing: Queue) -> None:
        """Let each replay of the CUDA graph that is being captured count an operation."""
        self._num_replayed.add_(1)
        computing.copy(self._words[3:], self._num_replayed)

    def num_replayed(self) -> int:
        """Operations that replays of CUDA graphs have begun."""
        return int(self._words[3])

    def numbers(self) -> tuple[int, ...]:
        """Numbers of the present waits by queue; 0: the queue does not wait for a peer."""
        return tuple(self._words[:3].tolist())

    def of(self, numbers: Sequence[int]) -> list[Wait]:
        """The waits with these numbers."""
        return [self._by_number[number] for number in numbers if number]
