"""Peers' memory on GPUs of one host: torch's SymmetricMemory, copy engines, and words written and awaited by streams.

Nothing but torch is needed: no NVSHMEM, no MPI. Written for CUDA and not run on it yet.
"""

from __future__ import annotations

import ctypes
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.connection import store_beside
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.backend import Queue
from megatron_overlap.comm.transport import TransportError
from megatron_overlap.diagnostics.consistency import first_unsupported_reason
from megatron_overlap.schedules.hierarchical import Nodes

_OLDEST_CAPABILITY = (8, 0)
_TRIAL_WORDS = 256
# A look at a flag takes about a microsecond: minutes, as the deadline of a collective.
_MAX_POLLS = 1 << 28


def local_objection() -> str:
    """What speaks against symmetric memory in this process; empty if nothing does. Asks no other rank."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is older than 8.0"
    try:
        from torch.distributed import _symmetric_memory  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no SymmetricMemory"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return ""


def survey(group: dist.ProcessGroup, *, deadline_s: float = 60.0) -> Nodes | str:
    """How the ranks of `group` lie on hosts, or what speaks against symmetric memory: the same on all of them.

    All ranks must call it. Tries it for real, with a deadline: the ranks of each host are mapped, each writes to each,
    and reads.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store = store_beside(group)
    found = first_unsupported_reason(store, rank, size, "local", local_objection(), deadline_s)
    if found:
        return found
    store.set(f"host/{rank}", socket.gethostname())
    try:
        nodes = Nodes.of([store.get(f"host/{other}").decode() for other in range(size)])
    except ValueError as error:
        return str(error)
    if nodes.per_node == 1 and nodes.num_nodes > 1:
        return f"the group has one rank on each of {size} hosts; peers' memory is addressed inside one"
    # A new thread starts on device 0, whatever this one has chosen.
    device = torch.cuda.current_device()
    members = HostGroup(group, nodes.members(nodes.node(rank)))
    text = _with_deadline(lambda: _trial(members, device), deadline_s)
    return first_unsupported_reason(store, rank, size, "trial", text, deadline_s) or nodes


def _with_deadline(attempt: Callable[[], str], deadline_s: float) -> str:
    """What `attempt` answers or raises; a text of its own where it hangs."""
    answer: list[str] = []

    def run() -> None:
        try:
            answer.append(attempt())
        except (RuntimeError, ValueError, AttributeError, NotImplementedError, OSError) as error:
            answer.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline_s)
    return answer[0] if answer else f"mapping peers' memory hangs for more than {deadline_s:g} s"


def _trial(members: HostGroup, device: int) -> str:
    """Writes this rank's number to each peer and reads what the peers wrote; waits for it as copies do."""
    torch.cuda.set_device(device)
    fabric = CudaFabric(members)
    words = [arena.view(torch.int32) for arena in fabric.map(4 * _TRIAL_WORDS)]
    words[fabric.rank].zero_()
    fabric.barrier()
    for peer in range(fabric.size):
        fabric.computing.write(words[peer], fabric.rank, fabric.rank + 1)
    fabric.barrier()
    for peer in range(fabric.size):
        fabric.copying.wait(words[fabric.rank], peer, peer + 1)
    torch.cuda.synchronize()
    got = words[fabric.rank][: fabric.size].tolist()
    fabric.barrier()
    return "" if got == list(range(1, fabric.size + 1)) else f"peers' writes did not arrive: {got}"


class _Driver:
    """The one call that torch does not offer: a stream that waits for a word, without a kernel."""

    def __init__(self) -> None:
        self._wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """The stream goes on when the word at `address` is at least `value`."""
        status = self._wait(
            ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(0)
        )
        if status:
            raise TransportError(f"cuStreamWaitValue32: CUDA driver error {status}")


class _StreamQueue:
    """A stream; `None` is the one that is current when something is put into it."""

    def __init__(self, stream: torch.cuda.Stream | None, driver: _Driver) -> None:
        self._stream, self._driver = stream, driver

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
        source.record_stream(self.stream)

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        with torch.cuda.stream(self.stream):
            # torch takes unsigned words only.
            symmetric._SymmetricMemory.stream_write_value32(words.view(torch.uint32), index, value)

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        self._driver.wait(self.stream, words.data_ptr() + 4 * index, value)


def _named(members: HostGroup) -> str:
    """A name under which torch's SymmetricMemory finds the members, who are no process group of their own."""
    from torch.distributed import _symmetric_memory as symmetric

    # torch keeps names as long as the process lives, so that none may come twice.
    if members.rank == 0:
        members.store.set("name", f"megatron_overlap/{uuid.uuid4().hex}")
    name = members.store.get("name").decode()
    symmetric._SymmetricMemory.set_group_info(name, members.rank, members.size, members.store)
    return name


class CudaFabric:
    """`Fabric` over torch's SymmetricMemory, on the current device.

    Args:
        members: ranks whose memory each other can address: `survey` found nothing against them.
    """

    def __init__(self, members: HostGroup) -> None:
        self.rank, self.size = members.rank, members.size
        self.ranks: Sequence[int] = members.ranks
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.capability, self.num_sms = properties.major * 10 + properties.minor, properties.multi_processor_count
        self.max_polls = _MAX_POLLS
        self._members, driver = members, _Driver()
        # A group, or its name: older releases of torch have no type for it.
        self._name: Any = members.group or _named(members)
        self._copies = torch.cuda.Stream(self.device, priority=-1)
        self.computing: Queue = _StreamQueue(None, driver)
        self.copying: Queue = _StreamQueue(self._copies, driver)
        self._arena: torch.Tensor | None = None
        self._handle: object | None = None

    def map(self, num_bytes: int) -> list[torch.Tensor]:
        from torch.distributed import _symmetric_memory as symmetric

        self.close()
        self._arena = symmetric.empty(num_bytes, dtype=torch.uint8, device=self.device)
        handle = self._handle = symmetric.rendezvous(self._arena, self._name)
        return [handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in range(self.size)]

    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        self._members.barrier()
        torch.cuda.synchronize(self.device)

    def fork(self) -> None:
        self._copies.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._copies)

    def objection(self) -> str:
        capturing = torch.cuda.is_current_stream_capturing()
        return "a CUDA graph is being captured: a replay would raise flags to a number of the past" if capturing else ""

    def close(self) -> None:
        if self._arena is not None:
            torch.cuda.synchronize(self.device)
            self._arena = self._handle = None
