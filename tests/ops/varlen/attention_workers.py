"""Worker functions: balanced attention and its reference on the same batch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import transport_of
from megatron_overlap.ops import balanced_attention
from megatron_overlap.ops.flash_attention import Attended, partial_backward, partial_forward
from megatron_overlap.ops.reference import gather, own_rows
from megatron_overlap.ops.varlen import layout
from megatron_overlap.schedules.varlen import Plan
from megatron_overlap.schedules.varlen.rebalance import rebalance_to_linear
from megatron_overlap.schedules.varlen.ring_groups import Passing
from tests.helpers import reference
from tests.helpers.late import LateTransport

HEAD_SIZE = 8
NAMES = ("y", "dq", "dk", "dv")
Batch = list[torch.Tensor]


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and key/value heads."""

    heads: int
    kv_heads: int


GQA = Heads(heads=4, kv_heads=2)


@dataclass(frozen=True)
class Case:
    """One call of balanced attention."""

    plan: Plan
    heads: Heads = GQA
    passing: Passing | None = None
    layout: str = "attention"
    softmax_scale: float | None = None
    late: bool = True
    """Messages complete as late as the transport contract allows."""


def make_batch(group: dist.ProcessGroup, case: Case, index: int, seed: int) -> Batch:
    """Own rows of query, key, value and output gradient, in float64."""
    return batch_of_rank(dist.get_rank(group), case, index, seed)


def batch_of_rank(rank: int, case: Case, index: int, seed: int) -> Batch:
    """See `make_batch`."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    moves = rebalance_to_linear(case.plan, index)
    rows = (moves.before if case.layout == "attention" else moves.after)[rank]
    heads = case.heads
    counts = (heads.heads, heads.kv_heads, heads.kv_heads, heads.heads)
    return [torch.randn(rows, count, HEAD_SIZE, generator=generator, dtype=torch.float64) for count in counts]


def run(function: Callable[..., torch.Tensor], batch: Batch, *args: Any, **options: Any) -> Batch:
    """Output and gradients; zeros if the reference of an empty batch has no gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in batch[:3]]
    y = function(*leaves, *args, **options)
    if y.requires_grad:
        y.backward(batch[3])
    return [y.detach(), *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)]


