"""A whole self-attention layer under Ulysses: the QKV projection, attention and the output projection by head groups.

`ulysses_attention` alone exposes the messages of its first and of its last head group. Here the projections of other
groups hide them. Forward and backward run for each group: project, send, attend, send back, project.

Source: DeepSpeed-Ulysses (arXiv 2309.14509); the overlap with the projections is that of this project.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Observer, Projection, product, transport_for
from megatron_overlap.ops.flash_attention import Kernel
from megatron_overlap.ops.ulysses.attention import HeadAttention, UlyssesCall, UlyssesPlan
from megatron_overlap.ops.wgrad import ProductSum, Spans, WeightGradient, WgradTarget
from megatron_overlap.schedules import HeadLayout, SequenceLayout
from megatron_overlap.schedules.ulysses import Run

Rotate = Callable[[torch.Tensor], torch.Tensor]
"""Encodes positions: own rows `[S/N, B, heads, D]` of query or key heads, to the same shape. It must be linear, the
same for every head, and without parameters."""

# The weight gradient of the output projection is computed in at most this many blocks of rows, while messages arrive.
_FILLERS = 4


def ulysses_self_attention(
    x: torch.Tensor,
    qkv: Projection,
    qkv_bias: torch.Tensor | None,
    out: Projection,
    *,
    num_heads: int,
    num_kv_heads: int,
    group: dist.ProcessGroup | Transport,
    rotate: Rotate | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    layout: SequenceLayout | None = None,
    plan: UlyssesPlan | None = None,
    observer: Observer | None = None,
    kernel: Kernel | None = None,
) -> torch.Tensor:
    """Equals `ulysses_attention(rotate(q), rotate(k), v) @ w_out.T` with `q, k, v = split(x @ w_qkv.T + b_qkv)`.

    Args:
        x: `[S/N, B, H]` own rows.
        qkv: weight `[(Hq + 2 Hkv) D, H]` in the order of Megatron's `linear_qkv`: for each key/value head its query
            heads, the key head, the value head. N divides Hkv.
        qkv_bias: `[(Hq + 2 Hkv) D]`, or None.
        out: weight `[H, Hq D]`.
        num_heads, num_kv_heads: Hq and Hkv.
        group: the N ranks, or their transport.
        rotate: encodes positions of queries and keys; None does not encode positions.
        causal, softmax_scale, layout, plan, kernel: see `ulysses_attention`.
        observer: see `ulysses_attention`; also called with `wgrad`.

    Returns:
        `[S/N, B, H]`, dtype of `x`, without a bias of the output projection.

    Raises:
        ValueError: shapes, dtypes or the layout do not fit each other.
        TransportError: a peer has failed or exceeds the deadline.
    """
    num_ranks = transport_for(group).size
    if num_kv_heads % num_ranks:
        raise ValueError(f"num_kv_heads: {num_kv_heads}: must be a multiple of the {num_ranks} ranks")
    size, left = divmod(qkv.weight.shape[0], num_heads + 2 * num_kv_heads)
    if x.dim() != 3 or left or qkv.weight.shape[1] != x.shape[2] or out.weight.shape[1] != num_heads * size:
        raise ValueError(
            f"x: shape {tuple(x.shape)} does not fit weights {tuple(qkv.weight.shape)} and {tuple(out.weight.shape)} "
            f"of {num_heads} query and {num_kv_heads} key/value heads"
        )
    if not x.dtype == qkv.weight.dtype == out.weight.dtype:
        raise ValueError(f"x: {x.dtype}: the weights are {qkv.weight.dtype} and {out.weight.dtype}")
    options = UlyssesCall.of(group, layout, x, plan, observer)
    # A group has whole key/value heads: consecutive rows of the QKV weight, and columns of the output weight.
    most = options.plan.most_groups(num_heads, num_kv_heads, num_ranks, options.head_bytes(x, size))
    counts = range(min(num_kv_heads // num_ranks, most), 0, -1)
    groups = next(count for count in counts if num_kv_heads // num_ranks % count == 0)
    heads = HeadLayout(num_heads, num_kv_heads, num_ranks, groups)
    attention = HeadAttention(heads, options.transport.rank, size, causal, softmax_scale, kernel)
    return _Layer.apply(x, qkv.weight, qkv_bias, out.weight, _Call(options, attention, qkv, out, rotate))


class _Call(NamedTuple):
    options: UlyssesCall
    attention: HeadAttention
    qkv: Projection
    out: Projection
    rotate: Rotate | None

    @property
    def heads(self) -> HeadLayout:
        return self.attention.heads

    def qkv_rows(self, rank: int, group: int) -> slice:
        """Rows of the QKV weight that compute the heads of `rank` in `group`."""
        per_key = (self.heads.queries_per_key + 2) * self.attention.size
        start, stop = self.heads.keys(rank, group)
        return slice(start * per_key, stop * per_key)

    def out_columns(self, rank: int, group: int) -> slice:
        """Columns of the output weight that multiply the results of `rank` in `group`."""
        start, stop = self.heads.queries(rank, group)
        return slice(start * self.attention.size, stop * self.attention.size)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of projected rows `[rows, B, features]`: `[rows, B, Hkv, n, D]` with n queries, one key, one value."""
        ratio = self.heads.queries_per_key
        keys = rows.shape[2] // ((ratio + 2) * self.attention.size)
        return rows.view(*rows.shape[:2], keys, ratio + 2, self.attention.size).split([ratio, 1, 1], dim=3)

    def rotated_back(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of `rotate`. It is linear, so its derivative needs no saved input."""
        if self.rotate is None:
            return grad
        with torch.enable_grad():
            any_input = grad.detach().requires_grad_()
            (input_grad,) = torch.autograd.grad(self.rotate(any_input), any_input, grad)
        return input_grad

    def pack(self, projected: torch.Tensor, slot: torch.Tensor, queries: Run, keys: Run) -> None:
        """Writes a message from projected rows."""
        parts = self.attention.split(slot, queries, keys)
        for part, source, rotate in zip(parts, self.unpack(projected), (self.rotate, self.rotate, None), strict=True):
            heads = source if rotate is None else rotate(source.flatten(2, 3)).view(source.shape)
            part.view(source.shape).copy_(heads)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w_qkv: torch.Tensor, bias: torch.Tensor | None, w_out: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        options, attention, heads = call.options, call.attention, call.heads
        rows, batch, _ = x.shape
        flat = x.flatten(0, 1)
        buffer_pool = options.transport.buffer_pool
        context = x.new_empty(rows * batch, w_out.shape[1])
        total = ProductSum(x.new_empty(rows * batch, w_out.shape[0]), buffer_pool, "ulysses_sum")
        spans = Spans()

        def produce(group: int, peers: tuple[int, ...], slots: list[torch.Tensor]) -> None:
            runs = [call.qkv_rows(peer, group) for peer in peers]
            first, last = min(run.start for run in runs), max(run.stop for run in runs)
            projected = buffer_pool.take("ulysses_projected", (rows * batch, last - first), x)
            product(flat, w_qkv[first:last].t(), None if bias is None else bias[first:last], projected)
            for peer, run, slot in zip(peers, runs, slots, strict=True):
                part = projected[:, run.start - first : run.stop - first].unflatten(0, (rows, batch))
                call.pack(part, slot, heads.queries(peer, group), heads.keys(peer, group))

        def consume(group: int, peer: int, received: torch.Tensor) -> None:
            columns = call.out_columns(peer, group)
            context[:, columns].copy_(received.flatten(0, 1))
            spans.add((columns.start, columns.stop))

        def flush() -> None:
            for start, stop in spans.joined():
                total.add(context[:, start:stop], w_out[:, start:stop].t())

        all_to_all = options.begin(attention, x, "ulysses_self_attention")
        all_to_all.run(produce, attention.forward, consume, flush=flush)
        ctx.save_for_backward(x, w_qkv, w_out, context)
        ctx.call, ctx.use_bias = call, bias is not None
        options.observer("forward", all_to_all.num_bytes)
        return total.result().unflatten(0, (rows, batch))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w_qkv, w_out, context = ctx.saved_tensors
        call: _Call = ctx.call
        options, attention, heads = call.options, call.attention, call.heads
        need_x, need_qkv, need_bias, need_out = ctx.needs_input_grad[:4]
        rows, batch, _ = x.shape
        flat, dy = x.flatten(0, 1), grads[0].flatten(0, 1)
        buffer_pool = options.transport.buffer_pool
        total = ProductSum(x.new_empty(flat.shape), buffer_pool, "ulysses_sum")
        projected = buffer_pool.take("ulysses_dprojected", (rows * batch, w_qkv.shape[0]), x)
        spans = Spans()
        wgrad, out_wgrad = (
            WeightGradient(each.weight, WgradTarget(each.main_grad, each.done, buffer_pool)) if needed else None
            for each, needed in ((call.qkv, need_qkv), (call.out, need_out))
        )

        def produce(group: int, peers: tuple[int, ...], slots: list[torch.Tensor]) -> None:
            runs = [call.out_columns(peer, group) for peer in peers]
            first, last = min(run.start for run in runs), max(run.stop for run in runs)
            dcontext = buffer_pool.take("ulysses_dcontext", (rows * batch, last - first), x)
            torch.mm(dy, w_out[:, first:last], out=dcontext)
            for run, slot in zip(runs, slots, strict=True):
                slot.copy_(dcontext[:, run.start - first : run.stop - first].view(slot.shape))

        def consume(group: int, peer: int, received: torch.Tensor) -> None:
            run = call.qkv_rows(peer, group)
            own_parts = call.unpack(projected[:, run].unflatten(0, (rows, batch)))
            parts = attention.split(received, heads.queries(peer, group), heads.keys(peer, group))
            for own, part, encoded in zip(own_parts, parts, (True, True, False), strict=True):
                own.copy_((call.rotated_back(part) if encoded else part).view(own.shape))
            spans.add((run.start, run.stop))

        def flush() -> None:
            for start, stop in spans.joined():
                if need_x:
                    total.add(projected[:, start:stop], w_qkv[start:stop])
                if wgrad is not None:
                    wgrad.add_features(projected, flat, slice(start, stop))

        fillers = () if out_wgrad is None else out_wgrad.pieces(dy, context, _FILLERS)
        all_to_all = options.begin(attention, x, "ulysses_self_attention dgrad", backward=True)
        all_to_all.run(produce, attention.backward, consume, flush=flush, fillers=fillers)
        options.observer("dgrad", all_to_all.num_bytes)
        if need_qkv or need_out:
            options.observer("wgrad", 0)
        dbias = projected.sum(0) if need_bias and ctx.use_bias else None
        dx = total.result().view(x.shape) if need_x else None
        dqkv, dout = (None if each is None else each.result() for each in (wgrad, out_wgrad))
        return dx, dqkv, dbias, dout, None
