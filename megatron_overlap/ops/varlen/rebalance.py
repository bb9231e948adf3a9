"""Rows between the layout of attention and that of linear layers, where every rank has as many tokens as the others.

Source: Zeppelin (arXiv 2509.21841, section 4.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Observer, transport_for
from megatron_overlap.ops.varlen.transfers import TripP2PWork
from megatron_overlap.schedules.varlen import Plan
from megatron_overlap.schedules.varlen.linear_layout import to_linear
from megatron_overlap.schedules.varlen.message_order import Trip
from megatron_overlap.schedules.varlen.messages import remap_trip
from megatron_overlap.schedules.varlen.rebalance import Remap

Layout = Literal["linear", "attention"]


def remap(
    x: torch.Tensor,
    plan: Plan,
    *,
    index: int = 0,
    to: Layout,
    group: dist.ProcessGroup | Transport,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Moves rows between the attention layout of a pass and that of linear layers, which is even where that pays.

    Equal to gathering all rows and picking those of `schedules.varlen.linear_layout.to_linear(plan, index)`, or of
    its way back; see
    `ops.reference.move_rows`. Only surpluses move, inside nodes first. The gradient takes the way back.
    It waits for its messages; `balanced_attention(layout="linear")` hides them.

    Args:
        x: `[rows, ...]`; to linear, `plan.tokens(index)[rank]` rows in the order of `plan.pieces`; to attention, the
            rows that the linear layout gives this rank: `to_linear(...).after[rank]`.
        plan: of the batch; the same on every rank.
        index: which pass of the plan.
        to: the layout to reach.
        group: the ranks of the plan in order, or their transport. All call, with the same trailing shape.
        observer: told `forward` and `dgrad` with the bytes that this rank sent.

    Returns:
        `[rows of the other layout, ...]`; bytes are moved, nothing is summed.

    Raises:
        ValueError: rows do not fit the plan, or the plan does not fit the group.
        TransportError: a peer is gone or late beyond the deadline.
    """
    transport = transport_for(group)
    if transport.size != plan.topology.ranks:
        raise ValueError(f"plan: for {plan.topology.ranks} ranks: the group has {transport.size}")
    moves = to_linear(plan, index)
    if to == "attention":
        moves = moves.back()
    if x.shape[0] != moves.before[transport.rank]:
        raise ValueError(
            f"x: {x.shape[0]} rows: on the way to {to} rank {transport.rank} has {moves.before[transport.rank]} in "
            f"pass {index} of the plan"
        )
    y: torch.Tensor = _Remapped.apply(x, moves, transport, observer)
    return y


class _Remapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, moves: Remap, transport: Transport, observer: Observer | None
    ) -> torch.Tensor:
        ctx.moves, ctx.transport, ctx.observer = moves, transport, observer
        return _move(x, moves, transport, observer, "forward")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _move(grads[0], ctx.moves.back(), ctx.transport, ctx.observer, "dgrad"), None, None, None


def _move(
    x: torch.Tensor, moves: Remap, transport: Transport, observer: Observer | None, direction: str
) -> torch.Tensor:
    x = x.contiguous()
    y = x.new_empty(moves.after[transport.rank], *x.shape[1:])
    way = _Way(transport, moves, x, y, {}, f"remap {direction}")
    y[: way.kept] = x[: way.kept]
    way.wait()
    way.p2p_work.wait_all()
    if observer is not None:
        observer(direction, way.p2p_work.num_bytes)
    return y


class _Way:
    """The messages of a remap, posted; of `x` and `y` only what leaves and what lands is touched.

    Args:
        first: the rows that `x[0]` and `y[0]` are in their layouts.
        works: see `TripP2PWork`.
    """

    def __init__(
        self,
        transport: Transport,
        moves: Remap,
        x: torch.Tensor,
        y: torch.Tensor,
        works: dict[tuple[int, int], int],
        name: str,
        first: int = 0,
    ) -> None:
        rank = transport.rank
        self.kept = min(moves.before[rank], moves.after[rank])
        numbered = [(move, (index, 0)) for index, move in enumerate(moves.moves)]
        sources = {key: x[m.start - first : m.stop - first] for m, key in numbered if m.source == rank}
        sinks = {key: y[m.at - first : m.at - first + m.rows] for m, key in numbered if m.to == rank}
        self.p2p_work = TripP2PWork(transport, _trip(moves), sources, sinks, works, x, 0, name)

    def is_completed(self) -> bool:
        return self.p2p_work.is_completed(self.p2p_work.arrivals)

    def wait(self) -> None:
        self.p2p_work.wait(self.p2p_work.arrivals)


