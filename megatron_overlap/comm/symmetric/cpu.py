"""Symmetric memory without a GPU: memory shared by processes of one host, and a thread that copies.

For kernels in Triton's interpreter: the same ops, the same protocol and the same kernels as on GPUs, to be checked and
never to be trained with. `method: fused` on a machine without a GPU runs p2p.
"""

from __future__ import annotations

import queue as queues
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.backend import Queue
from megatron_overlap.comm.transport import TransportError

_SHARED_FOLDER = Path("/dev/shm")
_MAX_POLLS = 300_000
_WAIT_S = 60.0
_POLL_S = 0.0002


class _Now:
    """The computing queue: kernels are interpreted where they are called, so that everything before is done."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        words[index] = value

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        deadline = time.monotonic() + _WAIT_S
        while int(words[index]) < value:
            if time.monotonic() > deadline:
                raise TransportError(f"word {index} has not reached {value} within {_WAIT_S:g} s: {int(words[index])}")
            time.sleep(_POLL_S)


class _Thread:
    """The copying queue."""

    def __init__(self) -> None:
        self._work: queues.Queue[Callable[[], None] | None] = queues.Queue()
        self._now = _Now()
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
        self._work.put(lambda: self._now.copy(to, source))

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        self._work.put(lambda: self._now.write(words, index, value))

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        self._work.put(lambda: self._now.wait(words, index, value))

    def join(self) -> None:
        """Returns when everything put here is done.

        Raises:
            TransportError: something of it failed.
        """
        self._work.join()
        if self._failure is not None:
            raise TransportError(f"copies: {self._failure}") from self._failure

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


class HostFabric:
    """`Fabric` over files in the host's shared memory.

    Args:
        members: ranks on one host.
        max_polls: looks at a flag before a kernel gives up.
    """

    def __init__(self, members: HostGroup, *, max_polls: int = _MAX_POLLS) -> None:
        self.rank, self.size = members.rank, members.size
        self.ranks: Sequence[int] = members.ranks
        self.device = torch.device("cpu")
        # Tile shapes as on Hopper; two blocks a kernel, so that a grid has more tiles than blocks.
        self.capability, self.num_sms, self.max_polls = 90, 2, max_polls
        self._thread = _Thread()
        self.computing: Queue = _Now()
        self.copying: Queue = self._thread
        self._members = members
        self._maps = 0

    def map(self, num_bytes: int) -> list[torch.Tensor]:
        self._maps += 1
        key = f"host fabric/{self._maps}"
        if self.rank == 0:
            self._members.store.set(key, tempfile.mkdtemp(prefix="overlap-", dir=_SHARED_FOLDER))
        folder = Path(self._members.store.get(key).decode())
        own = folder / str(self.rank)
        torch.from_file(str(own), shared=True, size=num_bytes, dtype=torch.uint8)
        self.barrier()
        arenas = [
            torch.from_file(str(folder / str(peer)), shared=True, size=num_bytes, dtype=torch.uint8)
            for peer in range(self.size)
        ]
        self.barrier()
        # Mapped by everybody: the names are not needed, and so nothing is left behind.
        own.unlink()
        self.barrier()
        if self.rank == 0:
            folder.rmdir()
        return arenas

    def barrier(self) -> None:
        self._thread.join()
        self._members.barrier()

    def fork(self) -> None:
        """Nothing to do: what the computing queue holds is done."""

    def join(self) -> None:
        self._thread.join()

    def objection(self) -> str:
        return ""

    def close(self) -> None:
        self._thread.close()
