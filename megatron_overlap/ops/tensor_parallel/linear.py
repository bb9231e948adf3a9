"""Column- and row-parallel linear layers that overlap communication with their GEMMs.

With sequence parallelism (`all_gather_linear`, `linear_reduce_scatter`) backward of the column-parallel layer starts to
gather the input again, runs dgrad as a GEMM + reduce-scatter, and then the weight gradient on the gathered rows, which
hides the remaining dgrad messages. Backward of the row-parallel layer gathers the output gradient once; dgrad and
weight gradient use the same rows as they arrive.

Without it (`linear_all_reduce`, `copy_linear`) every rank holds all rows.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013) for the forward order and the order of the partial sums. The
backward order and the all-gather of the sums are not from a paper.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Observer, WeightDone, check_operands
from megatron_overlap.ops.tensor_parallel.method import (
    Gather,
    LinearContext,
    LinearMethod,
    LinearOptions,
    LocalRows,
    Reduce,
    skipped_output,
)
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, method_for
from megatron_overlap.ops.wgrad import DeferredWgrad, Piece, WeightGradient, WgradTarget
from megatron_overlap.schedules import ChunkLayout


def all_gather_linear(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | Transport | LinearMethod,
    plan: LinearPlan | None = None,
    num_rows: int | None = None,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals `all_gather(x_shard) @ w.T + bias`; see `ops.reference.all_gather_linear`.

    Column-parallel linear under sequence parallelism. Backward equals `dx_shard = reduce_scatter(dy @ w)`,
    `dw = dy.T @ all_gather(x_shard)`, `dbias = dy.sum(0)`.

    Args:
        x_shard: `[S/R, ..., K]` own rows; its leading dimensions are flattened to rows.
        w: `[F/R, K]` own rows of the weight.
        bias: `[F/R]`, added to every row.
        group: the R ranks, their transport, or a method such as `FusedMethod`, which has its own plan.
        plan: how messages are cut and ordered; the same on every rank. None uses `LinearPlan()`.
        num_rows: rows of all ranks where it is not R times the own rows. `ChunkLayout` defines the shards, and
            `x_shard` is `[rows, K]`.
        main_grad: buffer of the shape of the weight that its gradient is added to. The weight then gets no gradient, or
            what `weight_done` returns.
        weight_done: called in backward when `main_grad` holds the gradient.
        observer: called in every pass.

    Returns:
        `[S, ..., F/R]`, dtype of `x_shard`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        TransportError: a peer has ended or misses the deadline.
    """
    method = method_for(group, plan)
    check_operands(x_shard, w, bias, main_grad, "x_shard")
    flat = x_shard if x_shard.dim() == 2 else x_shard.reshape(-1, x_shard.shape[-1])
    rank, size, given = method.rank, method.size, flat.shape[0]
    total = size * given if num_rows is None else num_rows
    if num_rows is not None and (own := ChunkLayout(total, size).shard_rows(rank)) != given:
        raise ValueError(f"x_shard: {given} rows: rank {rank} of {size} owns {own} of {total}")
    call = LinearOptions(
        method,
        WgradTarget(main_grad, weight_done, method.buffer_pool),
        observer,
        sharded=True,
        num_rows=total,
        # Without a graph (inference, the first pass of recomputation) nothing is saved.
        save_input=torch.is_grad_enabled() and w.requires_grad,
    )
    y: torch.Tensor = _ColumnParallel.apply(flat, w, bias, call)
    return y if x_shard.dim() == 2 else y.view(-1, *x_shard.shape[1:-1], w.shape[0])


