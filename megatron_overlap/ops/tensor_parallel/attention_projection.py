"""Attention and its row-parallel projection by query slices: both hide the reduce-scatter.

Attention and projection run per query slice, in the order of the owners of the slices, own slice last. Each partial
output is sent to its owner. Backward gathers the output gradient, own rows first. Dgrad of the projection and the
attention backward of arrived rows hide the rest of the gather. The weight gradient of the projection fills the time
without new rows. Key and value gradients accumulate in fp32.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013), query-split attention. The fp32 sum at the owner, the cut of slices
into chunks, and the backward are not from the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Observer, WeightDone, transport_for, unobserved
from megatron_overlap.ops.flash_attention import Attended, KeyGradients, flash_backward, flash_forward
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, P2PMethod
from megatron_overlap.ops.tensor_parallel.pipelined import PipelinedAllGather
from megatron_overlap.ops.wgrad import Spans, WeightGradient, WgradTarget
from megatron_overlap.schedules.heuristics import MIN_CHUNK_ROWS, most_parts

# One more chunk costs two kernel calls, a merge and a GEMM of fewer rows. It reduces exposed communication.
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

    `attention` is `softmax(softmax_scale * q @ k.T + mask) @ v` per head. Tensor parallelism with sequence
    parallelism: heads are divided over the R ranks in the input, sequence positions in the output. Scores are not
    stored. Forward saves q, k, v, the attention output and one fp32 number per query and head.

    Args:
        q: `[S, B, Hq/R, D]` queries of this rank's heads, whole sequence; any strides with D innermost.
        k: `[S, B, Hkv/R, D]` keys; consecutive Hq/Hkv query heads share one.
        v: `[S, B, Hkv/R, D]` values.
        w_shard: `[F, Hq/R * D]` own columns of the projection's weight. A bias is added to the result by the caller.
        group: the R ranks, or their transport.
        causal: position i sees positions 0..i only.
        softmax_scale: None is `D ** -0.5`.
        plan, main_grad, weight_done, observer: as in `all_gather_linear`.

    Returns:
        `[S/R, B, F]`, dtype of `q`. S need not be divisible by R: `ChunkLayout` defines the positions of each rank.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        TransportError: a peer has ended or misses the deadline.
    """
    transport = transport_for(group)
    _check(q, k, v, w_shard, main_grad)
    plan = plan or LinearPlan()
    if plan.chunks_per_rank is None:
        smallest = max(_MIN_CHUNK_POSITIONS, -(-MIN_CHUNK_ROWS // max(1, q.shape[1])))
        chunks = most_parts(_MAX_CHUNKS_PER_RANK, q.shape[0] // transport.size, smallest, "first")
        plan = replace(plan, chunks_per_rank=chunks)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    target = WgradTarget(main_grad, weight_done, transport.buffer_pool)
    call = _Call(P2PMethod(transport, plan), causal, scale, target, observer or unobserved)
    y: torch.Tensor = _QuerySplit.apply(q, k, v, w_shard, call)
    return y


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


@dataclass(frozen=True, slots=True)
class _Call:
    """The options of one call: everything but tensors that autograd differentiates."""

    method: P2PMethod
    causal: bool
    scale: float
    target: WgradTarget
    observer: Observer


class _QuerySplit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        positions, batch, features = q.shape[0], q.shape[1], w.shape[0]
        rows = AttentionRows(q, k, v, call.causal, call.scale)
        context = q.new_empty(positions, batch, w.shape[1])
        lse = q.new_empty(batch, positions, q.shape[2], dtype=torch.float32)

        def compute(start: int, stop: int, out: torch.Tensor) -> None:
            rows.forward(start, stop, context[start:stop], lse[:, start:stop])
            torch.mm(context[start:stop].flatten(0, 1), w.t(), out=out.view(-1, features))

        # The schedule cuts the sequence: one row is one position with its whole batch.
        scatter = call.method.begin_scatter(q, batch * features, "attention_linear_reduce_scatter")
        scatter.compute(compute)
        y = scatter.finish()
        ctx.save_for_backward(q, k, v, w, context, lse)
        ctx.call = call
        call.observer("forward", scatter.num_bytes)
        return y.view(-1, batch, features)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, w, context, lse = ctx.saved_tensors
        call: _Call = ctx.call
        transport, buffer_pool = call.method.transport, call.method.buffer_pool
        need_x, need_w = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        positions, batch, features = q.shape[0], q.shape[1], w.shape[0]
        dy_shard = grads[0].contiguous().flatten(1)
        row_bytes = batch * features * dy_shard.itemsize
        schedule, layout = call.method.plan.schedule("all_gather", transport, positions, row_bytes, dy_shard.device)
        full = buffer_pool.take("gather", (positions, batch * features), dy_shard, symmetric=True)
        dy_rows, context_rows = full.view(-1, features), context.flatten(0, 1)
        wgrad = WeightGradient(w, call.target) if need_w else None
        rows = AttentionRows(q, k, v, call.causal, call.scale)
        keys = KeyGradients(k.shape, k, buffer_pool) if need_x else None
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        op = "attention_linear_reduce_scatter dgrad"
        gather = PipelinedAllGather(transport, schedule, (dy_shard,), layout, (full,), op, repeats=True)
        gather.copy_own_rows()
        spans = Spans()
        for (start, stop), (dy,) in gather:
            if keys is not None:
                dcontext = buffer_pool.take("dcontext", (stop - start, batch, w.shape[1]), q)
                torch.mm(dy.reshape(-1, features), w, out=dcontext.view(-1, w.shape[1]))
                attended = context[start:stop], lse[:, start:stop]
                for place, dk, dv in rows.backward(start, stop, dcontext, *attended, dq[start:stop]):
                    keys.add(place, dk, dv)
            spans.add((start * batch, stop * batch))
            # The weight gradient fills the time without new rows; on a GPU it is one GEMM after the last row.
            if wgrad is not None and not (dy_rows.is_cuda or gather.ready):
                spans.add_to(wgrad, dy_rows, context_rows)
        if wgrad is not None:
            spans.add_to(wgrad, dy_rows, context_rows)
        gather.finish()
        dw = None if wgrad is None else wgrad.result()
        # Both gradients use one gather. It is counted for the first.
        num_bytes = (transport.size - 1) * dy_shard.nbytes
        if need_x:
            call.observer("dgrad", num_bytes)
        if need_w:
            call.observer("wgrad", 0 if need_x else num_bytes)
        return *((None, None, None) if keys is None else (dq, *keys.result())), dw, None


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """`softmax(scale * q @ k.T) @ v` per head, for any range of query rows.

    A causal range of query rows `[start, stop)` takes two kernel calls: one for keys `[0, start)`, which all of its
    queries see, and a causal one for the square of keys `[start, stop)`. The causal mask of torch's kernel starts at
    the first key, so it fits a square only; a mask tensor would also compute the masked scores. The partial results
    are merged by their log-sum-exp. Gradients need no merge: each part uses the merged result.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    scale: float

    def _calls(self, start: int, stop: int) -> list[tuple[slice, bool]]:
        """The keys of each kernel call, and whether it is causal."""
        num_full = start if self.causal else self.k.shape[0]
        full = [(slice(0, num_full), False)] if num_full else []
        return [*full, (slice(start, stop), True)] if self.causal else full

    def forward(self, start: int, stop: int, context: torch.Tensor, lse: torch.Tensor) -> None:
        """Writes rows `[start, stop)` of the result `[rows, B, Hq * D]` and of the log-sum-exp `[B, rows, Hq]`."""
        q, num_kv, num_rows = self.q[start:stop], self.k.shape[2], stop - start
        context = context.view(q.shape)
        outs, logs = [], []
        for keys, causal in self._calls(start, stop):
            queries = _rows(q) if causal else _group_queries(q, num_kv)
            out, log = flash_forward(queries, _rows(self.k[keys]), _rows(self.v[keys]), causal=causal, scale=self.scale)
            outs.append(out.permute(2, 0, 1, 3) if causal else _ungroup_queries(out, num_rows))
            logs.append(log.reshape(lse.shape[0], -1, num_rows).transpose(1, 2))
        if len(outs) == 1:
            context.copy_(outs[0])
            lse.copy_(logs[0])
            return
        # The share of the square in the sum of both: e^b / (e^a + e^b).
        share = torch.sigmoid(logs[1] - logs[0]).transpose(0, 1).unsqueeze(-1)
        context.copy_(torch.lerp(outs[0].to(share.dtype), outs[1].to(share.dtype), share))
        torch.logaddexp(logs[0], logs[1], out=lse)

    def backward(
        self, start: int, stop: int, dcontext: torch.Tensor, context: torch.Tensor, lse: torch.Tensor, dq: torch.Tensor
    ) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Gradients of rows `[start, stop)`. `forward` wrote `context` and `lse`; `dq` `[rows, B, Hq, D]` is written.

        Returns:
            Terms of the key and value gradients: rows, dk and dv of these rows `[rows, B, Hkv, D]`.
        """
        q, num_kv = self.q[start:stop], self.k.shape[2]
        rows = dcontext.view(q.shape), q, context.view(q.shape)
        log = lse.transpose(1, 2)
        terms: list[tuple[slice, torch.Tensor, torch.Tensor]] = []
        parts: list[torch.Tensor] = []
        for keys, causal in self._calls(start, stop):
            dout, queries, out = (_rows(x) if causal else _group_queries(x, num_kv) for x in rows)
            part_lse = log if causal else log.reshape(log.shape[0], num_kv, -1)
            attended = Attended(queries, _rows(self.k[keys]), _rows(self.v[keys]), out, part_lse)
            part, dk, dv = flash_backward(dout, attended, causal=causal, scale=self.scale)
            parts.append(part.permute(2, 0, 1, 3) if causal else _ungroup_queries(part, stop - start))
            terms.append((keys, dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)))
        if len(parts) == 1:
            dq.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=dq)
        return terms


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[n, B, H, D]` in the layout of the kernels, `[B, H, n, D]`."""
    return x.permute(1, 2, 0, 3)


def _group_queries(x: torch.Tensor, num_kv: int) -> torch.Tensor:
    """`[n, B, Hq, D]` to `[B, Hkv, Hq / Hkv * n, D]`: the queries of heads that share keys become rows of one head."""
    return x.unflatten(2, (num_kv, -1)).permute(1, 2, 3, 0, 4).flatten(2, 3)


def _ungroup_queries(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The inverse of `_group_queries`."""
    return x.unflatten(2, (-1, num_rows)).permute(3, 0, 1, 2, 4).flatten(2, 3)
