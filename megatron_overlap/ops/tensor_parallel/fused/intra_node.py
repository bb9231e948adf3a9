"""Fused all-gather and reduce-scatter on one node: kernels over symmetric memory.

The first operation imports Triton, not this module.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron_overlap.comm.symmetric.transport import SymmetricOp, SymmetricTransport, gathered_bytes
from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedKernels, FusedPlan
from megatron_overlap.ops.wgrad import WeightGradient


class IntraNodeGather:
    """An all-gather by copies, started by the constructor; see `Gather`. `finish` launches the kernels on its rows."""

    def __init__(
        self, transport: SymmetricTransport, shard: torch.Tensor, num_rows: int, op: str, plan: FusedPlan
    ) -> None:
        self._transport, self._kernels = transport, FusedKernels(transport, plan)
        self._layout = plan.layout(num_rows, transport.size)
        slot_bytes = gathered_bytes(num_rows, transport.size, shard.shape[1], shard.itemsize)
        self._op = transport.begin(slot_bytes, op)
        self.full = self._op.gather(shard, self._layout, plan.mover)
        self.num_bytes = (transport.size - 1) * shard.nbytes
        self._launches: list[Callable[[], object]] = []

    def matmul(
        self, b: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Gather.matmul`. Tiles run in order of arrival; the result is in `out` if given."""
        out = self.full.new_empty(self.full.shape[0], b.shape[1]) if out is None else out
        self._launches.append(partial(self._launch_matmul, b, bias, out))
        return out

    def wgrad(self, wgrad: WeightGradient, *, dy: torch.Tensor | None = None, x: torch.Tensor | None = None) -> None:
        self._launches.append(partial(self._launch_wgrad, dy, x, *wgrad.accumulator()))

    def rows(self, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of all rows, in `out` if given; complete after `finish`."""
        out = torch.empty_like(self.full) if out is None else out
        self._launches.append(partial(self._copy_rows, out))
        return out

    def advance(self) -> bool:
        return False

    def finish(self) -> None:
        for launch in self._launches:
            launch()
        # Later kernels do not read the gathered rows.
        self._op.acknowledge()

    def _launch_matmul(self, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        from megatron_overlap.kernels.ag_gemm import ag_gemm

        config = self._kernels.config(self.full, b, out)
        tiles = self._kernels.table(self._layout, "arrival", config.block_m)
        programs = self._kernels.programs
        ag_gemm(
            self.full,
            b,
            out,
            bias,
            tiles=tiles,
            waits=_waits(self._transport, self._op),
            config=config,
            num_programs=programs,
        )

    def _launch_wgrad(self, dy: torch.Tensor | None, x: torch.Tensor | None, out: torch.Tensor, add: bool) -> None:
        from megatron_overlap.kernels.wgrad import wgrad

        if x is not None and x.stride(-1) != 1:
            x = x.contiguous()
        wgrad(
            self.full if dy is None else dy,
            self.full if x is None else x,
            out,
            chunks=self._kernels.table(self._layout, "arrival", None),
            waits=_waits(self._transport, self._op),
            config=self._kernels.wgrad_config(out),
            num_programs=self._kernels.programs,
            add=add,
        )

    def _copy_rows(self, out: torch.Tensor) -> None:
        num_flags = self._transport.size * self._layout.chunks_per_rank
        self._transport.wait_all(self._op.flags[:num_flags], self._op.epoch)
        out.copy_(self.full)


class IntraNodeScatter:
    """A GEMM whose tiles are stored in the memory of their owners, launched by the constructor; see `Scatter`."""

    def __init__(
        self, transport: SymmetricTransport, a: torch.Tensor, b: torch.Tensor, op: str, plan: FusedPlan
    ) -> None:
        from megatron_overlap.kernels.gemm_rs import Owners, gemm_to_owners

        self._transport, self._kernels = transport, FusedKernels(transport, plan)
        self._layout = plan.layout(a.shape[0], transport.size)
        slot_rows = -(-a.shape[0] // transport.size)
        self._recv_shape = (transport.size, slot_rows, b.shape[1])
        self._dtype = a.dtype
        slot_bytes = gathered_bytes(a.shape[0], transport.size, b.shape[1], a.itemsize)
        self._op = transport.begin(slot_bytes, op)
        staged = None
        if plan.stores == "staged":
            staged = transport.staging(transport.size * slot_rows * b.shape[1] * a.itemsize)
            staged = staged.view(a.dtype).view(*self._recv_shape)
        recv_buffers, flags = self._op.addresses() if staged is None else self._staged_addresses(staged)
        config = self._kernels.config(a, b)
        owners = Owners(
            recv_buffers=recv_buffers,
            flags=flags,
            counters=transport.counters(self._op.epoch),
            rank=transport.rank,
            parts=self._layout.chunks_per_rank,
            slot_rows=slot_rows,
            epoch=self._op.epoch,
        )
        tiles = self._kernels.table(self._layout, "departure", config.block_m)
        gemm_to_owners(a, b, tiles=tiles, owners=owners, config=config, num_programs=self._kernels.programs)
        if staged is not None:
            self._op.send_staged(staged, self._layout)

    def _staged_addresses(self, staged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return addresses that redirect the tiles of other owners to `staged`, `[R owners, rows, N]`.

        The kernel stores a tile in block `rank` of the receive buffer at `recv_buffers[owner]` and sets
        `flags[owner] + rank * parts + part`. With the returned addresses, both are in staging memory: block `owner` and
        its flags.
        """
        transport, rank, parts = self._transport, self._transport.rank, self._layout.chunks_per_rank
        num_slot_bytes = staged[0].nbytes
        staged_flags = transport.staged_flags(self._op.epoch)
        key = ("staged", staged.data_ptr(), num_slot_bytes, parts, self._op.epoch % 2, self._op.flags.data_ptr())
        if key not in transport.tables:
            recv_buffers = [staged.data_ptr() + (owner - rank) * num_slot_bytes for owner in range(transport.size)]
            flags = [staged_flags.data_ptr() + 4 * (owner - rank) * parts for owner in range(transport.size)]
            own = self._op.slot(rank, self._recv_shape, self._dtype)
            recv_buffers[rank], flags[rank] = own.data_ptr(), self._op.flags.data_ptr()
            transport.tables[key] = torch.tensor([recv_buffers, flags], device=staged.device)
        addresses = transport.tables[key]
        return addresses[0], addresses[1]

    def finish(self) -> torch.Tensor:
        from megatron_overlap.kernels.gemm_rs import SUM_ROWS, sum_received

        transport = self._transport
        received = self._op.slot(transport.rank, self._recv_shape, self._dtype)
        out = received.new_empty(self._layout.shard_rows(transport.rank), self._recv_shape[2])
        sum_received(
            received,
            out,
            tiles=self._kernels.table(self._layout, "own", SUM_ROWS),
            waits=_waits(transport, self._op),
            parts=self._layout.chunks_per_rank,
            num_programs=transport.backend.num_sms * 4,
        )
        self._op.acknowledge()
        return out


def _waits(transport: SymmetricTransport, op: SymmetricOp) -> Any:
    from megatron_overlap.kernels.launch import Waits

    return Waits(op.flags, op.epoch, transport.status, transport.backend.max_polls)
