"""Attention and its row-parallel projection, query slice by query slice, with the reduce-scatter hidden under both.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013), query-split attention: after QKV, attention and out-projection run
per query slice in the order of the owners, and each partial output goes straight to its owner, own slice last.
PipelinedAllReduce
in fp32 at the owner, sub-slices and the backward are our own:

- the output gradient is gathered, own rows first;
- rows that have landed go through the projection's dgrad and the attention backward of those queries, so that the
  rest of the gather hides under both; key and value gradients accumulate in fp32;
- the projection's wgrad fills the time in which nothing new is there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import BufferPool, Transport, transport_of
from megatron_overlap.ops.tensor_parallel.attention_rows import AttentionRows
from megatron_overlap.ops.tensor_parallel.linear import Observer, WeightDone
from megatron_overlap.ops.tensor_parallel.pipelined import PipelinedAllGather, PipelinedReduceScatter
from megatron_overlap.ops.tensor_parallel.plan import LinearPlan
from megatron_overlap.ops.wgrad import Spans, WeightGradient, WgradTarget, add_wide
from megatron_overlap.schedules.heuristics import MIN_CHUNK_ROWS, most_parts

# A cut costs two more kernel calls, a merge, and a GEMM of fewer rows; it buys less exposed communication.
_MIN_CHUNK_POSITIONS = 64
_MAX_CHUNKS_PER_RANK = 16


def attention_linear_reduce_scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w_shard: torch.Tensor,
    *,
    group: dist.ProcessGroup | Transport,
    causal: bool = True,
    softmax_scale: float | None = None,
    plan: LinearPlan | None = None,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals `reduce_scatter(attention(q, k, v).reshape(S, B, -1) @ w_shard.T)` over the sequence.

    `attention` is `softmax(softmax_scale * q @ k.T + mask) @ v` per head; see
    `ops.reference.attention_linear_reduce_scatter`. Tensor parallelism with sequence parallelism: heads are divided
    over the R ranks on the way in, sequence positions on the way out. Scores are never stored: backward keeps q, k, v,
    the attention's output and one fp32 number a query and head.

    Args:
        q: `[S, B, Hq/R, D]` queries of this rank's heads, whole sequence; any strides with D innermost.
        k: `[S, B, Hkv/R, D]` keys; consecutive Hq/Hkv query heads share one.
        v: `[S, B, Hkv/R, D]` values.
        w_shard: `[F, Hq/R * D]` own columns of the projection's weight. A bias is added to the result by the caller.
        group: the R ranks, or their transport.
        causal: position i attends to positions 0..i only.
        softmax_scale: None is `D ** -0.5`.
        plan: how messages are cut and ordered; the same on every rank. None uses `LinearPlan()`.
        main_grad: `[F, Hq/R * D]` buffer that the weight gradient is added to; `w_shard` then gets no gradient, or
            what `weight_done` returns.
        weight_done: called in backward when `main_grad` holds the gradient.
        observer: called in every pass, for counting.

    Returns:
        `[S/R, B, F]`, dtype of `q`. S need not be divisible by R: positions are cut as `ChunkLayout` does.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        TransportError: a peer is gone or late beyond the deadline.
    """
    transport = transport_of(group) if isinstance(group, dist.ProcessGroup) else group
    _check(q, k, v, w_shard, main_grad)
    plan = plan or LinearPlan()
    if plan.chunks_per_rank is None:
        plan = replace(plan, chunks_per_rank=_num_chunks(q.shape[0] // transport.size, q.shape[1]))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    y: torch.Tensor = _QuerySplit.apply(
        q, k, v, w_shard, transport, plan, causal, scale, main_grad, weight_done, observer
    )
    return y


def _num_chunks(positions: int, batch: int) -> int:
    """Messages a rank's slice of `positions` is cut into."""
    smallest = max(_MIN_CHUNK_POSITIONS, -(-MIN_CHUNK_ROWS // max(1, batch)))
    return most_parts(_MAX_CHUNKS_PER_RANK, positions, smallest, "first")


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor, main_grad: torch.Tensor | None) -> None:
    if q.dim() != 4:
        raise ValueError(f"q: shape {tuple(q.shape)}: must be [positions, batch, heads, head size]")
    if k.shape != v.shape or k.dim() != 4 or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
        raise ValueError(
            f"k: shape {tuple(k.shape)}, v: {tuple(v.shape)}: must be equal, and as q {tuple(q.shape)} but for heads"
        )
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"k: {k.shape[2]} heads: must divide the {q.shape[2]} heads of q")
    if w.dim() != 2 or w.shape[1] != q.shape[2] * q.shape[3]:
        raise ValueError(f"w_shard: shape {tuple(w.shape)}: must be [features, {q.shape[2]} heads x {q.shape[3]}]")
    for name, tensor in (("k", k), ("v", v), ("w_shard", w)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(f"{name}: {tensor.dtype} on {tensor.device}: q is {q.dtype} on {q.device}")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or (q.is_cuda and q.dtype == torch.float32):
        raise ValueError(f"q: {q.dtype}: flash attention on {q.device.type} needs bfloat16 or float16")
    if main_grad is not None and main_grad.shape != w.shape:
        raise ValueError(f"main_grad: shape {tuple(main_grad.shape)}: must be {tuple(w.shape)}")


class _QuerySplit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        w: torch.Tensor,
        transport: Transport,
        plan: LinearPlan,
        causal: bool,
        scale: float,
        main_grad: torch.Tensor | None,
        weight_done: WeightDone | None,
        observer: Observer | None,
    ) -> torch.Tensor:
        positions, batch, features = q.shape[0], q.shape[1], w.shape[0]
        schedule = plan.schedule("reduce_scatter", transport, positions, batch * features * q.itemsize, q.device)
        layout = schedule.layout(positions)
        # What is cut is the sequence: one row for the engine is one position with its whole batch.
        y = q.new_empty(layout.shard_rows(transport.rank), batch * features)
        rows = AttentionRows(q, k, v, causal, scale)
        context = q.new_empty(positions, batch, w.shape[1])
        lse = q.new_empty(batch, positions, q.shape[2], dtype=torch.float32)

        def slice_of(start: int, stop: int, out: torch.Tensor) -> None:
            rows.forward(start, stop, context[start:stop], lse[:, start:stop])
            torch.mm(context[start:stop].flatten(0, 1), w.t(), out=out.view(-1, features))

        departures = PipelinedReduceScatter(transport, schedule, layout, y, "attention_linear_reduce_scatter")
        departures.compute(slice_of)
        departures.finish()
        ctx.save_for_backward(q, k, v, w, context, lse)
        ctx.transport, ctx.plan, ctx.causal, ctx.scale = transport, plan, causal, scale
        ctx.main_grad, ctx.weight_done, ctx.observer = main_grad, weight_done, observer
        if observer is not None:
            observer("forward", (positions - y.shape[0]) * y.shape[1] * y.element_size())
        return y.view(-1, batch, features)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, w, context, lse = ctx.saved_tensors
        transport = ctx.transport
        need_x, need_w = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        if not (need_x or need_w):
            return (None,) * 11
        positions, batch, features = q.shape[0], q.shape[1], w.shape[0]
        dy_shard = grads[0].contiguous().flatten(1)
        schedule = ctx.plan.schedule(
            "all_gather", transport, positions, batch * features * dy_shard.itemsize, dy_shard.device
        )
        layout = schedule.layout(positions)
        full = transport.buffer_pool.take("gather", (positions, batch * features), dy_shard)
        by_row = full.view(-1, features)
        wgrad = (
            WeightGradient(w, WgradTarget(ctx.main_grad, ctx.weight_done, transport.buffer_pool)) if need_w else None
        )
        inputs = (
            _InputGradients(AttentionRows(q, k, v, ctx.causal, ctx.scale), transport.buffer_pool) if need_x else None
        )
        arrivals = PipelinedAllGather(
            transport, schedule, dy_shard, layout, full, "attention_linear_reduce_scatter dgrad", whole=True
        )
        deferred_wgrad = Spans()
        for (start, stop), dy in arrivals:
            if inputs is not None:
                dcontext = transport.buffer_pool.take("dcontext", (stop - start, batch, w.shape[1]), q)
                torch.mm(dy.reshape(-1, features), w, out=dcontext.view(-1, w.shape[1]))
                inputs.add(start, stop, dcontext, context[start:stop], lse[:, start:stop])
            deferred_wgrad.add((start * batch, stop * batch))
            # wgrad fills the time in which no rows are there, with all that wait.
            if wgrad is not None and not arrivals.ready:
                deferred_wgrad.add_to(wgrad, by_row, context.flatten(0, 1))
        if wgrad is not None:
            deferred_wgrad.add_to(wgrad, by_row, context.flatten(0, 1))
        arrivals.finish()
        dq, dk, dv = (None, None, None) if inputs is None else inputs.result()
        dw = None
        if wgrad is not None:
            dw = wgrad.result()
        if ctx.observer is not None:
            # One gather serves both; it is counted with the first.
            for direction in ["dgrad"] * need_x + ["wgrad"] * need_w:
                first = direction == "dgrad" or not need_x
                ctx.observer(direction, (transport.size - 1) * dy_shard.nbytes * first)
        return dq, dk, dv, dw, None, None, None, None, None, None, None


class _InputGradients:
    """Gradients of q, k and v, accumulated over runs of queries; those of keys and values in fp32."""

    def __init__(self, rows: AttentionRows, buffer_pool: BufferPool) -> None:
        self._rows, self._buffer_pool = rows, buffer_pool
        k = rows.k
        self._dq = torch.empty_like(rows.q, memory_format=torch.contiguous_format)
        if k.element_size() == 4:
            self._dk, self._dv = (torch.zeros_like(k, memory_format=torch.contiguous_format) for _ in range(2))
        else:
            wide = torch.empty(0, dtype=torch.float32, device=k.device)
            self._dk, self._dv = (buffer_pool.take(name, k.shape, wide).zero_() for name in ("dk", "dv"))

    def add(self, start: int, stop: int, dcontext: torch.Tensor, context: torch.Tensor, lse: torch.Tensor) -> None:
        """Queries `[start, stop)`; see `AttentionRows.backward`."""
        for keys, dk, dv in self._rows.backward(start, stop, dcontext, context, lse, self._dq[start:stop]):
            add_wide(self._dk[keys], dk, self._buffer_pool)
            add_wide(self._dv[keys], dv, self._buffer_pool)

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv in the dtype of the inputs."""
        dtype = self._rows.k.dtype
        return self._dq, self._dk.to(dtype), self._dv.to(dtype)