def linear_reduce_scatter(
    x: torch.Tensor,
    w_shard: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | Transport | LinearMethod,
    plan: LinearPlan | None = None,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
    skip_output: bool = False,
) -> torch.Tensor:
    """Equals `reduce_scatter(x @ w_shard.T) + bias`; see `ops.reference.linear_reduce_scatter`.

    Row-parallel linear under sequence parallelism. Backward equals `dx = all_gather(dy_shard) @ w_shard`,
    `dw = all_gather(dy_shard).T @ x`, `dbias = dy_shard.sum(0)`.

    Args:
        x: `[S, ..., K/R]` all rows; its leading dimensions are flattened to rows.
        w_shard: `[F, K/R]` own columns of the weight.
        bias: `[F]`, added once, after the sum.
        group, plan, main_grad, weight_done, observer: as in `all_gather_linear`.
        skip_output: for a recomputed call whose output no code reads: forward computes and sends nothing, and the
            output is NaN. The same on every rank. Backward is unchanged.

    Returns:
        `[S/R, ..., F]`, dtype of `x`. If `x` is `[rows, K/R]`, rows need not be divisible by R: they are cut as
        `ChunkLayout` does.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        TransportError: a peer has ended or misses the deadline.
    """
    method = method_for(group, plan)
    check_operands(x, w_shard, bias, main_grad, "x")
    if x.dim() > 2 and x.shape[0] % method.size:
        raise ValueError(f"x: {x.shape[0]} positions: not divisible by {method.size} ranks; pad the sequence")
    target = WgradTarget(main_grad, weight_done, method.buffer_pool)
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    call = LinearOptions(method, target, observer, sharded=True, num_rows=flat.shape[0], skip_output=skip_output)
    y: torch.Tensor = _RowParallel.apply(flat, w_shard, call)
    if bias is not None:
        y = y + bias
    return y if x.dim() == 2 else y.view(-1, *x.shape[1:-1], w_shard.shape[0])


def linear_all_reduce(
    x: torch.Tensor,
    w_shard: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | Transport | LinearMethod,
    plan: LinearPlan | None = None,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
    deferred_wgrad: DeferredWgrad | None = None,
    skip_output: bool = False,
) -> torch.Tensor:
    """Equals `all_reduce(x @ w_shard.T) + bias`; see `ops.reference.linear_all_reduce`.

    Row-parallel linear without sequence parallelism. The result has the same bits on every rank. Backward takes a
    gradient that is the same on every rank, and communicates nothing: `dx = dy @ w_shard`, `dw = dy.T @ x`,
    `dbias = dy.sum(0)`.

    Args:
        x: `[S, ..., K/R]` all rows; its leading dimensions are flattened to rows.
        w_shard: `[F, K/R]` own columns of the weight.
        bias: `[F]`, added once, after the sum.
        group, plan, main_grad, weight_done, observer: as in `all_gather_linear`.
        deferred_wgrad: postpones the weight gradient to a `copy_linear` with the same object whose backward comes
            later in the pass. None computes it at once.
        skip_output: as in `linear_reduce_scatter`.

    Returns:
        `[S, ..., F]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other, or the plan's pattern is `ring`.
        TransportError: a peer has ended or misses the deadline.
    """
    method = method_for(group, plan)
    check_operands(x, w_shard, bias, main_grad, "x")
    defers = deferred_wgrad is not None and w_shard.is_leaf and w_shard.requires_grad and x.requires_grad
    call = LinearOptions(
        method,
        WgradTarget(main_grad, weight_done, method.buffer_pool),
        observer,
        save_input=w_shard.requires_grad,
        deferred_wgrad=deferred_wgrad,
        deferred_weight=w_shard if defers else None,
        skip_output=skip_output,
    )
    # For a weight in its graph, autograd would run the hooks with an empty gradient before the postponed one exists.
    w = w_shard.detach() if defers else w_shard
    y: torch.Tensor = _RowParallel.apply(x.reshape(-1, x.shape[-1]), w, call)
    if bias is not None:
        y = y + bias
    return y.view(*x.shape[:-1], w_shard.shape[0])


