"""Ulysses attention: ranks split the sequence outside attention and the heads inside attention.

Source: DeepSpeed-Ulysses (arXiv 2309.14509). Here the all-to-alls are cut by head groups and overlap with the attention
of other groups; see `schedules.ulysses`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import BufferPool, Transport, transport_of
from megatron_overlap.ops.ulysses.all_to_all import HeadAllToAll
from megatron_overlap.ops.ulysses.head_attention import HeadAttention
from megatron_overlap.ops.wgrad import add_wide
from megatron_overlap.schedules import AllToAllPlan, HeadLayout, SequenceLayout, ulysses_plan
from megatron_overlap.schedules.ulysses import AllToAllPattern

Observer = Callable[[str, int], None]
"""Called after each pass with `forward` or `dgrad` and the number of bytes that this rank sent."""

# Limits of the default number of head groups. The messages of one group are exposed, so more groups expose less, but
# smaller messages than this cost more than they hide.
_MAX_GROUPS = 8
_MESSAGE_BYTES = 1 << 19


@dataclass(frozen=True, slots=True)
class UlyssesPlan:
    """Options of one call; the same on every rank of the group.

    Attributes:
        num_groups: number of head groups; None selects it by the number and size of heads. It is reduced if a rank has
            fewer heads.
        pattern: `direct`, or `serial`: the same messages without overlap.
    """

    num_groups: int | None = None
    pattern: AllToAllPattern = "direct"

    def heads(self, num_heads: int, num_kv_heads: int, num_ranks: int, head_bytes: int) -> HeadLayout:
        """The heads of every rank and group; `head_bytes` as in `most_groups`."""
        most = self.most_groups(num_heads, num_kv_heads, num_ranks, head_bytes)
        if self.num_groups is not None:
            return HeadLayout(num_heads, num_kv_heads, num_ranks, most)
        layouts = [HeadLayout(num_heads, num_kv_heads, num_ranks, count) for count in range(most, 0, -1)]
        # Prefer groups that share no key/value heads, if that leaves more than one group.
        return next((layout for layout in layouts if layout.aligned and layout.num_groups > 1), layouts[0])

    def most_groups(self, num_heads: int, num_kv_heads: int, num_ranks: int, head_bytes: int) -> int:
        """Upper limit of the number of head groups.

        `head_bytes` is the size of one head of a rank's rows. It must be the same number on every rank.
        """
        limit = self.num_groups
        if limit is None:
            heads = num_heads // num_ranks + 2 * -(-num_kv_heads // num_ranks)
            limit = min(_MAX_GROUPS, max(2, heads * head_bytes // _MESSAGE_BYTES))
        return max(1, min(limit, num_heads // num_ranks))


DEFAULT_PLAN = UlyssesPlan()


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | Transport,
    causal: bool = True,
    softmax_scale: float | None = None,
    layout: SequenceLayout | None = None,
    plan: UlyssesPlan | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals `own_rows(attention(all_rows(q), all_rows(k), all_rows(v)))`; see `ops.reference.ulysses_attention`.

    Every rank sends each peer its rows of the heads of that peer, computes attention of its own heads over all rows,
    and sends the results back. If there are fewer key/value heads than ranks, each is sent to every rank that needs it,
    and its gradients are summed.

    Args:
        q: `[S/N, B, Hq, D]` own rows of all query heads, positions already encoded.
        k: `[S/N, B, Hkv, D]` own rows of all key heads; Hkv divides Hq.
        v: `[S/N, B, Hkv, D]` own rows of all value heads.
        group: the N ranks, or their transport.
        causal: position i sees positions 0..i of the whole sequence.
        softmax_scale: factor of the scores; None is `1 / sqrt(D)`.
        layout: rows of each rank; None is an equal number each, in rank order. Ranks may hold different numbers.
        plan: number of head groups and order of messages; the same on every rank. None uses `UlyssesPlan()`.
        observer: called after every pass.

    Returns:
        `[S/N, B, Hq, D]`, dtype of `q`.

    Raises:
        ValueError: shapes, dtypes or the layout do not fit each other.
        TransportError: a peer has failed or exceeds the deadline.
    """
    transport = transport_of(group) if isinstance(group, dist.ProcessGroup) else group
    if q.dim() != 4 or k.shape != v.shape or k.dim() != 4 or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
        raise ValueError(f"q: shape {tuple(q.shape)} does not fit k {tuple(k.shape)} and v {tuple(v.shape)}")
    if {q.dtype, k.dtype, v.dtype} != {q.dtype} or {q.device, k.device, v.device} != {q.device}:
        raise ValueError(f"q: {q.dtype} on {q.device}: k and v must be of the same dtype and on the same device")
    layout = layout or SequenceLayout.contiguous(q.shape[0] * transport.size, transport.size)
    check_layout(layout, q.shape[0], transport)
    heads = (plan or DEFAULT_PLAN).heads(q.shape[2], k.shape[2], transport.size, head_bytes(q, layout, q.shape[3]))
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    attention = HeadAttention(heads, transport.rank, q.shape[3], causal, scale)
    schedule = schedule_of(plan or DEFAULT_PLAN, transport, heads, layout)
    out: torch.Tensor = _Ulysses.apply(q, k, v, transport, schedule, layout, attention, observer)
    return out


