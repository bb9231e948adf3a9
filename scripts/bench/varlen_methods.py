"""Methods for attention over a batch of documents that bench/varlen.py compares: one kernel, transport and data set.

A method determines the rows of the batch on each rank, pass by pass, and computes attention, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from placements import hybrid, packing
from varlen_baselines import AllGather, Ulysses

from megatron_overlap.comm import BufferPool, Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.ops import balanced_attention
from megatron_overlap.ops.flash_attention import Attended, documents_backward, documents_forward
from megatron_overlap.ops.varlen.executor import Layout
from megatron_overlap.ops.varlen.layout import RowMessages, Rows
from megatron_overlap.ops.varlen.pass_kv_pass_q import Shape
from megatron_overlap.schedules.varlen import CostModel, Plan, Topology, partition
from megatron_overlap.schedules.varlen.messages import messages_of
from megatron_overlap.schedules.varlen.partition import ring_over_all
from megatron_overlap.schedules.varlen.plan import Pass
from megatron_overlap.schedules.varlen.rebalance import linear_layout
from megatron_overlap.schedules.varlen.ring_groups import ring_groups

Run = Callable[[], object]


@dataclass(frozen=True)
class Batch:
    """The whole batch on every rank, one document after the other."""

    lengths: tuple[int, ...]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def random(cls, lengths: Sequence[int], shape: Shape) -> Batch:
        generator = torch.Generator().manual_seed(11)
        heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        tensors = (torch.randn(sum(lengths), n, shape.size, generator=generator).to(shape.dtype) for n in heads)
        return cls(tuple(lengths), *tensors)

    def exact(self) -> tuple[torch.Tensor, ...]:
        """Output and gradients in fp32, one document after the other, on one rank."""
        q, k, v, dout = (x.float() for x in (self.q, self.k, self.v, self.dout))
        out, lse, scale = torch.empty_like(q), q.new_empty(q.shape[:2]), q.shape[-1] ** -0.5
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        lengths = [length for length in self.lengths if length]
        attended = Attended(q, k, v, out, lse)
        documents_forward(attended, lengths, scale)
        documents_backward(dout, attended, lengths, scale, grads)
        return out, *grads


class Method(Protocol):
    """One method: the layout of a batch, and its attention."""

    def passes(self) -> Sequence[tuple[torch.Tensor, bool]]:
        """For each pass, the rows of this rank in linear layers, and whether a barrier precedes the pass."""

    def attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention within each document over the rows of a pass."""


