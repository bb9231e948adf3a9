"""Balanced attention: documents of very different lengths, as `schedules.varlen.partition` lays them on the ranks.

Source: Zeppelin (arXiv 2509.21841, section 4.2), whose code is not public. Documents that are cut over several ranks
are rings: their members show each other keys and values, or queries, over messages that are posted before anything is
computed, those between nodes first. While they travel a rank attends to its own rows, to what has landed, and to its
whole documents where nothing has. `schedules.varlen.program` has the messages, `varlen_queues` the order of
computation.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport, transport_of
from megatron_overlap.ops.call import Observer
from megatron_overlap.ops.varlen.executor import Options, Pass
from megatron_overlap.ops.varlen.flash_attention import documents_backward, documents_forward, wide
from megatron_overlap.ops.varlen.pass_kv_pass_q import (
    BackwardKeys,
    BackwardQueries,
    ForwardKeys,
    ForwardQueries,
    Rows,
    Shape,
)
from megatron_overlap.ops.varlen.rebalance import Layout
from megatron_overlap.schedules.varlen import Plan
from megatron_overlap.schedules.varlen.linear_layout import to_linear
from megatron_overlap.schedules.varlen.program import Same
from megatron_overlap.schedules.varlen.rebalance import Remap
from megatron_overlap.schedules.varlen.ring_groups import Side


def balanced_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    index: int = 0,
    group: dist.ProcessGroup | Transport,
    softmax_scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    moves: Side | None = None,
    layout: Layout = "attention",
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals causal attention of each document of a pass alone; see `ops.reference.balanced_attention`.

    With `layout="linear"` it equals `remap(attention(remap(q), remap(k), remap(v)))`, to the layout of attention and
    back: what one rank has too many of travels, there and back, while it and others compute the rest.

    Args:
        q: `[T, Hq, D]`, the T = `plan.tokens(index)[rank]` rows of this rank in the order of
            `plan.pieces(index, rank)`: for each ring the early chunk and then the late one, then whole documents; or
            those of the linear layout. Positions are already encoded. T may be 0; every rank of the group must call.
        k: `[T, Hkv, D]`, the same rows; every Hq / Hkv query heads in a row share a key head.
        v: `[T, Hkv, D]`, the same rows.
        plan: of the batch; the same on every rank.
        index: which pass of the plan.
        group: the ranks of the plan in order, or their transport.
        softmax_scale: of the scores; None is `1 / sqrt(D)`.
        window: keys that a query sees before its own; None is all of its document.
        dropout: must be 0.
        moves: what travels in a ring; None chooses what is fewer bytes, in forward and in backward.
        layout: of the rows that come and that are returned: as `plan.pieces`, or as `remap(to="linear")` gives them.
        observer: told `forward` and `dgrad` with the bytes that this rank sent.

    Returns:
        `[T, Hq, D]`, dtype of `q`, in the order of `q`.

    Raises:
        ValueError: shapes or dtypes do not fit each other or the plan, or dropout is on.
        TransportError: a peer is gone or late beyond the deadline.
    """
    transports = _transports(group)
    ways = _check(q, k, v, plan, index, transports[0], window, dropout, layout)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    mover = transports[0] if ways is None else _mover(group, transports[0])
    options = Options(transports, mover, plan, index, scale, window, moves, ways, observer)
    out: torch.Tensor = _Balanced.apply(q, k, v, options)
    return out


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
        came = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]
        work = Pass(options, came, [q.shape[1]], "forward")
        q, k, v = work.rows
        (out,) = work.made
        lse = torch.empty(out.shape[:2], dtype=wide(q.dtype), device=q.device)
        rings = slice(0, work.own.rings)
        # The results of rings are merged wide, and rounded once.
        merged = out[rings] if out.dtype == lse.dtype else torch.empty_like(out[rings], dtype=lse.dtype)
        side = options.moves or Shape.of(q, k).cheaper(backward=False)
        flow = (ForwardKeys if side == "keys" else ForwardQueries)(q, k, v, merged, lse[rings], options.scale)

        def whole(rows: slice, lengths: tuple[int, ...]) -> None:
            documents_forward(q[rows], k[rows], v[rows], lengths, options.scale, options.window, out[rows], lse[rows])

        work.run(flow, whole)
        if merged.dtype != out.dtype:
            out[rings] = merged
        (y,) = work.finish()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        options: Options = ctx.options
        came = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        work = Pass(options, [came], [x.shape[1] for x in (q, k, v)], "backward")
        (dout,) = work.rows
        dq, dk, dv = work.made
        rings = slice(0, work.own.rings)
        sums = [torch.zeros_like(x[rings], dtype=lse.dtype) for x in (q, k, v)]
        side = options.moves or Shape.of(q, k).cheaper(backward=True)
        kind = BackwardKeys if side == "keys" else BackwardQueries
        flow = kind(Rows(*(x[rings] for x in (dout, q, k, v, out, lse)), *sums), options.scale)

        def whole(rows: slice, lengths: tuple[int, ...]) -> None:
            documents_backward(
                dout[rows], q[rows], k[rows], v[rows], out[rows], lse[rows],
                lengths, options.scale, options.window, (dq[rows], dk[rows], dv[rows]),
            )  # fmt: skip

        work.run(flow, whole)
        for grad, total in zip((dq, dk, dv), sums, strict=True):
            grad[rings] = total
        return *work.finish(), None


