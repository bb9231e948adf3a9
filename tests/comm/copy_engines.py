"""Symmetric memory of the device model: copies by copy engines, and words that streams write and wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_overlap.comm.symmetric.backend import Copy, FlagStep, copies_of
from tests.comm.device import Recorder
from tests.comm.makespan import Gpu


class EngineQueue:
    """See `backend.Queue`; a stream of the device model. Without a name it is the current one at each call."""

    def __init__(self, backend: EngineBackend, name: str = "") -> None:
        self._backend, self._name = backend, name

    @property
    def _stream(self) -> Any:
        return SimpleNamespace(name=self._name or self._backend.recorder.current)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.copy_all([(to, source)], [])

    def prepare_copies(self, copies: Sequence[Copy], *, captured: bool = False) -> object:
        return copies

    def copy_all(self, prepared: Any, tensors: Sequence[torch.Tensor]) -> None:
        copies, recorder, gpu = list(copies_of(prepared, tensors)), self._backend.recorder, self._backend.gpu
        moved = Counter[tuple[int, int]]()
        for to, source in copies:
            of, there = map(self._backend.owner, (source, to))
            moved[of, there] += to.nbytes
        local = any(of == there for of, there in moved)
        assert len(copies) == 1 or not local
        num_bytes = moved.total()
        seconds = gpu.move_s(2 * num_bytes) if local else gpu.message_s(num_bytes, len(copies))
        spans = [tuple(map(recorder.span, tensors)) for tensors in zip(*copies, strict=True)]
        self._put("copy", moved, seconds=seconds, reads=spans[1], writes=spans[0])

    def prepare(self, steps: Sequence[FlagStep], *, captured: bool = False) -> object:
        return tuple(steps)

    def run(self, prepared: Any) -> None:
        for words, index, sets, _ in prepared:
            word = (*self._backend.place(words), index)
            if not sets:
                assert word[0] == self._backend.recorder.rank
                self._put("reach", (word, 1))
            self._put("set", (word, int(sets)), seconds=self._backend.gpu.word_s)

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
    """`SymmetricBackend` of one rank. The ranks are recorded one after another, so arenas have no content.

    `ranks` share the memory; None: all. `name` distinguishes several backends of a rank.
    """

    def __init__(self, recorder: Recorder, gpu: Gpu, ranks: range | None = None, name: str = "") -> None:
        self.recorder, self.gpu, self.ranks = recorder, gpu, ranks or range(recorder.size)
        self.rank, self.size = self.ranks.index(recorder.rank), len(self.ranks)
        self.device = torch.device("cuda")
        self.computing = EngineQueue(self)
        self._name, self._num_queues, self._num_arenas = name, 0, 0
        # Rank, number and backend of each arena.
        self._places: dict[int, tuple[int, int, str]] = {}
        self._kept: list[StorageWeakRef] = []  # no later storage has the identity of an arena

    def map(self, num_bytes: int, name: str = "") -> list[torch.Tensor]:
        arenas = [torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in self.ranks]
        self._num_arenas += 1
        for rank, arena in zip(self.ranks, arenas, strict=True):
            storage = arena.untyped_storage()
            self._places[storage._cdata] = self.recorder.memories[storage._cdata] = rank, self._num_arenas, self._name
            self._kept.append(StorageWeakRef(storage))
        return arenas

    def place(self, tensor: torch.Tensor) -> tuple[int, int, str]:
        """The rank whose memory holds `tensor`, the number of the arena, 0 for other memory, and the backend."""
        return self._places.get(tensor.untyped_storage()._cdata, (self.recorder.rank, 0, ""))

    def owner(self, tensor: torch.Tensor) -> int:
        """The rank whose memory holds `tensor`."""
        return self.place(tensor)[0]

    def queue(self) -> EngineQueue:
        self._num_queues += 1
        return EngineQueue(self, f"copies {self._name}{self._num_queues}")

    def is_capturing(self) -> bool:
        return False

    def barrier(self) -> None:
        """Return: the ranks are recorded one after another."""

    def all_gather_text(self, text: str) -> list[str]:
        return [text]
