"""Memory of all ranks of a group that kernels and copy engines can address: torch's SymmetricMemory, nothing else.

One arena a group (`comm.arena`), allocated in the same order on every rank, two halves used in turn. Copies run on the
copy engines, from a stream of their own; flags are raised by stream writes, which come after a fence of the whole
system. No kernel of this file computes or waits; what waits for acknowledgements is handed in.

Written for CUDA and not run on it yet.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_overlap.comm.agreement import first_objection
from megatron_overlap.comm.arena import MAX_PARTS, ArenaLayout
from megatron_overlap.comm.transport import TransportError, store_beside
from megatron_overlap.schedules import Chunk, ChunkLayout

WaitAll = Callable[[torch.Tensor, int, torch.Tensor], None]
"""`wait_all(flags, epoch, status)`: the current stream goes on when all `flags` have reached `epoch`."""

_OLDEST_CAPABILITY = (8, 0)
_TRIAL_BYTES = 256


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


def objection(group: dist.ProcessGroup, *, deadline_s: float = 60.0) -> str:
    """What speaks against symmetric memory between the ranks of `group`: the same text on all of them.

    All ranks must call it. Tries it for real, with a deadline: peers are mapped, each writes to each, and reads.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store = store_beside(group)
    found = first_objection(store, rank, size, "local", local_objection(), deadline_s)
    if found:
        return found
    store.set(f"host/{rank}", socket.gethostname())
    hosts = {store.get(f"host/{other}").decode() for other in range(size)}
    if len(hosts) > 1:
        return f"the group is on {len(hosts)} hosts; peers' memory is addressed inside one"
    return first_objection(store, rank, size, "trial", _with_deadline(lambda: _trial(group), deadline_s), deadline_s)


def _with_deadline(attempt: Callable[[], str], deadline_s: float) -> str:
    """What `attempt` answers or raises; a text of its own where it hangs."""
    answer: list[str] = []

    def run() -> None:
        try:
            answer.append(attempt())
        except (RuntimeError, ValueError, AttributeError, NotImplementedError) as error:
            answer.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline_s)
    return answer[0] if answer else f"mapping peers' memory hangs for more than {deadline_s:g} s"


def _trial(group: dist.ProcessGroup) -> str:
    """Writes this rank's number to each peer and reads what the peers wrote."""
    from torch.distributed import _symmetric_memory as symmetric

    size, rank = dist.get_world_size(group), dist.get_rank(group)
    words = symmetric.empty(_TRIAL_BYTES, dtype=torch.int32, device=torch.device("cuda", torch.cuda.current_device()))
    words.zero_()
    torch.cuda.synchronize()
    handle = symmetric.rendezvous(words, group)
    handle.barrier()
    for peer in range(size):
        symmetric._SymmetricMemory.stream_write_value32(
            handle.get_buffer(peer, (_TRIAL_BYTES,), torch.int32), rank, rank + 1
        )
    handle.barrier()
    torch.cuda.synchronize()
    got = words[:size].tolist()
    return "" if got == list(range(1, size + 1)) else f"peers' writes did not arrive: {got}"