def copy_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | Transport | LinearMethod,
    plan: LinearPlan | None = None,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
    deferred_wgrad: DeferredWgrad | None = None,
) -> torch.Tensor:
    """Equals `copy(x) @ w.T + bias`, where `copy` sums gradients over ranks; see `ops.reference.copy_linear`.

    Column-parallel linear without sequence parallelism, for an `x` that is the same on every rank. Forward communicates
    nothing. Backward equals `dx = all_reduce(dy @ w)`, with the same bits on every rank, `dw = dy.T @ x`,
    `dbias = dy.sum(0)`. The dgrad GEMMs hide the partial sums, the weight gradient hides the sums.

    Args:
        x: `[S, ..., K]` all rows; its leading dimensions are flattened to rows.
        w: `[F/R, K]` own rows of the weight.
        bias: `[F/R]`, added to every row.
        group, plan, main_grad, weight_done, observer: as in `all_gather_linear`.
        deferred_wgrad: postponed weight gradients of other layers; backward computes them while messages are in flight.

    Returns:
        `[S, ..., F/R]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; in backward, if the plan's pattern is `ring`.
        TransportError: a peer has ended or misses the deadline.
    """
    method = method_for(group, plan)
    check_operands(x, w, bias, main_grad, "x")
    call = LinearOptions(
        method,
        WgradTarget(main_grad, weight_done, method.buffer_pool),
        observer,
        save_input=w.requires_grad,
        deferred_wgrad=deferred_wgrad,
    )
    y: torch.Tensor = _ColumnParallel.apply(x.reshape(-1, x.shape[-1]), w, bias, call)
    return y.view(*x.shape[:-1], w.shape[0])


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: LinearContext, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, call: LinearOptions
    ) -> torch.Tensor:
        method = call.method
        gather: Gather
        if call.sharded:
            x = x.contiguous()
            gather = method.gather(x, call.num_rows, "all_gather_linear")
        else:
            gather = LocalRows(x)
        y = gather.matmul(w.t(), bias)
        gather.finish()
        ctx.save_for_backward(x if call.save_input else None, w)
        ctx.call = call
        call.report("forward", gather.num_bytes)
        return y

    @staticmethod
    def backward(ctx: LinearContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, w), call, dy = ctx.saved_tensors, ctx.call, grads[0].contiguous()
        method = call.method
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        wgrad = WeightGradient(w, call.target) if need_w else None
        # The weight gradient, and those that other layers postponed, hide the messages.
        pieces: list[Piece] = []
        gather = dx = dw = None
        if wgrad is not None and not call.sharded:
            pieces = wgrad.pieces(dy, x, method.wgrad_pieces)
        elif wgrad is not None:
            # The first on the link: the weight gradient multiplies these rows, dgrad only adds received rows.
            gather = method.gather(x, dy.shape[0], "all_gather_linear wgrad")
            gather.wgrad(wgrad, dy=dy)
            pieces = [gather.finish]
        if call.deferred_wgrad is not None:
            pieces += call.deferred_wgrad.take()
        reduce: Reduce | None = None
        if need_x and call.sharded:
            reduce = method.scatter(dy, w, "all_gather_linear dgrad", None if gather is None else gather.advance)
        elif need_x:
            reduce, pieces = method.all_reduce(dy, w, "copy_linear dgrad", pieces), []
        for piece in pieces:
            piece()
        if wgrad is not None:
            dw = wgrad.result()
        if reduce is not None:
            dx = reduce.finish()
            call.report("dgrad", reduce.num_bytes)
        if need_w:
            call.report("wgrad", 0 if gather is None else gather.num_bytes)
        dbias = dy.sum(0) if need_bias else None
        return dx, dw, dbias, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: LinearContext, x: torch.Tensor, w: torch.Tensor, call: LinearOptions) -> torch.Tensor:
        ctx.save_for_backward(x if call.save_input else None, w)
        ctx.call, method = call, call.method
        if call.skip_output:
            num_rows = ChunkLayout(x.shape[0], method.size).shard_rows(method.rank) if call.sharded else x.shape[0]
            return skipped_output(x, num_rows, w.shape[0], call.report)
        op = "linear_reduce_scatter" if call.sharded else "linear_all_reduce"
        reduce = (method.scatter if call.sharded else method.all_reduce)(x, w.t(), op)
        y = reduce.finish()
        call.report("forward", reduce.num_bytes)
        return y

    @staticmethod
    def backward(ctx: LinearContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, w), call, dy = ctx.saved_tensors, ctx.call, grads[0].contiguous()
        need_x, need_w = ctx.needs_input_grad[:2]
        gather: Gather
        if call.sharded:
            gather = call.method.gather(dy, call.num_rows, "linear_reduce_scatter dgrad")
        else:
            gather = LocalRows(dy)
        dx = gather.matmul(w) if need_x else None
        wgrad = None
        if call.deferred_wgrad is not None and call.deferred_weight is not None:
            call.deferred_wgrad.put(call.deferred_weight, dy, x, call.target)
            need_w = True
        elif need_w:
            wgrad = WeightGradient(w, call.target)
            gather.wgrad(wgrad, x=x)
        gather.finish()
        dw = None if wgrad is None else wgrad.result()
        # Both gradients use one gather. It is counted for the first.
        if need_x:
            call.report("dgrad", gather.num_bytes)
        if need_w:
            call.report("wgrad", 0 if need_x else gather.num_bytes)
        return dx, dw, None


LINEAR_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "ag_gemm": all_gather_linear,
    "copy_gemm": copy_linear,
    "gemm_rs": linear_reduce_scatter,
    "gemm_ar": linear_all_reduce,
}
"""The operations by the names of the report."""
