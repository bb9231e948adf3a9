"""Symmetric memory: arenas that all ranks of a group address, queues that move bytes beside kernels, and their waits.

`cuda.CudaBackend` uses peer memory and copy engines. `CpuBackend` of `scripts/kernels/cpu_backend.py`, for kernels in
Triton's interpreter, uses memory shared by the processes of one host.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from megatron_overlap.comm.transport import message_text
from megatron_overlap.schedules.plan import Message

ALIGNMENT = 256


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up, so that any dtype may begin there."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Note(NamedTuple):
    """A word of host memory: `words[position]`, int32, is `number` while a queue waits; 0 before and after."""

    words: torch.Tensor
    position: int
    number: int


class FlagStep(NamedTuple):
    """A step on the flag `words[position]`, a word of symmetric memory that is 0 or 1.

    Attributes:
        sets: write 1, at any rank. Otherwise wait until the flag of this rank is 1, and write 0.
        note: identifies a wait; a queue without a watchdog may ignore it.
    """

    words: torch.Tensor
    position: int
    sets: bool
    note: Note | None = None


type Copy = tuple[torch.Tensor | None, torch.Tensor | None]
"""A target and a source. None stands for a tensor that each call gets."""


def copies_of(copies: Iterable[Copy], tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the copies with `tensors` in place of each None, in order."""
    given = iter(tensors)
    for to, source in copies:
        yield next(given) if to is None else to, next(given) if source is None else source


class Queue(Protocol):
    """An ordered queue of work that runs concurrently with the caller: a CUDA stream or a thread."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy. Each tensor may be in the memory of a peer."""

    def prepare_copies(self, copies: Sequence[Copy], *, captured: bool = False) -> object:
        """Return independent copies in the form that `copy_all` takes. `captured`: a CUDA graph captures them."""

    def copy_all(self, prepared: object, tensors: Sequence[torch.Tensor]) -> None:
        """Enqueue prepared copies, which may run at once. `tensors` take the place of each None, in order."""

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        """Enqueue `words[index] = value`. All ranks see it after all earlier work of this queue."""

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        """Block later work of this queue until `words[index] >= value`. `words` is memory of this rank."""

    def prepare(self, steps: Sequence[FlagStep], *, captured: bool = False) -> object:
        """Return `steps` in the form that `run` takes, as often as needed. `captured`: a CUDA graph captures them."""

    def run(self, prepared: object) -> None:
        """Enqueue prepared steps. All ranks see a flag after all earlier work of this queue."""

    def mark(self) -> object:
        """Return the present position of this queue."""

    def after(self, mark: object) -> None:
        """Order later work of this queue after the `mark` of another queue of this rank."""


class SymmetricBackend(Protocol):
    """Symmetric memory of the ranks of one group.

    Attributes:
        ranks: global ranks.
        computing: queue of the kernels. Its writes follow the kernels.
        copying: queue of the copies. It uses no processor that computes.
        capability: ten times the compute capability; selects tile shapes.
        num_sms: number of blocks that run concurrently.
        max_polls: number of reads of a flag before a kernel stops waiting.
        peer_atomics: kernels may set flags in the memory of all peers, which are atomic operations. The first read is
            collective.
    """

    rank: int
    size: int
    ranks: Sequence[int]
    device: torch.device
    computing: Queue
    copying: Queue
    capability: int
    num_sms: int
    max_polls: int

    @property
    def peer_atomics(self) -> bool: ...

    def map(self, num_bytes: int, name: str = "") -> list[torch.Tensor]:
        """Allocate an arena of `num_bytes` on every rank and return the arenas of all ranks, uint8. Collective.

        All bytes are zero. Earlier arenas of the same name become invalid: no rank may use them any more.

        Raises:
            TransportError: a rank has no memory left.
        """

    def free_replaced(self) -> None:
        """Free the arenas that `map` has replaced. This may synchronise the device: call it between training steps."""

    def barrier(self) -> None:
        """Block until all ranks have called it and have completed their work."""

    def all_gather_text(self, text: str) -> list[str]:
        """Return the text of every rank. Collective; blocks the host."""

    def queue(self) -> Queue:
        """Return a further queue of copies."""

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph captures the present work of the caller."""

    def close(self) -> None:
        """Free all memory."""


_NUM_ONCE = 1 << 14
"""Waits that are enqueued once to remember, and as many that repeat: more than a host enqueues ahead of its device."""


class Wait(NamedTuple):
    """A wait for the peer of `message`, number `number` in the plan of operation `op`.

    `reason` is why the rank cannot send the message; empty if it receives it.
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
        what = message_text(self.message, self.number, ranks, sends=bool(self.reason))
        return f"{what}: {self.reason or 'it has not arrived'}"


class Waits:
    """Numbers the waits of a rank, and has the number of the present wait of each queue.

    They are in host memory: with one hardware queue a copy from the device would wait behind the queue of sends.
    """

    SENDING, RECEIVING, COMPUTING = range(3)
    """The queues of a rank that wait for peers."""

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
            self._num_repeated = self._num_repeated % _NUM_ONCE + 1
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
