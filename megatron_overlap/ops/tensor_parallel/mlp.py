"""An MLP without sequence parallelism, part by part of its rows: both of its layers hide its all-reduce.

A row-parallel layer alone hides its all-reduce under its own GEMM only. Every row of an MLP is independent, so each
part of the rows goes through both layers before the next part; its sums travel while the next parts are computed.
Backward runs each layer on all rows: smaller GEMMs would hide no more there, and a weight gradient stays one sum.

Batch overlap hides more, but needs a micro-batch of at least two. This also covers micro-batches of one.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013) for the order of the partial sums. The joint layers are not from a
paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Observer, WeightDone, check_operands, gemm_into, transport_for
from megatron_overlap.ops.tensor_parallel.linear_all_reduce import column_backward, row_backward
from megatron_overlap.ops.tensor_parallel.method import LinearContext, LinearOptions
from megatron_overlap.ops.tensor_parallel.p2p import MIN_MLP_ROWS, LinearPlan, P2PMethod
from megatron_overlap.ops.tensor_parallel.pipelined import PipelinedAllReduce
from megatron_overlap.ops.wgrad import DeferredWgrad, WgradTarget

Between = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Options of one of the two layers; see `copy_linear` and `linear_all_reduce`."""

    main_grad: torch.Tensor | None = None
    weight_done: WeightDone | None = None
    observer: Observer | None = None


def mlp_all_reduce(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2_shard: torch.Tensor,
    between: Between,
    *,
    group: dist.ProcessGroup | Transport,
    plan: LinearPlan | None = None,
    first: LayerOptions | None = None,
    second: LayerOptions | None = None,
    deferred_wgrad: DeferredWgrad | None = None,
) -> torch.Tensor:
    """Equals `linear_all_reduce(between(copy_linear(x, w1)), w2_shard)`; see `ops.reference.mlp_all_reduce`.

    Args:
        x: `[S, ..., K]` all rows, the same on every rank; its leading dimensions are flattened to rows.
        w1: `[F/R, K]` own rows of the first weight.
        w2_shard: `[H, G/R]` own columns of the second weight.
        between: bias and activation: `[rows, 1, F/R]` to `[rows, 1, G/R]`. Each result row depends on its own input
            row only. Called once for each part of the rows; autograd differentiates it.
        group: the R ranks, or their transport.
        plan: how messages are cut and ordered; the same on every rank. None uses `LinearPlan()`.
        first: of the column-parallel layer.
        second: of the row-parallel layer.
        deferred_wgrad: as in `linear_all_reduce` and `copy_linear`: hides the all-reduce of the first layer's backward
            under the gradient of the second weight.

    Returns:
        `[S, ..., H]`, dtype of `x`, with the same bits on every rank.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other, there are no rows, or the plan's pattern is `ring`.
        TransportError: a peer has ended or misses the deadline.
    """
    first, second = first or LayerOptions(), second or LayerOptions()
    check_operands(x, w1, None, first.main_grad, "x")
    method = P2PMethod(transport_for(group), plan or LinearPlan())
    rows = x.reshape(-1, x.shape[-1])
    if not rows.shape[0]:
        raise ValueError(f"x: shape {tuple(x.shape)}: has no rows")
    schedule = method.plan.all_reduce_schedule(method.transport, rows.shape[0], rows.device, "between", MIN_MLP_ROWS)
    state = _BackwardState()
    column = _layer_call(method, w1, first, deferred_wgrad)
    inputs = _MlpInput.apply(rows, w1, column, state)
    y = x.new_empty(rows.shape[0], w2_shard.shape[0])
    total = PipelinedAllReduce(method.transport, schedule, y, "mlp_all_reduce", add_in_place=method.plan.add_in_place)
    weights = w1.detach(), w2_shard.detach()
    hidden = x.new_empty(rows.shape[0], w2_shard.shape[1])
    parts: list[torch.Tensor] = []

    def compute(start: int, stop: int, out: torch.Tensor) -> None:
        part = slice(start, stop)
        middle = between(_FirstGemm.apply(inputs, weights[0], state, part).unsqueeze(1)).reshape(stop - start, -1)
        check_operands(middle, weights[1], None, second.main_grad, "between")
        parts.append(_SecondGemm.apply(middle, weights[1], state, part, hidden, out))

    total.compute(compute)
    row = _layer_call(method, w2_shard, second, deferred_wgrad)
    if deferred_wgrad is not None and w2_shard.is_leaf and w2_shard.requires_grad and inputs.requires_grad:
        # See `linear_all_reduce`: autograd must not see a weight whose gradient is postponed.
        row, w2_shard = replace(row, deferred_weight=w2_shard), weights[1]
    y = _MlpOutput.apply(w2_shard, hidden, row, state, total, *parts)
    if second.observer is not None:
        second.observer("forward", total.num_bytes)
    return y.view(*x.shape[:-1], y.shape[1])


