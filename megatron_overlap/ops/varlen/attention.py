"""Balanced attention: causal attention of documents of very different lengths, placed by `schedules.varlen.partition`.

Source: Zeppelin (arXiv 2509.21841, section 4.2), whose code is not public. All messages are posted before the
computation starts, inter-node messages first. Meanwhile a rank computes attention of its own rows, of arrived rows, and
of its whole documents. `schedules.varlen.messages` plans the messages, `ops.varlen.ring` orders the computation.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport, transport_of
from megatron_overlap.ops.call import Observer, unobserved
from megatron_overlap.ops.flash_attention import Attended, accumulation_dtype, documents_backward, documents_forward
from megatron_overlap.ops.varlen.executor import Layout, PassExecutor
from megatron_overlap.ops.varlen.pass_kv_pass_q import BackwardPassKV, BackwardPassQ, ForwardPassKV, Shape
from megatron_overlap.ops.varlen.ring import CallOptions, VarlenTransports
from megatron_overlap.schedules.varlen import Plan
from megatron_overlap.schedules.varlen.rebalance import Rebalance, rebalance_to_linear
from megatron_overlap.schedules.varlen.ring_groups import Passing


def balanced_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    index: int = 0,
    group: dist.ProcessGroup | Transport | VarlenTransports,
    softmax_scale: float | None = None,
    passing: Passing | None = None,
    layout: Layout = "attention",
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals `softmax(softmax_scale * q @ k.T + mask) @ v` per head of each document of a pass; `mask` is causal.

    With `layout="linear"` it equals `to_linear(attention(to_attention(q), to_attention(k), to_attention(v)))`, where
    both conversions are `rebalance`. Their messages overlap with the computation.

    Args:
        q: `[T, Hq, D]`, positions already encoded. In the attention layout: the T = `plan.tokens(index)[rank]` rows of
            this rank in the order of `plan.pieces(index, rank)`, which is for each ring the early chunk and then the
            late one, followed by whole documents. T may be 0; every rank of the group must call.
        k, v: `[T, Hkv, D]`, the same rows; Hq / Hkv consecutive query heads share a key head.
        plan: plan of the batch; the same on every rank.
        index: index of the pass.
        group: the ranks of the plan in order, or their transport or transports.
        softmax_scale: factor of the scores; None is `1 / sqrt(D)`.
        passing: `kv` for pass-KV or `q` for pass-Q in backward; None selects the one with fewer bytes. Forward is
            pass-KV, which always sends fewer.
        layout: layout of the arguments and the result, `attention` or `linear`.
        observer: called with `forward` or `dgrad` and the number of bytes that this rank sent.

    Returns:
        `[T, Hq, D]`, dtype of `q`, in the row order of `q`.

    Raises:
        ValueError: shapes or dtypes do not fit each other or the plan.
        TransportError: a peer has failed or exceeds the deadline.
    """
    transports = _transports(group)
    size, rank = transports.inter.size, transports.inter.rank
    if size != plan.topology.ranks:
        raise ValueError(f"plan: for {plan.topology.ranks} ranks: the group has {size}")
    if not 0 <= index < len(plan.passes):
        raise ValueError(f"index: {index}: the plan has {len(plan.passes)} pass(es)")
    if layout not in ("attention", "linear"):
        raise ValueError(f"layout: {layout}: use attention or linear")
    rebalances = _rebalances(plan, index) if layout == "linear" else None
    rows = (plan.tokens(index) if rebalances is None else rebalances[0].before)[rank]
    if q.dim() != 3 or k.shape != v.shape or k.dim() != 3 or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        raise ValueError(f"q: shape {tuple(q.shape)} does not fit k {tuple(k.shape)} and v {tuple(v.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k: {k.shape[1]} heads: must divide the {q.shape[1]} of q")
    if {q.dtype, k.dtype, v.dtype} != {q.dtype} or {q.device, k.device, v.device} != {q.device}:
        raise ValueError(f"q: {q.dtype} on {q.device}: k and v must be of the same dtype and on the same device")
    if q.is_cuda and q.element_size() != 2:
        raise ValueError(f"q: {q.dtype}: FlashAttention takes bf16 and fp16; cast the query, key and value")
    if q.shape[0] != rows:
        raise ValueError(f"q: {q.shape[0]} rows: the plan has {rows} for rank {rank} in pass {index}, {layout} layout")
    if rebalances is not None and not rebalances[0].moves:
        rebalances = None
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options = CallOptions(transports, plan, index, scale, passing, rebalances, observer or unobserved)
    return _BalancedAttention.apply(q, k, v, options)


class _BalancedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: CallOptions) -> torch.Tensor:
        inputs = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]
        executor = PassExecutor(options, inputs, [q.shape[1]], "forward")
        q, k, v = executor.rows
        (out,) = executor.results
        lse = torch.empty(out.shape[:2], dtype=accumulation_dtype(q.dtype), device=q.device)
        rings = slice(0, executor.own.num_ring_rows)
        # Partial results of rings are merged in the accumulation dtype and rounded once.
        merged = out[rings] if out.dtype == lse.dtype else torch.empty_like(out[rings], dtype=lse.dtype)
        traffic = Shape.of(q, k).forward_traffic()
        attention = ForwardPassKV(traffic, options.scale, q, k, v, merged, lse[rings])

        def documents(rows: slice, lengths: tuple[int, ...]) -> None:
            documents_forward(Attended(q, k, v, out, lse).rows(rows), lengths, options.scale)

        executor.run(attention, documents)
        if merged.dtype != out.dtype:
            out[rings] = merged
        (y,) = executor.finish()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        options: CallOptions = ctx.options
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        executor = PassExecutor(options, [grad], [x.shape[1] for x in (q, k, v)], "backward")
        (dout,) = executor.rows
        dq, dk, dv = executor.results
        rings = slice(0, executor.own.num_ring_rows)
        sums = [torch.zeros_like(x[rings], dtype=lse.dtype) for x in (q, k, v)]
        shape = Shape.of(q, k)
        traffic = shape.backward_traffic(options.passing or shape.backward_passing())
        kind = BackwardPassKV if traffic.passing == "kv" else BackwardPassQ
        attention = kind(traffic, options.scale, *(x[rings] for x in (q, k, v, out, lse, dout)), *sums)

        def documents(rows: slice, lengths: tuple[int, ...]) -> None:
            attended, grads = Attended(q, k, v, out, lse).rows(rows), (dq[rows], dk[rows], dv[rows])
            documents_backward(dout[rows], attended, lengths, options.scale, grads)

        executor.run(attention, documents)
        for gradient, total in zip((dq, dk, dv), sums, strict=True):
            gradient[rings] = total
        return *executor.finish(), None


def _transports(group: dist.ProcessGroup | Transport | VarlenTransports) -> VarlenTransports:
    if isinstance(group, VarlenTransports):
        return group
    if isinstance(group, dist.ProcessGroup):
        return VarlenTransports.open(group, lambda channel: transport_of(group, channel=channel))
    return VarlenTransports(group, group, group)


@lru_cache(maxsize=16)
def _rebalances(plan: Plan, index: int) -> tuple[Rebalance, Rebalance]:
    """From the linear layout to the attention layout, and back. Cached, because every layer makes the same call."""
    to_linear = rebalance_to_linear(plan, index)
    return to_linear.inverse(), to_linear