def _transports(group: dist.ProcessGroup | Transport) -> tuple[Transport, Transport]:
    """For rings between nodes, and inside: on NCCL a stream each, so that slow ones do not hold up fast ones."""
    if not isinstance(group, dist.ProcessGroup):
        return group, group
    inter = transport_of(group)
    return inter, transport_of(group, channel="intra") if dist.get_backend(group) == "nccl" else inter


def _mover(group: dist.ProcessGroup | Transport, rings: Transport) -> Transport:
    """For moved rows. On NCCL a stream of their own: a receive holds up what is posted after it there, and what it
    waits for may need a ring's result from behind it.
    """
    if not isinstance(group, dist.ProcessGroup) or dist.get_backend(group) != "nccl":
        return rings
    return transport_of(group, channel="moved")


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    index: int,
    transport: Transport,
    window: int | None,
    dropout: float,
    layout: Layout,
) -> tuple[Remap, Remap] | None:
    """The way from the rows that come to those of attention, and back; None where they are the same."""
    if dropout:
        raise ValueError(f"dropout: {dropout}: balanced attention has none; set attention dropout to 0")
    if window is not None and window < 0:
        raise ValueError(f"window: {window}: give 0 or more keys, or None for all")
    if transport.size != plan.topology.ranks:
        raise ValueError(f"plan: for {plan.topology.ranks} ranks: the group has {transport.size}")
    if not 0 <= index < len(plan.passes):
        raise ValueError(f"index: {index}: the plan has {len(plan.passes)} pass(es)")
    if layout not in ("attention", "linear"):
        raise ValueError(f"layout: {layout}: use attention or linear")
    ways = _ways(Same(plan), index) if layout == "linear" else None
    rows = (plan.tokens(index) if ways is None else ways[0].before)[transport.rank]
    if q.dim() != 3 or k.shape != v.shape or k.dim() != 3 or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        raise ValueError(f"q: shape {tuple(q.shape)} does not fit k {tuple(k.shape)} and v {tuple(v.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k: {k.shape[1]} heads: must divide the {q.shape[1]} of q")
    if {q.dtype, k.dtype, v.dtype} != {q.dtype} or {q.device, k.device, v.device} != {q.device}:
        raise ValueError(f"q: {q.dtype} on {q.device}: k and v must be of the same dtype and on the same device")
    if q.is_cuda and q.element_size() != 2:
        raise ValueError(f"q: {q.dtype}: FlashAttention takes bf16 and fp16; cast the query, key and value")
    if q.shape[0] != rows:
        raise ValueError(
            f"q: {q.shape[0]} rows: the plan has {rows} for rank {transport.rank} in pass {index}, {layout} layout"
        )
    return ways if ways is not None and ways[0].moves else None


@lru_cache(maxsize=16)
def _ways(same: Same, index: int) -> tuple[Remap, Remap]:
    """From the layout of linear layers to that of attention, and back. Every layer of a model asks again."""
    back = to_linear(same.plan, index)
    return back.back(), back
