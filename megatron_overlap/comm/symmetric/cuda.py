"""Symmetric memory of the GPUs of one host, by torch's SymmetricMemory. A CUDA stream is a queue.

It requires torch only: no NVSHMEM and no MPI. Processes that share one GPU have run it, several GPUs not yet.
"""

import ctypes
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.host_group import HostGroup, cause_of, store_beside, timeout_of
from megatron_overlap.comm.symmetric.backend import FlagStep, Queue
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.symmetric.nodes import CopyNodesTransport
from megatron_overlap.comm.symmetric.stream_queue import StreamQueue, check_status
from megatron_overlap.comm.transport import DEFAULT_OPTIONS, Transport, TransportError, TransportOptions
from megatron_overlap.diagnostics.consistency import first_unsupported_reason, read
from megatron_overlap.diagnostics.heartbeat import within
from megatron_overlap.schedules.gather_scatter import Nodes

_OLDEST_CAPABILITY = (8, 0)
_TRIAL_WORDS = 256
# A read of a flag takes about a microsecond: the limit is minutes, like the timeout of a collective.
_MAX_POLLS = 1 << 28
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


def local_unsupported_reason() -> str:
    """Return why this process cannot use symmetric memory; empty if it can. Local: no communication."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is older than 8.0"
    return triton_unsupported_reason()


@lru_cache
def triton_unsupported_reason() -> str:
    """Return why this process cannot launch Triton's kernels on its device; empty if it can.

    The first launch needs a C compiler, the headers of Python and a cache that Triton can write.
    """
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
    reason = local_unsupported_reason()
    if not reason:
        # The stream may hold receives from earlier pipeline stages; the trial waits for them, and has a deadline.
        torch.cuda.current_stream().synchronize()
    reason = first_unsupported_reason(store, rank, size, "local", reason, timeout_s)
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

    def run() -> str:
        try:
            return attempt()
        except Exception as error:
            # torch refuses ranks with equal device indices; a process that sees one GPU always has index 0.
            remedy = "; let each process see all GPUs of its host (CUDA_VISIBLE_DEVICES)"
            return f"{type(error).__name__}: {cause_of(error)}{remedy * ('overlapping devices' in str(error))}"

    text = within(run, deadline_s)
    return f"mapping the memory of peers did not finish within {deadline_s:g} s" if text is None else text


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


def _has_atomics(device: int, peer: int) -> bool:
    """Whether the link between two devices carries all atomic operations. PCIe carries none."""
    value = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, device, peer)
    check_status("cuDeviceGetP2PAttribute", status)
    return value.value == 1


def _register_group(store: dist.Store, rank: int, size: int) -> tuple[Any, dist.ProcessGroup]:
    """Register ranks under a name that torch's rendezvous resolves as long as the returned process group exists."""
    from torch.distributed import _symmetric_memory as symmetric

    # torch never removes a name, so each registration needs a new one.
    if rank == 0:
        store.set("name", f"megatron_overlap/{uuid.uuid4().hex}")
    name: Any = store.get("name").decode()
    group = dist.ProcessGroup(store, rank, size)
    dist.distributed_c10d._register_process_group(name, group)
    symmetric._SymmetricMemory.set_group_info(name, rank, size, store)
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

    Attributes:
        num_rendezvous: number of rendezvous of this process, in all groups.
    """

    num_rendezvous = 0

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
            self._name, self._registered = _register_group(host_group.store, host_group.rank, host_group.size)
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
        # torch numbers the store keys of rendezvous by process, not by group: ranks with different numbers would wait
        # for different keys. A rank that is behind makes the missing rendezvous in groups of itself alone.
        # Source: github.com/pytorch/pytorch/issues/196082.
        counts = self._host_group.all_gather([CudaBackend.num_rendezvous])
        with _without_multicast():
            for number in range(CudaBackend.num_rendezvous, max(counts)[0]):
                store = dist.PrefixStore(f"alone/{self.rank}/{number}", self._host_group.store)
                alone, _registered = _register_group(store, 0, 1)
                symmetric._SymmetricMemory.rendezvous(arena, alone)
            handle = rendezvous(arena, self._name)
        CudaBackend.num_rendezvous = max(counts)[0] + 1
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
