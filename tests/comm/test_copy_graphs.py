"""Captured and replayed operations of `CopyTransport`: every order of the queues, results, buffers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.symmetric.heap import HeapPool
from megatron_overlap.comm.transport import TransportError
from megatron_overlap.ops import all_gather_linear, linear_reduce_scatter
from tests.comm.copy_protocol import (
    RecordedBackend,
    Step,
    explore,
    flag_uses,
    ordered,
    play,
    repeated,
)
from tests.comm.copy_recording import ALL_REDUCES, FOUR, record


def test_every_order_of_a_replayed_all_reduce() -> None:
    queues = record(2, ["gemm_ar", "gemm_rs"], rows=1).queues
    assert explore(repeated(queues, 2)) > 1000


@pytest.mark.parametrize(("pattern", "ops"), [("direct", FOUR), ("ring", FOUR), ("direct", ALL_REDUCES)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_replays(size: int, pattern: str, ops: list[str]) -> None:
    """A replayed CUDA graph enqueues the same steps again: each operation leaves all flags as it found them."""
    queues = record(size, ops, rows=1, pattern=pattern).queues
    if size == 2 and ops == FOUR:
        assert explore(repeated(queues, 2)) > 1000
    ordered(repeated(queues, 3))
    for use in flag_uses([queue.steps for queue in queues]).values():
        assert len(use.sets) == len(use.clears)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_results_of_a_hundred_replays(size: int, chunks: int) -> None:
    recorded = record(size, [*FOUR, "gemm_ar"], rows=chunks, chunks=chunks)
    order = random.Random(size)
    for step in range(100):
        recorded.set_input(step)
        play(recorded.queues, order.randrange)
        assert recorded.is_right()


CAPTURED = pytest.mark.parametrize(
    ("size", "pattern", "chunks", "ops"),
    [
        (2, "direct", 2, FOUR),
        (3, "ring", 1, FOUR),
        (4, "direct", 1, FOUR),
        (4, "ring", 2, FOUR),
        (3, "direct", 1, ALL_REDUCES),
    ],
)


@CAPTURED
def test_a_captured_graph_joins_all_queues(size: int, pattern: str, chunks: int, ops: list[str]) -> None:
    """At the end of a capture the capturing stream waits for all other streams; otherwise CUDA refuses the graph."""
    recorded = record(size, ops, rows=chunks, pattern=pattern, chunks=chunks, captured=True)
    assert [backend.unjoined() for backend in recorded.backends] == [[]] * size


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@CAPTURED
def test_a_captured_graph_on_one_hardware_queue(
    size: int, pattern: str, chunks: int, ops: list[str], device: str
) -> None:
    """CUDA may run the steps of a graph in any order that keeps their dependencies."""
    settings = {"rows": chunks, "pattern": pattern, "chunks": chunks, "device": device}
    recorded = record(size, ops, captured=True, **settings)
    ordered(recorded.queues)

    def first(wanted: Callable[[Step], object]) -> Callable[[list[Step]], int]:
        return lambda steps: max(range(len(steps)), key=lambda index: bool(wanted(steps[index])))

    orders = [first(lambda step: step.clears), first(lambda step: not step.sets and not step.writes)]
    draw = random.Random(size)
    orders += [lambda steps: draw.randrange(len(steps))] * 4
    for order in orders:
        ordered(repeated([backend.graph_in_one_queue(order) for backend in recorded.backends], 2))


def test_results_of_captured_replays() -> None:
    recorded = record(3, [*FOUR, "gemm_ar"], rows=1, captured=True)
    for step in range(10):
        recorded.set_input(step)
        play(recorded.queues, random.Random(step).randrange)
        assert recorded.is_right()


def test_a_captured_operation_marks_the_buffers() -> None:
    backend = RecordedBackend(0, 2, {})
    transport, x, weight = CopyTransport(backend), torch.ones(4, 64), torch.ones(64, 64)
    with torch.no_grad():
        linear_reduce_scatter(x, weight, group=transport)
        backend.begin_capture()
        linear_reduce_scatter(x, weight, group=transport)
    assert isinstance(transport.buffer_pool, HeapPool)
    assert transport.buffer_pool.captured


def test_new_buffers_are_not_captured() -> None:
    x, weight, backend = torch.ones(2, 64), torch.ones(64, 64), RecordedBackend(0, 2, {})
    transport = CopyTransport(backend)
    backend.begin_capture()
    error = "forward and backward with the same shapes before the capture"
    with torch.no_grad(), pytest.raises(TransportError, match=error):
        all_gather_linear(x, weight, group=transport)
