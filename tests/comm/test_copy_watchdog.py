"""The watchdog of copies names the message and the peer when no queue has moved for the deadline."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_overlap.comm import TransportError, TransportOptions
from megatron_overlap.comm.symmetric import cuda
from megatron_overlap.comm.symmetric.backend import _NUM_ONCE, FlagStep, Note, Wait, Waits
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.symmetric.nodes import CopyNodesTransport
from megatron_overlap.diagnostics.heartbeat import Watchdog
from megatron_overlap.ops import LinearPlan, all_gather_linear
from megatron_overlap.schedules.gather_scatter import Nodes
from megatron_overlap.schedules.plan import Chunk, Message
from tests.comm import watchdog_workers
from tests.comm.copy_protocol import RecordedBackend, Recording
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


def test_a_failed_wait_on_the_host_names_the_message(world: World) -> None:
    (text, peer), other = world.run(2, watchdog_workers.gather_from_a_rank_that_sends_nothing)
    assert text.startswith(f"all_gather_linear: rank 10 could not {late(0, 11)}: word ")
    assert (peer, other) == (11, ("", None))


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


class Driver:
    """Records the calls of the driver of one stream, and writes the words of copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.sources = torch.tensor([1, 0], dtype=torch.int32)
        monkeypatch.setattr(cuda, "_driver_functions", lambda: (self.copy, self.write, self.wait, self.batch))
        monkeypatch.setattr(cuda, "_source_words", lambda: self.sources)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        self.queue = cuda.StreamQueue(SimpleNamespace(cuda_stream=17))  # type: ignore[arg-type]

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> int:
        value = self.sources[(source - self.sources.data_ptr()) // 4].item()
        self.calls.append(("copy", to, num_bytes, value, stream))
        return 0

    def write(self, stream: int, address: int, value: int, flags: int) -> int:
        assert stream == 17
        self.sources[(address - self.sources.data_ptr()) // 4] = value
        return 0

    def wait(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append(("wait", address, value, stream))
        return 0

    def batch(self, stream: int, count: int, ops: Any, flags: int) -> int:
        assert count == len(ops)
        self.calls.append([(op.operation, op.address, op.value) for op in ops])
        return 0


def test_a_stream_writes_words_of_peers_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, words = Driver(monkeypatch), torch.zeros(8, dtype=torch.int32)
    driver.queue.write(words, 3, 41)
    driver.queue.run(driver.queue.prepare([FlagStep(words, position, sets=True) for position in (2, 6)]))
    driver.queue.write(words, 3, 42)
    at = words.data_ptr()
    assert driver.calls == [
        ("copy", at + 12, 4, 41, 17),
        ("copy", at + 8, 4, 1, 17),
        ("copy", at + 24, 4, 1, 17),
        ("copy", at + 12, 4, 42, 17),
    ]


def test_a_stream_notes_its_waits_and_no_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    notes, words = torch.zeros(3, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    steps = [FlagStep(words, 2, sets=True), FlagStep(words, 5, False, Note(notes, 1, 70000))]
    driver.queue.run(driver.queue.prepare(steps))
    flag, word, write, wait = words.data_ptr(), notes.data_ptr() + 4, cuda.WRITE_VALUE_32, cuda.WAIT_VALUE_32
    assert driver.calls == [
        ("copy", flag + 8, 4, 1, 17),
        [(write, word, 70000), (wait, flag + 20, 1), (write, flag + 20, 0), (write, word, 0)],
    ]


def test_a_call_of_the_driver_gets_at_most_255_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, words = Driver(monkeypatch), torch.zeros(200, dtype=torch.int32)
    driver.queue.run(driver.queue.prepare([FlagStep(words, position, sets=False) for position in range(200)]))
    assert [len(call) for call in driver.calls] == [255, 145]
    waits = [address for call in driver.calls for operation, address, _ in call if operation == cuda.WAIT_VALUE_32]
    assert waits == [words.data_ptr() + 4 * position for position in range(200)]


def test_a_new_buffer_waits_for_the_streams_of_its_transport_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may run a receive of a pipeline stage, whose sender waits for a new buffer too."""
    Driver(monkeypatch)
    waited, handle = list[Any](), [3]
    streams = [
        SimpleNamespace(cuda_stream=number, synchronize=partial(waited.append, number), record_event=object)
        for number in range(7)
    ]
    copying = iter(streams[5:])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: handle[0], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[handle[0]])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: next(copying))
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append("device"))
    group: Any = SimpleNamespace(rank=0, size=2, ranks=range(2), group="g", barrier=partial(waited.append, "ranks"))
    backend = cuda.CudaBackend(group)
    backend.queue()
    backend.computing.mark()
    handle[0] = 4  # a stream of gradient sums
    backend.computing.mark()
    backend.barrier()
    assert waited == [3, 4, 5, 6, "ranks"]


@pytest.mark.parametrize(("limit_s", "expected"), [(None, 40.0), (7.0, 7.0)])
def test_copies_have_the_deadline_of_the_session_or_group(
    monkeypatch: pytest.MonkeyPatch, limit_s: float | None, expected: float
) -> None:
    options = SimpleNamespace(_timeout=timedelta(seconds=40))
    group: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))
    members = opened_on(monkeypatch, Nodes(1, 2))
    transport = cuda.open_copies(group, TransportOptions("copies", timeout_s=limit_s))
    assert isinstance(transport, CopyTransport)
    assert transport._timeout_s == expected
    assert members == [range(2)]
    transport.close()


def opened_on(monkeypatch: pytest.MonkeyPatch, nodes: Nodes) -> list[range]:
    """Let rank 1 open copies on `nodes`; returns the ranks between which it does, once it has."""
    members: list[range] = []
    monkeypatch.setattr(cuda, "probe_symmetric_memory", lambda group: nodes)
    monkeypatch.setattr(cuda.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(cuda, "HostGroup", lambda group, ranks: members.append(ranks))
    monkeypatch.setattr(cuda, "CudaBackend", lambda host_group: RecordedBackend(0, 1, {}))
    return members


def test_copies_stay_inside_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    members, group = opened_on(monkeypatch, Nodes(2, 2)), SimpleNamespace()
    options, between = TransportOptions("copies", timeout_s=7.0), SimpleNamespace(rank=1, size=4)
    between.buffer_pool = between.on_device = None
    assert cuda.open_copies(group, options) == "the group spans 2 hosts"  # type: ignore[arg-type]
    transport: Any = cuda.open_copies(group, options, lambda group: between)  # type: ignore
    assert isinstance(transport, CopyNodesTransport)
    assert (transport.between, transport.size, members) == (between, 4, [range(2)])
    transport.close()


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
