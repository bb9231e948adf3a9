"""Symmetric memory of the device model: copies by copy engines, and words that streams write and wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.comm.device import Recorder
from tests.comm.makespan import Gpu


class EngineQueue:
    """See `backend.Queue`; a stream of the device model."""

    def __init__(self, backend: EngineBackend, name: str) -> None:
        self._backend, self._stream = backend, SimpleNamespace(name=name)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        rank, gpu = self._backend.owner(to), self._backend.gpu
        seconds = gpu.move_s(2 * to.nbytes) if rank == self._backend.rank else gpu.message_s(to.nbytes)
        self._put("copy", rank, seconds=seconds)

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        self._put("set", (self._backend.owner(words), index, value), seconds=self._backend.gpu.word_s)

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        assert self._backend.owner(words) == self._backend.rank
        self._put("reach", (self._backend.rank, index, value))

    def mark(self) -> object:
        event = self._backend.recorder.event()
        with self._backend.recorder.on(self._stream):
            event.record()
        return event

    def after(self, mark: Any) -> None:
        with self._backend.recorder.on(self._stream):
            self._backend.recorder.wait(mark)

    def _put(self, kind: str, label: Any, **fields: Any) -> None:
        with self._backend.recorder.on(self._stream):
            self._backend.recorder.put(kind, label, **fields)


class EngineBackend:
    """`SymmetricBackend` of one rank. The ranks are recorded one after another, so arenas have no content."""

    def __init__(self, recorder: Recorder, gpu: Gpu) -> None:
        self.recorder, self.gpu = recorder, gpu
        self.rank, self.size, self.ranks = recorder.rank, recorder.size, range(recorder.size)
        self.device = torch.device("cuda")
        self.computing = EngineQueue(self, "compute")
        self._num_queues = 0
        self._owners: dict[int, int] = {}

    def map(self, num_bytes: int, name: str = "") -> list[torch.Tensor]:
        arenas = [torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in self.ranks]
        self._owners.update({arena.untyped_storage()._cdata: rank for rank, arena in enumerate(arenas)})
        return arenas

    def owner(self, tensor: torch.Tensor) -> int:
        """The rank whose memory holds `tensor`."""
        return self._owners.get(tensor.untyped_storage()._cdata, self.rank)

    def queue(self) -> EngineQueue:
        self._num_queues += 1
        return EngineQueue(self, f"copies {self._num_queues}")

    def barrier(self) -> None:
        """Return: the ranks are recorded one after another."""

    def all_gather_text(self, text: str) -> list[str]:
        return [text]
