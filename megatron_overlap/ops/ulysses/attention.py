"""Ulysses attention: ranks split the sequence outside attention and the heads inside attention.

Source: DeepSpeed-Ulysses (arXiv 2309.14509). Here the all-to-alls are cut by head groups and overlap with the attention
of other groups; see `schedules.ulysses`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Observer, transport_for, unobserved
from megatron_overlap.ops.flash_attention import (
    Kernel,
    KeyGradients,
    SavedSequence,
    sequence_backward,
    sequence_forward,
)
from megatron_overlap.ops.ulysses.all_to_all import HeadAllToAll, Widths, shapes_of
from megatron_overlap.schedules import HeadLayout, SequenceLayout, ulysses_plan
from megatron_overlap.schedules.ulysses import AllToAllPattern, Call, Run

# Cached, because every layer makes the same call.
_schedule = lru_cache(maxsize=256)(ulysses_plan)
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
        """Upper limit of the number of head groups; see `UlyssesCall.head_bytes`."""
        limit = self.num_groups
        if limit is None:
            heads = num_heads // num_ranks + 2 * -(-num_kv_heads // num_ranks)
            limit = min(_MAX_GROUPS, max(2, heads * head_bytes // _MESSAGE_BYTES))
        return max(1, min(limit, num_heads // num_ranks))


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
    kernel: Kernel | None = None,
) -> torch.Tensor:
    """Equals `own_rows(attention(all_gather(q), all_gather(k), all_gather(v)))`.

    `attention` is `softmax(softmax_scale * q @ k.T + mask) @ v` per head. `layout` defines the order of `all_gather`.
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
        kernel: computes attention of some heads in place of the kernel of torch; `causal` and `softmax_scale` are then
            unused. It is called for the heads of each group, in the same order on every rank.

    Returns:
        `[S/N, B, Hq, D]`, dtype of `q`.

    Raises:
        ValueError: shapes, dtypes or the layout do not fit each other.
        TransportError: a peer has failed or exceeds the deadline.
    """
    if q.dim() != 4 or k.shape != v.shape or k.dim() != 4 or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
        raise ValueError(f"q: shape {tuple(q.shape)} does not fit k {tuple(k.shape)} and v {tuple(v.shape)}")
    if {q.dtype, k.dtype, v.dtype} != {q.dtype} or {q.device, k.device, v.device} != {q.device}:
        raise ValueError(f"q: {q.dtype} on {q.device}: k and v must be of the same dtype and on the same device")
    call = UlyssesCall.of(group, layout, q, plan, observer)
    heads = call.plan.heads(q.shape[2], k.shape[2], call.transport.size, call.head_bytes(q, q.shape[3]))
    attention = HeadAttention(heads, call.transport.rank, q.shape[3], causal, softmax_scale, kernel)
    return _Ulysses.apply(q, k, v, call, attention)


class HeadAttention:
    """Attention of the heads of one rank. It saves the tensors that backward needs.

    For each row and batch entry a message has query heads, then key heads, then value heads, D features each: in
    forward the key/value heads that are sent with a group, in backward gradients of those that no later group needs.
    """

    def __init__(
        self, heads: HeadLayout, rank: int, size: int, causal: bool, scale: float | None, kernel: Kernel | None
    ) -> None:
        self.heads, self.size = heads, size
        self._rank, self._causal, self._kernel = rank, causal, kernel
        self._scale = size**-0.5 if scale is None else scale
        self._gathered: dict[int, torch.Tensor] = {}
        self._saved: dict[int, list[tuple[Call, SavedSequence]]] = {}
        self._partial_sums: dict[int, list[torch.Tensor]] = {}

    def split(self, tensor: torch.Tensor, queries: Run, keys: Run) -> tuple[torch.Tensor, ...]:
        """Views of a message `[rows, B, width]`: queries, keys and values, `[rows, B, heads, D]` each."""
        sizes = [len(range(*queries)), len(range(*keys)), len(range(*keys))]
        return tensor.view(*tensor.shape[:2], sum(sizes), self.size).split(sizes, dim=2)

    def forward(self, group: int, gathered: torch.Tensor, result: torch.Tensor) -> None:
        """`all_to_all.Attend` of forward."""
        heads, rank = self.heads, self._rank
        self._gathered[group] = gathered
        first, last = heads.queries(rank, group)
        query = self.split(gathered, (first, last), heads.first_keys(rank, group))[0]
        out = result.view(*result.shape[:2], last - first, self.size)
        self._saved[group] = []
        for call in heads.calls(rank, group):
            query_heads = slice(call.queries[0] - first, call.queries[1] - first)
            source = call.source_group
            source_keys = heads.first_keys(rank, source)
            _, keys, values = self.split(self._gathered[source], heads.queries(rank, source), source_keys)
            key_heads = slice(call.keys[0] - source_keys[0], call.keys[1] - source_keys[0])
            inputs = query[:, :, query_heads], keys[:, :, key_heads], values[:, :, key_heads]
            attended, saved = sequence_forward(*inputs, causal=self._causal, scale=self._scale, kernel=self._kernel)
            out[:, :, query_heads].copy_(attended)
            self._saved[group].append((call, saved))

    def backward(self, group: int, gathered: torch.Tensor, result: torch.Tensor) -> None:
        """`all_to_all.Attend` of backward: `gathered` is the gradient of the result of forward."""
        heads, rank = self.heads, self._rank
        first, last = heads.queries(rank, group)
        complete = heads.last_keys(rank, group)
        grad = gathered.view(*gathered.shape[:2], last - first, self.size)
        dq, dk, dv = self.split(result, (first, last), complete)
        for call, saved in self._saved[group]:
            query_heads = slice(call.queries[0] - first, call.queries[1] - first)
            query_grad, *key_grads = sequence_backward(
                saved, grad[:, :, query_heads], causal=self._causal, scale=self._scale
            )
            dq[:, :, query_heads].copy_(query_grad)
            start, stop = call.keys
            if complete[0] <= start and stop <= complete[1] and not self._partial_sums.keys() & range(start, stop):
                key_heads = slice(start - complete[0], stop - complete[0])
                dk[:, :, key_heads].copy_(key_grads[0])
                dv[:, :, key_heads].copy_(key_grads[1])
                continue
            for head in range(start, stop):
                # Several groups use the head. The sum of its gradients is rounded once.
                terms = [key_grad[:, :, head - start] for key_grad in key_grads]
                sums = [term.float() if term.element_size() < 4 else term for term in terms]
                if head in self._partial_sums:
                    sums = [total.add_(term) for total, term in zip(self._partial_sums[head], sums, strict=True)]
                self._partial_sums[head] = sums
                if head in range(*complete):
                    for gradient, total in zip((dk, dv), self._partial_sums.pop(head), strict=True):
                        gradient[:, :, head - complete[0]].copy_(total)


class UlyssesCall(NamedTuple):
    """The options of one call: everything but tensors that autograd differentiates."""

    transport: Transport
    layout: SequenceLayout
    plan: UlyssesPlan
    observer: Observer

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup | Transport,
        layout: SequenceLayout | None,
        x: torch.Tensor,
        plan: UlyssesPlan | None,
        observer: Observer | None,
    ) -> Self:
        """Fills in the defaults, and refuses a layout that does not fit the group or `x`, the own rows."""
        transport = transport_for(group)
        layout = layout or SequenceLayout.contiguous(x.shape[0] * transport.size, transport.size)
        if layout.num_ranks != transport.size:
            raise ValueError(f"layout: {layout.num_ranks} ranks: the group has {transport.size}")
        own = layout.rows_of(transport.rank)
        if own != x.shape[0]:
            raise ValueError(f"layout: {own} rows for rank {transport.rank}: the tensors have {x.shape[0]}")
        return cls(transport, layout, plan or UlyssesPlan(), observer or unobserved)

    def head_bytes(self, x: torch.Tensor, size: int) -> int:
        """Bytes of one head of the mean number of rows of a rank: the same on all ranks."""
        return self.layout.num_rows * x.shape[1] * size * x.element_size() // self.layout.num_ranks

    def begin(self, attention: HeadAttention, like: torch.Tensor, op: str, *, backward: bool = False) -> HeadAllToAll:
        size, rank, groups = self.transport.size, self.transport.rank, attention.heads.num_groups
        schedule = _schedule(size, rank, num_groups=groups, num_runs=self.layout.num_runs, pattern=self.plan.pattern)
        inputs, results, gradients = widths(attention.heads, attention.size)
        both = (results, gradients) if backward else (inputs, results)
        shapes = shapes_of(self.layout, like.shape[1], *both)
        return HeadAllToAll(self.transport, schedule, shapes, like, op, retain=not backward)


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: UlyssesCall, attention: HeadAttention
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

        all_to_all = call.begin(attention, q, "ulysses_attention")
        all_to_all.run(produce, attention.forward, consume)
        ctx.call, ctx.attention, ctx.shape = call, attention, k.shape
        call.observer("forward", all_to_all.num_bytes)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy = grads[0]
        call, attention, heads = ctx.call, ctx.attention, ctx.attention.heads
        dq = torch.empty_like(dy, memory_format=torch.contiguous_format)
        # Each rank that uses a head computes a term.
        keys = KeyGradients(ctx.shape, dy, call.transport.buffer_pool, added=heads.shares_keys)

        def produce(group: int, peers: tuple[int, ...], slots: list[torch.Tensor]) -> None:
            for peer, slot in zip(peers, slots, strict=True):
                own = dy[:, :, slice(*heads.queries(peer, group))]
                slot.view(own.shape).copy_(own)

        def consume(group: int, peer: int, rows: torch.Tensor) -> None:
            queries, complete = heads.queries(peer, group), heads.last_keys(peer, group)
            query_grad, key_grad, value_grad = attention.split(rows, queries, complete)
            dq[:, :, slice(*queries)].copy_(query_grad)
            keys.add((slice(None), slice(None), slice(*complete)), key_grad, value_grad)

        all_to_all = call.begin(attention, dy, "ulysses_attention dgrad", backward=True)
        all_to_all.run(produce, attention.backward, consume)
        call.observer("dgrad", all_to_all.num_bytes)
        return dq, *keys.result(), None, None


@lru_cache(maxsize=256)
def widths(heads: HeadLayout, size: int) -> tuple[Widths, Widths, Widths]:
    """Features of the queries, keys and values that are sent with a group; of its results; of its sent gradients."""
    ranks, groups = range(heads.num_ranks), range(heads.num_groups)

    def features(keys: Callable[[int, int], Run] | None) -> Widths:
        def width(rank: int, group: int) -> int:
            num_keys = 0 if keys is None else len(range(*keys(rank, group)))
            return (len(range(*heads.queries(rank, group))) + 2 * num_keys) * size

        return tuple(tuple(width(rank, group) for group in groups) for rank in ranks)

    return features(heads.first_keys), features(None), features(heads.last_keys)