class SymmetricTransport:
    """Owns a group's arena, its copy stream and the number of the op that is next.

    Every rank of the group begins the same ops, of the same sizes, in the same order.

    Args:
        group: ranks whose memory each other can address: `objection(group)` was empty.
        wait_all: orders the current stream after acknowledgements.
    """

    def __init__(self, group: dist.ProcessGroup, wait_all: WaitAll) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._group, self._wait_all = group, wait_all
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._copies = torch.cuda.Stream(self._device, priority=-1)
        self._layout: ArenaLayout | None = None
        self._epoch = 0
        self._open = 0
        self.status = torch.zeros(1, dtype=torch.int32, device=self._device)
        # Of the two halves: tiles counted so far of each chunk; a kernel leaves them at 0.
        self._counters = torch.zeros(2, self.size * MAX_PARTS, dtype=torch.int32, device=self._device)
        self._status_seen = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena now; 0 before the first op."""
        return self._layout.num_bytes if self._layout else 0

    def begin(self, half_bytes: int, op: str) -> SymmetricOp:
        """The next op, which needs `half_bytes`; from here on the current stream may write into peers' halves.

        Raises:
            TransportError: a kernel of an earlier op gave up waiting for a peer.
        """
        if int(self._status_seen):
            raise TransportError(
                f"{op}: rank {self.ranks[self.rank]}: op {int(self._status_seen)} of this group waited in vain for a "
                "peer; results since then are wrong"
            )
        if self._layout is None or self._layout.half_bytes < half_bytes:
            self._allocate(half_bytes)
        self._epoch += 1
        self._open += 1
        assert self._layout is not None
        op_ = SymmetricOp(self, self._layout, self._epoch)
        # On the computing stream and before its kernels: a kernel that waits beside a persistent grid might find no SM.
        if self._epoch > 2:
            self._wait_all(op_.own_acknowledgements, self._epoch - 2, self.status)
        return op_

    def counters(self, epoch: int) -> torch.Tensor:
        """Own counters of stored tiles for op `epoch`, int32, all 0 between ops."""
        return self._counters[epoch % 2]

    def _allocate(self, half_bytes: int) -> None:
        """A larger arena, on all ranks at the same op; the old one is idle by then."""
        assert not self._open, "an op in flight would lose its half; begin the larger one first"
        from torch.distributed import _symmetric_memory as symmetric

        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)
        self._views: list[torch.Tensor] = []
        self._arena = self._handle = None
        self._layout = ArenaLayout(self.size, half_bytes)
        self._arena = symmetric.empty(self._layout.num_bytes, dtype=torch.uint8, device=self._device)
        # Flags start behind every epoch, acknowledgements at the newest: nothing is in use.
        self._arena.zero_()
        for epoch in (0, 1):
            start = self._layout.acknowledgements(epoch)
            self._arena[start : start + 4 * self.size].view(torch.int32).fill_(self._epoch)
        torch.cuda.synchronize(self._device)
        self._handle = symmetric.rendezvous(self._arena, self._group)
        self._views = [
            self._handle.get_buffer(peer, (self._layout.num_bytes,), torch.uint8) for peer in range(self.size)
        ]
        bases = [view.data_ptr() for view in self._views]
        starts = [(self._layout.half(epoch), self._layout.flags(epoch)) for epoch in (0, 1)]
        table = [[[base + start for base in bases] for start in both] for both in starts]
        self._addresses = torch.tensor(table, dtype=torch.int64, device=self._device)
        dist.barrier(self._group)

    def close(self) -> None:
        """Lets the arena go, when all ranks are done with it."""
        if self._layout is not None:
            torch.cuda.synchronize(self._device)
            self._views, self._arena, self._handle, self._layout = [], None, None, None


class SymmetricOp:
    """One op's half of every rank's arena, from `begin` until `done`."""

    def __init__(self, transport: SymmetricTransport, layout: ArenaLayout, epoch: int) -> None:
        self.epoch = epoch
        self._transport, self._layout = transport, layout

    def _words(self, peer: int, offset: int, count: int) -> torch.Tensor:
        return self._transport._views[peer][offset : offset + 4 * count].view(torch.int32)

    @property
    def own_acknowledgements(self) -> torch.Tensor:
        """Which op of this half each rank was done with last: int32 `[R]`, written by the peers."""
        transport = self._transport
        return self._words(transport.rank, self._layout.acknowledgements(self.epoch), transport.size)

    @property
    def flags(self) -> torch.Tensor:
        """Own flags, raised to `epoch` by peers."""
        return self._words(self._transport.rank, self._layout.flags(self.epoch), self._layout.num_flags)

    def half(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The half of `peer` as a tensor."""
        num_bytes = dtype.itemsize
        for extent in shape:
            num_bytes *= extent
        start = self._layout.half(self.epoch)
        return self._transport._views[peer][start : start + num_bytes].view(dtype).view(*shape)

    def addresses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Device tables for kernels: int64 `[R]` addresses of the halves, and of the flags, of all ranks."""
        halves, flags = self._transport._addresses[self.epoch % 2]
        return halves, flags

    def push(self, shard: torch.Tensor, layout: ChunkLayout) -> torch.Tensor:
        """Starts an all-gather of `shard` by copy engines; returns the gathered rows, of which only own ones are there.

        Chunks go to r+1, r+2, ... in turn; chunk c of this rank raises flag `rank * parts + c` at the peer. Everything
        is enqueued when this returns, so that a kernel enqueued after it may occupy the whole device and wait.
        """
        from torch.distributed import _symmetric_memory as symmetric

        transport, parts = self._transport, layout.chunks_per_rank
        assert parts <= MAX_PARTS
        shape = (layout.num_rows, shard.shape[1])
        gathered = self.half(transport.rank, shape, shard.dtype)
        own = slice(*layout.shard(transport.rank))
        gathered[own].copy_(shard)
        transport._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(transport._copies):
            for distance in range(1, transport.size):
                peer = (transport.rank + distance) % transport.size
                there = self.half(peer, shape, shard.dtype)
                flags = self._words(peer, self._layout.flags(self.epoch), self._layout.num_flags)
                for part in range(parts):
                    rows = slice(*layout.rows(Chunk(transport.rank, part)))
                    if rows.start < rows.stop:
                        there[rows].copy_(gathered[rows], non_blocking=True)
                        symmetric._SymmetricMemory.stream_write_value32(
                            flags, transport.rank * parts + part, self.epoch
                        )
        return gathered

    def done(self) -> None:
        """Tells all ranks that what this rank needs of the op has been read, once the current stream gets here."""
        from torch.distributed import _symmetric_memory as symmetric

        transport = self._transport
        for peer in range(transport.size):
            words = self._words(peer, self._layout.acknowledgements(self.epoch), transport.size)
            symmetric._SymmetricMemory.stream_write_value32(words, transport.rank, self.epoch)
        transport._open -= 1
        transport._status_seen.copy_(transport.status, non_blocking=True)
