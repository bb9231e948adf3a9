"""Symmetric memory of a group as ops use it: numbered ops, two halves in turn, all-gathers and departures by copies.

One arena a group (`comm.symmetric.layout`), allocated in the same order on every rank. Copies run beside the kernels
(`comm.symmetric.backend`); flags are raised by the queue that copied. No kernel of this file computes or waits; what
waits for
flags on the computing stream is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.symmetric.backend import Fabric
from megatron_overlap.comm.symmetric.layout import MAX_PARTS, ArenaLayout
from megatron_overlap.comm.transport import TransportError
from megatron_overlap.schedules import Chunk, ChunkLayout

WaitAll = Callable[..., None]
"""`wait_all(flags, epoch, status, max_polls)`: the current stream goes on when all `flags` have reached `epoch`."""

Mover = Literal["push", "pull", "ring"]
"""Who copies an all-gather: the owner to each peer, each peer from the owner, or each rank to the next one."""


class SymmetricTransport:
    """Owns a group's arena and the number of the op that is next.

    Every rank of the group begins the same ops, of the same sizes, in the same order.

    Args:
        fabric: memory that all ranks of the group address.
        wait_all: orders the current stream after flags.
    """

    def __init__(self, fabric: Fabric, wait_all: WaitAll) -> None:
        self.fabric = fabric
        self.rank, self.size = fabric.rank, fabric.size
        self._wait_all = wait_all
        self.buffer_pool = BufferPool()
        self._layout: ArenaLayout | None = None
        self._views: list[torch.Tensor] = []
        self._epoch = 0
        self._open = 0
        self.status = torch.zeros(1, dtype=torch.int32, device=fabric.device)
        # Of each half: tiles counted so far of each chunk (a kernel leaves them at 0), and chunks whole in staging.
        self._counters = torch.zeros(2, self.size * MAX_PARTS, dtype=torch.int32, device=fabric.device)
        self._departed = torch.zeros(2, self.size * MAX_PARTS, dtype=torch.int32, device=fabric.device)
        self._staging = torch.empty(0, dtype=torch.uint8, device=fabric.device)
        self._status_seen = torch.zeros(1, dtype=torch.int32, pin_memory=fabric.device.type == "cuda")
        self.tables: dict[Any, Any] = {}
        """What ops have made for their shapes and want to find again."""

    @property
    def num_bytes(self) -> int:
        """Bytes of symmetric memory and staging now; 0 before the first op."""
        return (self._layout.num_bytes if self._layout else 0) + self._staging.numel()

    @property
    def bound_bytes(self) -> int:
        """Twice the largest gathered activation so far: what `num_bytes` is beside flags (and staging, if used)."""
        return 2 * self._layout.half_bytes if self._layout else 0

    def begin(self, half_bytes: int, op: str) -> SymmetricOp:
        """The next op, which needs `half_bytes`; from here on the current stream may write into peers' halves.

        Raises:
            TransportError: a kernel of an earlier op gave up waiting for a peer, or an op cannot start here.
        """
        who = f"{op}: rank {self.fabric.ranks[self.rank]}"
        if int(self._status_seen):
            raise TransportError(
                f"{who}: op {int(self._status_seen)} of this group waited in vain for a peer; results since then are "
                "wrong"
            )
        if text := self.fabric.objection():
            raise TransportError(f"{who}: {text}; use method p2p there")
        if self._layout is None or self._layout.half_bytes < half_bytes:
            self._allocate(half_bytes)
        self._epoch += 1
        self._open += 1
        assert self._layout is not None
        op_ = SymmetricOp(self, self._layout, self._epoch)
        # On the computing stream and before its kernels: a kernel that waits beside a persistent grid might find no SM.
        if self._epoch > 2:
            self.wait_all(op_.own_acknowledgements, self._epoch - 2)
        return op_

    def wait_all(self, flags: torch.Tensor, epoch: int) -> None:
        """The current stream goes on when all of own `flags` have reached `epoch`."""
        self._wait_all(flags, epoch, self.status, self.fabric.max_polls)

    def counters(self, epoch: int) -> torch.Tensor:
        """Own counters of stored tiles for op `epoch`, int32, all 0 between ops."""
        return self._counters[epoch % 2]

    def departed(self, epoch: int) -> torch.Tensor:
        """Own words that say which chunks in `staging` are whole, int32, raised to `epoch`."""
        return self._departed[epoch % 2]

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Own memory for what copies will take to its owners, behind all copies that read it before."""
        self.fabric.join()
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self.fabric.device)
        return self._staging[:num_bytes]

    def _allocate(self, half_bytes: int) -> None:
        """A larger arena, on all ranks at the same op; the old one is idle by then."""
        assert not self._open, "an op in p2p_work would lose its half; begin the larger one first"
        self.fabric.barrier()
        self._views, self._addresses = [], torch.empty(0)
        layout = self._layout = ArenaLayout(self.size, half_bytes)
        self._views = self.fabric.map(layout.num_bytes)
        # Flags start behind every epoch, acknowledgements at the newest: nothing is in use.
        words = self._views[self.rank][layout.flags(0) :].view(torch.int32)
        words.zero_()
        for epoch in (0, 1):
            self._words(self.rank, layout.acknowledgements(epoch), self.size).fill_(self._epoch)
        bases = [view.data_ptr() for view in self._views]
        starts = [(layout.half(epoch), layout.flags(epoch)) for epoch in (0, 1)]
        table = [[[base + start for base in bases] for start in both] for both in starts]
        self._addresses = torch.tensor(table, dtype=torch.int64, device=self.fabric.device)
        self.fabric.barrier()

    def _words(self, peer: int, offset: int, count: int) -> torch.Tensor:
        return self._views[peer][offset : offset + 4 * count].view(torch.int32)

    def close(self) -> None:
        """Lets all memory go, when all ranks are done with it."""
        self._views, self._layout = [], None
        self.tables.clear()
        self.fabric.close()