class Inbound:
    """Tensors of linear layers as attention has them; rows of other ranks land while own ones are computed.

    Args:
        transport: of the group.
        moves: from the layout of linear layers to that of attention.
        tensors: `[rows, heads, D]` each, in the layout of linear layers.
        name: of the op.

    Attributes:
        rows: the same tensors, with the rows that attention has; from `kept` on only after `wait`.
        kept: rows that were here before.
    """

    def __init__(self, transport: Transport, moves: Remap, tensors: Sequence[torch.Tensor], name: str) -> None:
        held, wanted = moves.before[transport.rank], moves.after[transport.rank]
        like, self._heads = tensors[0], [x.shape[1] for x in tensors]
        self.kept = kept = min(held, wanted)
        shape = (sum(self._heads), like.shape[2])
        # Only what moves is packed: one message for all tensors.
        leaving = transport.buffer_pool.take(f"{name} leaving", (held - kept, *shape), like)
        torch.cat([x[kept:] for x in tensors], dim=1, out=leaving)
        self._landing = transport.buffer_pool.take(f"{name} landing", (wanted - kept, *shape), like)
        self.rows = [x[:wanted] for x in tensors]
        if wanted > held:
            self.rows = [x.new_empty(wanted, *x.shape[1:]) for x in tensors]
            for whole, own in zip(self.rows, tensors, strict=True):
                whole[:held] = own
        self._way = _Way(transport, moves, leaving, self._landing, {}, f"{name} there", kept)
        self._waits = wanted > held
        self.is_completed = self._way.is_completed

    def wait(self) -> None:
        """Returns when all rows are here."""
        self._way.wait()
        if self._waits:
            self._waits = False
            for whole, part in zip(self.rows, self._landing.split(self._heads, dim=1), strict=True):
                whole[self.kept :] = part

    def finish(self) -> int:
        """Waits until what leaves has left; the bytes of it."""
        self.wait()
        self._way.p2p_work.wait_all()
        return self._way.p2p_work.num_bytes


class Outbound:
    """Results of attention on their way to the layout of linear layers, each from when it is made.

    Args:
        transport: of the group.
        moves: from the layout of attention to that of linear layers.
        heads: of each result.
        like: dtype, device and D.
        name: of the op.

    Attributes:
        made: the results, to be written, `[rows in attention, heads, D]` each.
    """

    def __init__(self, transport: Transport, moves: Remap, heads: Sequence[int], like: torch.Tensor, name: str) -> None:
        self._transport, self._moves, self._name = transport, moves, name
        held, self._wanted = moves.before[transport.rank], moves.after[transport.rank]
        # What is made here, and what lands: the kept rows are both.
        self._packed = like.new_empty(max(held, self._wanted), sum(heads), like.shape[2])
        self._parts = self._packed.split(list(heads), dim=1)
        self.made = [part[:held] for part in self._parts]
        self._done = 0

    def begin(self, works: Callable[[int, int], int]) -> None:
        """Posts the messages. `works(start, stop)`: how many `step`s make these rows."""
        rank = self._transport.rank
        after = {(i, 0): works(m.start, m.stop) for i, m in enumerate(self._moves.moves) if m.source == rank}
        self._way = _Way(self._transport, self._moves, self._packed, self._packed, after, f"{self._name} back")

    def step(self) -> None:
        """One more piece is made."""
        self._done += 1
        self._way.p2p_work.mark_ready(self._done)

    def finish(self) -> int:
        """Waits until what comes is here and what leaves has left; the bytes of it."""
        self._way.wait()
        self._way.p2p_work.wait_all()
        return self._way.p2p_work.num_bytes

    def results(self) -> list[torch.Tensor]:
        """The results in the layout of linear layers."""
        return [part[: self._wanted] for part in self._parts]


@lru_cache(maxsize=64)
def _trip(moves: Remap) -> Trip:
    return remap_trip(moves)
