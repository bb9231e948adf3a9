"""`CudaBackend` and its queues on a stub of the driver, of streams and of torch's SymmetricMemory."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_overlap.comm import TransportError, TransportOptions
from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.symmetric import cuda, stream_queue
from megatron_overlap.comm.symmetric.backend import FlagStep, Note
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.symmetric.nodes import CopyNodesTransport
from megatron_overlap.comm.symmetric.stream_queue import WAIT_VALUE_32, WRITE_VALUE_32
from megatron_overlap.config import OverlapConfig
from megatron_overlap.schedules.gather_scatter import Nodes
from megatron_overlap.session import Session
from tests.comm.copy_protocol import RecordedBackend


class Driver:
    """Records the calls of the driver of one stream, and writes the words of copies."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, writes_reach_peers: bool = False, has_batches: bool = True
    ) -> None:
        self.calls: list[Any] = []
        self.sources = torch.tensor([1, 0, 0, 0], dtype=torch.int32)
        monkeypatch.setattr(stream_queue, "_driver_functions", lambda: (self.copy, self.write, self.wait, self.batch))
        monkeypatch.setattr(stream_queue, "_source_words", lambda: self.sources)
        monkeypatch.setattr(stream_queue, "_batch_function", lambda: self.copy_batch if has_batches else None)
        monkeypatch.setattr(stream_queue, "_writes_reach_peers", lambda: writes_reach_peers)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        self.queue = stream_queue.StreamQueue(SimpleNamespace(cuda_stream=17))  # type: ignore[arg-type]

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> int:
        value = self.sources[(source - self.sources.data_ptr()) // 4].item()
        self.calls.append(("copy", to, num_bytes, value, stream))
        return 0

    def write(self, stream: int, address: int, value: int, flags: int) -> int:
        assert stream == 17
        place = (address - self.sources.data_ptr()) // 4
        if place in (0, 1):
            self.sources[place] = value
        else:
            self.calls.append(("write", address, value, stream))
        return 0

    def wait(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append(("wait", address, value, stream))
        return 0

    def copy_batch(self, to: Any, source: Any, num_bytes: Any, stream: int) -> int:
        self.calls.append(("batch", [*zip(to, source, num_bytes, strict=True)], stream))
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
    at, one = words.data_ptr(), driver.sources.data_ptr()
    assert driver.calls == [
        ("copy", at + 12, 4, 41, 17),
        ("batch", [(at + 8, one, 4), (at + 24, one, 4)], 17),
        ("copy", at + 12, 4, 42, 17),
    ]


@pytest.mark.parametrize(("captured", "has_batches"), [(False, True), (True, True), (False, False)])
def test_a_stream_copies_together(monkeypatch: pytest.MonkeyPatch, captured: bool, has_batches: bool) -> None:
    """Several copies are one call of the driver, unless it has no such call or a CUDA graph captures them."""
    driver = Driver(monkeypatch, has_batches=has_batches)
    a, b, c = (driver.sources[number:] for number in range(3))
    prepared = driver.queue.prepare_copies([(a[:2], None), (None, b[:2]), (c[:1], b[:1])], captured=captured)
    flags = driver.queue.prepare([FlagStep(a, position, sets=True) for position in (2, 3)], captured=captured)
    for source, to in ((b[:2], c[:2]), (c[:2], a[:2])):
        driver.calls.clear()
        driver.queue.copy_all(prepared, [source, to])
        driver.queue.run(flags)
        rows = [(a, source, 8), (to, b, 8), (c, b, 4), (a[2:], a, 4), (a[3:], a, 4)]
        copies = [(to.data_ptr(), source.data_ptr(), num_bytes) for to, source, num_bytes in rows]
        if captured or not has_batches:
            assert [(kind, to, num_bytes) for kind, to, num_bytes, _, _ in driver.calls] == [
                ("copy", to, num_bytes) for to, _, num_bytes in copies
            ]
        else:
            assert driver.calls == [("batch", copies[:3], 17), ("batch", copies[3:], 17)]


def test_the_default_stream_has_no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    queue, words = stream_queue.StreamQueue(None), driver.sources
    queue.run(queue.prepare([FlagStep(words, position, sets=True) for position in (2, 3)]))
    assert [call[0] for call in driver.calls] == ["copy", "copy"]


@pytest.mark.parametrize(
    ("name", "status", "num_arguments"),
    [("cuMemcpyBatchAsync_v2", 0, 8), ("cuMemcpyBatchAsync", 0, 9), ("cuMemcpyBatchAsync_v2", 801, 8), ("", 0, 0)],
)
def test_which_drivers_have_batches(
    monkeypatch: pytest.MonkeyPatch, name: str, status: int, num_arguments: int
) -> None:
    """Since CUDA 12.8; since 13.0 without an argument for the copy that failed. It must also run."""
    found: list[Any] = []

    def copy_batch(*arguments: Any) -> int:
        found.append(arguments)
        words[2:] = words[:2]
        return status

    words = torch.tensor([1, 0, 0, 0], dtype=torch.int32)
    monkeypatch.setattr(stream_queue, "_source_words", lambda: words)
    stream = SimpleNamespace(cuda_stream=17, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(
        stream_queue.ctypes, "CDLL", lambda library: SimpleNamespace(**({name: copy_batch} if name else {}))
    )
    function = stream_queue._batch_function.__wrapped__()
    assert (function is not None) == bool(name and not status)
    if not name:
        return
    ((to, source, num_bytes, count, attributes, first, num_attributes, *_, handle),) = found
    at = words.data_ptr()
    assert [*to, *source, *num_bytes] == [at + 8, at + 12, at, at + 4, 4, 4]
    assert (count.value, first._obj.value, num_attributes.value, handle.value) == (2, 0, 1, 17)
    assert (attributes._obj.order, *attributes._obj.hints, attributes._obj.flags) == (1, 0, 0, 0, 0, 1)
    assert len(found[0]) == num_arguments


def test_a_stream_writes_words_of_peers_where_the_driver_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for several flags."""
    driver, words = Driver(monkeypatch, writes_reach_peers=True), torch.zeros(8, dtype=torch.int32)
    driver.queue.write(words, 3, 41)
    steps = [FlagStep(words, position, sets) for position, sets in ((2, True), (5, False), (6, True))]
    driver.queue.run(driver.queue.prepare(steps))
    at, write, wait = words.data_ptr(), WRITE_VALUE_32, WAIT_VALUE_32
    assert driver.calls == [
        ("write", at + 12, 41, 17),
        [(write, at + 8, 1), (wait, at + 20, 1), (write, at + 20, 0), (write, at + 24, 1)],
    ]


@pytest.mark.parametrize(("version", "reach"), [(12080, True), (13000, True), (13010, False), (13020, False)])
def test_which_drivers_write_to_peers(monkeypatch: pytest.MonkeyPatch, version: int, reach: bool) -> None:
    def get_version(found: Any) -> int:
        found._obj.value = version
        return 0

    library = SimpleNamespace(cuDriverGetVersion=get_version)
    monkeypatch.setattr(stream_queue.ctypes, "CDLL", lambda name: library)
    assert stream_queue._writes_reach_peers.__wrapped__() is reach


def test_an_error_of_the_driver_has_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_error_string(status: int, text: Any) -> int:
        text._obj.value = b"an illegal memory access was encountered" if status == 700 else None
        return 0

    library = SimpleNamespace(cuGetErrorString=get_error_string)
    monkeypatch.setattr(stream_queue.ctypes, "CDLL", lambda name: library)
    stream_queue.check_status("f", 0)
    with pytest.raises(TransportError, match="^f: CUDA driver error 700: an illegal memory access was encountered$"):
        stream_queue.check_status("f", 700)
    with pytest.raises(TransportError, match="^f: CUDA driver error 12345: unknown$"):
        stream_queue.check_status("f", 12345)


def test_a_stream_notes_its_waits_and_no_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    notes, words = torch.zeros(3, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    steps = [FlagStep(words, 2, sets=True), FlagStep(words, 5, False, Note(notes, 1, 70000))]
    driver.queue.run(driver.queue.prepare(steps))
    flag, word, write, wait = (
        words.data_ptr(),
        notes.data_ptr() + 4,
        WRITE_VALUE_32,
        WAIT_VALUE_32,
    )
    assert driver.calls == [
        ("copy", flag + 8, 4, 1, 17),
        [(write, word, 70000), (wait, flag + 20, 1), (write, flag + 20, 0), (write, word, 0)],
    ]


def test_a_call_of_the_driver_gets_at_most_255_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, words = Driver(monkeypatch), torch.zeros(200, dtype=torch.int32)
    driver.queue.run(driver.queue.prepare([FlagStep(words, position, sets=False) for position in range(200)]))
    assert [len(call) for call in driver.calls] == [255, 145]
    waits = [address for call in driver.calls for operation, address, _ in call if operation == WAIT_VALUE_32]
    assert waits == [words.data_ptr() + 4 * position for position in range(200)]


class StubBackend(cuda.CudaBackend):
    """`CudaBackend` of rank 0 of 2 on stubs: streams 0 to 4 of the caller, 5 to 8 of the backend.

    Attributes:
        waited: what the host has waited for.
        current: the handle of the current stream.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, texts: Callable[[str], list[str]] = lambda text: [text]
    ) -> None:
        Driver(monkeypatch)
        self.waited, self.current = list[Any](), [3]
        waited, handle = self.waited, self.current
        streams = [
            SimpleNamespace(cuda_stream=number, synchronize=partial(waited.append, number), record_event=object)
            for number in range(9)
        ]
        copying = iter(streams[5:])
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: handle[0], raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[handle[0]])
        monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: next(copying))
        properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append("device"))
        group: Any = SimpleNamespace(rank=0, size=2, ranks=range(2), group="g", barrier=partial(waited.append, "ranks"))
        group.all_gather_text, group.all_gather, group.store = texts, lambda values: [values], dist.HashStore()
        super().__init__(group)


