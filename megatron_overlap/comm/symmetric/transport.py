"""Operations on the symmetric memory of a group: numbering, alternation of two slots, all-gathers and sends by copies.

A group has one arena on each rank. Every rank allocates it at the same operation, with the same layout, so that an
offset is an address:

    slot 0 | slot 1 | flags of slot 0 | flags of slot 1 | acknowledgements | ready words

Operation number e (1, 2, ...) of a group is its epoch. It uses slot e % 2, so two operations can be in flight. The slot
holds the gathered rows of an all-gather or the receive buffer of a reduce-scatter.

- Flags: a chunk of operation e is complete when its flag is e.
- Acknowledgements: a rank that no longer reads its slot for operation e writes e at every peer. A rank writes into the
  slots for operation e + 2 after all ranks have acknowledged e.
- Ready words: a rank writes e at every peer when the peers may pull its rows of operation e.

Copies run concurrently with the kernels (`backend`), and the queue that copies a chunk sets its flag. This module
launches no kernels: the caller passes the function that waits for flags on the computing stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.symmetric.backend import SymmetricBackend, aligned
from megatron_overlap.comm.transport import TransportError
from megatron_overlap.schedules import Chunk, ChunkLayout

WaitAll = Callable[..., None]
"""`wait_all(flags, epoch, status, max_polls)`: block the current stream until all `flags` have reached `epoch`."""

Mover = Literal["push", "pull", "ring"]
"""The copies of an all-gather: the owner writes to each peer, each peer reads from the owner, or a ring of ranks."""

MAX_PARTS = 32
"""Largest number of chunks per shard: the arena has one flag for each."""

MAX_EPOCH = (1 << 31) - (1 << 20)
"""After this epoch those of a group begin again at 1: flags are int32, and a job may have more operations in weeks."""

_FLAG_BYTES = 4


def gathered_bytes(num_rows: int, num_ranks: int, features: int, itemsize: int) -> int:
    """Bytes of a slot that one operation needs: R times the largest shard, for gathered rows or a receive buffer."""
    return -(-num_rows // num_ranks) * num_ranks * features * itemsize


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Offsets in bytes into an arena for operations of at most `slot_bytes`."""

    num_ranks: int
    slot_bytes: int

    @property
    def num_flags(self) -> int:
        """Flags of one slot: one for each chunk of each rank."""
        return self.num_ranks * MAX_PARTS

    def slot(self, epoch: int) -> int:
        """Offset of the slot of operation `epoch`."""
        return epoch % 2 * aligned(self.slot_bytes)

    def flags(self, epoch: int) -> int:
        """Offset of the flags of operation `epoch`, int32 `[num_flags]`."""
        return 2 * aligned(self.slot_bytes) + epoch % 2 * aligned(self.num_flags * _FLAG_BYTES)

    def acknowledgements(self, epoch: int) -> int:
        """Offset of the latest epoch of this slot that each rank has acknowledged, int32 `[R]`."""
        flags = 2 * (aligned(self.slot_bytes) + aligned(self.num_flags * _FLAG_BYTES))
        return flags + epoch % 2 * aligned(self.num_ranks * _FLAG_BYTES)

    def ready(self, epoch: int) -> int:
        """Offset of the latest epoch of this slot whose rows peers may pull from each rank, int32 `[R]`."""
        return self.acknowledgements(0) + (2 + epoch % 2) * aligned(self.num_ranks * _FLAG_BYTES)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena: twice the largest gathered activation and a few kilobytes of flags."""
        return self.ready(1) + aligned(self.num_ranks * _FLAG_BYTES)


class SymmetricTransport:
    """Owns the arena of a group and numbers its operations. All ranks begin the same ones with the same sizes."""

    def __init__(self, backend: SymmetricBackend, wait_all: WaitAll) -> None:
        self.backend = backend
        self.rank, self.size = backend.rank, backend.size
        self._wait_all = wait_all
        self.buffer_pool = BufferPool()
        self._layout: ArenaLayout | None = None
        self._views: list[torch.Tensor] = []
        self._epoch = self._open = 0
        self.status = torch.zeros(1, dtype=torch.int32, device=backend.device)
        # For each slot: stored tiles of each chunk (each kernel resets them to 0), and complete chunks in staging.
        self._counters = torch.zeros(2, self.size * MAX_PARTS, dtype=torch.int32, device=backend.device)
        self._staged_flags = torch.zeros(2, self.size * MAX_PARTS, dtype=torch.int32, device=backend.device)
        self._staging = torch.empty(0, dtype=torch.uint8, device=backend.device)
        self._status_seen = torch.zeros(1, dtype=torch.int32, pin_memory=backend.device.type == "cuda")
        self.tables: dict[Any, Any] = {}
        """Cached objects of operations, such as device tables by shape."""

    @property
    def num_bytes(self) -> int:
        """Present bytes of symmetric memory and staging; 0 before the first operation."""
        return (self._layout.num_bytes if self._layout else 0) + self._staging.numel()

    @property
    def bound_bytes(self) -> int:
        """Twice the largest gathered activation of the node so far: `num_bytes` without flags and staging."""
        return 2 * self._layout.slot_bytes if self._layout else 0

    def begin(self, slot_bytes: int, op: str) -> SymmetricOp:
        """Begin the next operation, which needs `slot_bytes`. Later work of the stream may write to slots of peers.

        Raises:
            TransportError: a kernel of an earlier operation timed out, or a CUDA graph is being captured.
        """
        prefix = f"{op}: rank {self.backend.ranks[self.rank]}"
        if int(self._status_seen):
            raise TransportError(
                f"{prefix}: operation {int(self._status_seen)} of this group timed out waiting for a peer; its results "
                "and all later ones are wrong; restart the run"
            )
        if self.backend.is_capturing():
            raise TransportError(
                f"{prefix}: a CUDA graph is being captured; a replay would write the epoch of the capture to flags; "
                "use method p2p there"
            )
        if self._layout is None or self._layout.slot_bytes < slot_bytes:
            self._allocate(slot_bytes)
        elif self._epoch >= MAX_EPOCH and not self._open:
            self.backend.barrier()
            self._number_anew()
            self.backend.barrier()
        self._epoch += 1
        self._open += 1
        assert self._layout is not None
        operation = SymmetricOp(self, self._layout, self._epoch)
        # Before the kernels of this operation: beside a persistent grid, a waiting kernel might get no SM.
        if self._epoch > 2:
            acknowledgements = self._words(self.rank, self._layout.acknowledgements(self._epoch), self.size)
            self.wait_all(acknowledgements, self._epoch - 2)
        return operation

    def wait_all(self, flags: torch.Tensor, epoch: int) -> None:
        """Block the current stream until all `flags` of this rank have reached `epoch`."""
        self._wait_all(flags, epoch, self.status, self.backend.max_polls)

    def counters(self, epoch: int) -> torch.Tensor:
        """Counters of stored tiles of this rank for operation `epoch`, int32; 0 between operations."""
        return self._counters[epoch % 2]

    def staged_flags(self, epoch: int) -> torch.Tensor:
        """Flags of the chunks in `staging`, int32: a chunk is complete when its flag is `epoch`."""
        return self._staged_flags[epoch % 2]

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of this rank for chunks to send, after all copies from it.

        Later copies follow the present work, but not the GEMM that the caller enqueues next: they wait for its flags.
        """
        computing, copying, num_bytes = self.backend.computing, self.backend.copying, prod(shape) * dtype.itemsize
        computing.after(copying.mark())
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self.backend.device)
        copying.after(computing.mark())
        return self._staging[:num_bytes].view(dtype).view(*shape)

    def _allocate(self, slot_bytes: int) -> None:
        """Replace the arena by a larger one, on all ranks at the same operation. The old one must be idle."""
        assert not self._open, "the arena cannot grow while an operation uses it; begin the larger operation first"
        self.backend.barrier()
        self._views, self._addresses = [], torch.empty(0)
        layout = self._layout = ArenaLayout(self.size, slot_bytes)
        self._views = self.backend.map(layout.num_bytes)
        self._number_anew()
        # Loads the kernel. Loading waits for all streams, and a stream may later wait for a peer.
        self.wait_all(self._words(self.rank, layout.acknowledgements(0), self.size), self._epoch)
        bases = [view.data_ptr() for view in self._views]
        starts = [(layout.slot(epoch), layout.flags(epoch)) for epoch in (0, 1)]
        table = [[[base + start for base in bases] for start in both] for both in starts]
        self._addresses = torch.tensor(table, dtype=torch.int64, device=self.backend.device)
        self.backend.barrier()

    def _number_anew(self) -> None:
        """Let the next operation have epoch 1, on all ranks. No slot is in use."""
        assert self._layout is not None
        self._views[self.rank][self._layout.flags(0) :].zero_()
        self._staged_flags.zero_()
        self._epoch = 0

    def _words(self, peer: int, offset: int, count: int) -> torch.Tensor:
        return self._views[peer][offset : offset + 4 * count].view(torch.int32)

    def close(self) -> None:
        """Free all memory. Call it when no rank uses it any more."""
        self._views, self._layout = [], None
        self.tables.clear()
        self.backend.close()


