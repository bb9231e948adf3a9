"""Tensor parallel layers without sequence parallelism on the two halves of a micro-batch.

One half's all-reduces travel while the other half is computed. What a layer needs next of a half is that half's sum,
and nothing of the other. So where a caller computes half a, then half b, then goes on with half a, every sum has as
long as a half's computation to arrive, forward and backward:

    compute   attention a | attention b | MLP a       | MLP b
    link                  | sum of a    | sum of b    | sum of a

In backward autograd itself goes from node to node, the latest first. A wait is a node of its own here (`entered`),
which is told to come as late as the other half's computation needs: see `Slots`. Weight gradients, which nothing in the
pass needs, are put off to where there is the least to hide under, of both halves together (`DeferredWgrad`).

Source: Domino (arXiv 2409.15241) for the halves of a micro-batch; the order of the backward is our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.transport import TransportError
from megatron_overlap.ops.call import Observer, check_operands
from megatron_overlap.ops.wgrad import DeferredWgrad, WgradTarget


def can_be_ordered() -> bool:
    """Whether this torch lets a node of autograd's graph say when it runs."""
    return hasattr(torch._C._FunctionBase, "_set_sequence_nr")


class Slots:
    """Places in the order of a backward pass, reserved where a piece of the forward begins.

    Autograd runs of all nodes that are ready the one that was made last. A node that is put into a slot runs as if it
    had been made when the slot was reserved: after everything of the pieces that began after it.
    """

    @staticmethod
    def reserve() -> int | None:
        """A place before all nodes that are made from now on; None where no graph is made."""
        if not torch.is_grad_enabled():
            return None
        node = torch.empty(0, requires_grad=True).view(0).grad_fn
        assert node is not None
        number: int = node._sequence_nr()
        return number

    @staticmethod
    def put(tensor: torch.Tensor, slot: int | None) -> None:
        """Moves the node that made `tensor` to a slot."""
        if slot is not None and tensor.grad_fn is not None:
            tensor.grad_fn._set_sequence_nr(slot)


class Reduction:
    """An all-reduce of one tensor at a time, which its starter does not wait for.

    It is the group's own collective: of what is hidden under another half nothing has to be cut, and its order among
    other collectives of the group is the program's, which is the same on every rank.

    Args:
        group: the R ranks.
        serial: wait at once, to measure against.
    """

    def __init__(self, group: dist.ProcessGroup, *, serial: bool = False) -> None:
        self._group, self._serial = group, serial
        self._work: dist.Work | None = None

    def start(self, tensor: torch.Tensor) -> int:
        """Sums `tensor` over the ranks, in place; returns the bytes that this rank sends."""
        self.wait()
        self._work = dist.all_reduce(tensor, group=self._group, async_op=True)
        if self._serial:
            self.wait()
        ranks = self._group.size()
        return 2 * (ranks - 1) * tensor.nbytes // ranks

    def wait(self) -> None:
        """Returns when the tensor that was started last may be read; at once if there is none.

        Raises:
            TransportError: the collective failed, by the group's own deadline too.
        """
        if self._work is None:
            return
        work, self._work = self._work, None
        try:
            work.wait()
        except RuntimeError as error:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(self._group)))
            raise TransportError(f"all-reduce of half a micro-batch among ranks {ranks}: {error}") from error


def entered(
    x: torch.Tensor, reduction: Reduction, before: Callable[[], object] | None = None, slot: int | None = None
) -> torch.Tensor:
    """`x` on its way into a `column_half`; backward waits there for the sum of its gradient.

    Args:
        reduction: the one that the `column_half` is given.
        before: called in backward before the wait.
        slot: when the wait comes, see `Slots`.
    """
    y: torch.Tensor = _Entered.apply(x, reduction, before)
    Slots.put(y, slot)
    return y


def arrived(y: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """What a `row_half` returned, when its sum is there."""
    result: torch.Tensor = _Arrived.apply(y, reduction)
    return result


def column_half(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: Reduction,
    gradients: DeferredWgrad,
    into: WgradTarget | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals `x @ w.T + bias`, whose input's gradient is summed over ranks by `reduction`, and awaited by `entered`.

    Args:
        x: `[S, B, K]` one half, the same on every rank, as `entered` returned it; nobody else may read that.
        w: `[F/R, K]` own rows of the weight.
        bias: `[F/R]` or None.
        reduction: for this half of this layer.
        gradients: where the weight gradient is put.
        into: where it goes from there.
        observer: called in every pass, for counting.

    Returns:
        `[S, B, F/R]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
    """
    call = _Call(x, w, bias, reduction, gradients, into or WgradTarget(), observer)
    y: torch.Tensor = _ColumnHalf.apply(x.reshape(-1, x.shape[-1]), w.detach(), bias, call)
    return y.view(*x.shape[:-1], w.shape[0])


def row_half(
    x: torch.Tensor,
    w_shard: torch.Tensor,
    reduction: Reduction,
    gradients: DeferredWgrad,
    into: WgradTarget | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """`x @ w_shard.T`, which `reduction` has begun to sum over ranks: only `arrived` may read it.

    Args:
        x: `[S, B, K/R]` one half.
        w_shard: `[F, K/R]` own columns of the weight.
        reduction, gradients, into, observer: as of `column_half`.

    Returns:
        `[S, B, F]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
    """
    call = _Call(x, w_shard, None, reduction, gradients, into or WgradTarget(), observer)
    y: torch.Tensor = _RowHalf.apply(x.reshape(-1, x.shape[-1]), w_shard.detach(), call)
    return y.view(*x.shape[:-1], w_shard.shape[0])


class _Call:
    """What one half's GEMM in one layer keeps besides tensors."""

    def __init__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        reduction: Reduction,
        gradients: DeferredWgrad,
        into: WgradTarget,
        observer: Observer | None,
    ) -> None:
        check_operands(x, w, bias, into.main_grad, "x")
        self.weight, self.reduction = w, reduction
        self._gradients, self._into, self._observer = gradients, into, observer

    def count(self, direction: str, num_bytes: int = 0) -> None:
        if self._observer is not None:
            self._observer(direction, num_bytes)

    def put_off(self, dy: torch.Tensor, x: torch.Tensor | None) -> None:
        if x is not None:
            self._gradients.put(self.weight, dy, x, self._into)
            self.count("wgrad")


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reduction: Reduction, before: Callable[[], object] | None) -> torch.Tensor:
        ctx.reduction, ctx.before = reduction, before
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.before is not None:
            ctx.before()
        ctx.reduction.wait()
        return grads[0], None, None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        reduction.wait()
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


class _ColumnHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, call: _Call) -> torch.Tensor:
        ctx.save_for_backward(x if call.weight.requires_grad else None, w)
        ctx.call = call
        call.count("forward")
        return torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, dy = ctx.call, grads[0].contiguous()
        x, w = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy @ w
            call.count("dgrad", call.reduction.start(dx))
        call.put_off(dy, x)
        return dx, None, dy.sum(0) if ctx.needs_input_grad[2] else None, None


class _RowHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, call: _Call) -> torch.Tensor:
        ctx.save_for_backward(x if call.weight.requires_grad else None, w)
        ctx.call = call
        y = torch.mm(x, w.t())
        call.count("forward", call.reduction.start(y))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, dy = ctx.call, grads[0].contiguous()
        x, w = ctx.saved_tensors
        dx = dy @ w if ctx.needs_input_grad[0] else None
        if dx is not None:
            call.count("dgrad")
        call.put_off(dy, x)
        return dx, None, None