def _layer_call(
    method: P2PMethod, w: torch.Tensor, options: LayerOptions, deferred_wgrad: DeferredWgrad | None
) -> LinearOptions:
    target = WgradTarget(options.main_grad, options.weight_done, method.buffer_pool)
    return LinearOptions(method, target, options.observer, save_input=w.requires_grad, deferred_wgrad=deferred_wgrad)


class _BackwardState:
    """Gradients of all rows that the autograd nodes of one call pass to each other in backward."""

    def __init__(self) -> None:
        self.d_middle: torch.Tensor | None = None
        """Of the activation's output, for `_SecondGemm`."""
        self.d_first: torch.Tensor | None = None
        """Of the first GEMM's output, collected by `_FirstGemm`."""


class _MlpContext(LinearContext, Protocol):
    state: _BackwardState
    part: slice
    num_rows: int
    num_parts: int


class _MlpInput(torch.autograd.Function):
    """All rows of the input. Its backward is that of the first layer, for all rows."""

    @staticmethod
    def forward(
        ctx: _MlpContext, x: torch.Tensor, w: torch.Tensor, call: LinearOptions, state: _BackwardState
    ) -> torch.Tensor:
        # Each part writes its gradient to `state.d_first` and returns none to autograd.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if call.save_input else None, w)
        ctx.call, ctx.state = call, state
        if call.observer is not None:
            call.observer("forward", 0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _MlpContext, *_grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        state = ctx.state
        dy, state.d_first, state.d_middle = state.d_first, None, None
        assert dy is not None
        dx, dw = column_backward(ctx.call, *ctx.saved_tensors, dy, *ctx.needs_input_grad[:2])
        return dx, dw, None, None


class _FirstGemm(torch.autograd.Function):
    """The GEMM of the first layer for one part of the rows."""

    @staticmethod
    def forward(ctx: _MlpContext, x: torch.Tensor, w: torch.Tensor, state: _BackwardState, part: slice) -> torch.Tensor:
        ctx.state, ctx.part, ctx.num_rows = state, part, x.shape[0]
        return torch.mm(x[part], w.t())

    @staticmethod
    def backward(ctx: _MlpContext, *grads: torch.Tensor) -> tuple[None, ...]:
        state, (dy,) = ctx.state, grads
        if state.d_first is None:
            state.d_first = dy.new_empty(ctx.num_rows, dy.shape[1])
        state.d_first[ctx.part] = dy
        return None, None, None, None


class _SecondGemm(torch.autograd.Function):
    """The GEMM of the second layer for one part, written to `out`. The empty result is a node in autograd's graph."""

    @staticmethod
    def forward(
        ctx: _MlpContext,
        middle: torch.Tensor,
        w: torch.Tensor,
        state: _BackwardState,
        part: slice,
        hidden: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        ctx.state, ctx.part = state, part
        hidden[part] = middle
        gemm_into(middle, w.t(), out)
        return middle.new_empty(0)

    @staticmethod
    def backward(ctx: _MlpContext, *_grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert ctx.state.d_middle is not None
        return ctx.state.d_middle[ctx.part], None, None, None, None, None


class _MlpOutput(torch.autograd.Function):
    """All rows of the output, after the sum. Its backward is that of the second layer, for all rows."""

    @staticmethod
    def forward(
        ctx: _MlpContext,
        w: torch.Tensor,
        hidden: torch.Tensor,
        call: LinearOptions,
        state: _BackwardState,
        total: PipelinedAllReduce,
        *parts: torch.Tensor,
    ) -> torch.Tensor:
        y = total.finish()
        ctx.save_for_backward(hidden if call.save_input else None, w)
        ctx.call, ctx.state, ctx.num_parts = call, state, len(parts)
        return y

    @staticmethod
    def backward(ctx: _MlpContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        need_w, need_middle = ctx.needs_input_grad[0], any(ctx.needs_input_grad[5:])
        ctx.state.d_middle, dw = row_backward(ctx.call, *ctx.saved_tensors, grads[0].contiguous(), need_middle, need_w)
        return dw, *[None] * (4 + ctx.num_parts)
