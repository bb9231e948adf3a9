"""Symmetric memory of the GPUs of one host: torch's SymmetricMemory, copy engines, and stream memory operations.

It requires torch only: no NVSHMEM and no MPI. Processes that share one GPU have run it, several GPUs not yet.
"""

import ctypes
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from itertools import batched, groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_overlap.comm.host_group import HostGroup, cause_of, store_beside, timeout_of
from megatron_overlap.comm.symmetric.backend import Copy, FlagStep, Queue, copies_of
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.symmetric.nodes import CopyNodesTransport
from megatron_overlap.comm.transport import DEFAULT_OPTIONS, Transport, TransportError, TransportOptions
from megatron_overlap.diagnostics.consistency import first_unsupported_reason, read
from megatron_overlap.schedules.gather_scatter import Nodes

_OLDEST_CAPABILITY = (8, 0)
_TRIAL_WORDS = 256
# A read of a flag takes about a microsecond: the limit is minutes, like the timeout of a collective.
_MAX_POLLS = 1 << 28


def local_unsupported_reason() -> str:
    """Return why this process cannot use symmetric memory; empty if it can. Local: no communication."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is older than 8.0"
    try:
        from torch.distributed import _symmetric_memory  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no SymmetricMemory"
    return triton_unsupported_reason()


@lru_cache
def triton_unsupported_reason() -> str:
    """Return why this process cannot launch Triton's kernels on its device; empty if it can.

    The first launch needs a C compiler, the headers of Python and a cache that Triton can write.
    """
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        from triton.runtime import driver

        driver.active.get_current_target()  # compiles what every launch needs, or loads it from the cache
    except Exception as error:
        return f"triton cannot launch kernels: {type(error).__name__}: {cause_of(error)}"
    return ""


def open_backend(
    group: dist.ProcessGroup, *, timeout_s: float | None = None, deadline_s: float = 60.0
) -> "tuple[CudaBackend, Nodes] | str":
    """Return the memory of the ranks of this host and the placement of all ranks, or why there is none. Collective.

    All ranks return the same reason. The ranks of each host map an arena, write to each peer and read the result.
    `timeout_s` limits the wait for ranks that call this later, None: the timeout of the group. `deadline_s` limits what
    follows.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store = store_beside(group)
    timeout_s = timeout_s or timeout_of(group)
    reason = first_unsupported_reason(store, rank, size, "local", local_unsupported_reason(), timeout_s)
    if reason:
        return reason
    store.set(f"host/{rank}", socket.gethostname())
    try:
        nodes = Nodes.of(read(store, [f"host/{other}" for other in range(size)]))
    except ValueError as error:
        return str(error)
    if nodes.per_node == 1 and nodes.num_nodes > 1:
        return f"the group has one rank on each of {size} hosts; symmetric memory needs several ranks on one host"
    # A new thread starts on device 0, not on the current device of this thread.
    device = torch.cuda.current_device()
    host_group = HostGroup(group, nodes.members(nodes.node(rank)))
    opened: list[CudaBackend] = []
    text = _with_deadline(lambda: _trial(host_group, device, opened), deadline_s)
    return first_unsupported_reason(store, rank, size, "trial", text, deadline_s) or (opened[0], nodes)


