"""Symmetric memory without a GPU: memory shared by the processes of one host, and a thread that copies.

Tests run the operations, protocol and kernels of GPUs with it, in Triton's interpreter. Training does not use it:
`method: fused` without a GPU runs p2p.
"""

from __future__ import annotations

import queue as queues
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.backend import Copy, FlagStep, Queue, copies_of
from megatron_overlap.comm.transport import TransportError

_SHARED_FOLDER = Path("/dev/shm")
_MAX_POLLS = 300_000
_WAIT_S = 60.0
_POLL_S = 0.0002


class _ImmediateQueue:
    """The computing queue. The interpreter runs a kernel inside its call, so all earlier work is complete."""

    @torch.no_grad()
    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def prepare_copies(self, copies: Sequence[Copy], *, captured: bool = False) -> object:
        return copies

    def copy_all(self, prepared: Any, tensors: Sequence[torch.Tensor]) -> None:
        for to, source in copies_of(prepared, tensors):
            self.copy(to, source)

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        words[index] = value

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        deadline = time.monotonic() + _WAIT_S
        while int(words[index]) < value:
            if time.monotonic() > deadline:
                raise TransportError(f"word {index}: {int(words[index])}: did not reach {value} within {_WAIT_S:g} s")
            time.sleep(_POLL_S)

    def prepare(self, steps: Sequence[FlagStep], *, captured: bool = False) -> object:
        return tuple(steps)

    def run(self, prepared: Any) -> None:
        for words, index, sets, note in prepared:
            if note is not None:
                self.write(note.words, note.position, note.number)
            if not sets:
                self.wait(words, index, 1)
            self.write(words, index, int(sets))
            if note is not None:
                self.write(note.words, note.position, 0)

    def mark(self) -> object:
        return None

    def after(self, mark: object) -> None:
        assert isinstance(mark, threading.Event)
        if not mark.wait(_WAIT_S):
            raise TransportError(f"the copy queue did not finish within {_WAIT_S:g} s")


class _ThreadQueue:
    """The copying queue: a thread."""

    def __init__(self) -> None:
        self._work: queues.Queue[Callable[[], None] | None] = queues.Queue()
        self._immediate = _ImmediateQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                if self._failure is None:
                    work()
            except (RuntimeError, ValueError, TransportError) as error:
                self._failure = error
            self._work.task_done()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._work.put(lambda: self._immediate.copy(to, source))

    def prepare_copies(self, copies: Sequence[Copy], *, captured: bool = False) -> object:
        return copies

    def copy_all(self, prepared: Any, tensors: Sequence[torch.Tensor]) -> None:
        for to, source in copies_of(prepared, tensors):
            self.copy(to, source)

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        self._work.put(lambda: self._immediate.write(words, index, value))

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        self._work.put(lambda: self._immediate.wait(words, index, value))

    def prepare(self, steps: Sequence[FlagStep], *, captured: bool = False) -> object:
        return self._immediate.prepare(steps)

    def run(self, prepared: object) -> None:
        self._work.put(lambda: self._immediate.run(prepared))

    def mark(self) -> object:
        reached = threading.Event()
        self._work.put(reached.set)
        return reached

    def after(self, mark: object) -> None:
        """Do nothing: the work of the computing queue is always complete."""

    def join(self) -> None:
        """Block until all work of this queue is complete.

        Raises:
            TransportError: a copy, write or wait failed.
        """
        self._work.join()
        if self._failure is not None:
            raise TransportError(f"copy queue: {self._failure}") from self._failure

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


class CpuBackend:
    """`SymmetricBackend` over files in the host's shared memory.

    Args:
        host_group: ranks on one host.
        max_polls: number of reads of a flag before a kernel stops waiting.
    """

    peer_atomics = True

    def __init__(self, host_group: HostGroup, *, max_polls: int = _MAX_POLLS) -> None:
        self.rank, self.size = host_group.rank, host_group.size
        self.ranks: Sequence[int] = host_group.ranks
        self.device = torch.device("cpu")
        # Tile shapes of Hopper. Two blocks per kernel: each block computes several tiles.
        self.capability, self.num_sms, self.max_polls = 90, 2, max_polls
        self._thread = _ThreadQueue()
        self.computing: Queue = _ImmediateQueue()
        self.copying: Queue = self._thread
        self._host_group = host_group
        self._num_maps = 0
        self._queues: list[_ThreadQueue] = []

    def map(self, num_bytes: int, name: str = "") -> list[torch.Tensor]:
        self._num_maps += 1
        key = f"symmetric memory/{self._num_maps}"
        if self.rank == 0:
            self._host_group.store.set(key, tempfile.mkdtemp(prefix="overlap-", dir=_SHARED_FOLDER))
        folder = Path(self._host_group.store.get(key).decode())
        own = folder / str(self.rank)
        torch.from_file(str(own), shared=True, size=num_bytes, dtype=torch.uint8)
        self.barrier()
        arenas = [
            torch.from_file(str(folder / str(peer)), shared=True, size=num_bytes, dtype=torch.uint8)
            for peer in range(self.size)
        ]
        self.barrier()
        # All ranks have mapped the files. Without names, the system frees them even if a process is killed.
        own.unlink()
        self.barrier()
        if self.rank == 0:
            folder.rmdir()
        return arenas

    def barrier(self) -> None:
        self._thread.join()
        self._host_group.barrier()

    def free_replaced(self) -> None:
        """Return: a replaced arena is freed with its last view."""

    def all_gather_text(self, text: str) -> list[str]:
        return self._host_group.all_gather_text(text)

    def queue(self) -> Queue:
        self._queues.append(_ThreadQueue())
        return self._queues[-1]

    def is_capturing(self) -> bool:
        return False

    def close(self) -> None:
        for thread in (self._thread, *self._queues):
            thread.close()
