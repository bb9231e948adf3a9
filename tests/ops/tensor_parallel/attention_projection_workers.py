"""What the workers run: query-split attention against float64 arithmetic written out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import transport_of
from megatron_overlap.ops import LinearPlan, attention_linear_reduce_scatter
from megatron_overlap.ops.reference import gather_rows, scatter_sum
from megatron_overlap.schedules import ChunkLayout, SequenceLayout
from tests.helpers import reference
from tests.helpers.late import LateTransport
from tests.helpers.numerics import assert_close_to_exact

NAMES = ("y", "dq", "dk", "dv", "dw")


@dataclass(frozen=True)
class Shape:
    """Of the whole sequence, and of one rank's heads."""

    positions: int
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    size: int = 16
    features: int = 24


def _data(group: dist.ProcessGroup, shape: Shape, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """q, k, v, w_shard and the gradient of y_shard, other numbers on each rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    s, b, d = shape.positions, shape.batch, shape.size
    own = ChunkLayout(s, size).shard_rows(rank)
    sizes = [(s, b, shape.heads, d), (s, b, shape.kv_heads, d), (s, b, shape.kv_heads, d)]
    sizes += [(shape.features, shape.heads * d), (own, b, shape.features)]
    return [torch.randn(*dims, generator=generator).to(dtype) for dims in sizes]


def by_hand(
    group: dist.ProcessGroup, data: list[torch.Tensor], causal: bool, scale: float, *, magnitude: bool = False
) -> list[torch.Tensor]:
    """y, dq, dk, dv, dw in float64, from the formulas and not from autograd.

    With `magnitude` the same sums over absolute values, with the probabilities that the data have: what rounding
    errors are proportional to.
    """
    q, k, v, w, dy = (tensor.double() for tensor in data)
    s, b, heads, d = q.shape
    groups = heads // k.shape[2]
    visible = torch.ones(s, s, dtype=torch.bool).tril() if causal else torch.ones(s, s, dtype=torch.bool)
    wide_k, wide_v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, wide_k) * scale
    p = torch.where(visible, scores, -torch.inf).softmax(-1)
    if magnitude:
        q, wide_k, wide_v, w, dy = (x.abs() for x in (q, wide_k, wide_v, w, dy))
    context = torch.einsum("bhst,tbhd->sbhd", p, wide_v)
    rows = SequenceLayout.contiguous(s, dist.get_world_size(group))
    y = scatter_sum(torch.einsum("sbk,fk->sbf", context.flatten(2), w), group, rows)
    dy = gather_rows(dy, group, rows)
    dcontext = torch.einsum("sbf,fk->sbk", dy, w).unflatten(2, (heads, d))
    dw = torch.einsum("sbf,sbk->fk", dy, context.flatten(2))
    dp = torch.einsum("sbhd,tbhd->bhst", dcontext, wide_v)
    delta = (dcontext * context).sum(-1).permute(1, 2, 0).unsqueeze(-1)
    ds = p * (dp + delta if magnitude else dp - delta) * scale
    dq = torch.einsum("bhst,tbhd->sbhd", ds, wide_k)
    dk = torch.einsum("bhst,sbhd->tbhd", ds, q).unflatten(2, (-1, groups)).sum(3)
    dv = torch.einsum("bhst,sbhd->tbhd", p, dcontext).unflatten(2, (-1, groups)).sum(3)
    return [y, dq, dk, dv, dw]


def _plain(group: dist.ProcessGroup, data: list[torch.Tensor], causal: bool, scale: float | None) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in data[:4]]
    y = reference.attention_linear_reduce_scatter(*leaves, group=group, causal=causal, softmax_scale=scale)
    y.backward(data[4])
    return [y.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def against_exact(
    group: dist.ProcessGroup,
    shape: Shape,
    dtype: torch.dtype,
    plan: LinearPlan,
    *,
    late: bool,
    causal: bool = True,
    scale: float | None = None,
    main_grad: bool = False,
    seed: int = 1,
    repeats: int = 2,
) -> None:
    """Output and every gradient, twice over the same buffers."""
    transport: Any = LateTransport(group) if late else transport_of(group)
    used = shape.size**-0.5 if scale is None else scale
    for repeat in range(repeats):
        data = _data(group, shape, dtype, seed + repeat)
        unfused = _plain(group, data, causal, scale)
        exact = by_hand(group, data, causal, used)
        size_of = by_hand(group, data, causal, used, magnitude=True)
        leaves = [tensor.clone().requires_grad_() for tensor in data[:4]]
        # As Megatron's: q, k and v are views of one projection, side by side in each head's row.
        leaves[0] = torch.cat([data[0], data[0]], dim=3)[..., : shape.size].detach().requires_grad_()
        into = torch.ones(data[3].shape) if main_grad else None
        y = attention_linear_reduce_scatter(
            *leaves, group=transport, causal=causal, softmax_scale=scale, plan=plan, main_grad=into
        )
        y.backward(data[4])
        grads = [leaf.grad for leaf in leaves]
        if into is not None:
            assert grads[3] is None
            grads[3] = into - 1
            # 1 was there before: what is rounded away of it counts too.
            size_of[4] = size_of[4] + 1
        terms = shape.positions + shape.heads * shape.size * group.size() + shape.features
        for name, mine, plain, true, magnitude in zip(
            NAMES, [y.detach(), *grads], unfused, exact, size_of, strict=True
        ):
            assert mine is not None, name
            # Rounded to the dtype of the data on the way: probabilities, both parts of a slice, their merged sum or
            # the gradient of the context, and what travels or is added.
            assert_close_to_exact(f"query split {name}", mine, plain, true, 4 * magnitude, terms)
    if late:
        transport.close()


def random_calls(group: dist.ProcessGroup, seed: int, count: int) -> None:
    """Calls with everything drawn from `seed`, the same on all ranks."""
    import random

    draw = random.Random(seed)
    for _ in range(count):
        kv_heads = draw.choice([1, 2, 3])
        against_exact(
            group,
            Shape(
                positions=draw.choice([1, 2, 3, 7, 16, 33, 70]),
                batch=draw.choice([1, 2, 3]),
                heads=kv_heads * draw.choice([1, 1, 2, 4]),
                kv_heads=kv_heads,
                size=draw.choice([8, 16, 24]),
                features=draw.choice([1, 5, 32]),
            ),
            draw.choice([torch.float32, torch.bfloat16]),
            LinearPlan(
                pattern=draw.choice(["direct", "ring", "serial"]),
                chunks_per_rank=draw.choice([None, 1, 2, 3, 5]),
                split=draw.choice([None, "edge", "all"]),
            ),
            late=draw.random() < 0.5,
            causal=draw.random() < 0.7,
            scale=draw.choice([None, 0.3]),
            main_grad=draw.random() < 0.3,
            seed=draw.randrange(1000),
            repeats=1,
        )


def reference_is_the_formulas(group: dist.ProcessGroup, *, causal: bool) -> None:
    """The plain program, through autograd in float64, against the formulas."""
    data = [tensor.double() for tensor in _data(group, Shape(13, heads=4), torch.float32, 5)]
    for name, plain, exact in zip(
        NAMES, _plain(group, data, causal, 0.4), by_hand(group, data, causal, 0.4), strict=True
    ):
        torch.testing.assert_close(plain, exact, rtol=1e-12, atol=1e-12, msg=name)


def frozen(group: dist.ProcessGroup, which: str) -> list[bool]:
    """Backward where the weight, or q, k and v, need no gradient; which gradients were made."""
    data = _data(group, Shape(12), torch.float32, 3)
    expected = _plain(group, data, True, None)[1:]
    leaves = data[:4]
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_((which == "w") == (index < 3))
    y = attention_linear_reduce_scatter(*leaves, group=group, plan=LinearPlan(chunks_per_rank=2))
    y.backward(data[4])
    for leaf, plain in zip(leaves, expected, strict=True):
        assert leaf.grad is None or torch.allclose(leaf.grad, plain, rtol=1e-5, atol=1e-5)
    return [leaf.grad is not None for leaf in leaves]


def counted(group: dist.ProcessGroup) -> dict[str, int]:
    """Bytes that each pass sent, as the observer is told."""
    sent: dict[str, int] = {}
    leaves = [tensor.requires_grad_() for tensor in _data(group, Shape(12), torch.float32, 3)[:4]]
    y = attention_linear_reduce_scatter(*leaves, group=group, observer=sent.__setitem__)
    y.sum().backward()
    return sent


def saved_bytes(group: dist.ProcessGroup, shape: Shape) -> int:
    """Bytes that autograd keeps beside q, k, v and the weight."""
    leaves = [tensor.requires_grad_() for tensor in _data(group, shape, torch.bfloat16, 3)[:4]]
    known = {leaf.data_ptr() for leaf in leaves}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention_linear_reduce_scatter(*leaves, group=group)
    return sum(kept.values())


def recomputed(group: dist.ProcessGroup, *, checkpoint: bool) -> list[float]:
    """Norms of output and gradients with and without activation recomputation."""
    from torch.utils.checkpoint import checkpoint as recompute

    leaves = [tensor.requires_grad_() for tensor in _data(group, Shape(20), torch.float32, 4)[:4]]

    def block(*args: torch.Tensor) -> torch.Tensor:
        return attention_linear_reduce_scatter(*args, group=group, plan=LinearPlan(chunks_per_rank=2))

    y = recompute(block, *leaves, use_reentrant=False) if checkpoint else block(*leaves)
    assert isinstance(y, torch.Tensor)
    y.square().sum().backward()
    return [float(t.double().norm()) for t in (y.detach(), *(leaf.grad for leaf in leaves)) if t is not None]


def refused(group: dist.ProcessGroup) -> list[str]:
    """The messages for arguments that do not fit."""
    q, k, v, w, _ = _data(group, Shape(8, heads=4, kv_heads=2), torch.float32, 1)
    calls: list[tuple[Any, ...]] = [
        (q.flatten(2), k, v, w),
        (q, k, v[:4], w),
        (q, k[:, :1], v[:, :1], w),
        (q[:, :, :3], k, v, w[:, :48]),
        (q, k, v, w[:, :-1]),
        (q, k, v.bfloat16(), w),
        (q.double(), k.double(), v.double(), w.double()),
    ]
    messages = []
    for call in calls:
        try:
            attention_linear_reduce_scatter(*call, group=group)
        except ValueError as error:
            messages.append(str(error))
    try:
        attention_linear_reduce_scatter(q, k, v, w, group=group, main_grad=torch.zeros(1, 1))
    except ValueError as error:
        messages.append(str(error))
    return messages
