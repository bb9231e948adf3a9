"""Batch overlap: tensor-parallel layers without sequence parallelism on both parts of a split micro-batch.

The all-reduces of one half travel while the other half is computed. Where the caller computes half a, then half b, and
then continues with half a, every sum has the computation of one half to complete, in forward and in backward:

    compute   attention a | attention b | MLP a       | MLP b
    link                  | sum of a    | sum of b    | sum of a

In backward, autograd runs the ready node that was made last. A wait is a separate node here (`entered`); `Slots`
moves it behind the computation of the other half. `DeferredWgrad` postpones weight gradients, which no other node
needs, to the point with the least computation to hide messages, and sums both parts.

Source: Domino (arXiv 2409.15241) for the split of a micro-batch. The order of the backward is not from the paper.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.transport import TransportError
from megatron_overlap.ops.call import Observer, check_operands
from megatron_overlap.ops.tensor_parallel.method import skipped_output
from megatron_overlap.ops.wgrad import DeferredWgrad, LateTensor, WgradTarget


def can_be_ordered() -> bool:
    """Whether this torch can change the order of nodes of the autograd graph."""
    return hasattr(torch._C._FunctionBase, "_set_sequence_nr")


class Slots:
    """Positions in the order of a backward pass, reserved at the start of a part of the forward.

    Of all ready nodes, autograd runs the one with the highest sequence number. A node in a slot runs as if it had been
    made when the slot was reserved: after the nodes of the parts that started later.
    """

    @staticmethod
    def reserve() -> int | None:
        """A position before all nodes that are made from now on; None where autograd is disabled."""
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
    """An asynchronous all-reduce of one tensor at a time, by the collective of the group.

    The computation of the other half hides it as a whole, so it needs no chunks. All ranks call the collectives of the
    group in program order. With `serial` it waits in `start`, to measure the time without overlap.
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
        """Waits for the sum of the last started tensor.

        Raises:
            TransportError: the collective failed or reached the timeout of the group.
        """
        if self._work is None:
            return
        work, self._work = self._work, None
        try:
            work.wait()
        except RuntimeError as error:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(self._group)))
            raise TransportError(f"all-reduce of one half of a micro-batch among ranks {ranks}: {error}") from error


def entered(
    x: torch.Tensor, reduction: Reduction, before: Callable[[], object] | None = None, slot: int | None = None
) -> torch.Tensor:
    """`x` itself, the input of a `column_half`. Backward calls `before`, then waits for the sum of its gradient.

    `slot` is the position of the wait in the backward pass; see `Slots`.
    """

    def wait() -> None:
        if before is not None:
            before()
        reduction.wait()

    y: torch.Tensor = Identity.apply(x, None, wait)
    Slots.put(y, slot)
    return y


def arrived(y: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """The result `y` of a `row_half`, after its sum is complete."""
    result: torch.Tensor = Identity.apply(y, reduction.wait, None)
    return result


def column_half(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: Reduction,
    deferred_wgrad: DeferredWgrad,
    target: WgradTarget | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals `x @ w.T + bias`, whose input gradient `reduction` sums over ranks. `entered` waits for that sum.

    Args:
        x: `[S, B, K]` one half, the same on every rank: the result of `entered`, with no other use.
        w: `[F/R, K]` own rows of the weight.
        bias: `[F/R]` or None.
        reduction: for this half of this layer.
        deferred_wgrad: gets the weight gradient, for `target`.
        observer: called in every pass.

    Returns:
        `[S, B, F/R]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
    """
    call = PartCall(x, w, bias, deferred_wgrad, target, observer)
    y: torch.Tensor = _ColumnHalf.apply(x.reshape(-1, x.shape[-1]), w.detach(), bias, call, reduction)
    return y.view(*x.shape[:-1], w.shape[0])


def row_half(
    x: torch.Tensor,
    w_shard: torch.Tensor,
    reduction: Reduction,
    deferred_wgrad: DeferredWgrad,
    target: WgradTarget | None = None,
    observer: Observer | None = None,
    skip_output: bool = False,
) -> torch.Tensor:
    """`x @ w_shard.T`, for which `reduction` starts the sum over ranks. Only `arrived` may read the result.

    Args:
        x: `[S, B, K/R]` one half.
        w_shard: `[F, K/R]` own columns of the weight.
        reduction, deferred_wgrad, target, observer: see `column_half`.
        skip_output: see `linear_reduce_scatter`.

    Returns:
        `[S, B, F]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
    """
    call = PartCall(x, w_shard, None, deferred_wgrad, target, observer)
    y: torch.Tensor = _RowHalf.apply(x.reshape(-1, x.shape[-1]), w_shard.detach(), call, reduction, skip_output)
    return y.view(*x.shape[:-1], w_shard.shape[0])


class PartCall:
    """The options of one GEMM of a part: everything but tensors that autograd differentiates."""

    def __init__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        deferred_wgrad: DeferredWgrad,
        target: WgradTarget | None,
        observer: Observer | None,
    ) -> None:
        self._target = target or WgradTarget()
        check_operands(x, w, bias, self._target.main_grad, "x")
        self.weight, self.deferred_wgrad, self._observer = w, deferred_wgrad, observer
        # Inside the autograd function gradients are disabled.
        self.saves_input = torch.is_grad_enabled() and w.requires_grad

    def report(self, direction: str, num_bytes: int = 0) -> None:
        """Reports a pass to the observer."""
        if self._observer is not None:
            self._observer(direction, num_bytes)

    def defer_wgrad(self, dy: torch.Tensor, x: LateTensor) -> None:
        """Postpones the weight gradient `dy.T @ x`."""
        self.deferred_wgrad.put(self.weight, dy, x, self._target)
        self.report("wgrad")


class Identity(torch.autograd.Function):
    """`x` itself, after `on_forward()`; backward passes the gradient on, after `on_backward()`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, on_forward: Callable[[], object] | None, on_backward: Callable[[], object] | None
    ) -> torch.Tensor:
        ctx.on_backward = on_backward
        if on_forward is not None:
            on_forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.on_backward is not None:
            ctx.on_backward()
        return grads[0], None, None


class _ColumnHalf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, call: PartCall, reduction: Reduction
    ) -> torch.Tensor:
        ctx.save_for_backward(x if call.saves_input else None, w)
        ctx.call, ctx.reduction = call, reduction
        call.report("forward")
        return torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, dy = ctx.call, grads[0].contiguous()
        x, w = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy @ w
            call.report("dgrad", ctx.reduction.start(dx))
        if x is not None:
            call.defer_wgrad(dy, x)
        return dx, None, dy.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _RowHalf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, call: PartCall, reduction: Reduction, skip_output: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x if call.saves_input else None, w)
        ctx.call = call
        if skip_output:
            return skipped_output(x, x.shape[0], w.shape[0], call.report)
        y = torch.mm(x, w.t())
        call.report("forward", reduction.start(y))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, dy = ctx.call, grads[0].contiguous()
        x, w = ctx.saved_tensors
        dx = dy @ w if ctx.needs_input_grad[0] else None
        if dx is not None:
            call.report("dgrad")
        if x is not None:
            call.defer_wgrad(dy, x)
        return dx, None, None, None, None
