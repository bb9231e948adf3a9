"""Baselines on the kernel and transport of balanced attention: all-gather of keys and values, and Ulysses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.ops.flash_attention import (
    Attended,
    accumulation_dtype,
    documents_backward,
    documents_forward,
    partial_backward,
    partial_forward,
)
from megatron_overlap.ops.varlen.layout import merge
from megatron_overlap.ops.varlen.pass_kv_pass_q import Shape
from megatron_overlap.schedules.plan import Chunk, Message
from megatron_overlap.schedules.varlen import Plan, Topology


class AllGather:
    """Every rank gathers the keys and values of all, then attends; gradients of keys and values are reduced back.

    The gather takes every card once: across nodes from device d to device d, then inside the nodes. Both gather and
    reduction are in the dtype of the data, half of what the engine sends back. Nothing is hidden, as in
    TransformerEngine's `all_gather`.
    """

    def __init__(self, plan: Plan, topology: Topology, shape: Shape, transport: Transport) -> None:
        (self._part,) = plan.passes
        self._plan, self._topology, self._shape, self.transport = plan, topology, shape, transport
        starts = list(accumulate(plan.lengths, initial=0))
        rows = []
        for rank in range(topology.ranks):
            runs = [torch.arange(starts[d] + a, starts[d] + b) for d, a, b in plan.pieces(0, rank)]
            rows.append(torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64))
        self.rows = rows[transport.rank]
        self.counts = [len(mine) for mine in rows]
        # Row n of the batch is row `order[n]` of what was gathered, by rank.
        self.order = torch.argsort(torch.cat(rows))
        self.back = torch.cat(rows)
        self.pieces = []
        row = 0
        for document, start, stop in plan.pieces(0, transport.rank):
            self.pieces.append((slice(row, row + stop - start), starts[document], start, stop))
            row += stop - start

    def passes(self) -> list[tuple[torch.Tensor, bool]]:
        """See `Method.passes`."""
        return [(self.rows, False)]

    def attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `Method.attend`."""
        out: torch.Tensor = _Gathered.apply(q, k, v, self)
        return out

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """`[rows of the batch, ...]`, in its order."""
        whole = self.transport.buffer_pool.take("gathered", (sum(self.counts), own[0].numel()), own)
        blocks = list(whole.split(self.counts))
        blocks[self.transport.rank].copy_(own.flatten(1))
        transfers = []
        rails, mates = self._rails(), self._mates()
        mine = self.transport.rank
        for to, source in rails:
            transfers.append(_transfer(to, source, blocks[mine], blocks[source]))
        for to, source in mates:
            transfers.append(_transfer(to, source, blocks[mine], blocks[source]))
        for number, (_, far) in enumerate(rails):
            for to, source in mates:
                beside = self._rank(self._topology.node_of(far), source)
                transfers.append(_transfer(to, source, blocks[far], blocks[beside], number))
        self.transport.begin(transfers, "all-gather of keys and values").wait_all()
        return whole[self.order].unflatten(1, own.shape[1:])

    def reduce(self, whole: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of own rows of `[rows of the batch, ...]`."""
        parts = whole.flatten(1)[self.back].contiguous()
        blocks = list(parts.split(self.counts))
        mine = self.transport.rank
        nodes = range(self._topology.nodes)
        transfers, arriving = [], []
        for to, source in self._mates():
            for node in nodes:
                block = blocks[self._rank(node, mine)]
                arriving.append((node, torch.empty_like(block)))
                transfers.append(_transfer(to, source, blocks[self._rank(node, to)], arriving[-1][1]))
        self.transport.begin(transfers, "reduce-scatter inside").wait_all()
        for node, term in arriving:
            blocks[self._rank(node, mine)].add_(term)
        terms = [torch.empty_like(blocks[mine]) for _ in self._rails()]
        pairs = zip(self._rails(), terms, strict=True)
        transfers = [_transfer(to, source, blocks[to], term) for (to, source), term in pairs]
        self.transport.begin(transfers, "reduce-scatter between").wait_all()
        for term in terms:
            blocks[mine].add_(term)
        return blocks[mine].unflatten(1, whole.shape[1:])

    def _rank(self, node: int, like: int) -> int:
        """The device of a node that stands where `like` does in its own."""
        per_node = self._topology.devices_per_node
        return node * per_node + like % per_node

    def _rails(self) -> list[tuple[int, int]]:
        """To whom and from whom in each step, over the nodes."""
        mine, nodes = self.transport.rank, self._topology.nodes
        node = self._topology.node_of(mine)
        return [
            (self._rank((node + step) % nodes, mine), self._rank((node - step) % nodes, mine))
            for step in range(1, nodes)
        ]

    def _mates(self) -> list[tuple[int, int]]:
        """To whom and from whom in each step, inside the node."""
        per_node = self._topology.devices_per_node
        first = self.transport.rank // per_node * per_node
        place = self.transport.rank - first
        return [(first + (place + step) % per_node, first + (place - step) % per_node) for step in range(1, per_node)]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, method: AllGather) -> torch.Tensor:
        both = method.gather(torch.stack([k, v], dim=1))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))
        scale = q.shape[-1] ** -0.5
        for rows, first, start, stop in method.pieces:
            keys, values = both[first : first + stop].unbind(1)
            part, part_lse = partial_forward(q[rows], keys[start:], values[start:], scale, causal=True)
            if start:
                earlier = partial_forward(q[rows], keys[:start], values[:start], scale, causal=False)
                part = part.to(lse.dtype)
                merge(part, part_lse, [slice(0, len(part))], *earlier)
            out[rows], lse[rows] = part, part_lse
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.method = method
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        method, dout = ctx.method, grads[0]
        both = method.gather(torch.stack([k, v], dim=1))
        dq, dboth = torch.empty_like(q), torch.zeros(both.shape, dtype=lse.dtype)
        scale = q.shape[-1] ** -0.5
        for rows, first, start, stop in method.pieces:
            keys, values = both[first : first + stop].unbind(1)
            sums = dboth[first : first + stop]
            results = out[rows], lse[rows]
            total = torch.zeros(q[rows].shape, dtype=lse.dtype)
            for a, b in ((start, stop), (0, start)) if start else ((0, stop),):
                attended = Attended(q[rows], keys[a:b], values[a:b], *results)
                terms = partial_backward(dout[rows], attended, scale, causal=b == stop)
                total += terms[0]
                sums[a:b, 0] += terms[1]
                sums[a:b, 1] += terms[2]
            dq[rows] = total
        dk, dv = method.reduce(dboth.to(q.dtype)).unbind(1)
        return dq, dk, dv, None


class Ulysses:
    """Rows for heads: all rows of a rank's heads are attended to whole, between two all-to-alls. Nothing is hidden.

    Rows are dealt in runs of equal size, wherever documents begin. Key heads must be divisible by the ranks.
    """

    def __init__(self, lengths: Sequence[int], shape: Shape, transport: Transport) -> None:
        self.transport, self.lengths = transport, [length for length in lengths if length]
        total = sum(lengths)
        self.bounds = [total * rank // transport.size for rank in range(transport.size + 1)]

    def passes(self) -> list[tuple[torch.Tensor, bool]]:
        """See `Method.passes`."""
        rank = self.transport.rank
        return [(torch.arange(self.bounds[rank], self.bounds[rank + 1]), False)]

    def attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `Method.attend`."""
        out: torch.Tensor = _Ulysses.apply(q, k, v, self)
        return out

    def to_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Own rows of all heads to all rows of own heads."""
        size, rank = self.transport.size, self.transport.rank
        cut = torch.cat([x.unflatten(1, (size, -1)) for x in tensors], dim=2)  # rows, ranks, heads of all, size
        send = cut.transpose(0, 1).contiguous()
        counts = [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)]
        whole = self.transport.buffer_pool.take("ulysses heads", (sum(counts), *cut.shape[2:]), cut)
        parts = whole.split(counts)
        parts[rank].copy_(send[rank])
        self._exchange(send.unbind(0), parts)
        return list(whole.split([x.shape[1] // size for x in tensors], dim=1))

    def to_rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `to_heads`."""
        size, rank = self.transport.size, self.transport.rank
        whole = torch.cat(tensors, dim=1)
        counts = [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)]
        got = whole.new_empty(size, counts[rank], *whole.shape[1:])
        parts = whole.split(counts)
        got[rank] = parts[rank]
        self._exchange(parts, got.unbind(0))
        pieces = got.split([x.shape[1] for x in tensors], dim=2)
        return [piece.transpose(0, 1).flatten(1, 2) for piece in pieces]

    def _exchange(self, send: Sequence[torch.Tensor], recv: Sequence[torch.Tensor]) -> None:
        size, rank = self.transport.size, self.transport.rank
        transfers = []
        for step in range(1, size):
            to, source = (rank + step) % size, (rank - step) % size
            transfers.append(_transfer(to, source, send[to], recv[source]))
        self.transport.begin(transfers, "all-to-all").wait_all()


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, method: Ulysses) -> torch.Tensor:
        mine = [x.contiguous() for x in method.to_heads(q, k, v)]
        out, lse = torch.empty_like(mine[0]), mine[0].new_empty(mine[0].shape[:2], dtype=accumulation_dtype(q.dtype))
        documents_forward(Attended(*mine, out, lse), method.lengths, q.shape[-1] ** -0.5)
        ctx.save_for_backward(*mine, out, lse)
        ctx.method = method
        return method.to_rows(out)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        attended = Attended(*ctx.saved_tensors)
        dout = ctx.method.to_heads(grads[0])[0].contiguous()
        mine = torch.empty_like(attended.q), torch.empty_like(attended.k), torch.empty_like(attended.v)
        documents_backward(dout, attended, ctx.method.lengths, dout.shape[-1] ** -0.5, mine)
        return (*ctx.method.to_rows(*mine), None)


def _transfer(to: int, source: int, send: torch.Tensor, recv: torch.Tensor, *after: int) -> Transfer:
    nowhere = Chunk(0, 0)
    return Transfer(Message(nowhere, to, nowhere, source, 0, after), send, recv)