class Engine:
    """The engine with a plan; `rebalanced`: linear layers have equally many rows on every rank, where that pays off."""

    def __init__(self, plan: Plan, transport: Transport, *, rebalanced: bool = False) -> None:
        self.plan, self._transport, self._rebalanced = plan, transport, rebalanced

    def passes(self) -> list[tuple[torch.Tensor, bool]]:
        """See `Method.passes`."""
        starts = list(accumulate(self.plan.lengths, initial=0))
        found, stage = [], 0
        for index, part in enumerate(self.plan.passes):
            pieces = self.plan.pieces(index, self._transport.rank)
            if self._rebalanced:
                pieces = linear_layout(self.plan, index)[self._transport.rank]
            runs = [torch.arange(starts[p.document] + p.start, starts[p.document] + p.stop) for p in pieces]
            rows = torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)
            found.append((rows, part.stage != stage))
            stage = part.stage
        return found

    def attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `Method.attend`."""
        layout: Layout = "linear" if self._rebalanced else "attention"
        return balanced_attention(q, k, v, self.plan, index=index, group=self._transport, layout=layout)


def methods(
    lengths: Sequence[int], topology: Topology, cost: CostModel, shape: Shape, transport: Transport
) -> dict[str, Method]:
    """All methods: the baselines, then the parts of balanced attention, each added to the previous one."""
    share = -(-sum(lengths) // topology.ranks)
    room = share + -(-share // 16)
    direct = replace(topology, routing=False)
    ring = ring_over_all(lengths, direct, capacity=room, cost=cost)
    ours = partition(lengths, topology, capacity=room, cost=cost)
    plain = replace(ours, topology=direct)
    found: dict[str, Method] = {
        "ring": Engine(ring, transport),
        "all_gather": AllGather(ring, topology, shape, transport),
        "hybrid": Engine(hybrid(lengths, direct, capacity=room, cost=cost), transport),
        "packing": Engine(packing(lengths, direct, capacity=sum(lengths), cost=cost), transport),
        "ring_routed": Engine(replace(ring, topology=topology), transport),
        "partition": Engine(one_after_the_other(plain), transport),
        "engine": Engine(plain, transport),
        "routing": Engine(ours, transport),
        "remap": Engine(ours, transport, rebalanced=True),
    }
    if not shape.kv_heads % topology.ranks:
        found["ulysses"] = Ulysses(lengths, shape, transport)
    return found


def one_after_the_other(plan: Plan) -> Plan:
    """The same placement without an order across rings: whole documents, then the rings of each set of ranks.

    Each of these is a pass: its messages are posted when it begins and hidden behind its own computation alone.
    """
    passes: list[Pass] = []
    for part in plan.passes:
        nothing: tuple[tuple[int, ...], ...] = ((),) * plan.topology.ranks
        passes.append(Pass(part.local, (), part.stage))
        passes += [Pass(nothing, ring_group.rings, part.stage) for ring_group in ring_groups(part)]
    return replace(plan, passes=tuple(passes))


class Layer:
    """A method on a batch: attention alone, or between the linear layers of a transformer layer."""

    def __init__(self, method: Method, batch: Batch, *, backward: bool, linear: bool = False) -> None:
        self._method, self._backward, self._linear = method, backward, linear
        self._heads = [batch.q.shape[1], batch.k.shape[1], batch.v.shape[1]]
        width, size = batch.q.shape[1] * batch.q.shape[2], batch.q.shape[2]
        generator = torch.Generator().manual_seed(5)

        def weight(features_in: int, features_out: int) -> torch.Tensor:
            drawn = torch.randn(features_out, features_in, generator=generator) / features_in**0.5
            return drawn.to(batch.q.dtype).requires_grad_()

        if linear:
            self._weights = [weight(width, sum(self._heads) * size), weight(width, width)]
            self._weights += [weight(width, 4 * width), weight(4 * width, width)]
        self.rows: list[torch.Tensor] = []
        self._data = []
        for rows, meet in method.passes():
            self.rows.append(rows)
            self._data.append(([x[rows] for x in (batch.q, batch.k, batch.v, batch.dout)], meet))

    def run(self) -> list[tuple[torch.Tensor, ...]]:
        """All passes: output, and gradients of q, k and v (of the rows alone, in a whole layer)."""
        results = []
        for index, ((q, k, v, dout), meet) in enumerate(self._data):
            if meet:
                dist.barrier()
            if self._linear:
                results.append(self._layer(index, q, dout))
                continue
            leaves = [x.detach().requires_grad_(self._backward) for x in (q, k, v)]
            out = self._method.attend(index, *leaves)
            if self._backward:
                out.backward(dout)
            results.append((out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)))
        return results

    def _layer(self, index: int, x: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w_qkv, w_out, w_up, w_down = self._weights
        x = x.flatten(1).detach().requires_grad_(self._backward)
        with torch.set_grad_enabled(self._backward):
            q, k, v = (x @ w_qkv.t()).unflatten(1, (-1, dout.shape[2])).split(self._heads, dim=1)
            x = x + self._method.attend(index, q, k, v).flatten(1) @ w_out.t()
            x = x + torch.relu(x @ w_up.t()) @ w_down.t()
        if self._backward:
            x.backward(dout.flatten(1))
            for weight in self._weights:
                weight.grad = None
        return (x.detach(),)


class Silent:
    """A transport that sends nothing and completes at once, for the time of computation alone."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.buffer_pool, self.exposed_s = BufferPool(), 0.0
        self.on_device = self.prepares = False
        self._filled: set[tuple[int, int]] = set()

    def begin(self, transfers: Sequence[Transfer], op: str) -> Silent:
        """Fills each receive buffer once with normal numbers: a kernel can be slow with others."""
        for transfer in transfers:
            key = transfer.recv.data_ptr(), transfer.recv.numel()
            if key not in self._filled:
                transfer.recv.fill_(0.5)
                self._filled.add(key)
        return self

    def mark_ready(self, work_done: int) -> None:
        """Does nothing."""

    def wait(self, *messages: int) -> None:
        """Returns at once."""

    def is_completed(self, exchange: int) -> bool:
        """Always true."""
        return True

    def wait_all(self) -> None:
        """Returns at once."""

    def close(self) -> None:
        """Does nothing."""


