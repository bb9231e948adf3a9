"""Row- and column-parallel linear layers without sequence parallelism, with their all-reduces hidden.

Every rank holds all rows, so one of a pair of layers sums: the row-parallel one its output in forward, the
column-parallel one its input's gradient in backward. The other passes have no communication.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013) for the order of the partial sums; the gather behind them and the
backward are our own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Observer, WeightDone, check_operands, gemm_into, transport_for
from megatron_overlap.ops.tensor_parallel.pipelined import PipelinedAllReduce
from megatron_overlap.ops.tensor_parallel.plan import LinearPlan
from megatron_overlap.ops.wgrad import DeferredWgrad, Piece, WeightGradient, WgradTarget
from megatron_overlap.schedules import PartLayout, Plan
from megatron_overlap.schedules.all_reduce import Gathers

_DEFAULT = LinearPlan()


def linear_all_reduce(
    x: torch.Tensor,
    w_shard: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | Transport,
    plan: LinearPlan | None = None,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
    deferred_wgrad: DeferredWgrad | None = None,
) -> torch.Tensor:
    """Equals `all_reduce(x @ w_shard.T) + bias`; see `ops.reference.linear_all_reduce`.

    Row-parallel linear without sequence parallelism. The result has the same bits on every rank. Backward takes a
    gradient that is the same on every rank, and communicates nothing: `dx = dy @ w_shard`, `dw = dy.T @ x`,
    `dbias = dy.sum(0)`.

    Args:
        x: `[S, ..., K/R]` all rows; its leading dimensions are one run of rows.
        w_shard: `[F, K/R]` own columns of the weight.
        bias: `[F]`, added once, after the sum.
        group: the R ranks, or their transport.
        plan: how messages are cut and ordered; the same on every rank. None uses `LinearPlan()`.
        main_grad: `[F, K/R]` buffer that the weight gradient is added to; `w_shard` then gets no gradient,
            or what `weight_done` returns.
        weight_done: called in backward when `main_grad` holds the gradient.
        observer: called in every pass, for counting.
        deferred_wgrad: where the weight gradient is put off to, for a `copy_linear` with the same deferred_wgrad
        whose backward
            comes later in the pass. None computes it at once.

    Returns:
        `[S, ..., F]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other, or the plan's pattern is `ring`.
        TransportError: a peer is gone or late beyond the deadline.
    """
    check_operands(x, w_shard, bias, main_grad, "x")
    # A weight that autograd knows of would be handed an empty gradient, and its hooks run, before the real one is made.
    later = deferred_wgrad is not None and w_shard.is_leaf and w_shard.requires_grad and x.requires_grad
    y: torch.Tensor = _LinearAllReduce.apply(
        x.reshape(-1, x.shape[-1]),
        w_shard.detach() if later else w_shard,
        transport_for(group),
        plan or _DEFAULT,
        main_grad,
        weight_done,
        observer,
        (deferred_wgrad, w_shard) if later else None,
    )
    if bias is not None:
        y = y + bias
    return y.view(*x.shape[:-1], w_shard.shape[0])


def copy_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | Transport,
    plan: LinearPlan | None = None,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
    deferred_wgrad: DeferredWgrad | None = None,
) -> torch.Tensor:
    """Equals `copy(x) @ w.T + bias`, where `copy` sums gradients over ranks; see `ops.reference.copy_linear`.

    Column-parallel linear without sequence parallelism, for an `x` that is the same on every rank. Forward communicates
    nothing. Backward equals `dx = all_reduce(dy @ w)`, with the same bits on every rank, `dw = dy.T @ x`,
    `dbias = dy.sum(0)`: partial sums travel beside dgrad's GEMMs, sums beside wgrad's.

    Args:
        x: `[S, ..., K]` all rows; its leading dimensions are one run of rows.
        w: `[F/R, K]` own rows of the weight.
        bias: `[F/R]`, added to every row.
        group: the R ranks, or their transport.
        plan: how messages are cut and ordered; the same on every rank. None uses `LinearPlan()`.
        main_grad: `[F/R, K]` buffer that the weight gradient is added to; `w` then gets no gradient, or what
            `weight_done` returns.
        weight_done: called in backward when `main_grad` holds the gradient.
        observer: called in every pass, for counting.
        deferred_wgrad: weight gradients that others have put off; backward computes them beside its messages.

    Returns:
        `[S, ..., F/R]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; in backward, if the plan's pattern is `ring`.
        TransportError: a peer is gone or late beyond the deadline.
    """
    check_operands(x, w, bias, main_grad, "x")
    y: torch.Tensor = _CopyLinear.apply(
        x.reshape(-1, x.shape[-1]),
        w,
        bias,
        transport_for(group),
        plan or _DEFAULT,
        main_grad,
        weight_done,
        observer,
        deferred_wgrad,
    )
    return y.view(*x.shape[:-1], w.shape[0])


class _LinearAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        transport: Transport,
        plan: LinearPlan,
        main_grad: torch.Tensor | None,
        weight_done: WeightDone | None,
        observer: Observer | None,
        later: tuple[DeferredWgrad, torch.Tensor] | None,
    ) -> torch.Tensor:
        schedule = plan.all_reduce_schedule(transport, x.shape[0], x.device, "between")
        y = x.new_empty(x.shape[0], w.shape[0])
        sums = PipelinedAllReduce(transport, schedule, y, "linear_all_reduce", add_in_place=plan.add_in_place)
        sums.compute(lambda start, stop, out: gemm_into(x[start:stop], w.t(), out))
        sums.finish()
        ctx.save_for_backward(x if w.requires_grad or later is not None else None, w)
        ctx.buffer_pool, ctx.main_grad = transport.buffer_pool, main_grad
        ctx.weight_done, ctx.observer, ctx.later = weight_done, observer, later
        if observer is not None:
            observer("forward", bytes_sent(schedule, y))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dw = row_backward(ctx, grads[0].contiguous(), *ctx.needs_input_grad[:2])
        return dx, dw, *(None,) * 6


class _CopyLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        transport: Transport,
        plan: LinearPlan,
        main_grad: torch.Tensor | None,
        weight_done: WeightDone | None,
        observer: Observer | None,
        deferred_wgrad: DeferredWgrad | None,
    ) -> torch.Tensor:
        y = torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())
        ctx.save_for_backward(x if w.requires_grad else None, w)
        ctx.transport, ctx.plan, ctx.use_bias = transport, plan, bias is not None
        ctx.main_grad, ctx.weight_done, ctx.observer, ctx.deferred_wgrad = (
            main_grad,
            weight_done,
            observer,
            deferred_wgrad,
        )
        if observer is not None:
            observer("forward", 0)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy = grads[0].contiguous()
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        dx, dw = column_backward(ctx, dy, need_x, need_w)
        dbias = dy.sum(0) if need_bias and ctx.use_bias else None
        return dx, dw, dbias, *(None,) * 6


def row_backward(
    ctx: Any, dy: torch.Tensor, need_x: bool, need_w: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`dy @ w` and `dy.T @ x`, the second put off where `ctx.later` has a deferred_wgrad. No communication."""
    x, w = ctx.saved_tensors
    dx = dy @ w if need_x else None
    dw = None
    need_w = need_w or ctx.later is not None
    if need_w:
        target = WgradTarget(ctx.main_grad, ctx.weight_done, ctx.buffer_pool)
        if ctx.later is not None:
            deferred_wgrad, weight = ctx.later
            deferred_wgrad.put(weight, dy, x, target)
        else:
            wgrad = WeightGradient(w, target)
            wgrad.add(dy, x)
            dw = wgrad.result()
    if ctx.observer is not None:
        for direction in ["dgrad"] * need_x + ["wgrad"] * need_w:
            ctx.observer(direction, 0)
    return dx, dw


