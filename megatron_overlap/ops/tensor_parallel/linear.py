"""Column- and row-parallel linear layers under sequence parallelism, with their communication hidden.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013) for the forward order. The backward is our own:

- column-parallel: dgrad is a GEMM + reduce-scatter, own rows last; the input is gathered again meanwhile for wgrad,
  whose GEMM hides what dgrad still has on its way;
- row-parallel: the output gradient is gathered once; dgrad and wgrad consume the same rows as they arrive.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Hold, Keeper, Observer, WeightDone, check_operands, gemm_into, transport_for
from megatron_overlap.ops.tensor_parallel.pipelined import PipelinedAllGather, PipelinedReduceScatter
from megatron_overlap.ops.tensor_parallel.plan import LinearPlan
from megatron_overlap.ops.wgrad import Spans, WeightGradient, WgradTarget
from megatron_overlap.schedules import ChunkLayout

_DEFAULT = LinearPlan()


def all_gather_linear(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | Transport,
    plan: LinearPlan | None = None,
    num_rows: int | None = None,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
    keeper: Keeper | None = None,
) -> torch.Tensor:
    """Equals `all_gather(x_shard) @ w.T + bias`; see `ops.reference.all_gather_linear`.

    Column-parallel linear under sequence parallelism. Calls that follow each other with the same `x_shard` object share
    one all-gather in forward. Backward equals `dx_shard = reduce_scatter(dy @ w)`,
    `dw = dy.T @ all_gather(x_shard)`, `dbias = dy.sum(0)`.

    Args:
        x_shard: `[S/R, ..., K]` own rows; its leading dimensions are one run of rows.
        w: `[F/R, K]` own rows of the weight.
        bias: `[F/R]`, added to every row.
        group: the R ranks, or their transport.
        plan: how messages are cut and ordered; the same on every rank. None uses `LinearPlan()`.
        num_rows: rows of all shards together where it is not R times the own ones; the shards are then cut as
            `ChunkLayout` does, and `x_shard` is `[rows, K]`.
        main_grad: `[F/R, K]` buffer that the weight gradient is added to; `w` then gets no gradient, or what
            `weight_done` returns.
        weight_done: called in backward when `main_grad` holds the gradient.
        observer: called in every pass, for counting.
        keeper: called in forward where something is kept for wgrad.

    Returns:
        `[S, ..., F/R]`, dtype of `x_shard`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        TransportError: a peer is gone or late beyond the deadline.
    """
    transport = transport_for(group)
    plan = plan or _DEFAULT
    rows_per_index = check_operands(x_shard, w, bias, main_grad, "x_shard")
    flat = x_shard.reshape(-1, x_shard.shape[-1])
    total = transport.size * flat.shape[0] if num_rows is None else num_rows
    layout = ChunkLayout(total, transport.size)
    if layout.shard_rows(transport.rank) != flat.shape[0]:
        raise ValueError(
            f"x_shard: {flat.shape[0]} rows: rank {transport.rank} of {transport.size} owns "
            f"{layout.shard_rows(transport.rank)} of {total}"
        )
    # Without a graph (inference, the first pass of recomputation) nothing is kept, whatever the plan says.
    keeps = torch.is_grad_enabled() and w.requires_grad
    source = None if x_shard.is_inference() else _Source(weakref.ref(x_shard), x_shard._version)
    y: torch.Tensor = _AllGatherLinear.apply(
        flat, w, bias, transport, plan, total, source, main_grad, weight_done, observer, keeps, keeper
    )
    if x_shard.dim() == 2:
        return y
    return y.view(total // rows_per_index, *x_shard.shape[1:-1], w.shape[0])


def linear_reduce_scatter(
    x: torch.Tensor,
    w_shard: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | Transport,
    plan: LinearPlan | None = None,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals `reduce_scatter(x @ w_shard.T) + bias`; see `ops.reference.linear_reduce_scatter`.

    Row-parallel linear under sequence parallelism. Backward equals `dx = all_gather(dy_shard) @ w_shard`,
    `dw = all_gather(dy_shard).T @ x`, `dbias = dy_shard.sum(0)`.

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

    Returns:
        `[S/R, ..., F]`, dtype of `x`. If `x` is `[rows, K/R]`, rows need not be divisible by R: they are cut as
        `ChunkLayout` does.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        TransportError: a peer is gone or late beyond the deadline.
    """
    transport = transport_for(group)
    rows_per_index = check_operands(x, w_shard, bias, main_grad, "x")
    if x.dim() > 2 and x.shape[0] % transport.size:
        raise ValueError(f"x: {x.shape[0]} positions: not divisible by {transport.size} ranks; pad the sequence")
    flat = x.reshape(-1, x.shape[-1])
    y: torch.Tensor = _LinearReduceScatter.apply(
        flat, w_shard, transport, plan or _DEFAULT, main_grad, weight_done, observer
    )
    if bias is not None:
        y = y + bias
    if x.dim() == 2:
        return y
    return y.view(y.shape[0] // rows_per_index, *x.shape[1:-1], w_shard.shape[0])


class _Source(NamedTuple):
    """Which tensor a gathered buffer was made from, and its version counter then."""

    tensor: weakref.ref[torch.Tensor]
    version: int

    def unchanged_since(self, earlier: object) -> bool:
        """Whether `earlier` is the same living tensor, and nobody has written into it in between."""
        return isinstance(earlier, _Source) and earlier.tensor() is self.tensor() and earlier.version == self.version


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        transport: Transport,
        plan: LinearPlan,
        num_rows: int,
        source: _Source | None,
        main_grad: torch.Tensor | None,
        weight_done: WeightDone | None,
        observer: Observer | None,
        keeps: bool,
        keeper: Keeper | None,
    ) -> torch.Tensor:
        x = x.contiguous()
        schedule = plan.schedule("all_gather", transport, num_rows, x.shape[1] * x.itemsize, x.device)
        layout = schedule.layout(num_rows)
        shape = (num_rows, x.shape[1])
        save = plan.save_gathered and keeps
        y = x.new_empty(num_rows, w.shape[0])
        num_bytes = 0
        full = None if save else _still_gathered(transport, x, source, layout)
        if full is not None:
            gemm_into(full, w.t(), y, bias)
        else:
            full = x.new_empty(shape) if save else transport.buffer_pool.take("gather", shape, x)
            arrivals = PipelinedAllGather(transport, schedule, x, layout, full, "all_gather_linear", whole=save)
            for (start, stop), rows in arrivals:
                gemm_into(rows, w.t(), y[start:stop], bias)
            arrivals.finish()
            num_bytes = (transport.size - 1) * x.nbytes
            if source is not None and not save:
                transport.buffer_pool.remember("gather", full, source)
        ctx.save_for_backward((full if save else x) if keeps else None, w)
        ctx.hold = Hold(keeper(x, full.nbytes)) if keeps and keeper is not None else None
        ctx.gathered, ctx.use_bias, ctx.main_grad = save, bias is not None, main_grad
        ctx.transport, ctx.plan, ctx.weight_done, ctx.observer = transport, plan, weight_done, observer
        if observer is not None:
            observer("forward", num_bytes)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dy = grads[0].contiguous()
        transport, plan = ctx.transport, ctx.plan
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        num_rows = dy.shape[0]
        wgrad = (
            WeightGradient(w, WgradTarget(ctx.main_grad, ctx.weight_done, transport.buffer_pool)) if need_w else None
        )
        late: _LateRows | None = None
        if wgrad is not None and not ctx.gathered:
            schedule = plan.schedule("all_gather", transport, num_rows, x.shape[1] * x.itemsize, x.device)
            layout = schedule.layout(num_rows)
            full = transport.buffer_pool.take("gather", (num_rows, x.shape[1]), x)
            # First on the link: wgrad needs it as a GEMM, dgrad's messages only have to be added.
            arrivals = PipelinedAllGather(transport, schedule, x, layout, full, "all_gather_linear wgrad", whole=True)
            late = _LateRows(arrivals, wgrad, dy)
        dx = None
        if need_x:
            schedule = plan.schedule("reduce_scatter", transport, num_rows, w.shape[1] * dy.itemsize, dy.device)
            layout = schedule.layout(num_rows)
            dx = dy.new_empty(layout.shard_rows(transport.rank), w.shape[1])
            departures = PipelinedReduceScatter(transport, schedule, layout, dx, "all_gather_linear dgrad")
            meanwhile = None if late is None else late.add_what_is_there
            departures.compute(lambda start, stop, out: gemm_into(dy[start:stop], w, out), meanwhile)
        dw = None
        if wgrad is not None:
            if late is None:
                wgrad.add(dy, x)
            else:
                late.finish()
            dw = wgrad.result()
        if dx is not None:
            departures.finish()
        if ctx.observer is not None:
            if dx is not None:
                ctx.observer("dgrad", (num_rows - dx.shape[0]) * dx.shape[1] * dx.element_size())
            if need_w:
                ctx.observer("wgrad", 0 if late is None else (transport.size - 1) * x.nbytes)
        dbias = dy.sum(0) if need_bias and ctx.use_bias else None
        if ctx.hold is not None:
            ctx.hold.end()
        return dx, dw, dbias, *(None,) * 9


