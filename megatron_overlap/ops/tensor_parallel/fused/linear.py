"""Method `fused`: linear layers whose GEMM kernels communicate over symmetric memory.

- All-gather: copy engines move the rows; each tile of the GEMM waits for its rows.
- Reduce-scatter: the GEMM stores its tiles in the memory of their owners; the owners add them.
- All-reduce: that reduce-scatter, then an all-gather of the sums.

Over several nodes kernels communicate inside a node, and messages pass between nodes (`ops.tensor_parallel.nodes`).

Source: Flux (arXiv 2406.06858) for the forward pass. Flux has no backward pass. Not yet run on several GPUs.
The first operation imports Triton, not this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.comm.symmetric.cuda import open_backend
from megatron_overlap.comm.symmetric.nodes import NodesTransport
from megatron_overlap.comm.symmetric.transport import SymmetricOp, SymmetricTransport, gathered_bytes
from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedKernels, FusedPlan
from megatron_overlap.ops.tensor_parallel.method import LinearMethod
from megatron_overlap.ops.tensor_parallel.nodes import NodesGather, NodesScatter
from megatron_overlap.ops.wgrad import Piece, WeightGradient
from megatron_overlap.schedules.gather_scatter import Nodes

FusedTransport = SymmetricTransport | NodesTransport[SymmetricTransport]
"""Symmetric memory of the ranks of a node, over several nodes beside messages between all ranks of the group."""


def inside_host(transport: FusedTransport) -> SymmetricTransport:
    """Return the symmetric memory that fused operations use inside a node."""
    return transport.inside if isinstance(transport, NodesTransport) else transport


def open_fused(
    group: dist.ProcessGroup,
    messages: Callable[[dist.ProcessGroup], Transport],
    *,
    timeout_s: float | None = None,
) -> FusedTransport | str:
    """Return the transport of fused operations in `group`, or the same reason on all ranks why there is none.

    Collective. `messages` opens the transport between nodes; called only if the group spans several nodes. `timeout_s`
    is as of `open_backend`.
    """
    opened = open_backend(group, timeout_s=timeout_s)
    if isinstance(opened, str):
        return opened
    from megatron_overlap.kernels.primitives import wait_all

    backend, nodes = opened
    inside = SymmetricTransport(backend, wait_all)
    return inside if nodes.num_nodes == 1 else NodesTransport(inside, messages(group), nodes)


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
        """One GEMM after the last row has arrived: every tile of the gradient needs all rows."""

        def add() -> None:
            self._wait_all()
            wgrad.add(self.full if dy is None else dy, self.full if x is None else x)

        self._launches.append(add)

    def rows(self, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of all rows, in `out` if given; complete after `finish`."""
        out = torch.empty_like(self.full) if out is None else out

        def copy_rows() -> None:
            self._wait_all()
            out.copy_(self.full)

        self._launches.append(copy_rows)
        return out

    def advance(self) -> bool:
        return False

    def finish(self) -> None:
        # The launches refer to this object: without them its tensors live no longer than their users.
        launches, self._launches = self._launches, []
        for launch in launches:
            launch()
        # Later kernels do not read the gathered rows.
        self._op.acknowledge()

    def _launch_matmul(self, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        from megatron_overlap.kernels.ag_gemm import ag_gemm

        config, waits = self._kernels.config(self.full, b, out), _waits(self._transport, self._op)
        tiles, programs = self._kernels.table(self._layout, "arrival", config.block_m), self._kernels.programs
        ag_gemm(self.full, b, out, bias, tiles=tiles, waits=waits, config=config, num_programs=programs)

    def _wait_all(self) -> None:
        num_flags = self._transport.size * self._layout.chunks_per_rank
        self._transport.wait_all(self._op.flags[:num_flags], self._op.epoch)


class IntraNodeScatter:
    """A GEMM whose tiles are stored in the memory of their owners, launched by the constructor; see `Reduce`."""

    def __init__(
        self, transport: SymmetricTransport, a: torch.Tensor, b: torch.Tensor, op: str, plan: FusedPlan
    ) -> None:
        from megatron_overlap.kernels.gemm_rs import Owners, gemm_to_owners

        self._transport, self._kernels = transport, FusedKernels(transport, plan)
        self._layout = plan.layout(a.shape[0], transport.size)
        slot_rows = -(-a.shape[0] // transport.size)
        self._recv_shape = (transport.size, slot_rows, b.shape[1])
        self._dtype = a.dtype
        self.num_bytes = (a.shape[0] - self._layout.shard_rows(transport.rank)) * b.shape[1] * a.itemsize
        slot_bytes = gathered_bytes(a.shape[0], transport.size, b.shape[1], a.itemsize)
        self._op = transport.begin(slot_bytes, op)
        stages = plan.stores == "staged" or not transport.backend.peer_atomics
        staged = transport.staging(self._recv_shape, a.dtype) if stages else None
        recv_buffers, flags = self._op.addresses() if staged is None else self._staged_addresses(staged)
        config = self._kernels.config(a, b)
        epoch, parts = self._op.epoch, self._layout.chunks_per_rank
        owners = Owners(recv_buffers, flags, transport.counters(epoch), transport.rank, parts, slot_rows, epoch)
        tiles = self._kernels.table(self._layout, "departure", config.block_m)
        gemm_to_owners(a, b, tiles=tiles, owners=owners, config=config, num_programs=self._kernels.programs)
        if staged is not None:
            self._op.send_staged(staged, self._layout)

    def _staged_addresses(self, staged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return addresses that redirect the tiles of other owners and their flags to `staged`, `[R owners, rows, N]`.

        The kernel stores a tile in block `rank` at `recv_buffers[owner]` and sets `flags[owner] + rank * parts + part`.
        """
        transport, rank, parts = self._transport, self._transport.rank, self._layout.chunks_per_rank
        num_slot_bytes = staged[0].nbytes
        staged_flags = transport.staged_flags(self._op.epoch)
        own = self._op.slot(rank, self._recv_shape, self._dtype)
        places = staged.data_ptr(), own.data_ptr(), self._op.flags.data_ptr()
        key = ("staged", *places, num_slot_bytes, parts, self._op.epoch % 2)
        if key not in transport.tables:
            recv_buffers = [staged.data_ptr() + (owner - rank) * num_slot_bytes for owner in range(transport.size)]
            flags = [staged_flags.data_ptr() + 4 * (owner - rank) * parts for owner in range(transport.size)]
            recv_buffers[rank], flags[rank] = own.data_ptr(), self._op.flags.data_ptr()
            transport.tables[key] = torch.tensor([recv_buffers, flags], device=staged.device)
        addresses = transport.tables[key]
        return addresses[0], addresses[1]

    def finish(self) -> torch.Tensor:
        from megatron_overlap.kernels.gemm_rs import SUM_ROWS, sum_received

        transport = self._transport
        received = self._op.slot(transport.rank, self._recv_shape, self._dtype)
        out = received.new_empty(self._layout.shard_rows(transport.rank), self._recv_shape[2])
        tiles, waits = self._kernels.table(self._layout, "own", SUM_ROWS), _waits(transport, self._op)
        parts, programs = self._layout.chunks_per_rank, transport.backend.num_sms * 4
        sum_received(received, out, tiles=tiles, waits=waits, parts=parts, num_programs=programs)
        self._op.acknowledge()
        return out


def _waits(transport: SymmetricTransport, op: SymmetricOp) -> Any:
    from megatron_overlap.kernels.launch import Waits

    return Waits(op.flags, op.epoch, transport.status, transport.backend.max_polls)


class FusedMethod(LinearMethod):
    """Fused kernels over symmetric memory. Pass it as `group` of a linear layer.

    Args:
        plan: how bytes are moved and tiles computed; the same on every rank. None uses `FusedPlan()`.
    """

    def __init__(self, transport: FusedTransport, plan: FusedPlan | None = None) -> None:
        self.transport, self.plan = transport, plan or FusedPlan()
        self.rank, self.size, self.buffer_pool = transport.rank, transport.size, transport.buffer_pool

    @staticmethod
    def unsupported_reason(x: torch.Tensor, num_rows: int, num_ranks: int) -> str | None:
        """Return why one call cannot use the fused kernels; None if it can."""
        if x.device.type != "cuda":
            return f"fused kernels need CUDA, not {x.device.type}"
        if x.dtype not in (torch.bfloat16, torch.float16):
            return f"fused kernels compute in bf16 and fp16, not {x.dtype}"
        if num_rows < num_ranks:
            return f"{num_rows} rows are fewer than {num_ranks} ranks"
        return None

    def gather(self, shard: torch.Tensor, num_rows: int, op: str) -> IntraNodeGather | NodesGather:
        if isinstance(self.transport, NodesTransport):
            return NodesGather(*self._over_nodes(self.transport), shard, num_rows, op)
        return IntraNodeGather(self.transport, shard, num_rows, op, self.plan)

    def scatter(
        self, a: torch.Tensor, b: torch.Tensor, op: str, meanwhile: Callable[[], bool] | None = None
    ) -> IntraNodeScatter | NodesScatter:
        if isinstance(self.transport, NodesTransport):
            return NodesScatter(*self._over_nodes(self.transport), a, b, op)
        return IntraNodeScatter(self.transport, a, b, op, self.plan)

    def _over_nodes(self, transport: NodesTransport[SymmetricTransport]) -> tuple[FusedMethod, Transport, Nodes]:
        return FusedMethod(transport.inside, self.plan), transport.between, transport.nodes

    def all_reduce(self, a: torch.Tensor, b: torch.Tensor, op: str, pieces: Sequence[Piece] = ()) -> FusedAllReduce:
        return FusedAllReduce(self, a, b, op, pieces)


class FusedAllReduce:
    """A fused GEMM + reduce-scatter and an all-gather of the sums; see `Reduce`."""

    def __init__(self, method: FusedMethod, a: torch.Tensor, b: torch.Tensor, op: str, pieces: Sequence[Piece]) -> None:
        scatter = method.scatter(a, b, op)
        self._gather = method.gather(scatter.finish(), a.shape[0], op)
        self._out = self._gather.rows()
        self.num_bytes = scatter.num_bytes + self._gather.num_bytes
        for piece in pieces:
            piece()

    def finish(self) -> torch.Tensor:
        self._gather.finish()
        return self._out
