"""Fused all-gather and reduce-scatter over several nodes: kernels inside a node, messages between nodes.

A gather receives the rows of one rail (`schedules.hierarchical`); each row reaches a node once. It then runs one gather
inside the node for the rows of each node, own rows first. A scatter computes the rows of other nodes first. For each
node it runs a GEMM + reduce-scatter inside this node and sends the sums along the rail during the next GEMM.

Source: Flux (arXiv 2406.06858) for starting inter-node messages first. Not yet run on a GPU.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.cuda import CudaBackend, probe_symmetric_memory
from megatron_overlap.comm.symmetric.transport import SymmetricTransport
from megatron_overlap.comm.transport import Transfer, Transport
from megatron_overlap.ops.tensor_parallel.fused.intra_node import IntraNodeGather, IntraNodeScatter
from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedPlan
from megatron_overlap.ops.wgrad import WeightGradient
from megatron_overlap.schedules import ChunkLayout
from megatron_overlap.schedules.hierarchical import Nodes


class NodesTransport:
    """Symmetric memory of the ranks of this node, and messages between all ranks of the group."""

    def __init__(self, inside: SymmetricTransport, between: Transport, nodes: Nodes) -> None:
        self.inside, self.between, self.nodes = inside, between, nodes
        self.rank, self.size = between.rank, between.size

    @property
    def buffer_pool(self) -> BufferPool:
        """Buffers of messages and operations."""
        return self.between.buffer_pool

    @property
    def num_bytes(self) -> int:
        """See `SymmetricTransport.num_bytes`."""
        return self.inside.num_bytes

    @property
    def bound_bytes(self) -> int:
        """See `SymmetricTransport.bound_bytes`; counts the rows of one node, not of the whole group."""
        return self.inside.bound_bytes

    def close(self) -> None:
        """Free the symmetric memory. The caller owns `between`."""
        self.inside.close()


FusedTransport = SymmetricTransport | NodesTransport


def inside_host(transport: FusedTransport) -> SymmetricTransport:
    """Return the symmetric memory that fused operations use inside a node."""
    return transport.inside if isinstance(transport, NodesTransport) else transport


def open_fused(group: dist.ProcessGroup, messages: Callable[[dist.ProcessGroup], Transport]) -> FusedTransport | str:
    """Open the transport of fused operations between the ranks of `group`. Collective.

    Args:
        group: ranks with a CUDA device each.
        messages: opens the transport between nodes; called only if the group spans several nodes.

    Returns:
        The transport, or why the group cannot have one. All ranks return the same reason.
    """
    nodes = probe_symmetric_memory(group)
    if isinstance(nodes, str):
        return nodes
    from megatron_overlap.kernels.primitives import wait_all

    host_group = HostGroup(group, nodes.members(nodes.node(dist.get_rank(group))))
    inside = SymmetricTransport(CudaBackend(host_group), wait_all)
    return inside if nodes.num_nodes == 1 else NodesTransport(inside, messages(group), nodes)


class NodesGather:
    """An all-gather over several nodes; see `Gather`. `finish` computes node by node as rows arrive."""

    def __init__(self, transport: NodesTransport, shard: torch.Tensor, num_rows: int, op: str, plan: FusedPlan) -> None:
        self._transport, self._shard, self._num_rows = transport, shard, num_rows
        self._op, self._plan = op, plan
        nodes, layout = transport.nodes, ChunkLayout(num_rows, transport.size)
        self._schedule = nodes.gather(transport.rank)
        sizes = [layout.shard_rows(message.recv.owner) for message in self._schedule.messages]
        received = transport.buffer_pool.take("rail gathered", (sum(sizes), shard.shape[1]), shard)
        self._received = received.split(sizes)
        transfers = [
            Transfer(*each) for each in zip(self._schedule.messages, [shard] * len(sizes), self._received, strict=True)
        ]
        self._p2p_work = transport.between.begin(transfers, op)
        self.num_bytes = (transport.size - 1) * shard.nbytes
        self._consumers: list[Callable[[IntraNodeGather, slice], object]] = []
        self._last: list[Callable[[], object]] = []

    @property
    def full(self) -> torch.Tensor:
        """Not available: the buffer holds the gathered rows of one node at a time."""
        raise NotImplementedError("a gather over several nodes has no buffer of all rows")

    def matmul(self, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self._shard.new_empty(self._num_rows, b.shape[1])
        self._consumers.append(lambda gather, rows: gather.matmul(b, bias, out=out[rows]))
        return out

    def wgrad(self, wgrad: WeightGradient, *, dy: torch.Tensor | None = None, x: torch.Tensor | None = None) -> None:
        out, add = wgrad.accumulator()
        # Without the accumulator of the caller, the sum over nodes is in fp32 and rounded once.
        total = out if add else torch.zeros(out.shape, dtype=torch.float32, device=out.device)

        def consume(gather: IntraNodeGather, rows: slice) -> None:
            dy_rows, x_rows = (None if operand is None else operand[rows] for operand in (dy, x))
            gather.wgrad_into(total, True, dy=dy_rows, x=x_rows)

        self._consumers.append(consume)
        if not add:
            self._last.append(lambda: out.copy_(total))

    def rows(self) -> torch.Tensor:
        """Return a copy of all rows, complete after `finish`."""
        out = self._shard.new_empty(self._num_rows, self._shard.shape[1])
        self._consumers.append(lambda gather, rows: gather.rows(out=out[rows]))
        return out

    def advance(self) -> bool:
        return False

    def finish(self) -> None:
        transport, nodes = self._transport, self._transport.nodes
        for work in self._schedule.work:
            for message in work.needs:
                self._p2p_work.wait(message)
            node = work.chunks[0].owner
            start, stop = nodes.rows(self._num_rows, node)
            shard = self._received[work.needs[0]] if work.needs else self._shard
            gather = IntraNodeGather(transport.inside, shard, stop - start, self._op, self._plan)
            for consume in self._consumers:
                consume(gather, slice(start, stop))
            gather.finish()
        self._p2p_work.wait_all()
        for finish in self._last:
            finish()


class NodesScatter:
    """A GEMM + reduce-scatter over several nodes; see `Scatter`."""

    def __init__(self, transport: NodesTransport, a: torch.Tensor, b: torch.Tensor, op: str, plan: FusedPlan) -> None:
        nodes, rank = transport.nodes, transport.rank
        self._node = nodes.node(rank)
        schedule = nodes.scatter(rank)
        layout, width = ChunkLayout(a.shape[0], transport.size), b.shape[1]
        sizes = [layout.shard_rows(message.send.owner) for message in schedule.messages]
        partials = transport.buffer_pool.take("rail partial", (sum(sizes), width), a).split(sizes)
        own = layout.shard_rows(rank)
        received = transport.buffer_pool.take("rail received", (len(sizes), own, width), a)
        transfers = [Transfer(*each) for each in zip(schedule.messages, partials, received, strict=True)]
        self._p2p_work = transport.between.begin(transfers, op)
        # By source node: the sum is in the order of the nodes, independent of the order of arrival.
        self._parts = {nodes.node(each.source): part for each, part in zip(schedule.messages, received, strict=True)}
        computed = [work.chunks[0].owner for work in schedule.work if work.chunks]
        for number, node in enumerate(computed):
            rows = slice(*nodes.rows(a.shape[0], node))
            # One operation inside the node at a time: symmetric memory has two slots.
            part = IntraNodeScatter(transport.inside, a[rows], b, op, plan).finish()
            if number < len(partials):
                partials[number].copy_(part)
                self._p2p_work.mark_ready(number + 1)
            else:
                self._parts[self._node] = part

    def finish(self) -> torch.Tensor:
        """See `Scatter.finish`. Messages carry sums in the dtype of the operands; additions are in fp32."""
        for message in range(len(self._parts) - 1):
            self._p2p_work.wait(message)
        own = self._parts[self._node]
        total = torch.zeros_like(own, dtype=torch.float32)
        for node in sorted(self._parts):
            total += self._parts[node]
        self._p2p_work.wait_all()
        return total.to(own.dtype)