def column_backward(
    ctx: Any, dy: torch.Tensor, need_x: bool, need_w: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`all_reduce(dy @ w)` and `dy.T @ x`; the messages travel beside both, and beside what waits in the
    deferred_wgrad."""
    x, w = ctx.saved_tensors
    transport = ctx.transport
    target = WgradTarget(ctx.main_grad, ctx.weight_done, transport.buffer_pool)
    wgrad = WeightGradient(w, target) if need_w else None
    pieces = [] if wgrad is None else wgrad.pieces(dy, x)
    if ctx.deferred_wgrad is not None:
        pieces += ctx.deferred_wgrad.take()
    dx = None
    if need_x:
        gathers: Gathers = "after" if pieces else "between"
        schedule = ctx.plan.all_reduce_schedule(transport, dy.shape[0], dy.device, gathers)
        dx = dy.new_empty(dy.shape[0], w.shape[1])
        sums = PipelinedAllReduce(transport, schedule, dx, "copy_linear dgrad", add_in_place=ctx.plan.add_in_place)
        sums.compute(lambda start, stop, out: gemm_into(dy[start:stop], w, out))
        if schedule.pattern == "serial":
            sums.finish()
            _run(pieces)
        else:
            sums.run_beside(pieces)
            sums.finish()
    else:
        _run(pieces)
    dw = None if wgrad is None else wgrad.result()
    if ctx.observer is not None:
        if dx is not None:
            ctx.observer("dgrad", bytes_sent(schedule, dx))
        if need_w:
            ctx.observer("wgrad", 0)
    return dx, dw


def _run(pieces: list[Piece]) -> None:
    for piece in pieces:
        piece()


def bytes_sent(schedule: Plan, rows: torch.Tensor) -> int:
    """Bytes that this rank sends in an all-reduce of `rows`."""
    layout = PartLayout(rows.shape[0], schedule.num_ranks, schedule.chunks_per_rank)
    num_rows = sum(layout.num_chunk_rows(message.send) for message in schedule.messages)
    return num_rows * rows.shape[1] * rows.element_size()
