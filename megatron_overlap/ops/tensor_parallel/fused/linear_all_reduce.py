"""Linears without sequence parallelism, whose all-reduce is a fused GEMM + reduce-scatter and an all-gather by copies.

The same programs as in `ops.tensor_parallel.linear_all_reduce`, whose docstrings say what they equal. A row-parallel
layer sums its output in
forward: tiles go to their owners as they are computed, owners sum, copies bring the sums to all. A column-parallel one
does the same with dgrad, and the sums travel under its weight gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_overlap.ops.call import Observer, WeightDone, check_operands
from megatron_overlap.ops.tensor_parallel.fused.multi_node import FusedTransport, open_gather, open_scatter
from megatron_overlap.ops.tensor_parallel.fused.plan import FusedPlan
from megatron_overlap.ops.wgrad import add_product

_DEFAULT = FusedPlan()


def fused_linear_all_reduce(
    x: torch.Tensor,
    w_shard: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: FusedTransport,
    plan: FusedPlan | None = None,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals `ops.linear_all_reduce`, argument by argument; `plan` says how, the same on every rank.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        TransportError: an earlier op waited for a peer in vain.
    """
    check_operands(x, w_shard, bias, main_grad, "x")
    flat = x.reshape(-1, x.shape[-1])
    y: torch.Tensor = _FusedLinearAllReduce.apply(
        flat, w_shard, transport, plan or _DEFAULT, main_grad, weight_done, observer
    )
    if bias is not None:
        y = y + bias
    return y.view(*x.shape[:-1], w_shard.shape[0])


def fused_copy_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: FusedTransport,
    plan: FusedPlan | None = None,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals `ops.copy_linear`, argument by argument; `plan` says how, the same on every rank.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        TransportError: an earlier op waited for a peer in vain.
    """
    check_operands(x, w, bias, main_grad, "x")
    flat = x.reshape(-1, x.shape[-1])
    y: torch.Tensor = _FusedCopyLinear.apply(
        flat, w, bias, transport, plan or _DEFAULT, main_grad, weight_done, observer
    )
    return y.view(*x.shape[:-1], w.shape[0])


def _weight_gradient(ctx: Any, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    if ctx.observer is not None:
        ctx.observer("wgrad", 0)
    if ctx.main_grad is None:
        return dy.t() @ x
    add_product(ctx.main_grad, dy, x, ctx.transport.buffer_pool)
    return None if ctx.weight_done is None else ctx.weight_done()


def _sent_bytes(transport: FusedTransport, y: torch.Tensor) -> int:
    """Others' rows of the partial sums, and own sums to all others."""
    own = -(-y.shape[0] // transport.size)
    return int((y.shape[0] - own + (transport.size - 1) * own) * y.shape[1] * y.itemsize)


class _FusedLinearAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        transport: FusedTransport,
        plan: FusedPlan,
        main_grad: torch.Tensor | None,
        weight_done: WeightDone | None,
        observer: Observer | None,
    ) -> torch.Tensor:
        own = open_scatter(transport, x, w.t(), "linear_all_reduce", plan).sum()
        gather = open_gather(transport, own, x.shape[0], "linear_all_reduce", plan)
        y = gather.rows()
        gather.done()
        ctx.save_for_backward(x, w)
        ctx.transport, ctx.main_grad = transport, main_grad
        ctx.weight_done, ctx.observer = weight_done, observer
        if observer is not None:
            observer("forward", _sent_bytes(transport, y))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = dy @ w
            if ctx.observer is not None:
                ctx.observer("dgrad", 0)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(ctx, dy, x)
        return dx, dw, None, None, None, None, None


class _FusedCopyLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        transport: FusedTransport,
        plan: FusedPlan,
        main_grad: torch.Tensor | None,
        weight_done: WeightDone | None,
        observer: Observer | None,
    ) -> torch.Tensor:
        y = x @ w.t() if bias is None else torch.addmm(bias, x, w.t())
        ctx.save_for_backward(x, w)
        ctx.transport, ctx.plan, ctx.use_bias = transport, plan, bias is not None
        ctx.main_grad, ctx.weight_done, ctx.observer = main_grad, weight_done, observer
        if observer is not None:
            observer("forward", 0)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dy = grads[0].contiguous()
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        dx = dw = gather = None
        if need_x:
            own = open_scatter(ctx.transport, dy, w, "copy_linear dgrad", ctx.plan).sum()
            gather = open_gather(ctx.transport, own, dy.shape[0], "copy_linear dgrad", ctx.plan)
        if need_w:
            # Under the all-gather of the sums.
            dw = _weight_gradient(ctx, dy, x)
        if gather is not None:
            dx = gather.rows()
            gather.done()
            if ctx.observer is not None:
                ctx.observer("dgrad", _sent_bytes(ctx.transport, dx))
        dbias = dy.sum(0) if need_bias and ctx.use_bias else None
        return dx, dw, dbias, None, None, None, None, None
