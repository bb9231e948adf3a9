"""The watchdog of copies names the message and the peer when no queue has moved for the deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_overlap.comm import TransportError, TransportOptions
from megatron_overlap.comm.symmetric.backend import _NUM_ONCE, Wait, Waits
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.diagnostics.heartbeat import Watchdog
from megatron_overlap.ops import LinearPlan, all_gather_linear
from megatron_overlap.schedules.plan import Chunk, Message
from tests.comm import watchdog_workers
from tests.comm.copy_protocol import RecordedBackend, RecordedQueue, Recording
from tests.comm.watchdog_workers import DEADLINE_S, Late
from tests.helpers.world import World

BEYOND_S, WITHIN_S = 2.5 * DEADLINE_S, 0.4 * DEADLINE_S
REMEDY = "; look at the log of rank {}, or raise overlap.timeout_s if it is only slow"
NOT_FREE = "send message 0 (chunk 0 of rank 10) to rank 11: its buffer is not free"


def late(message: int, rank: int) -> str:
    return f"receive message {message} (chunk {message} of rank {rank}) from rank {rank}: it has not arrived"


@pytest.mark.parametrize(
    ("size", "case", "expected"),
    [
        (2, Late(BEYOND_S), f"{NOT_FREE}, and not {late(0, 11)}"),
        (2, Late(BEYOND_S, copy=1), late(1, 11)),
        # Rank 11 is not late. The second copy of rank 12 is for rank 10.
        (3, Late(BEYOND_S, copy=1), late(1, 12)),
    ],
    ids=["no operation", "second message", "one of two peers"],
)
def test_a_message_beyond_the_deadline_is_named(world: World, size: int, case: Late, expected: str) -> None:
    (printed, failure, right), *others = world.run(size, watchdog_workers.gather_from_a_late_rank, case)
    text = f"all_gather_linear: within 1 s rank 10 could not {expected}"
    assert printed == text + REMEDY.format(9 + size) + "\n"
    assert failure + "\n" == printed
    assert right
    assert all(correct for *_, correct in others)


@pytest.mark.parametrize("copy", [None, 0])
def test_messages_within_the_deadline_are_not_reported(world: World, copy: int | None) -> None:
    """Four late calls together are longer than the deadline."""
    case = Late(WITHIN_S, copy, calls=4 if copy is None else 1)
    assert world.run(2, watchdog_workers.gather_from_a_late_rank, case) == [("", "", True)] * 2


def test_an_error_of_the_driver_names_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the host enqueues a step, the device waits for a message of an earlier operation."""
    transport = CopyTransport(RecordedBackend(0, 2, {}, "cuda"))

    def fail(queue: Any, prepared: object, tensors: Sequence[torch.Tensor]) -> None:
        transport.waits._words[Waits.COMPUTING] = next(iter(transport.waits._by_number))
        raise TransportError("cuMemcpyAsync: CUDA driver error 2")

    monkeypatch.setattr(RecordedQueue, "copy_all", fail)
    text = "all_gather_linear: rank 0 could not enqueue its messages: cuMemcpyAsync: CUDA driver error 2"
    with pytest.raises(TransportError, match=f"^{text}$") as caught:
        all_gather_linear(torch.ones(4, 64), torch.ones(64, 64), group=transport, plan=LinearPlan(pattern="direct"))
    assert caught.value.peer == -1


def test_closing_ends_the_watchdog(world: World) -> None:
    assert world.run(2, watchdog_workers.threads_after_close) == [["megatron_overlap_watchdog"]] * 2


def test_operations_that_share_buffers_have_their_own_names() -> None:
    transport = CopyTransport(RecordedBackend(0, 2, {}))
    weight = torch.ones(8, 8, requires_grad=True)
    y = all_gather_linear(torch.ones(4, 8), weight, group=transport, plan=LinearPlan(pattern="direct"))
    y.sum().backward()
    waits = transport.waits._by_number.values()
    assert {wait.op for wait in waits} == {"all_gather_linear", "all_gather_linear wgrad"}


def test_a_watchdog_reports_once_and_never_a_program_that_moves() -> None:
    looks, reports = [0], list[int]()

    def look() -> int | None:
        looks[0] += 1
        return [looks[0], None, 7][min(looks[0] // 30, 2)]

    watchdog = Watchdog(0.1, look, reports.append)
    until = time.monotonic() + 20
    while not reports and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.3)
    watchdog.close()
    assert reports == [7]
    assert looks[0] == 60 + 10


def test_replays_move_although_they_wait_for_the_same_message() -> None:
    backend = RecordedBackend(0, 2, {})
    transport = CopyTransport(backend)
    x, weight = torch.ones(4, 8), torch.ones(8, 8)
    with torch.no_grad():
        all_gather_linear(x, weight, group=transport)
        backend.begin_capture()
        with Recording(backend.computing):
            all_gather_linear(x, weight, group=transport)
    transport.waits._words[Waits.COMPUTING] = 1
    seen = []
    for _ in range(3):
        seen.append(transport._waiting())
        for step in backend.computing.steps:
            if step.action is not None:
                step.action()
    assert None not in seen
    assert len(set(seen)) == 3


def test_the_flight_recorder_explains_the_first_peer(capfd: pytest.CaptureFixture[str]) -> None:
    recorder: Any = SimpleNamespace(explain=lambda text, peer: f"{text}; explained for rank {peer}")
    options = TransportOptions(timeout_s=0.1, flight_recorder=recorder)
    transport = CopyTransport(RecordedBackend(0, 3, {}), options)
    chunk = Chunk(0, 0)
    waits = Wait("op", 5, Message(chunk, 2, chunk, 1)), Wait("op", 4, Message(chunk, 2, chunk, 1), "not free")
    for queue, wait in zip((Waits.COMPUTING, Waits.SENDING), waits, strict=True):
        note = transport.waits.note(queue, wait, repeats=True)
        note.words[note.position] = note.number
    until = time.monotonic() + 20
    while transport.broken is None and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(TransportError, match=r"to rank 2: not free, and not receive .*explained for rank 2$") as raised:
        transport.begin([], "next")
    transport.close()
    assert raised.value.peer == 2
    assert raised.value.explained
    assert capfd.readouterr().err == f"{raised.value}\n"


def test_waits_are_remembered_until_many_later() -> None:
    """Those that repeat and those that do not: the steps of other plans replace the prepared ones."""
    waits, chunk = Waits(on_device=False), Chunk(0, 0)
    described = [Wait("op", number, Message(chunk, 1, chunk, 1)) for number in range(_NUM_ONCE + 3)]
    for repeats in (True, False):
        first = waits.note(Waits.COMPUTING, described[0], repeats=not repeats)
        notes = [waits.note(Waits.COMPUTING, wait, repeats=repeats) for wait in described]
        assert waits.of([0, first.number]) == described[:1]
        assert waits.of([note.number for note in notes[3:]]) == described[3:]
    assert len(waits._by_number) == 2 * _NUM_ONCE