def test_a_new_buffer_waits_for_the_streams_of_its_transport_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may run a receive of a pipeline stage, whose sender waits for a new buffer too."""
    backend = StubBackend(monkeypatch)
    backend.queue()
    backend.computing.mark()
    backend.current[0] = 4  # a stream of gradient sums
    backend.computing.mark()
    backend.barrier()
    assert backend.waited == [3, 4, 5, 6, "ranks"]


@pytest.mark.parametrize(
    ("peers", "without", "expected"),
    [("ab", "", True), ("aa", "b", True), ("abc", "c", False), ("abc", "", True), ("az", "", False)],
)
def test_kernels_set_flags_over_links_with_atomics(
    monkeypatch: pytest.MonkeyPatch, peers: str, without: str, expected: bool
) -> None:
    """Of the devices a, b and c of this process, and z of another. PCIe has no atomic operations."""
    backend = StubBackend(monkeypatch, lambda text: list(peers))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid="abc"[number]))
    monkeypatch.setattr(cuda, "_has_atomics", lambda device, peer: (device, "abc"[peer]) != (0, without))
    assert backend.peer_atomics is expected


def arenas_on_the_host(monkeypatch: pytest.MonkeyPatch, num_free: float = inf) -> list[str | None]:
    """Let torch map arenas of at most `num_free` bytes; returns the value of its variable in each rendezvous."""
    variable = list[str | None]()

    def empty(shape: tuple[int], stride: tuple[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if shape[0] > num_free:
            raise torch.OutOfMemoryError("no memory\nat line 1")
        return torch.empty(shape, dtype=dtype)

    def rendezvous(arena: torch.Tensor, group: str) -> SimpleNamespace:
        variable.append(os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST"))
        return SimpleNamespace(get_buffer=lambda peer, shape, dtype: arena)

    monkeypatch.setattr(_symmetric_memory, "_SymmetricMemory", SimpleNamespace(empty_strided_p2p=empty))
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    return variable


@pytest.mark.parametrize("over_nodes", [False, True])
def test_a_replaced_arena_lives_until_it_is_freed_between_steps(
    monkeypatch: pytest.MonkeyPatch, over_nodes: bool
) -> None:
    """torch synchronises the device when it frees one."""
    variable, backend = arenas_on_the_host(monkeypatch), StubBackend(monkeypatch)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    first = StorageWeakRef(backend.map(64, "sums")[0].untyped_storage())
    other = StorageWeakRef(backend.map(64, "others")[0].untyped_storage())
    backend.map(128, "sums")
    assert not first.expired()
    session, transport = Session(OverlapConfig()), CopyTransport(backend)
    between: Any = SimpleNamespace(rank=0, size=4, buffer_pool=BufferPool(), on_device=True)
    opened = CopyNodesTransport(transport, between, Nodes(2, 2)) if over_nodes else transport
    session.transports.insert(object(), opened)  # type: ignore[arg-type]
    session.next_step()
    assert (first.expired(), other.expired()) == (True, False)
    assert "device" not in backend.waited
    assert variable == ["1"] * 3
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "0"


def test_a_rank_without_memory_is_named_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks do not wait for it in torch's rendezvous, which no deadline ends."""
    variable = arenas_on_the_host(monkeypatch, num_free=100)
    backend = StubBackend(monkeypatch, lambda text: ["", text])
    backend.map(64)
    with pytest.raises(TransportError, match="^symmetric memory, 128 bytes: rank 0: no memory$"):
        backend.map(128)
    assert len(variable) == 1


