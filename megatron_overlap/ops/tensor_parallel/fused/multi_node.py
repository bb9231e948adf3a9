"""Fused halves of an op for a group on several hosts: kernels over symmetric memory inside a host, messages between.

A gather brings the rows of one rail (`schedules.hierarchical`) over the network, each row once for every host, and is
then,
for each host whose rows are there, a gather inside the own host: own host's rows first. A scatter computes other
hosts' rows first, each a GEMM + reduce-scatter inside the own host, whose sums travel along the rail under what is
computed next.

The same interface as `ops.tensor_parallel.fused.intra_node`, but for one thing: what a gather's consumers return is
complete after `done`.
Source: Flux (arXiv 2406.06858) starts the slow hop first; the rest is of our own design. Not run on GPUs yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.members import Members
from megatron_overlap.comm.symmetric.cuda import CudaFabric, survey
from megatron_overlap.comm.symmetric.transport import SymmetricTransport
from megatron_overlap.comm.transport import Transfer, Transport
from megatron_overlap.ops.tensor_parallel.fused.intra_node import Gather, Scatter
from megatron_overlap.ops.tensor_parallel.fused.plan import FusedPlan
from megatron_overlap.schedules import ChunkLayout
from megatron_overlap.schedules.hierarchical import Nodes


class NodesTransport:
    """What moves bytes for a group on several hosts.

    Args:
        inside: symmetric memory of the ranks on this host.
        between: messages between all ranks of the group.
        nodes: how the group lies on hosts.
    """

    def __init__(self, inside: SymmetricTransport, between: Transport, nodes: Nodes) -> None:
        self.inside, self.between, self.nodes = inside, between, nodes
        self.rank, self.size = between.rank, between.size

    @property
    def buffer_pool(self) -> BufferPool:
        """Buffers of messages and ops."""
        return self.between.buffer_pool

    @property
    def num_bytes(self) -> int:
        """See `SymmetricTransport.num_bytes`."""
        return self.inside.num_bytes

    @property
    def bound_bytes(self) -> int:
        """See `SymmetricTransport.bound_bytes`: of what one host's ranks own, not of the whole group's rows."""
        return self.inside.bound_bytes

    def close(self) -> None:
        """Lets the symmetric memory go; the messages' transport has another owner."""
        self.inside.close()


FusedTransport = SymmetricTransport | NodesTransport


def inside_host(transport: FusedTransport) -> SymmetricTransport:
    """What fused ops of `transport` run over inside a host."""
    return transport.inside if isinstance(transport, NodesTransport) else transport


def open_fused(group: dist.ProcessGroup, messages: Callable[[dist.ProcessGroup], Transport]) -> FusedTransport | str:
    """What fused ops of `group` run over, or what speaks against it, the same on all ranks, which all call this.

    Args:
        group: ranks with a CUDA device each.
        messages: makes the transport between hosts; called only where the group is on several.
    """
    nodes = survey(group)
    if isinstance(nodes, str):
        return nodes
    from megatron_overlap.kernels.wait import wait_all

    members = Members(group, nodes.members(nodes.node(dist.get_rank(group))))
    inside = SymmetricTransport(CudaFabric(members), wait_all)
    return inside if nodes.num_nodes == 1 else NodesTransport(inside, messages(group), nodes)


def open_gather(
    transport: FusedTransport, shard: torch.Tensor, num_rows: int, op: str, plan: FusedPlan
) -> Gather | NodesGather:
    """Starts an all-gather of `shard` (contiguous) over the whole group."""
    kind = NodesGather if isinstance(transport, NodesTransport) else Gather
    return kind(transport, shard, num_rows, op, plan)  # type: ignore[arg-type]


def open_scatter(
    transport: FusedTransport, a: torch.Tensor, b: torch.Tensor, op: str, plan: FusedPlan
) -> Scatter | NodesScatter:
    """Starts `a @ b`, whose rows are summed at their owners, over the whole group."""
    kind = NodesScatter if isinstance(transport, NodesTransport) else Scatter
    return kind(transport, a, b, op, plan)  # type: ignore[arg-type]