class SymmetricOp:
    """One op's half of every rank's arena, from `begin` until `done`."""

    def __init__(self, transport: SymmetricTransport, layout: ArenaLayout, epoch: int) -> None:
        self.epoch = epoch
        self._transport, self._layout = transport, layout

    @property
    def own_acknowledgements(self) -> torch.Tensor:
        """Which op of this half each rank was done with last: int32 `[R]`, written by the peers."""
        transport = self._transport
        return transport._words(transport.rank, self._layout.acknowledgements(self.epoch), transport.size)

    @property
    def flags(self) -> torch.Tensor:
        """Own flags, raised to `epoch` by whoever delivers."""
        return self.flags_of(self._transport.rank)

    def flags_of(self, peer: int) -> torch.Tensor:
        """The flags of `peer`."""
        return self._transport._words(peer, self._layout.flags(self.epoch), self._layout.num_flags)

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

    def gather(self, shard: torch.Tensor, layout: ChunkLayout, mover: Mover = "push") -> torch.Tensor:
        """Starts an all-gather of `shard` by copies; returns the gathered rows, of which only own ones are there.

        Flag `owner * parts + part` is raised when a chunk is there, own ones at once. Rows come in the order of
        `schedules.tile_order.arrival_order`. All is enqueued when this returns, so that a kernel enqueued after it may
        occupy the whole device and wait.
        """
        transport, parts = self._transport, layout.chunks_per_rank
        assert parts <= MAX_PARTS
        fabric, rank, size = transport.fabric, transport.rank, transport.size
        rows_of = [self.half(peer, (layout.num_rows, shard.shape[1]), shard.dtype) for peer in range(size)]
        own = slice(*layout.shard(rank))
        rows_of[rank][own].copy_(shard)
        for part in range(parts):
            fabric.computing.write(self.flags, rank * parts + part, self.epoch)
        if mover == "pull":
            for peer in range(size):
                fabric.computing.write(self._ready(peer), rank, self.epoch)
        fabric.fork()
        copying = fabric.copying
        for distance in range(1, size):
            following, preceding = (rank + distance) % size, (rank - distance) % size
            to, source, owner = {
                "push": (following, rank, rank),
                "pull": (rank, preceding, preceding),
                "ring": ((rank + 1) % size, rank, (rank + 1 - distance) % size),
            }[mover]
            if mover == "pull":
                copying.wait(self._ready(rank), owner, self.epoch)
            for part in range(parts):
                rows = slice(*layout.rows(Chunk(owner, part)))
                if rows.start < rows.stop:
                    flag = owner * parts + part
                    if mover == "ring" and owner != rank:
                        copying.wait(self.flags, flag, self.epoch)
                    copying.copy(rows_of[to][rows], rows_of[source][rows])
                    copying.write(self.flags_of(to), flag, self.epoch)
        return rows_of[rank]

    def _ready(self, peer: int) -> torch.Tensor:
        """The words of `peer` that say whose rows of this op may be pulled."""
        return self._transport._words(peer, self._layout.ready(self.epoch), self._transport.size)

    def deliver(self, staged: torch.Tensor, layout: ChunkLayout) -> None:
        """Takes chunks from `staged`, `[R owners, slot_rows, N]`, to their owners' landings as they become whole."""
        transport, parts = self._transport, layout.chunks_per_rank
        fabric, rank, size = transport.fabric, transport.rank, transport.size
        departed = transport.departed(self.epoch)
        fabric.fork()
        for distance in range(1, size):
            owner = (rank + distance) % size
            landing = self.half(owner, tuple(staged.shape), staged.dtype)[rank]
            for part in range(parts):
                rows = slice(*layout.rows_in_shard(Chunk(owner, part)))
                if rows.start < rows.stop:
                    fabric.copying.wait(departed, owner * parts + part, self.epoch)
                    fabric.copying.copy(landing[rows], staged[owner, rows])
                    fabric.copying.write(self.flags_of(owner), rank * parts + part, self.epoch)

    def done(self) -> None:
        """Tells all ranks that what this rank needs of the op has been read, once the current stream gets here."""
        transport = self._transport
        for peer in range(transport.size):
            words = transport._words(peer, self._layout.acknowledgements(self.epoch), transport.size)
            transport.fabric.computing.write(words, transport.rank, self.epoch)
        transport._open -= 1
        transport._status_seen.copy_(transport.status, non_blocking=True)
