"""A whole MLP without sequence parallelism, by parts of its rows: its all-reduce hides under both of its layers.

A row-parallel layer alone has only its own GEMM to hide its all-reduce under. All of an MLP is row by row, so here a
part of the rows goes through both layers before the next, and its sums travel while the next parts are computed.
Backward is that of the two layers, whole: smaller GEMMs would gain nothing there, and a weight gradient stays one sum.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013) for the order of the partial sums; joining the layers is our own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Observer, WeightDone, check_operands, gemm_into, transport_for
from megatron_overlap.ops.tensor_parallel.linear_all_reduce import bytes_sent, column_backward, row_backward
from megatron_overlap.ops.tensor_parallel.pipelined import PipelinedAllReduce
from megatron_overlap.ops.tensor_parallel.plan import MIN_MLP_ROWS, LinearPlan
from megatron_overlap.ops.wgrad import DeferredWgrad

Between = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What `copy_linear` or `linear_all_reduce` would be told of one of the two layers; see there."""

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
        x: `[S, ..., K]` all rows, the same on every rank; its leading dimensions are one run of rows.
        w1: `[F/R, K]` own rows of the first weight.
        w2_shard: `[H, G/R]` own columns of the second weight.
        between: bias and activation: `[rows, 1, F/R]` to `[rows, 1, G/R]`, each row from its own alone. Called once
            for each part of the rows; autograd sees it.
        group: the R ranks, or their transport.
        plan: how messages are cut and ordered; the same on every rank. None uses `LinearPlan()`.
        first: of the column-parallel layer.
        second: of the row-parallel layer.
        deferred_wgrad: as in `linear_all_reduce` and `copy_linear`: hides the second weight's gradient under the
        first layer's
            all-reduce in backward.

    Returns:
        `[S, ..., H]`, dtype of `x`, with the same bits on every rank.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other, there are no rows, or the plan's pattern is `ring`.
        TransportError: a peer is gone or late beyond the deadline.
    """
    first, second = first or LayerOptions(), second or LayerOptions()
    check_operands(x, w1, None, first.main_grad, "x")
    transport, plan = transport_for(group), plan or LinearPlan()
    rows = x.reshape(-1, x.shape[-1])
    if not rows.shape[0]:
        raise ValueError(f"x: shape {tuple(x.shape)}: has no rows")
    schedule = plan.all_reduce_schedule(transport, rows.shape[0], rows.device, "between", MIN_MLP_ROWS)
    call = _Call(transport, plan, first, second, deferred_wgrad)
    entered = _Enter.apply(rows, w1, call)
    y = x.new_empty(rows.shape[0], w2_shard.shape[0])
    sums = PipelinedAllReduce(transport, schedule, y, "mlp_all_reduce", add_in_place=plan.add_in_place)
    weights = w1.detach(), w2_shard.detach()
    hidden = x.new_empty(rows.shape[0], w2_shard.shape[1])
    parts = []

    def compute(start: int, stop: int, out: torch.Tensor) -> None:
        part = slice(start, stop)
        middle = between(_First.apply(entered, weights[0], call, part).unsqueeze(1)).reshape(stop - start, -1)
        check_operands(middle, weights[1], None, second.main_grad, "between")
        parts.append(_Second.apply(middle, weights[1], call, part, hidden, out))

    sums.compute(compute)
    # A weight that autograd knows of would be handed an empty gradient, and its hooks run, before the real one is made.
    later = deferred_wgrad is not None and w2_shard.is_leaf and w2_shard.requires_grad and entered.requires_grad
    call.later = (deferred_wgrad, w2_shard) if later else None
    y = _Leave.apply(weights[1] if later else w2_shard, hidden, call, sums, y, *parts)
    if second.observer is not None:
        second.observer("forward", bytes_sent(schedule, y))
    return y.view(*x.shape[:-1], y.shape[1])


class _Call:
    """What the nodes of one call share: in forward the choices, in backward the gradients of all rows."""

    def __init__(
        self,
        transport: Transport,
        plan: LinearPlan,
        first: LayerOptions,
        second: LayerOptions,
        deferred_wgrad: DeferredWgrad | None,
    ) -> None:
        self.transport, self.plan, self.first, self.second, self.deferred_wgrad = (
            transport,
            plan,
            first,
            second,
            deferred_wgrad,
        )
        self.later: tuple[DeferredWgrad | None, torch.Tensor] | None = None
        self.of_middle: torch.Tensor | None = None
        self.of_first: torch.Tensor | None = None


class _Enter(torch.autograd.Function):
    """All rows on their way in. Its backward is the first layer's, for all rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, call: _Call) -> torch.Tensor:
        # The parts hand their gradients over in `call.of_first`, and autograd nothing.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if w.requires_grad else None, w)
        ctx.call, ctx.transport, ctx.plan, ctx.deferred_wgrad = call, call.transport, call.plan, call.deferred_wgrad
        ctx.main_grad, ctx.weight_done, ctx.observer = call.first.main_grad, call.first.weight_done, call.first.observer
        if ctx.observer is not None:
            ctx.observer("forward", 0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call = ctx.call
        dy, call.of_first, call.of_middle = call.of_first, None, None
        dx, dw = column_backward(ctx, dy, *ctx.needs_input_grad[:2])
        return dx, dw, None


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, call: _Call, part: slice) -> torch.Tensor:
        ctx.call, ctx.part, ctx.num_rows = call, part, x.shape[0]
        return torch.mm(x[part], w.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        call, (dy,) = ctx.call, grads
        if call.of_first is None:
            call.of_first = dy.new_empty(ctx.num_rows, dy.shape[1])
        call.of_first[ctx.part] = dy
        return (None,) * 4


class _Second(torch.autograd.Function):
    """One part's GEMM of the second layer, into `out`; returns nothing but a place in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        middle: torch.Tensor,
        w: torch.Tensor,
        call: _Call,
        part: slice,
        hidden: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        ctx.call, ctx.part = call, part
        hidden[part] = middle
        gemm_into(middle, w.t(), out)
        return middle.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.call.of_middle[ctx.part], *(None,) * 5


class _Leave(torch.autograd.Function):
    """All rows on their way out: waits for the sums. Its backward is the second layer's, for all rows."""

    @staticmethod
    def forward(
        ctx: Any,
        w: torch.Tensor,
        hidden: torch.Tensor,
        call: _Call,
        sums: PipelinedAllReduce,
        y: torch.Tensor,
        *parts: torch.Tensor,
    ) -> torch.Tensor:
        sums.finish()
        ctx.save_for_backward(hidden if w.requires_grad or call.later is not None else None, w)
        ctx.call, ctx.later, ctx.buffer_pool = call, call.later, call.transport.buffer_pool
        ctx.main_grad, ctx.weight_done = call.second.main_grad, call.second.weight_done
        ctx.observer, ctx.num_parts = call.second.observer, len(parts)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        need_w, need_middle = ctx.needs_input_grad[0], any(ctx.needs_input_grad[5:])
        ctx.call.of_middle, dw = row_backward(ctx, grads[0].contiguous(), need_middle, need_w)
        return dw, *(None,) * (4 + ctx.num_parts)
