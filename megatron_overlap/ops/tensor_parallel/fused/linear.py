"""Column- and row-parallel linears with fused kernels: forward, dgrad and wgrad, over symmetric memory.

The same programs as in `ops.tensor_parallel.linear`, whose docstrings say what they equal:

- column-parallel: forward gathers by copy engines into a GEMM whose tiles wait. Backward starts gathering again, runs
  dgrad as a GEMM that stores at the owners of its rows, then wgrad over the rows that have arrived, and sums dgrad
  last: what dgrad has on its way hides under wgrad.
- row-parallel: forward is a GEMM that stores at the owners, and a sum. Backward gathers the output gradient once: dgrad
  in the order of arrival, then wgrad over the same rows.

Source: Flux (arXiv 2406.06858) for the forward; it has no backward. Written for CUDA and not run on it yet.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_overlap.ops.call import Observer, WeightDone, check_operands
from megatron_overlap.ops.tensor_parallel.fused.multi_node import FusedTransport, open_gather, open_scatter
from megatron_overlap.ops.tensor_parallel.fused.plan import FusedPlan
from megatron_overlap.schedules import ChunkLayout

_DEFAULT = FusedPlan()


def unsupported_fused_reason(x: torch.Tensor, num_rows: int, num_ranks: int) -> str | None:
    """What keeps one call from the fused kernels; None if nothing does."""
    if x.device.type != "cuda":
        return f"fused kernels need CUDA, not {x.device.type}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"fused kernels compute in bf16 and fp16, not {x.dtype}"
    if num_rows < num_ranks:
        return f"{num_rows} rows are fewer than {num_ranks} ranks"
    return None


def fused_all_gather_linear(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: FusedTransport,
    plan: FusedPlan | None = None,
    num_rows: int | None = None,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals `ops.all_gather_linear`, argument by argument; `plan` says how, the same on every rank.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        TransportError: an earlier op waited for a peer in vain.
    """
    rows_per_index = check_operands(x_shard, w, bias, main_grad, "x_shard")
    flat = x_shard.reshape(-1, x_shard.shape[-1])
    num_rows = transport.size * flat.shape[0] if num_rows is None else num_rows
    own = ChunkLayout(num_rows, transport.size).shard_rows(transport.rank)
    if own != flat.shape[0]:
        raise ValueError(f"x_shard: {flat.shape[0]} rows: rank {transport.rank} must hold {own} of {num_rows}")
    y: torch.Tensor = _FusedAllGatherLinear.apply(
        flat, w, bias, transport, plan or _DEFAULT, num_rows, main_grad, weight_done, observer
    )
    if x_shard.dim() == 2:
        return y
    return y.view(y.shape[0] // rows_per_index, *x_shard.shape[1:-1], w.shape[0])


def fused_linear_reduce_scatter(
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
    """Equals `ops.linear_reduce_scatter`, argument by argument; `plan` says how, the same on every rank.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        TransportError: an earlier op waited for a peer in vain.
    """
    rows_per_index = check_operands(x, w_shard, bias, main_grad, "x")
    if x.dim() > 2 and x.shape[0] % transport.size:
        raise ValueError(f"x: {x.shape[0]} positions: not divisible by {transport.size} ranks; pad the sequence")
    flat = x.reshape(-1, x.shape[-1])
    y: torch.Tensor = _FusedLinearReduceScatter.apply(
        flat, w_shard, transport, plan or _DEFAULT, main_grad, weight_done, observer
    )
    if bias is not None:
        y = y + bias
    if x.dim() == 2:
        return y
    return y.view(y.shape[0] // rows_per_index, *x.shape[1:-1], w_shard.shape[0])


def _weight_result(
    dw: torch.Tensor | None, main_grad: torch.Tensor | None, weight_done: WeightDone | None
) -> torch.Tensor | None:
    return dw if main_grad is None or weight_done is None else weight_done()


class _FusedAllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        transport: FusedTransport,
        plan: FusedPlan,
        num_rows: int,
        main_grad: torch.Tensor | None,
        weight_done: WeightDone | None,
        observer: Observer | None,
    ) -> torch.Tensor:
        x = x.contiguous()
        gather = open_gather(transport, x, num_rows, "all_gather_linear", plan)
        y = gather.gemm(w.t(), bias)
        gather.done()
        ctx.save_for_backward(x, w)
        ctx.transport, ctx.use_bias, ctx.main_grad = transport, bias is not None, main_grad
        ctx.plan, ctx.weight_done, ctx.observer = plan, weight_done, observer
        if observer is not None:
            observer("forward", (transport.size - 1) * x.nbytes)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dy = grads[0].contiguous()
        transport, observer = ctx.transport, ctx.observer
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        gather = scatter = None
        dx = dw = None
        if need_w:
            gather = open_gather(transport, x, dy.shape[0], "all_gather_linear wgrad", ctx.plan)
        if need_x:
            scatter = open_scatter(transport, dy, w, "all_gather_linear dgrad", ctx.plan)
        if gather is not None:
            dw = gather.weight_gradient(dy, None, w, ctx.main_grad)
            gather.done()
            dw = _weight_result(dw, ctx.main_grad, ctx.weight_done)
            if observer is not None:
                observer("wgrad", (transport.size - 1) * x.nbytes)
        if scatter is not None:
            dx = scatter.sum()
            if observer is not None:
                observer("dgrad", (dy.shape[0] - dx.shape[0]) * dx.shape[1] * dx.itemsize)
        dbias = dy.sum(0) if need_bias and ctx.use_bias else None
        return dx, dw, dbias, None, None, None, None, None, None


class _FusedLinearReduceScatter(torch.autograd.Function):
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
        # The weight gradient reads rows of it as they lie.
        x = x if x.stride(-1) == 1 else x.contiguous()
        y = open_scatter(transport, x, w.t(), "linear_reduce_scatter", plan).sum()
        ctx.save_for_backward(x, w)
        ctx.transport, ctx.main_grad = transport, main_grad
        ctx.plan, ctx.weight_done, ctx.observer = plan, weight_done, observer
        if observer is not None:
            observer("forward", (x.shape[0] - y.shape[0]) * w.shape[0] * y.itemsize)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        need_x, need_w = ctx.needs_input_grad[:2]
        dx = dw = None
        if need_x or need_w:
            shard = grads[0].contiguous()
            gather = open_gather(ctx.transport, shard, x.shape[0], "linear_reduce_scatter dgrad", ctx.plan)
            if need_x:
                dx = gather.gemm(w)
            if need_w:
                dw = gather.weight_gradient(None, x, w, ctx.main_grad)
            gather.done()
            if need_w:
                dw = _weight_result(dw, ctx.main_grad, ctx.weight_done)
            if ctx.observer is not None:
                # One gather serves both; it is counted with the first.
                for direction in ["dgrad"] * need_x + ["wgrad"] * need_w:
                    first = direction == "dgrad" or not need_x
                    ctx.observer(direction, (ctx.transport.size - 1) * shard.nbytes * first)
        return dx, dw, None, None, None, None, None