def _still_gathered(
    transport: Transport, x: torch.Tensor, source: _Source | None, layout: ChunkLayout
) -> torch.Tensor | None:
    """The gathered rows of `x` if the last gather was of the same tensor; all ranks call alike, so all agree."""
    kept = transport.buffer_pool.recall("gather", x)
    if source is None or kept is None or not source.unchanged_since(kept[1]):
        return None
    full = kept[0]
    start, stop = layout.shard(transport.rank)
    full[start:stop].copy_(x)
    return full


class _LateRows:
    """The weight gradient of rows that are still arriving; what has landed together is one GEMM."""

    def __init__(self, arrivals: PipelinedAllGather, wgrad: WeightGradient, dy: torch.Tensor) -> None:
        self._arrivals, self._wgrad, self._dy = arrivals, wgrad, dy
        self._deferred_wgrad = Spans()

    def add_what_is_there(self) -> bool:
        """Adds the gradient of the rows that have landed; False if there are none."""
        if self._arrivals.ready:
            self._add_next()
            return True
        return False

    def finish(self) -> None:
        """Adds the rest as it lands."""
        while not self._arrivals.done:
            self._add_next()
        self._arrivals.finish()

    def _add_next(self) -> None:
        self._deferred_wgrad.add(self._arrivals.next_rows()[0])
        while self._arrivals.ready:
            self._deferred_wgrad.add(self._arrivals.next_rows()[0])
        self._deferred_wgrad.add_to(self._wgrad, self._dy, self._arrivals.full)


