"""What the workers run: balanced attention and its definition on the same batch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import transport_of
from megatron_overlap.ops import balanced_attention, reference, remap
from megatron_overlap.ops.varlen import flash_attention as kernel
from megatron_overlap.schedules.varlen import Plan
from megatron_overlap.schedules.varlen.linear_layout import to_linear
from tests.helpers.late import LateTransport

SIZE = 8
NAMES = ("y", "dq", "dk", "dv")
Batch = list[torch.Tensor]


def make(
    group: dist.ProcessGroup,
    plan: Plan,
    index: int,
    heads: int,
    kv_heads: int,
    seed: int,
    layout: str = "attention",
) -> Batch:
    """Own rows of query, key, value and output gradient, in float64."""
    rank = dist.get_rank(group)
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    moves = to_linear(plan, index)
    rows = (moves.before if layout == "attention" else moves.after)[rank]
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(rows, count, SIZE, generator=generator, dtype=torch.float64) for count in counts]


def run(function: Callable[..., torch.Tensor], data: Batch, *args: Any, **options: Any) -> Batch:
    """Output and gradients; zeros where the definition of an empty batch leaves none."""
    leaves = [tensor.clone().requires_grad_() for tensor in data[:3]]
    y = function(*leaves, *args, **options)
    if y.requires_grad:
        y.backward(data[3])
    return [y.detach(), *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)]


def definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    index: int,
    group: dist.ProcessGroup,
    layout: str,
    **options: Any,
) -> torch.Tensor:
    """What `balanced_attention` equals, in both layouts."""
    if layout == "attention":
        return reference.balanced_attention(q, k, v, plan, index=index, group=group, **options)
    back = to_linear(plan, index)
    q, k, v = (reference.move_rows(x, back.back(), group=group) for x in (q, k, v))
    y = reference.balanced_attention(q, k, v, plan, index=index, group=group, **options)
    return reference.move_rows(y, back, group=group)


def against_reference(
    group: dist.ProcessGroup,
    plan: Plan,
    heads: int,
    kv_heads: int,
    *,
    late: bool = True,
    layout: str = "attention",
    **options: Any,
) -> list[tuple[str, int]]:
    """In float64, equal to textbook attention of each document but for the last bits; then what was sent."""
    transport: Any = LateTransport(group) if late else transport_of(group)
    sent: list[tuple[str, int]] = []
    for index in range(len(plan.passes)):
        data = make(group, plan, index, heads, kv_heads, index, layout)
        said = {key: value for key, value in options.items() if key in ("softmax_scale", "window")}
        expected = run(definition, data, plan, index=index, group=group, layout=layout, **said)

        def observe(what: str, num_bytes: int) -> None:
            sent.append((what, num_bytes))

        options |= {"layout": layout, "observer": observe}
        got = run(balanced_attention, data, plan, index=index, group=transport, **options)
        for name, mine, true in zip(NAMES, got, expected, strict=True):
            assert torch.isfinite(mine).all(), f"{name}: not finite"
            torch.testing.assert_close(
                mine, true, rtol=1e-10, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
            )
    if late:
        transport.close()
    return sent


def whole_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, *, index: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Every document in one call of the kernel on one rank, which all ranks play."""
    layout, places = reference.places_of(plan, index)
    whole = [reference._GatherRuns.apply(tensor, group, layout) for tensor in (q, k, v)]
    y = torch.zeros_like(whole[0])
    for rows in places.values():
        y = y.index_copy(0, rows, _OneDocument.apply(*(tensor[rows] for tensor in whole)))
    return reference.own_rows(y, layout, dist.get_rank(group))