class Messages:
    """The messages of the only pass of a plan, without computation, in the order of the links."""

    def __init__(self, plan: Plan, shape: Shape, transport: Transport) -> None:
        (self._part,) = plan.passes
        self._plan, self._shape, self._transport = plan, shape, transport

    def begin(self, *, backward: bool, kinds: Sequence[str] = ("payload", "result")) -> list[RowMessages]:
        """Posts the messages of one direction: payloads, and results."""
        shape, like = self._shape, torch.empty(0, dtype=self._shape.dtype)
        traffic = shape.backward_traffic(shape.backward_passing()) if backward else shape.forward_traffic()
        p2p_works = []
        for number, group in enumerate(messages_of(self._plan, 0, traffic)):
            most = max((rows for payload in group.payloads for rows in payload.rows), default=0)
            for messages, row_bytes, wide, name in (
                (group.distribute, traffic.payload_bytes, like, "payload"),
                (group.collect, traffic.result_bytes, like.float(), "result"),
            ):
                if messages is not None and name in kinds:
                    label, width = f"messages {name} {number}", row_bytes // wide.itemsize
                    rows = self._transport.buffer_pool.take(label, (most, width), wide)
                    both = Rows(rows, _Always(slice(0, most)))
                    p2p_works.append(RowMessages(self._transport, {0: messages}, both, both, {}, messages, label))
        return p2p_works

    def run(self, *, backward: bool) -> None:
        """Posts and waits: forward payloads, then backward payloads, then backward results."""
        for direction, kind in (
            ((False, "payload"), (True, "payload"), (True, "result")) if backward else ((False, "payload"),)
        ):
            for p2p_work in self.begin(backward=direction, kinds=(kind,)):
                p2p_work.wait_all()


class _Always(dict[Any, slice]):
    """The same rows under every key."""

    def __init__(self, rows: slice) -> None:
        super().__init__()
        self._rows = rows

    def __missing__(self, key: Any) -> slice:
        return self._rows


def limits(ours: Engine, batch: Batch, shape: Shape, transport: Transport, *, backward: bool) -> dict[str, Run]:
    """Bounds of a plan of one pass: computation alone, messages alone, and both at once without dependencies."""
    plan, silent = ours.plan, Silent(transport)
    data = Layer(Engine(plan, transport), batch, backward=backward)
    messages = Messages(plan, shape, transport)
    ((q, k, v, dout), _) = data._data[0]

    def both(*, sending: bool) -> None:
        p2p_works = messages.begin(backward=False) if sending else []
        leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]
        out = balanced_attention(*leaves, plan, group=silent)
        for p2p_work in p2p_works:
            p2p_work.wait_all()
        if backward:
            p2p_works = messages.begin(backward=True) if sending else []
            out.backward(dout)
            for p2p_work in p2p_works:
                p2p_work.wait_all()

    return {
        "compute": lambda: both(sending=False),
        "messages": lambda: messages.run(backward=backward),
        "roof": lambda: both(sending=True),
    }