def reference_in_layout(
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
    """The plain program that `balanced_attention` equals, in both layouts."""
    if layout == "attention":
        return reference.balanced_attention(q, k, v, plan, index=index, group=group, **options)
    to_linear = rebalance_to_linear(plan, index)
    q, k, v = (reference.move_rows(x, to_linear.inverse(), group=group) for x in (q, k, v))
    y = reference.balanced_attention(q, k, v, plan, index=index, group=group, **options)
    return reference.move_rows(y, to_linear, group=group)


def compare_with_reference(group: dist.ProcessGroup, case: Case) -> list[tuple[str, int]]:
    """In float64, equal to textbook attention of each document up to the last bits. Returns the bytes sent per pass."""
    transport: Any = LateTransport(group) if case.late else transport_of(group)
    sent: list[tuple[str, int]] = []
    options = {"softmax_scale": case.softmax_scale, "layout": case.layout}
    for index in range(len(case.plan.passes)):
        batch = make_batch(group, case, index, seed=index)
        expected = run(reference_in_layout, batch, case.plan, index=index, group=group, **options)

        def observe(direction: str, num_bytes: int) -> None:
            sent.append((direction, num_bytes))

        result = run(
            balanced_attention,
            batch,
            case.plan,
            index=index,
            group=transport,
            passing=case.passing,
            observer=observe,
            **options,
        )
        for name, got, true in zip(NAMES, result, expected, strict=True):
            assert torch.isfinite(got).all(), f"{name}: not finite"
            torch.testing.assert_close(got, true, rtol=1e-10, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")
    if case.late:
        transport.close()
    return sent


def whole_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, *, index: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Every document in one kernel call, computed by all ranks alike."""
    layout, places = reference.places_of(plan, index)
    whole = [gather(tensor, group, layout) for tensor in (q, k, v)]
    y = torch.zeros_like(whole[0])
    for rows in places.values():
        y = y.index_copy(0, rows, _OneDocument.apply(*(tensor[rows] for tensor in whole)))
    return own_rows(y, layout, dist.get_rank(group))


class _OneDocument(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *qkv: torch.Tensor) -> torch.Tensor:
        ctx.result = partial_forward(*qkv, qkv[0].shape[-1] ** -0.5, causal=True)
        ctx.save_for_backward(*qkv)
        return ctx.result[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        qkv = ctx.saved_tensors
        scale = qkv[0].shape[-1] ** -0.5
        return partial_backward(grads[0].contiguous(), Attended(*qkv, *ctx.result), scale, causal=True)


def compare_rounding(group: dist.ProcessGroup, case: Case, dtype: torch.dtype) -> None:
    """The error against float64 is that of the same kernel on one rank, plus the rounding of partial results.

    A partial result is rounded once, by eps / 2 of itself. The weights of the partial results of one query sum to 1,
    and partial gradients are terms of a sum. The allowed error is therefore twice the error on one rank plus eps of the
    largest magnitude.
    """
    transport: Any = LateTransport(group)
    batch = [tensor.to(dtype) for tensor in make_batch(group, case, 0, seed=5)]
    exact = run(reference.balanced_attention, [tensor.double() for tensor in batch], case.plan, group=group)
    one_rank = run(whole_documents, batch, case.plan, index=0, group=group)
    result = run(balanced_attention, batch, case.plan, group=transport, passing=case.passing)
    for name, got, alone, true in zip(NAMES, result, one_rank, exact, strict=True):
        assert got.dtype == dtype
        if not true.numel():
            continue
        own_error = torch.tensor([(alone.double() - true).abs().max(), true.abs().max()])
        dist.all_reduce(own_error, op=dist.ReduceOp.MAX, group=group)
        allowed = 2 * own_error[0] + torch.finfo(dtype).eps * own_error[1]
        error = (got.double() - true).abs().max()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
    transport.close()


def is_deterministic(group: dist.ProcessGroup, case: Case) -> bool:
    """Whether the results are bitwise equal for different arrival orders."""
    batch = [tensor.float() for tensor in make_batch(group, case, 0, seed=3)]
    transport: Any = LateTransport(group)
    results = [run(balanced_attention, batch, case.plan, group=transport, passing=case.passing)]
    transport.close()
    results += [run(balanced_attention, batch, case.plan, group=group, passing=case.passing) for _ in range(3)]
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def compare_with_separate_rebalancing(group: dist.ProcessGroup, plan: Plan) -> None:
    """The linear layout is bitwise equal to rebalancing before and after attention."""
    case = Case(plan, layout="linear")
    batch = make_batch(group, case, 0, seed=3)
    to_linear = rebalance_to_linear(plan)

    def separate(*linear: torch.Tensor) -> torch.Tensor:
        rows = (reference.move_rows(x, to_linear.inverse(), group=group) for x in linear)
        return reference.move_rows(balanced_attention(*rows, plan, group=group), to_linear, group=group)

    transport: Any = LateTransport(group)
    result = run(balanced_attention, batch, plan, group=transport, layout="linear")
    transport.close()
    for got, other in zip(result, run(separate, batch), strict=True):
        assert torch.equal(got, other)


def error_messages(group: dist.ProcessGroup, plan: Plan) -> list[str]:
    """Error messages of calls with arguments that do not fit."""
    q, k, _, _ = make_batch(group, Case(plan), 0, seed=1)
    calls: list[dict[str, Any]] = [
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
    return messages


def repeated_layers(group: dist.ProcessGroup, case: Case) -> tuple[int, int]:
    """Operations whose transfers a third layer builds, and tensors beside buffers that are held for a fourth one."""
    transport, built = transport_of(group), list[str]()
    make = layout._Transfers.__init__

    def noted(self: Any, transport: Any, *args: Any) -> None:
        built.append(args[-1])
        make(self, transport, *args)

    pool = transport.buffer_pool
    pool.forget()
    layout._Transfers.__init__ = noted  # type: ignore[method-assign]
    try:
        for _ in range(3):  # buffers grow in the first one
            first = len(built)
            run(balanced_attention, make_batch(group, case, 0, 1), case.plan, group=group, layout=case.layout)
    finally:
        layout._Transfers.__init__ = make  # type: ignore[method-assign]
    buffers = {each.untyped_storage().data_ptr() for each in pool._storage.values()}
    held = [each for of, _ in pool.derived.values() for each in of if isinstance(each, torch.Tensor)]
    return len(built) - first, sum(each.untyped_storage().data_ptr() not in buffers for each in held)