class _LinearReduceScatter(torch.autograd.Function):
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
    ) -> torch.Tensor:
        schedule = plan.schedule("reduce_scatter", transport, x.shape[0], w.shape[0] * x.itemsize, x.device)
        layout = schedule.layout(x.shape[0])
        y = x.new_empty(layout.shard_rows(transport.rank), w.shape[0])
        departures = PipelinedReduceScatter(transport, schedule, layout, y, "linear_reduce_scatter")
        departures.compute(lambda start, stop, out: gemm_into(x[start:stop], w.t(), out))
        departures.finish()
        ctx.save_for_backward(x, w)
        ctx.transport, ctx.plan, ctx.main_grad = transport, plan, main_grad
        ctx.weight_done, ctx.observer = weight_done, observer
        if observer is not None:
            observer("forward", (x.shape[0] - y.shape[0]) * w.shape[0] * y.element_size())
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dy_shard = grads[0].contiguous()
        transport = ctx.transport
        need_x, need_w = ctx.needs_input_grad[:2]
        if not (need_x or need_w):
            return (None,) * 7
        num_rows = x.shape[0]
        schedule = ctx.plan.schedule("all_gather", transport, num_rows, w.shape[0] * dy_shard.itemsize, dy_shard.device)
        layout = schedule.layout(num_rows)
        full = transport.buffer_pool.take("gather", (num_rows, w.shape[0]), dy_shard)
        dx = torch.empty_like(x) if need_x else None
        wgrad = (
            WeightGradient(w, WgradTarget(ctx.main_grad, ctx.weight_done, transport.buffer_pool)) if need_w else None
        )
        arrivals = PipelinedAllGather(
            transport, schedule, dy_shard, layout, full, "linear_reduce_scatter dgrad", whole=True
        )
        deferred_wgrad = Spans()
        for (start, stop), rows in arrivals:
            if dx is not None:
                gemm_into(rows, w, dx[start:stop])
            deferred_wgrad.add((start, stop))
            # While rows are there, dgrad takes them; wgrad fills the time in which none are, with all that wait.
            if wgrad is not None and not arrivals.ready:
                deferred_wgrad.add_to(wgrad, full, x)
        if wgrad is not None:
            deferred_wgrad.add_to(wgrad, full, x)
        arrivals.finish()
        dw = None
        if wgrad is not None:
            dw = wgrad.result()
        if ctx.observer is not None:
            # One gather serves both; it is counted with the first.
            for direction in ["dgrad"] * need_x + ["wgrad"] * need_w:
                first = direction == "dgrad" or not need_x
                ctx.observer(direction, (transport.size - 1) * dy_shard.nbytes * first)
        return dx, dw, None, None, None, None, None