class SymmetricOp:
    """The slots that one operation uses in the arenas of all ranks, from `begin` until `acknowledge`."""

    def __init__(self, transport: SymmetricTransport, layout: ArenaLayout, epoch: int) -> None:
        self.epoch = epoch
        self._transport, self._layout = transport, layout
        self.flags = self.flags_of(transport.rank)
        """Flags of this rank. The rank that copies a chunk sets its flag to `epoch`."""

    def flags_of(self, peer: int) -> torch.Tensor:
        """Flags of `peer`."""
        return self._transport._words(peer, self._layout.flags(self.epoch), self._layout.num_flags)

    def slot(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The slot of `peer` as a tensor."""
        start = self._layout.slot(self.epoch)
        stop = start + prod(shape) * dtype.itemsize
        return self._transport._views[peer][start:stop].view(dtype).view(*shape)

    def addresses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Device tables for kernels: the addresses of the slots and of the flags of all ranks, int64 `[R]` each."""
        slots, flags = self._transport._addresses[self.epoch % 2]
        return slots, flags

    def gather(self, shard: torch.Tensor, layout: ChunkLayout, mover: Mover = "push") -> torch.Tensor:
        """Start an all-gather of `shard` by copies and return the buffer of gathered rows.

        A chunk is valid when flag `owner * parts + part` is `epoch`; own chunks are valid on return. They arrive in the
        order of `tile_order.arrival_order`. On return all copies are enqueued: a later kernel may wait on all SMs.
        """
        transport, parts = self._transport, layout.chunks_per_rank
        assert parts <= MAX_PARTS
        backend, rank, size = transport.backend, transport.rank, transport.size
        rows_of = [self.slot(peer, (layout.num_rows, shard.shape[1]), shard.dtype) for peer in range(size)]
        own = slice(*layout.shard(rank))
        rows_of[rank][own].copy_(shard)
        for part in range(parts):
            backend.computing.write(self.flags, rank * parts + part, self.epoch)
        copying = backend.copying
        copying.after(backend.computing.mark())
        ready = self._layout.ready(self.epoch)
        if mover == "pull":
            self._write_at_peers(ready)
        for distance in range(1, size):
            following, preceding = (rank + distance) % size, (rank - distance) % size
            to, source, owner = {
                "push": (following, rank, rank),
                "pull": (rank, preceding, preceding),
                "ring": ((rank + 1) % size, rank, (rank + 1 - distance) % size),
            }[mover]
            if mover == "pull":
                copying.wait(transport._words(rank, ready, size), owner, self.epoch)
            for part in range(parts):
                rows = slice(*layout.rows(Chunk(owner, part)))
                if rows.start < rows.stop:
                    flag = owner * parts + part
                    if mover == "ring" and owner != rank:
                        copying.wait(self.flags, flag, self.epoch)
                    copying.copy(rows_of[to][rows], rows_of[source][rows])
                    copying.write(self.flags_of(to), flag, self.epoch)
        return rows_of[rank]

    def _write_at_peers(self, offset: int) -> None:
        """Enqueue the epoch in the word of this rank, of the `[R]` at `offset`, at all peers.

        By copies, and not on the computing stream: on the legacy default stream a copy to a peer starts after all work
        of both devices, also after a receive whose sender needs later work of this rank.
        """
        transport = self._transport
        for distance in range(1, transport.size):
            words = transport._words((transport.rank + distance) % transport.size, offset, transport.size)
            transport.backend.copying.write(words, transport.rank, self.epoch)

    def send_staged(self, staged: torch.Tensor, layout: ChunkLayout) -> None:
        """Copy chunks from `staged`, `[R owners, rows, N]`, to the receive buffers of their owners as they complete.

        Call it after the launch of the GEMM that completes them: a stream that waits delays the loading of modules, and
        with one hardware queue all later work.
        """
        transport, parts = self._transport, layout.chunks_per_rank
        backend, rank, size = transport.backend, transport.rank, transport.size
        staged_flags = transport.staged_flags(self.epoch)
        for distance in range(1, size):
            owner = (rank + distance) % size
            received = self.slot(owner, tuple(staged.shape), staged.dtype)[rank]
            for part in range(parts):
                rows = slice(*layout.rows_in_shard(Chunk(owner, part)))
                if rows.start < rows.stop:
                    backend.copying.wait(staged_flags, owner * parts + part, self.epoch)
                    backend.copying.copy(received[rows], staged[owner, rows])
                    backend.copying.write(self.flags_of(owner), rank * parts + part, self.epoch)

    def acknowledge(self) -> None:
        """Enqueue the acknowledgement at all ranks: later work of this rank does not read the slot."""
        transport, offset = self._transport, self._layout.acknowledgements(self.epoch)
        backend = transport.backend
        # Not by the queue of copies: a copy inside a device may need an SM, and the next GEMM may hold all SMs until
        # later copies of the queue arrive.
        backend.computing.write(transport._words(transport.rank, offset, transport.size), transport.rank, self.epoch)
        backend.copying.after(backend.computing.mark())
        self._write_at_peers(offset)
        transport._open -= 1
        transport._status_seen.copy_(transport.status, non_blocking=True)