def test_ranks_of_one_of_several_hosts_meet_under_their_registered_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In older releases of torch `rendezvous` first looks for it among torch's own groups, and fails."""
    arenas_on_the_host(monkeypatch)
    backend, names = StubBackend(monkeypatch), list[str]()

    def rendezvous(arena: torch.Tensor, name: str) -> SimpleNamespace:
        names.append(name)
        return SimpleNamespace(get_buffer=lambda peer, shape, dtype: arena)

    monkeypatch.setattr(_symmetric_memory._SymmetricMemory, "rendezvous", rendezvous, raising=False)
    backend._host_group.group, backend._name = None, "megatron_overlap/1"
    backend.map(64)
    assert names == ["megatron_overlap/1"]


def test_ranks_count_the_same_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch numbers the store keys of rendezvous by process. The peer has made three more, in other groups.

    Source: github.com/pytorch/pytorch/issues/196082.
    """
    arenas_on_the_host(monkeypatch)
    backend, before, met = StubBackend(monkeypatch), cuda.CudaBackend.num_rendezvous, list[tuple[str, int]]()
    sizes: dict[str, int] = {}

    def rendezvous(arena: torch.Tensor, name: str) -> SimpleNamespace:
        met.append((name, sizes.get(name, 2)))
        return SimpleNamespace(get_buffer=lambda peer, shape, dtype: arena)

    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(_symmetric_memory._SymmetricMemory, "rendezvous", rendezvous, raising=False)
    set_group_info = lambda name, rank, size, store: sizes.update({name: size})  # noqa: E731
    monkeypatch.setattr(_symmetric_memory._SymmetricMemory, "set_group_info", set_group_info, raising=False)
    backend._host_group.all_gather = lambda values: [list(values), [before + 3]]  # type: ignore[method-assign]
    for _ in range(2):
        backend.map(64)
    assert [size for _, size in met] == [1, 1, 1, 2, 2]
    assert len({name for name, _ in met}) == 4
    assert cuda.CudaBackend.num_rendezvous == before + 5


@pytest.mark.parametrize(("limit_s", "expected"), [(None, 40.0), (7.0, 7.0)])
def test_copies_have_the_deadline_of_the_session_or_group(
    monkeypatch: pytest.MonkeyPatch, limit_s: float | None, expected: float
) -> None:
    options = SimpleNamespace(_timeout=timedelta(seconds=40))
    group: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))
    members = opened_on(monkeypatch, "aa")
    waits: list[float] = []
    monkeypatch.setattr(cuda, "first_unsupported_reason", lambda *args: waits.append(args[-1]) or "")
    monkeypatch.setattr(cuda.dist, "get_backend", lambda group: "nccl")
    transport = cuda.open_copies(group, TransportOptions("copies", timeout_s=limit_s))
    assert isinstance(transport, CopyTransport)
    assert transport._timeout_s == expected
    assert waits[0] == expected, "a rank may reach its first operation minutes after its peers"
    assert members == [range(2)]
    transport.close()


def opened_on(monkeypatch: pytest.MonkeyPatch, hosts: str) -> list[range]:
    """Let rank 1 open copies; `hosts` has one letter for each rank. Returns the ranks between which it does."""
    members: list[range] = []

    def trial(host_group: object, device: int, opened: list[RecordedBackend]) -> str:
        opened.append(RecordedBackend(0, 1, {}))
        return ""

    store = SimpleNamespace(
        set=lambda *_: None, multi_get=lambda keys: [hosts[int(key.rpartition("/")[2])].encode() for key in keys]
    )
    monkeypatch.setattr(cuda, "store_beside", lambda group: store)
    monkeypatch.setattr(cuda, "first_unsupported_reason", lambda *_: "")
    monkeypatch.setattr(cuda.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(cuda.dist, "get_world_size", lambda group: len(hosts))
    monkeypatch.setattr(torch.cuda, "current_device", int)
    monkeypatch.setattr(cuda, "HostGroup", lambda group, ranks: members.append(ranks))
    monkeypatch.setattr(cuda, "_trial", trial)
    return members


def test_the_work_of_earlier_pipeline_stages_is_not_in_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    opened_on(monkeypatch, "aa")
    monkeypatch.setattr(cuda, "local_unsupported_reason", str)
    stream = SimpleNamespace(synchronize=lambda: done.append("own work"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(cuda, "first_unsupported_reason", lambda *args: done.append(args[3]) or "")
    assert not isinstance(cuda.open_backend(SimpleNamespace(), timeout_s=7.0), str)  # type: ignore[arg-type]
    assert done == ["own work", "local", "trial"]


def test_copies_stay_inside_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    members, group = opened_on(monkeypatch, "aabb"), SimpleNamespace()
    options, between = TransportOptions("copies", timeout_s=7.0), SimpleNamespace(rank=1, size=4)
    between.buffer_pool = between.on_device = None
    assert cuda.open_copies(group, options) == "the group spans 2 hosts"  # type: ignore[arg-type]
    transport: Any = cuda.open_copies(group, options, lambda group: between)  # type: ignore
    assert isinstance(transport, CopyNodesTransport)
    assert (transport.between, transport.size, members) == (between, 4, [range(2)] * 2)
    transport.close()