def _with_deadline(attempt: Callable[[], str], deadline_s: float) -> str:
    """Return the result of `attempt`, its exception as text, or a message if it exceeds the deadline."""
    results: list[str] = []

    def run() -> None:
        try:
            results.append(attempt())
        except Exception as error:
            results.append(f"{type(error).__name__}: {cause_of(error)}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline_s)
    return results[0] if results else f"mapping the memory of peers did not finish within {deadline_s:g} s"


def _trial(host_group: HostGroup, device: int, opened: "list[CudaBackend]") -> str:
    """Write this rank's number to each peer and set flags of all peers as copies do; compare the numbers.

    `opened` gets the backend, so that the trial does not free its arena: torch would synchronise the device.
    """
    torch.cuda.set_device(device)
    backend = CudaBackend(host_group)
    opened.append(backend)
    words = [arena.view(torch.int32) for arena in backend.map(4 * _TRIAL_WORDS)]
    peers, copying, flags = range(backend.size), backend.copying, backend.size
    number = torch.tensor([backend.rank + 1], dtype=torch.int32, device=words[0].device)
    torch.cuda.current_stream().synchronize()  # the copies are on another stream
    own = [(words[peer][backend.rank : backend.rank + 1], number) for peer in peers]
    copying.copy_all(copying.prepare_copies(own), [])
    backend.barrier()
    for peer in peers:
        copying.wait(words[backend.rank], peer, peer + 1)
    for _ in range(2):
        copying.run(copying.prepare([FlagStep(words[peer], flags + backend.rank, sets=True) for peer in peers]))
        copying.run(copying.prepare([FlagStep(words[backend.rank], flags + peer, sets=False) for peer in peers]))
        backend.barrier()
    got = words[backend.rank][: 2 * backend.size].tolist()
    backend.barrier()
    wanted = [*range(1, backend.size + 1), *[0] * backend.size]
    return "" if got == wanted else f"the writes of the peers did not arrive: {got}"


@lru_cache
def _driver_functions() -> tuple[Callable[..., int], ...]:
    """The calls of the driver that copy, write a word, wait for a word, and do several of these on a stream."""
    driver = ctypes.CDLL("libcuda.so.1")
    copy, write, wait = driver.cuMemcpyAsync, driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
    batch = driver.cuStreamBatchMemOp_v2
    copy.argtypes = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
    write.argtypes = wait.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
    batch.argtypes = ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint
    return copy, write, wait, batch


class _CopyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes` of the CUDA driver. Hints of locations are for managed memory."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_STREAM_ORDER, _BESIDE_COMPUTATION = 1, 1  # CUmemcpySrcAccessOrder, CUmemcpyFlags


@lru_cache
def _batch_function() -> Callable[..., int] | None:
    """The call of the driver that enqueues several copies on a stream, which has run once; None if it has none.

    CUDA has it since 12.8. Since 13.0 it has no argument for the number of the copy that failed.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    attributes, first = _CopyAttributes(order=_STREAM_ORDER, flags=_BESIDE_COMPUTATION), ctypes.c_size_t(0)
    of_all: tuple[object, ...] = (ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1))
    function = getattr(driver, "cuMemcpyBatchAsync_v2", None)
    if function is None:
        function, failed = getattr(driver, "cuMemcpyBatchAsync", None), ctypes.c_size_t()
        of_all += (ctypes.byref(failed),)
    if function is None:
        return None

    def batch(to: Any, source: Any, num_bytes: Any, stream: int) -> int:
        count = ctypes.c_size_t(len(to))
        return int(function(to, source, num_bytes, count, *of_all, ctypes.c_void_p(stream)))

    words = _source_words()
    stream, first_word = torch.cuda.Stream(), words.data_ptr()
    source, to = _addresses([first_word, first_word + 4]), _addresses([first_word + 8, first_word + 12])
    status = batch(to, source, _sizes([4, 4]), stream.cuda_stream)
    stream.synchronize()
    return batch if not status and words[2].item() == 1 else None


def _addresses(values: Sequence[int]) -> Any:
    return (ctypes.c_uint64 * len(values))(*values)


def _sizes(values: Sequence[int]) -> Any:
    return (ctypes.c_size_t * len(values))(*values)


class _Batch(NamedTuple):
    """Copies for one call of the driver.

    Attributes:
        to, source, num_bytes: arrays.
        gaps: where each call puts the address of a tensor: an array and an index.
        tensors: live as long as this.
    """

    to: Any
    source: Any
    num_bytes: Any
    gaps: Sequence[tuple[Any, int]] = ()
    tensors: object = None


@lru_cache
def _writes_reach_peers() -> bool:
    """Whether a stream can write to the memory of another GPU: since CUDA 13.1 it cannot.

    Source: github.com/NVIDIA/nccl/issues/2052. A write takes the host and the device less time than a copy.
    """
    version = ctypes.c_int()
    _check("cuDriverGetVersion", ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)))
    return version.value < 13010


class MemOp(ctypes.Structure):
    """`CUstreamBatchMemOpParams` of the CUDA driver: a wait for a word or a write to it."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


_MAX_OPS = 255  # of one call of cuStreamBatchMemOp
WAIT_VALUE_32, WRITE_VALUE_32 = 1, 2  # CUstreamBatchMemOpType
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class StreamQueue:
    """A queue on a stream. `None` selects the current stream at each call.

    Where a stream cannot write to the memory of another GPU, copies write the words of peers.

    The caller orders the computing stream after all copies from a tensor before it frees the tensor. A new thread, such
    as one of autograd, calls `mark` or `after` first: calls of the driver fail (201) in a thread without a context.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._handle = None if stream is None else stream.cuda_stream
        self._device = torch.cuda.current_device()
        # The streams of earlier calls, by handle.
        self._used = {} if stream is None else {stream.cuda_stream: stream}
        self._copy, self._write, self._wait, self._batch = _driver_functions()
        # The driver refuses batches on the default stream.
        self._copy_batch = None if stream is None else _batch_function()
        self._copies_words = not _writes_reach_peers()
        self._sources = _source_words()
        self._one, self._value = self._sources.data_ptr(), self._sources.data_ptr() + 4

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._used[self._raw_stream()]

    def _raw_stream(self) -> int:
        if self._handle is not None:
            return self._handle
        # `torch.cuda.current_stream()` takes microseconds.
        handle = torch._C._cuda_getCurrentRawStream(self._device)
        if handle not in self._used:
            self._used[handle] = torch.cuda.current_stream()
        return handle

    def synchronize(self) -> None:
        """Block until the work of the present stream and of those of earlier calls is complete."""
        self._raw_stream()  # adds the present one
        for stream in self._used.values():
            stream.synchronize()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        _check("cuMemcpyAsync", self._copy(to.data_ptr(), source.data_ptr(), source.nbytes, self._raw_stream()))

    def prepare_copies(self, copies: Sequence[Copy], *, captured: bool = False) -> object:
        # A CUDA graph has no batches.
        if len(copies) == 1 or captured or self._copy_batch is None:
            return copies
        arrays = to, source = [
            _addresses([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
            for tensors in zip(*copies, strict=True)
        ]
        num_bytes = [next(tensor.nbytes for tensor in copy if tensor is not None) for copy in copies]
        gaps = [(arrays[side], index) for index, copy in enumerate(copies) for side in (0, 1) if copy[side] is None]
        return _Batch(to, source, _sizes(num_bytes), gaps, copies)

    def copy_all(self, prepared: Any, tensors: Sequence[torch.Tensor]) -> None:
        if not isinstance(prepared, _Batch):
            for to, source in copies_of(prepared, tensors):
                self.copy(to, source)
            return
        for (column, index), tensor in zip(prepared.gaps, tensors, strict=True):
            column[index] = tensor.data_ptr()
        self._enqueue(prepared)

    def _enqueue(self, batch: _Batch) -> None:
        assert self._copy_batch is not None
        status = self._copy_batch(batch.to, batch.source, batch.num_bytes, self._raw_stream())
        _check("cuMemcpyBatchAsync", status)

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        stream, address = self._raw_stream(), words.data_ptr() + 4 * index
        # Flags 0: the write follows all earlier work of the stream, also for readers on other devices.
        written = self._write(stream, self._value if self._copies_words else address, value, 0)
        _check("cuStreamWriteValue32", written)
        if self._copies_words:
            _check("cuMemcpyAsync", self._copy(address, self._value, 4, stream))

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        # Flags 0: until the word is at least the value.
        status = self._wait(self._raw_stream(), words.data_ptr() + 4 * index, value, 0)
        _check("cuStreamWaitValue32", status)

    def prepare(self, steps: Sequence[FlagStep], *, captured: bool = False) -> object:
        calls: list[object] = []
        for copies, group in groupby(steps, key=lambda step: step.sets and self._copies_words):
            if copies:
                to = [step.words.data_ptr() + 4 * step.position for step in group]
                if len(to) == 1 or captured or self._copy_batch is None:
                    calls += to
                else:
                    calls.append(_Batch(_addresses(to), _addresses([self._one] * len(to)), _sizes([4] * len(to))))
            else:
                ops = (op for step in group for op in _ops(step))
                calls += [(MemOp * len(some))(*some) for some in batched(ops, _MAX_OPS)]
        return calls

    def run(self, prepared: object) -> None:
        assert isinstance(prepared, list)
        stream = self._raw_stream()
        for call in prepared:
            if isinstance(call, int):
                _check("cuMemcpyAsync", self._copy(call, self._one, 4, stream))
            elif isinstance(call, _Batch):
                self._enqueue(call)
            else:
                _check("cuStreamBatchMemOp", self._batch(stream, len(call), call, 0))

    def mark(self) -> object:
        return self.stream.record_event()

    def after(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self.stream.wait_event(mark)


def _source_words() -> torch.Tensor:
    """Four words of device memory: a queue copies the first, 1, or the second to peers; a trial writes the others."""
    words = torch.tensor([1, 0, 0, 0], dtype=torch.int32, device="cuda")
    torch.cuda.current_stream().synchronize()  # other streams read them
    return words


def _ops(step: FlagStep) -> list[MemOp]:
    """Set a flag, or wait for one of this rank and clear it. Flags 0, as in `StreamQueue.write` and `wait`."""
    address = step.words.data_ptr() + 4 * step.position
    if step.sets:
        return [MemOp(WRITE_VALUE_32, address, 1)]
    wait = [MemOp(WAIT_VALUE_32, address, 1), MemOp(WRITE_VALUE_32, address, 0)]
    if step.note is None:
        return wait
    # A device writes pinned memory at its address on the host.
    word = step.note.words.data_ptr() + 4 * step.note.position
    return [MemOp(WRITE_VALUE_32, word, step.note.number), *wait, MemOp(WRITE_VALUE_32, word, 0)]


def _check(function: str, status: int) -> None:
    if status:
        raise TransportError(f"{function}: CUDA driver error {status}")


def _has_atomics(device: int, peer: int) -> bool:
    """Whether the link between two devices carries all atomic operations. PCIe carries none."""
    value = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, device, peer)
    _check("cuDeviceGetP2PAttribute", status)
    return value.value == 1


def _register_group(host_group: HostGroup) -> tuple[str, dist.ProcessGroup]:
    """Register ranks under a name that torch's rendezvous resolves as long as the returned process group exists."""
    from torch.distributed import _symmetric_memory as symmetric

    # torch never removes a name, so each registration needs a new one.
    if host_group.rank == 0:
        host_group.store.set("name", f"megatron_overlap/{uuid.uuid4().hex}")
    name: Any = host_group.store.get("name").decode()
    group = dist.ProcessGroup(host_group.store, host_group.rank, host_group.size)
    dist.distributed_c10d._register_process_group(name, group)
    symmetric._SymmetricMemory.set_group_info(name, host_group.rank, host_group.size, host_group.store)
    return name, group


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Inside the context a rendezvous creates no multicast object: none is used, and its creation may block the peers.

    Source: github.com/pytorch/pytorch/pull/195596. torch reads the variable at each rendezvous.
    """
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class CudaBackend:
    """`SymmetricBackend` over torch's SymmetricMemory, on the current device.

    Args:
        host_group: ranks of one host. `open_backend` tests whether they reach each other's memory.
    """

    def __init__(self, host_group: HostGroup) -> None:
        self.rank, self.size = host_group.rank, host_group.size
        self.ranks: Sequence[int] = host_group.ranks
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.capability, self.num_sms = properties.major * 10 + properties.minor, properties.multi_processor_count
        self.max_polls = _MAX_POLLS
        self._host_group = host_group
        # A process group or a name. Older releases of torch have no type for both.
        self._name: Any = host_group.group
        if host_group.group is None:
            self._name, self._registered = _register_group(host_group)
        self._queues = [StreamQueue(None)]
        self.computing: Queue = self._queues[0]
        self.copying = self.queue()
        # Arenas by name, with the handles that keep the memory of the peers mapped.
        self._arenas: dict[str, tuple[torch.Tensor, object]] = {}
        self._replaced: list[tuple[torch.Tensor, object]] = []

    @cached_property
    def peer_atomics(self) -> bool:
        uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
        own = uuids[self.device.index]
        peers = set(self.all_gather_text(own)) - {own}
        # Nothing is known of the link to a device that this process does not see.
        return peers <= {*uuids} and all(_has_atomics(self.device.index, uuids.index(peer)) for peer in peers)

    def map(self, num_bytes: int, name: str = "") -> list[torch.Tensor]:
        from torch.distributed import _symmetric_memory as symmetric

        # In older releases of torch `symmetric.rendezvous` finds only the names of groups of `new_group`.
        by_name = self._host_group.group is None
        rendezvous: Any = symmetric._SymmetricMemory.rendezvous if by_name else symmetric.rendezvous
        if (replaced := self._arenas.pop(name, None)) is not None:
            self._replaced.append(replaced)
        reason = ""
        try:
            # Without the memory pool of `symmetric.empty`, in which the places of arenas may differ between the ranks.
            arena = symmetric._SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self.device).zero_()
        except RuntimeError as error:
            reason = f"rank {self.ranks[self.rank]}: {cause_of(error)}"
        self._synchronize()  # the peers may write when they have mapped it
        # The rendezvous holds Python's lock, so no deadline ends the wait for a rank that has no memory.
        reasons = list(filter(None, self._host_group.all_gather_text(reason)))
        if reasons:
            raise TransportError(f"symmetric memory, {num_bytes} bytes: {'; '.join(reasons)}")
        with _without_multicast():
            handle = rendezvous(arena, self._name)
        self._arenas[name] = arena, handle
        return [handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in range(self.size)]

    def barrier(self) -> None:
        self._synchronize()
        self._host_group.barrier()

    def _synchronize(self) -> None:
        """Block until all work on the memory of this backend is complete.

        Not the device: it may run a receive of a pipeline stage whose peer sends only when it has computed, and that
        peer may block here too. What a stream of this backend waits for, a peer sends before it needs later work of
        this rank.
        """
        for queue in self._queues:
            queue.synchronize()

    def free_replaced(self) -> None:
        self._replaced.clear()

    def all_gather_text(self, text: str) -> list[str]:
        return self._host_group.all_gather_text(text)

    def queue(self) -> Queue:
        self._queues.append(StreamQueue(torch.cuda.Stream(self.device, priority=-1)))
        return self._queues[-1]

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def close(self) -> None:
        if self._arenas:
            torch.cuda.synchronize(self.device)
            self._arenas.clear()
            self._replaced.clear()


def open_copies(
    group: dist.ProcessGroup,
    options: TransportOptions = DEFAULT_OPTIONS,
    between: Callable[[dist.ProcessGroup], Transport] | None = None,
) -> CopyTransport | CopyNodesTransport | str:
    """Return a transport of copy engines between the ranks of each host of `group`, or why there is none. Collective.

    All ranks return the same reason. `between` opens the messages of a group that spans several hosts; None: such a
    group has no copies.
    """
    limit_s = options.timeout_s or timeout_of(group)
    opened = open_backend(group, timeout_s=limit_s)
    if isinstance(opened, str):
        return opened
    backend, nodes = opened
    if nodes.num_nodes > 1 and between is None:
        backend.close()
        return f"the group spans {nodes.num_nodes} hosts"
    inside = CopyTransport(backend, replace(options, timeout_s=limit_s))
    return inside if between is None or nodes.num_nodes == 1 else CopyNodesTransport(inside, between(group), nodes)
