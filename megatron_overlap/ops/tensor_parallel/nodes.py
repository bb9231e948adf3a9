"""All-gather and reduce-scatter over several nodes: a method inside each node, messages between nodes.

A gather receives the rows of one rail (`schedules.hierarchical`); each row reaches a node once. It then runs one gather
inside the node for the rows of each node, own rows first. A scatter computes the rows of other nodes first. For each
node it runs a GEMM + reduce-scatter inside this node and sends the sums along the rail during the next GEMM.

Source: Flux (arXiv 2406.06858) for starting inter-node messages first. Not yet run on a GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_overlap.comm.transport import Transfer, Transport
from megatron_overlap.ops.tensor_parallel.method import Gather, LinearMethod, Reduce
from megatron_overlap.ops.wgrad import Piece, WeightGradient, add_terms
from megatron_overlap.schedules import ChunkLayout
from megatron_overlap.schedules.gather_scatter import Nodes


class NodesMethod(LinearMethod):
    """Method `inside` each node, messages `between` nodes, and method `reduces` for all-reduces of all ranks."""

    def __init__(self, inside: LinearMethod, between: Transport, nodes: Nodes, reduces: LinearMethod) -> None:
        self._over_nodes, self._reduces = (inside, between, nodes), reduces
        self.rank, self.size, self.buffer_pool = between.rank, between.size, between.buffer_pool

    def gather(self, shard: torch.Tensor, num_rows: int, op: str) -> Gather:
        return NodesGather(*self._over_nodes, shard, num_rows, op)

    def scatter(self, a: torch.Tensor, b: torch.Tensor, op: str, meanwhile: Callable[[], bool] | None = None) -> Reduce:
        return NodesScatter(*self._over_nodes, a, b, op, meanwhile)

    def all_reduce(self, a: torch.Tensor, b: torch.Tensor, op: str, pieces: Sequence[Piece] = ()) -> Reduce:
        return self._reduces.all_reduce(a, b, op, pieces)


class NodesGather:
    """An all-gather over several nodes; see `Gather`. `finish` computes node by node as rows arrive.

    The arguments are those of `NodesMethod` and of `LinearMethod.gather`.
    """

    def __init__(
        self, inside: LinearMethod, between: Transport, nodes: Nodes, shard: torch.Tensor, num_rows: int, op: str
    ) -> None:
        self._inside, self._nodes, self._shard, self._num_rows, self._op = inside, nodes, shard, num_rows, op
        layout = ChunkLayout(num_rows, between.size)
        self._schedule = nodes.gather(between.rank)
        sizes = [layout.shard_rows(message.recv.owner) for message in self._schedule.messages]
        received = between.buffer_pool.take("rail gathered", (sum(sizes), shard.shape[1]), shard)
        self._received = received.split(sizes)
        transfers = [
            Transfer(*each) for each in zip(self._schedule.messages, [shard] * len(sizes), self._received, strict=True)
        ]
        self._p2p_work = between.begin(transfers, op)
        self._p2p_work.mark_ready(1)  # the first message before all GEMMs: links between nodes are the slowest
        self.num_bytes = (between.size - 1) * shard.nbytes
        self._consumers: list[Callable[[Any, slice], object]] = []
        # Of the rows of this node.
        self._own = slice(*nodes.rows(num_rows, nodes.node(between.rank)))
        self._first = self._begin(shard, self._own) if inside.concurrent else None

    def _begin(self, shard: torch.Tensor, rows: slice) -> Gather:
        return self._inside.gather(shard, rows.stop - rows.start, self._op)

    def _consume(self, consumer: Callable[[Any, slice], object]) -> None:
        self._consumers.append(consumer)
        if self._first is not None:
            consumer(self._first, self._own)

    def matmul(
        self, b: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        product = self._shard.new_empty(self._num_rows, b.shape[1]) if out is None else out
        self._consume(lambda gather, rows: gather.matmul(b, bias, out=product[rows]))
        return product

    def wgrad(self, wgrad: WeightGradient, *, dy: torch.Tensor | None = None, x: torch.Tensor | None = None) -> None:
        def consume(gather: Gather, rows: slice) -> None:
            dy_rows, x_rows = (None if operand is None else operand[rows] for operand in (dy, x))
            gather.wgrad(wgrad, dy=dy_rows, x=x_rows)

        wgrad.start_in_fp32()
        self._consume(consume)

    def rows(self) -> torch.Tensor:
        """A copy of all rows, complete after `finish`; for a method inside the node whose gather has `rows`."""
        out = self._shard.new_empty(self._num_rows, self._shard.shape[1])
        self._consume(lambda gather, rows: gather.rows(out=out[rows]))
        return out

    def advance(self) -> bool:
        return self._first is not None and self._first.advance()

    def finish(self) -> None:
        for number, work in enumerate(self._schedule.work):
            self._p2p_work.mark_ready(number + 1)
            for message in work.needs:
                self._p2p_work.wait(message)
            gather = None if number else self._first
            if gather is None:
                rows = slice(*self._nodes.rows(self._num_rows, work.chunks[0].owner))
                gather = self._begin(self._received[work.needs[0]] if work.needs else self._shard, rows)
                for consume in self._consumers:
                    consume(gather, rows)
            gather.finish()
        self._p2p_work.wait_all()


class NodesScatter:
    """A GEMM + reduce-scatter over several nodes; see `Reduce`.

    The arguments are those of `NodesMethod` and of `LinearMethod.scatter`.
    """

    def __init__(
        self,
        inside: LinearMethod,
        between: Transport,
        nodes: Nodes,
        a: torch.Tensor,
        b: torch.Tensor,
        op: str,
        meanwhile: Callable[[], bool] | None = None,
    ) -> None:
        schedule = nodes.scatter(between.rank)
        layout, width = ChunkLayout(a.shape[0], between.size), b.shape[1]
        sizes = [layout.shard_rows(message.send.owner) for message in schedule.messages]
        partials = between.buffer_pool.take("rail partial", (sum(sizes), width), a).split(sizes)
        own_rows = layout.shard_rows(between.rank)
        self.num_bytes = (a.shape[0] - own_rows) * width * a.itemsize
        self._received = between.buffer_pool.take("rail received", (len(sizes), own_rows, width), a)
        transfers = [Transfer(*each) for each in zip(schedule.messages, partials, self._received, strict=True)]
        self._p2p_work = between.begin(transfers, op)
        *others, own = (slice(*nodes.rows(a.shape[0], work.chunks[0].owner)) for work in schedule.work if work.chunks)
        # One reduce-scatter inside the node at a time: they use the same buffers.
        for number, rows in enumerate(others):
            partials[number].copy_(inside.scatter(a[rows], b, op).finish())
            self._p2p_work.mark_ready(number + 1)
        last = inside.scatter(a[own], b, op, meanwhile)
        self._p2p_work.mark_ready(len(others) + 1)
        self._finish_last: Callable[[], torch.Tensor] = last.finish
        if not inside.concurrent:
            finished = last.finish()
            self._finish_last = lambda: finished

    def finish(self) -> torch.Tensor:
        """See `Reduce.finish`. Messages carry sums in the dtype of the operands; additions are in fp32."""
        own = self._finish_last()
        for message in range(len(self._received)):
            self._p2p_work.wait(message)
        self._p2p_work.wait_all()
        return add_terms(self._received, own, own)
