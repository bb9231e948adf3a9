"""Random thread scheduler with memory by address and pending copies, on which `gluon_model` runs kernels."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import torch


class StuckError(Exception):
    """All threads wait for each other."""


class Machine:
    """Runs one launch at a time: one random thread at a time, memory by address, pending copies.

    Args:
        seed: seed of the random order.
        looked: called with the address of a word before an atomic add of 0 reads it.
        raised: called with the address of a word right after an atomic exchange with release.
    """

    def __init__(
        self, seed: int, looked: Callable[[int], None] | None = None, raised: Callable[[int], None] | None = None
    ) -> None:
        self.draw = random.Random(seed)
        self.looked, self.raised = looked, raised
        self.memory: dict[int, torch.Tensor] = {}
        self.pending_copies: list[Callable[[], None]] = []
        self._turn = threading.Condition()
        self._ready: dict[int, Callable[[], bool]] = {}
        self._running: int | None = None
        self._error: BaseException | None = None

    def know(self, tensor: torch.Tensor) -> int:
        """Make `tensor` addressable and return its address."""
        self.memory[tensor.data_ptr()] = tensor.as_strided((_extent(tensor),), (1,))
        return tensor.data_ptr()

    def find(self, address: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """Return the flat tensor at `address` and the index in it."""
        for base, tensor in self.memory.items():
            if base <= address < base + tensor.nbytes and tensor.dtype == dtype:
                return tensor, (address - base) // tensor.itemsize
        raise IndexError(f"address {address:#x} of {dtype} belongs to no tensor")

    def run(self, works: list[Callable[[], None]]) -> None:
        """Run each of `works` in a thread until all have ended."""
        self._error = None
        self._ready = {number: lambda: True for number in range(len(works))}
        threads = [threading.Thread(target=self._work, args=each, daemon=True) for each in enumerate(works)]
        for thread in threads:
            thread.start()
        with self._turn:
            self._next()
        for thread in threads:
            thread.join()
        while self.pending_copies:
            self.pending_copies.pop(0)()
        if self._error is not None:
            raise self._error

    def _work(self, number: int, work: Callable[[], None]) -> None:
        try:
            self._await(number)
            work()
        except BaseException as error:
            self._fail(error)
        with self._turn:
            del self._ready[number]
            self._next()

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Let another thread run. The calling thread continues when `until` holds."""
        with self._turn:
            number = self._running
            assert number is not None
            self._ready[number] = until
            self._next()
        self._await(number)

    def _next(self) -> None:
        """Select the next thread at random. A pending copy completes at random, or when no thread can continue."""
        try:
            while self.pending_copies and (not self._able() or self.draw.random() < 0.2):
                self.pending_copies.pop(self.draw.randrange(len(self.pending_copies)))()
            if self._ready and not self._able():
                raise StuckError(f"{len(self._ready)} threads wait forever")
        except (StuckError, AssertionError) as error:
            self._fail(error)
        able = self._able()
        self._running = self.draw.choice(able) if able else None
        self._turn.notify_all()

    def _able(self) -> list[int]:
        """Return the threads that can continue; after an error all threads, so that they end."""
        return [number for number, ready in self._ready.items() if self._error or ready()]

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self.pending_copies.clear()

    def _await(self, number: int) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._running == number)
        if self._error is not None:
            raise self._error


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
