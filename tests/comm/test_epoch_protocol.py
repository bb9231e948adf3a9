"""Every order in which the queues of all ranks may run fused operations is free of races and deadlocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_overlap.comm.symmetric.transport import Mover, SymmetricOp, SymmetricTransport
from megatron_overlap.schedules import Chunk, ChunkLayout
from tests.comm.copy_protocol import RecordedBackend, RecordedQueue, Recording, Step, explore, ordered, span

ROWS, FEATURES = 2, 8


class Backend(RecordedBackend):
    """`SymmetricBackend` of one rank with a queue of copies."""

    max_polls = 1

    def __init__(self, rank: int, size: int, arenas: dict[tuple[str, int], list[torch.Tensor]]) -> None:
        super().__init__(rank, size, arenas)
        self.copying = self.queue()


class Rank:
    """The operations of a rank; steps of the computing queue stand for their kernels."""

    def __init__(self, backend: Backend, mover: Mover, stores: str) -> None:
        self._computing, self._mover, self._stores = backend.computing, mover, stores
        self._transport = SymmetricTransport(backend, self._wait_all)  # type: ignore[arg-type]
        self._layout = ChunkLayout(ROWS * backend.size, backend.size)
        self._rank, self._size = backend.rank, backend.size

    def _wait_all(self, flags: torch.Tensor, epoch: int, status: torch.Tensor, max_polls: int) -> None:
        if epoch > 0:  # the words of a new arena are 0
            for index in range(flags.numel()):
                self._computing.wait(flags, index, epoch)

    def _begin(self, op: str) -> SymmetricOp:
        return self._transport.begin(4 * ROWS * self._size * FEATURES, op)

    def gather(self) -> Any:
        """Begin an all-gather; returns the function that launches its kernel and acknowledges."""
        op = self._begin("gather")
        full = op.gather(torch.ones(ROWS, FEATURES), self._layout, self._mover)

        def finish() -> None:
            for owner in range(self._size):
                self._computing.wait(op.flags, owner, op.epoch)
                self._computing.steps.append(Step([span(full[slice(*self._layout.rows(Chunk(owner, 0)))])]))
            op.acknowledge()

        return finish

    def scatter(self) -> Any:
        """Launch a scattering GEMM; returns the function that launches the sum and acknowledges."""
        op, shape = self._begin("scatter"), (self._size, ROWS, FEATURES)
        staged = self._transport.staging(shape, torch.float32) if self._stores == "staged" else None
        for distance in range(1, self._size + 1):
            owner = (self._rank + distance) % self._size
            if staged is None or owner == self._rank:
                place, flags, flag = op.slot(owner, shape, torch.float32)[self._rank], op.flags_of(owner), self._rank
            else:
                place, flags, flag = staged[owner], self._transport.staged_flags(op.epoch), owner
            self._computing.steps.append(Step(writes=[span(place)]))
            self._computing.write(flags, flag, op.epoch)
        if staged is not None:
            op.send_staged(staged, self._layout)

        def finish() -> None:
            for source in range(self._size):
                self._computing.wait(op.flags, source, op.epoch)
            self._computing.steps.append(Step([span(op.slot(self._rank, shape, torch.float32))]))
            op.acknowledge()

        return finish

    def run(self, num_layers: int) -> None:
        """Forward and backward of a column- and a row-parallel layer; the last has two unfinished operations."""
        for _ in range(num_layers):
            self.gather()()
            self.scatter()()
            self.gather()()
            finish = self.gather(), self.scatter()
            for each in finish:
                each()


def record(size: int, mover: Mover, stores: str, num_layers: int = 1) -> list[Backend]:
    arenas: dict[tuple[str, int], list[torch.Tensor]] = {}
    backends = [Backend(rank, size, arenas) for rank in range(size)]
    ranks = [Rank(backend, mover, stores) for backend in backends]
    for rank, backend in zip(ranks, backends, strict=True):
        with torch.no_grad(), Recording(backend.computing):
            rank.run(num_layers)
    return backends


def queues_of(backends: list[Backend]) -> list[RecordedQueue]:
    return [queue for backend in backends for queue in backend.queues]


PLANS = [("push", "remote"), ("push", "staged"), ("pull", "remote"), ("ring", "staged")]


@pytest.mark.parametrize(("mover", "stores"), PLANS)
def test_every_state_of_two_ranks(mover: Mover, stores: str) -> None:
    backends = record(2, mover, stores)
    assert explore(queues_of(backends), reduced=True) > 100
    explore([backend.one_hardware_queue() for backend in backends])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("mover", "stores"), PLANS)
def test_all_orders_of_more_ranks(mover: Mover, stores: str, size: int) -> None:
    backends = record(size, mover, stores, num_layers=2)
    ordered(queues_of(backends))
    ordered([backend.one_hardware_queue() for backend in backends])


@pytest.mark.parametrize("mover", ["push", "pull", "ring"])
def test_the_computing_stream_copies_to_no_peer(mover: Mover) -> None:
    """On the default stream such a copy waits for all work of both devices, also for a receive of another group."""
    for backend in record(3, mover, "staged"):
        (arenas,) = backend._arenas.values()
        start, stop = span(arenas[backend.rank])
        others = [span(arena) for number, arena in enumerate(arenas) if number != backend.rank]
        words = [step.sets[0] for step in backend.computing.steps if isinstance(step.sets, tuple)]
        assert any(start <= word < stop for word in words)
        assert not any(first <= word < last for word in words for first, last in others)