class _OneDocument(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *qkv: torch.Tensor) -> torch.Tensor:
        ctx.result = kernel.forward(*qkv, qkv[0].shape[-1] ** -0.5, kernel.Mask(0, None))
        ctx.save_for_backward(*qkv)
        return ctx.result[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        qkv = ctx.saved_tensors
        scale = qkv[0].shape[-1] ** -0.5
        return kernel.backward(grads[0].contiguous(), *qkv, *ctx.result, scale, kernel.Mask(0, None))


def rounding(group: dist.ProcessGroup, plan: Plan, dtype: torch.dtype, heads: int, kv_heads: int, moves: Any) -> None:
    """As near to float64 as the same kernel on one rank is, up to the rounding of partial results.

    A partial result is rounded once, by half an eps of itself; merged, those of one query weigh 1 together, and those
    of a gradient are terms of its sum. So what is split may be off by eps of the sum of their magnitudes, which is
    taken from attention of magnitudes, besides twice what is not split is off.
    """
    transport: Any = LateTransport(group)
    data = [tensor.to(dtype) for tensor in make(group, plan, 0, heads, kv_heads, 5)]
    exact = run(reference.balanced_attention, [tensor.double() for tensor in data], plan, group=group)
    alone = run(whole_documents, data, plan, index=0, group=group)
    got = run(balanced_attention, data, plan, group=transport, moves=moves)
    for name, mine, one, true in zip(NAMES, got, alone, exact, strict=True):
        assert mine.dtype == dtype
        if not true.numel():
            continue
        own_error = torch.tensor([(one.double() - true).abs().max(), true.abs().max()])
        dist.all_reduce(own_error, op=dist.ReduceOp.MAX, group=group)
        allowed = 2 * own_error[0] + torch.finfo(dtype).eps * own_error[1]
        off = (mine.double() - true).abs().max()
        assert off <= allowed, f"{name}: off by {off:.2e}, allowed {allowed:.2e}"
    transport.close()


def repeated(group: dist.ProcessGroup, plan: Plan, moves: Any) -> bool:
    """Bit for bit the same, whatever landed first."""
    data = [tensor.float() for tensor in make(group, plan, 0, 4, 2, 3)]
    transport: Any = LateTransport(group)
    results = [run(balanced_attention, data, plan, group=transport, moves=moves)]
    transport.close()
    results += [run(balanced_attention, data, plan, group=group, moves=moves) for _ in range(3)]
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def between_linear_layers(group: dist.ProcessGroup, plan: Plan) -> None:
    """Bit for bit what remaps before and after give."""
    data = make(group, plan, 0, 4, 2, 3, "linear")

    def apart(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        there = remap(torch.cat([q, k, v], dim=1), plan, to="attention", group=group)
        y = balanced_attention(*there.split([4, 2, 2], dim=1), plan, group=group)
        return remap(y, plan, to="linear", group=group)

    transport: Any = LateTransport(group)
    got = run(balanced_attention, data, plan, group=transport, layout="linear")
    transport.close()
    for mine, other in zip(got, run(apart, data), strict=True):
        assert torch.equal(mine, other)


def remapped(group: dist.ProcessGroup, plan: Plan) -> None:
    """There, and its gradient; and back again."""
    rank = dist.get_rank(group)
    transport: Any = LateTransport(group)
    for index in range(len(plan.passes)):
        moves = to_linear(plan, index)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(moves.before[rank], 3, 5, generator=generator)
        mine, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = remap(mine, plan, index=index, to="linear", group=transport)
        expected = reference.move_rows(plain, moves, group=group)
        assert torch.equal(y, expected)
        weights = torch.randn(y.shape, generator=generator)
        (y * weights).sum().backward()
        (expected * weights).sum().backward()
        assert mine.grad is not None
        assert plain.grad is not None
        assert torch.equal(mine.grad, plain.grad)
        assert torch.equal(remap(y.detach(), plan, index=index, to="attention", group=transport), x)
    transport.close()


def refused(group: dist.ProcessGroup, plan: Plan) -> list[str]:
    """Messages of calls that do not fit."""
    q, k, _, _ = make(group, plan, 0, 4, 2, 1)
    calls: list[dict[str, Any]] = [
        {"dropout": 0.1},
        {"window": -1},
        {"index": 7},
        {"k": k[:, :, :4], "v": k[:, :, :4]},
        {"k": q[:, :3], "v": q[:, :3]},
        {"v": k.float()},
        {"q": q[1:], "k": k[1:], "v": k[1:]},
        {"layout": "linear", "q": q[1:], "k": k[1:], "v": k[1:]},
        {"layout": "other"},
    ]
    messages = []
    for call in calls:
        try:
            balanced_attention(**{"q": q, "k": k, "v": k, "plan": plan, **call}, group=group)
        except ValueError as error:
            messages.append(str(error))
    try:
        remap(q[1:], plan, to="linear", group=group)
    except ValueError as error:
        messages.append(str(error))
    return messages