def check_layout(layout: SequenceLayout, num_rows: int, transport: Transport) -> None:
    """Refuses a layout that does not fit the group or the number of own rows."""
    if layout.num_ranks != transport.size:
        raise ValueError(f"layout: {layout.num_ranks} ranks: the group has {transport.size}")
    if layout.rows_of(transport.rank) != num_rows:
        raise ValueError(
            f"layout: {layout.rows_of(transport.rank)} rows for rank {transport.rank}: the tensors have {num_rows}"
        )


def head_bytes(x: torch.Tensor, layout: SequenceLayout, size: int) -> int:
    """Bytes of one head, by the mean number of rows of a rank, so that all ranks compute the same number."""
    return layout.num_rows * x.shape[1] * size * x.element_size() // layout.num_ranks


def schedule_of(plan: UlyssesPlan, transport: Transport, heads: HeadLayout, layout: SequenceLayout) -> AllToAllPlan:
    """This rank's plan."""
    return _schedule(transport.size, transport.rank, heads.num_groups, layout.num_runs, plan.pattern)


@lru_cache(maxsize=256)
def _schedule(size: int, rank: int, num_groups: int, num_runs: int, pattern: AllToAllPattern) -> AllToAllPlan:
    return ulysses_plan(size, rank, num_groups=num_groups, num_runs=num_runs, pattern=pattern)


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        transport: Transport,
        schedule: AllToAllPlan,
        layout: SequenceLayout,
        attention: HeadAttention,
        observer: Observer | None,
    ) -> torch.Tensor:
        heads = attention.heads
        y = torch.empty_like(q, memory_format=torch.contiguous_format)

        def produce(group: int, peers: tuple[int, ...], slots: list[torch.Tensor]) -> None:
            for peer, slot in zip(peers, slots, strict=True):
                queries, keys = heads.queries(peer, group), heads.first_keys(peer, group)
                for part, source, run in zip(
                    attention.split(slot, queries, keys), (q, k, v), (queries, keys, keys), strict=True
                ):
                    part.copy_(source[:, :, slice(*run)])

        def consume(group: int, peer: int, rows: torch.Tensor) -> None:
            own = y[:, :, slice(*heads.queries(peer, group))]
            own.copy_(rows.view(own.shape))

        all_to_all = HeadAllToAll(
            transport,
            schedule,
            layout,
            q.shape[1],
            attention.inputs_width,
            attention.queries_width,
            q,
            "ulysses_attention",
            retain_gathered=True,
        )
        all_to_all.run(produce, attention.forward, consume)
        ctx.transport, ctx.schedule, ctx.layout = transport, schedule, layout
        ctx.attention, ctx.observer, ctx.shape = attention, observer, k.shape
        if observer is not None:
            observer("forward", all_to_all.num_bytes)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy = grads[0]
        attention, transport = ctx.attention, ctx.transport
        heads = attention.heads
        dq = torch.empty_like(dy, memory_format=torch.contiguous_format)
        keys = _KeyGradients(heads, ctx.shape, dy, transport.buffer_pool)

        def produce(group: int, peers: tuple[int, ...], slots: list[torch.Tensor]) -> None:
            for peer, slot in zip(peers, slots, strict=True):
                own = dy[:, :, slice(*heads.queries(peer, group))]
                slot.view(own.shape).copy_(own)

        def consume(group: int, peer: int, rows: torch.Tensor) -> None:
            queries, complete = heads.queries(peer, group), heads.last_keys(peer, group)
            query_grad, key_grad, value_grad = attention.split(rows, queries, complete)
            dq[:, :, slice(*queries)].copy_(query_grad)
            keys.add(complete, key_grad, value_grad)

        all_to_all = HeadAllToAll(
            transport,
            ctx.schedule,
            ctx.layout,
            dy.shape[1],
            attention.queries_width,
            attention.gradients_width,
            dy,
            "ulysses_attention dgrad",
            retain_gathered=False,
        )
        all_to_all.run(produce, attention.backward, consume)
        if ctx.observer is not None:
            ctx.observer("dgrad", all_to_all.num_bytes)
        return dq, *keys.result(), None, None, None, None, None


class _KeyGradients:
    """Gradients of the own rows of all key/value heads, summed over the ranks that use a head."""

    def __init__(self, heads: HeadLayout, shape: torch.Size, like: torch.Tensor, buffer_pool: BufferPool) -> None:
        self._own = (like.new_empty(shape), like.new_empty(shape))
        self._shared, self._buffer_pool = heads.shares_keys, buffer_pool
        self._totals = self._own
        if self._shared:
            if like.element_size() < 4:
                fp32 = torch.empty(0, dtype=torch.float32, device=like.device)
                # Sums over ranks accumulate in fp32 and are rounded once.
                sums = buffer_pool.take("ulysses_keys", (2, *shape), fp32)
                self._totals = (sums[0], sums[1])
            for total in self._totals:
                total.zero_()

    def add(self, heads: tuple[int, int], key_grad: torch.Tensor, value_grad: torch.Tensor) -> None:
        """Adds the gradients that one rank computed for a run of heads."""
        for total, term in zip(self._totals, (key_grad, value_grad), strict=True):
            own = total[:, :, slice(*heads)]
            if self._shared:
                add_wide(own, term, self._buffer_pool)
            else:
                own.copy_(term)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of keys and values."""
        if self._totals is not self._own:
            for own, total in zip(self._own, self._totals, strict=True):
                own.copy_(total)
        return self._own