class NodesGather:
    """As `fused_parts.Gather`; consumers run in `done`, host by host, as rows arrive."""

    def __init__(self, transport: NodesTransport, shard: torch.Tensor, num_rows: int, op: str, plan: FusedPlan) -> None:
        self._transport, self._shard, self._num_rows = transport, shard, num_rows
        self._op, self._plan = op, plan
        nodes, layout = transport.nodes, ChunkLayout(num_rows, transport.size)
        self._schedule = nodes.gather(transport.rank)
        sizes = [layout.shard_rows(message.recv.owner) for message in self._schedule.messages]
        landing = transport.buffer_pool.take("rail gathered", (sum(sizes), shard.shape[1]), shard)
        self._landed = landing.split(sizes)
        transfers = [
            Transfer(*each) for each in zip(self._schedule.messages, [shard] * len(sizes), self._landed, strict=True)
        ]
        self._p2p_work = transport.between.begin(transfers, op)
        self._consumers: list[Callable[[Gather, slice], object]] = []
        self._last: list[Callable[[], object]] = []

    def gemm(self, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`gathered @ b + bias`."""
        out = self._shard.new_empty(self._num_rows, b.shape[1])
        self._consumers.append(lambda gather, rows: gather.gemm(b, bias, out=out[rows]))
        return out

    def weight_gradient(
        self, dy: torch.Tensor | None, x: torch.Tensor | None, w: torch.Tensor, main_grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """`dy.T @ x` where one of them (None) is what is gathered: into `main_grad`, or as a gradient of its own."""

        def some(operand: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
            return None if operand is None else operand[rows]

        # Summed over hosts in fp32 before it is rounded once.
        total = torch.zeros(w.shape, dtype=torch.float32, device=w.device) if main_grad is None else main_grad
        self._consumers.append(lambda gather, rows: gather.weight_gradient(some(dy, rows), some(x, rows), w, total))
        if main_grad is not None:
            return None
        out = torch.empty_like(w, memory_format=torch.contiguous_format)
        self._last.append(lambda: out.copy_(total))
        return out

    def rows(self) -> torch.Tensor:
        """All rows, in memory of their own."""
        out = self._shard.new_empty(self._num_rows, self._shard.shape[1])
        self._consumers.append(lambda gather, rows: gather.rows(out=out[rows]))
        return out

    def done(self) -> None:
        """Runs the consumers over each host's rows, in the order in which they arrive."""
        transport, nodes = self._transport, self._transport.nodes
        for work in self._schedule.work:
            for message in work.needs:
                self._p2p_work.wait(message)
            node = work.chunks[0].owner
            start, stop = nodes.rows(self._num_rows, node)
            shard = self._landed[work.needs[0]] if work.needs else self._shard
            gather = Gather(transport.inside, shard, stop - start, self._op, self._plan)
            for consume in self._consumers:
                consume(gather, slice(start, stop))
            gather.done()
        self._p2p_work.wait_all()
        for finish in self._last:
            finish()


class NodesScatter:
    """As `fused_parts.Scatter`."""

    def __init__(self, transport: NodesTransport, a: torch.Tensor, b: torch.Tensor, op: str, plan: FusedPlan) -> None:
        nodes, rank = transport.nodes, transport.rank
        self._node = nodes.node(rank)
        schedule = nodes.scatter(rank)
        layout, width = ChunkLayout(a.shape[0], transport.size), b.shape[1]
        sizes = [layout.shard_rows(message.send.owner) for message in schedule.messages]
        leaving = transport.buffer_pool.take("rail partial", (sum(sizes), width), a).split(sizes)
        own = layout.shard_rows(rank)
        landing = transport.buffer_pool.take("rail landing", (len(sizes), own, width), a)
        transfers = [Transfer(*each) for each in zip(schedule.messages, leaving, landing, strict=True)]
        self._p2p_work = transport.between.begin(transfers, op)
        # Whose partial sums land where: sums are made in the order of the hosts, whatever came first.
        self._parts = {nodes.node(each.source): part for each, part in zip(schedule.messages, landing, strict=True)}
        computed = [work.chunks[0].owner for work in schedule.work if work.chunks]
        for number, node in enumerate(computed):
            rows = slice(*nodes.rows(a.shape[0], node))
            # One op inside the host at a time: its sum is what travels, and the next op needs the other half.
            part = Scatter(transport.inside, a[rows], b, op, plan).sum()
            if number < len(leaving):
                leaving[number].copy_(part)
                self._p2p_work.mark_ready(number + 1)
            else:
                self._parts[self._node] = part

    def sum(self) -> torch.Tensor:
        """Own rows of the sum over ranks: of sums inside hosts, which travelled in the inputs' dtype, in fp32."""
        for message in range(len(self._parts) - 1):
            self._p2p_work.wait(message)
        own = self._parts[self._node]
        total = torch.zeros_like(own, dtype=torch.float32)
        for node in sorted(self._parts):
            total += self._parts[node]
        self._p2p_work.wait_all()
        return total.to(own.dtype)
