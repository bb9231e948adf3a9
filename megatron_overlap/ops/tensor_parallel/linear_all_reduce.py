"""Row- and column-parallel linear layers without sequence parallelism that overlap their all-reduces with GEMMs.

Every rank holds all rows. The row-parallel layer sums its output over ranks in forward. The column-parallel layer sums
the gradient of its input in backward. The other passes have no communication.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013) for the order of the partial sums. The all-gather of the sums and
the backward order are not from a paper.
"""

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Observer, WeightDone, check_operands
from megatron_overlap.ops.tensor_parallel.method import LinearContext, LinearMethod, LinearOptions, skipped_output
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, method_for
from megatron_overlap.ops.wgrad import DeferredWgrad, WeightGradient, WgradTarget


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
    y: torch.Tensor = _LinearAllReduce.apply(x.reshape(-1, x.shape[-1]), w, call)
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
    y: torch.Tensor = _CopyLinear.apply(x.reshape(-1, x.shape[-1]), w, bias, call)
    return y.view(*x.shape[:-1], w.shape[0])


class _LinearAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: LinearContext, x: torch.Tensor, w: torch.Tensor, call: LinearOptions) -> torch.Tensor:
        ctx.save_for_backward(x if call.save_input else None, w)
        ctx.call = call
        if call.skip_output:
            return skipped_output(x, x.shape[0], w.shape[0], call.observer)
        total = call.method.all_reduce(x, w.t(), "linear_all_reduce")
        y = total.finish()
        if call.observer is not None:
            call.observer("forward", total.num_bytes)
        return y

    @staticmethod
    def backward(ctx: LinearContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, w), call, dy = ctx.saved_tensors, ctx.call, grads[0].contiguous()
        need_x, need_w = ctx.needs_input_grad[:2]
        dx = dy @ w if need_x else None
        dw = None
        if call.deferred_wgrad is not None and call.deferred_weight is not None:
            call.deferred_wgrad.put(call.deferred_weight, dy, x, call.target)
            need_w = True
        elif need_w:
            wgrad = WeightGradient(w, call.target)
            wgrad.add(dy, x)
            dw = wgrad.result()
        if call.observer is not None:
            if need_x:
                call.observer("dgrad", 0)
            if need_w:
                call.observer("wgrad", 0)
        return dx, dw, None


class _CopyLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: LinearContext, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, call: LinearOptions
    ) -> torch.Tensor:
        y = torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())
        ctx.save_for_backward(x if call.save_input else None, w)
        ctx.call = call
        if call.observer is not None:
            call.observer("forward", 0)
        return y

    @staticmethod
    def backward(ctx: LinearContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, w), call, dy = ctx.saved_tensors, ctx.call, grads[0].contiguous()
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        wgrad = WeightGradient(w, call.target) if need_w else None
        # The weight gradient, and those that other layers postponed, hide the messages.
        pieces = [] if wgrad is None else wgrad.pieces(dy, x, call.method.wgrad_pieces)
        if call.deferred_wgrad is not None:
            pieces += call.deferred_wgrad.take()
        dx = total = None
        if need_x:
            total = call.method.all_reduce(dy, w, "copy_linear dgrad", work_follows=bool(pieces))
            total.run_beside(pieces)
            dx = total.finish()
        else:
            for piece in pieces:
                piece()
        dw = None if wgrad is None else wgrad.result()
        if call.observer is not None:
            if total is not None:
                call.observer("dgrad", total.num_bytes)
            if need_w:
                call.observer("wgrad", 0)
        return dx, dw, dy.sum(0) if need_bias else None, None
