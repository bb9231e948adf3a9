"""Rows between the layout of attention and that of linear layers, where every rank has as many tokens as the others.

Source: Zeppelin (arXiv 2509.21841, section 4.3).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.common import Observer, transport_for
from megatron_overlap.ops.varlen_flight import TripFlight
from megatron_overlap.varlen import Plan
from megatron_overlap.varlen import remap as planner
from megatron_overlap.varlen.messages import Trip, remap_trip
from megatron_overlap.varlen.remap import Remap

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
    """Moves rows between the attention layout of a pass and the token-balanced layout of linear layers.

    Equal to gathering all rows and picking those of `varlen.remap.remap(plan.tokens(index), plan.topology)`, or of its
    way back; see `ops.reference.move_rows`. Only surpluses move, inside nodes first. The gradient takes the way back.

    Args:
        x: `[rows, ...]`; to linear, `plan.tokens(index)[rank]` rows in the order of `plan.pieces`; to attention, the
            rows that the linear layout gives this rank: `varlen.remap.remap(...).after[rank]`.
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
    moves = planner.remap(plan.tokens(index), plan.topology)
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
    rank = transport.rank
    x = x.contiguous()
    y = x.new_empty(moves.after[rank], *x.shape[1:])
    sources = {(i, 0): x[m.start : m.stop] for i, m in enumerate(moves.moves) if m.source == rank}
    sinks = {(i, 0): y[m.at : m.at + m.rows] for i, m in enumerate(moves.moves) if m.to == rank}
    flight = TripFlight(transport, _trip(moves), sources, sinks, {}, x, 0, f"remap {direction}")
    kept = min(moves.before[rank], moves.after[rank])
    y[:kept] = x[:kept]
    flight.finish()
    if observer is not None:
        observer(direction, flight.num_bytes)
    return y


@lru_cache(maxsize=64)
def _trip(moves: Remap) -> Trip:
    return remap_trip(moves)
