"""Batch overlap: tensor-parallel layers on one part of a split micro-batch.

The messages of one part travel while the other part is computed. A step is a column-parallel layer, what follows it,
and a row-parallel layer. The caller runs the steps of both parts in turn. `PartMessages` has the messages.

Without sequence parallelism every sum has the computation of one step to complete, in forward and in backward:

    compute   attention a | attention b | MLP a       | MLP b
    link                  | sum of a    | sum of b    | sum of a

In backward, autograd runs the ready node that was made last. The wait for the sum of an input gradient is a separate
node (`part_input`); a slot moves it behind the computation of the other part.

Under sequence parallelism, in the middle of a step, after its column-parallel GEMM, the caller completes the output of
the step before, and starts the gather of the same part's next step:

    compute   attention a         | attention b              | MLP a                    | MLP b
    link                          | scatter of a, gather of a | scatter of b, gather of b | scatter of a, gather of a

Autograd mirrors this order in backward, where `part_input` completes the reduce-scatter of the input gradient and
`part_output` starts the all-gathers of the output gradient and of the saved input.

Source: Domino (arXiv 2409.15241) for the split of a micro-batch. The order of the backward and the order under sequence
parallelism are not from a paper.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.ops.call import Observer, check_operands, unobserved
from megatron_overlap.ops.tensor_parallel.method import skipped_output
from megatron_overlap.ops.tensor_parallel.part_messages import PartMessages
from megatron_overlap.ops.wgrad import LateTensor, WgradTarget


def reserve_slot() -> int | None:
    """A slot: a position in the order of a backward pass. None where autograd is disabled.

    Of all ready nodes, autograd runs the one with the highest sequence number. A node in a slot runs as if it had been
    made when the slot was reserved: after the nodes of the parts that started later.
    """
    if not torch.is_grad_enabled():
        return None
    node = torch.empty(0, requires_grad=True).view(0).grad_fn
    assert node is not None
    number: int = node._sequence_nr()
    return number


def _put(tensor: torch.Tensor, slot: int | None) -> torch.Tensor:
    """Moves the node that made `tensor` to a slot."""
    if slot is not None and tensor.grad_fn is not None:
        tensor.grad_fn._set_sequence_nr(slot)
    return tensor


def part_input(x: torch.Tensor, messages: PartMessages, slot: int | None = None) -> torch.Tensor:
    """`x`, the input of `column_part`, whose all-gather starts where ranks own rows `[S/R, B, K]` of it.

    Backward completes the sum of its gradient, at `slot`; see `reserve_slot`.
    """
    return _put(_PartInput.apply(x, messages), slot)


def part_output(y: torch.Tensor, messages: PartMessages, slot: int | None = None) -> torch.Tensor:
    """The result `y` of `row_part`, after its sum is complete.

    Backward starts its all-gathers, at `slot`; see `reserve_slot`.
    """
    saved, messages.saved = messages.saved, None
    return _put(_PartOutput.apply(y, saved, messages), slot)


def column_part(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    messages: PartMessages,
    target: WgradTarget | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals `x @ w.T + bias`, or `all_gather(x) @ w.T + bias` where ranks own rows.

    `part_input` waits for the sum of its input gradient.

    Args:
        x: `[S, B, K]` one part, or `[S/R, B, K]` own rows of it: the result of `part_input`, with no other use.
        w: `[F/R, K]` own rows of the weight.
        bias: `[F/R]` or None.
        messages: of the step.
        target: destination of the weight gradient.
        observer: as of `all_gather_linear`.

    Returns:
        `[S, B, F/R]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        RuntimeError: `part_input` has not started the all-gather.
    """
    call = _PartCall(x, w, bias, messages, target, observer)
    y: torch.Tensor = _ColumnPart.apply(x.reshape(-1, x.shape[-1]), w.detach(), bias, call)
    return y.view(-1, *x.shape[1:-1], w.shape[0])


def row_part(
    x: torch.Tensor,
    w_shard: torch.Tensor | None,
    messages: PartMessages,
    target: WgradTarget | None = None,
    observer: Observer | None = None,
    skip_output: bool = False,
) -> torch.Tensor:
    """`x @ w_shard.T`, whose sum over ranks starts: all rows, or own ones. Only `part_output` may read the result.

    Args:
        x: `[S, B, K/R]` all rows of one part.
        w_shard: `[F, K/R]` own columns of the weight; None for the sum of `x`, whose F is K/R.
        messages, target, observer: see `column_part`.
        skip_output: see `linear_reduce_scatter`.

    Returns:
        `[S, B, F]`, or `[S/R, B, F]` where ranks own rows; dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
    """
    call = _PartCall(x, w_shard, None, messages, target, observer)
    w = None if w_shard is None else w_shard.detach()
    y: torch.Tensor = _RowPart.apply(x.reshape(-1, x.shape[-1]), w, call, skip_output)
    return y.view(-1, *x.shape[1:-1], y.shape[1])


class _PartCall:
    """The options of one GEMM of a part: everything but tensors that autograd differentiates."""

    def __init__(
        self,
        x: torch.Tensor,
        w: torch.Tensor | None,
        bias: torch.Tensor | None,
        messages: PartMessages,
        target: WgradTarget | None,
        observer: Observer | None,
    ) -> None:
        self._target = target or WgradTarget()
        if w is not None:
            check_operands(x, w, bias, self._target.main_grad, "x")
        self._weight, self.messages, self.report = w, messages, observer or unobserved
        # Inside the autograd function gradients are disabled.
        self.saves_input = torch.is_grad_enabled() and w is not None and w.requires_grad

    def defer_wgrad(self, dy: torch.Tensor, x: LateTensor) -> None:
        """Postpones the weight gradient `dy.T @ x`."""
        assert self._weight is not None
        self.messages.defer_wgrad(self._weight, dy, x, self._target)
        self.report("wgrad", 0)


class _PartInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, messages: PartMessages) -> torch.Tensor:
        ctx.messages = messages
        messages.gather("input", x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.messages.finish("input gradient")
        return grads[0], None


class _PartOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, x: torch.Tensor | None, messages: PartMessages) -> torch.Tensor:
        ctx.messages = messages
        ctx.save_for_backward(x)
        if messages.has_started("output"):
            messages.finish("output")
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        messages, (x,) = ctx.messages, ctx.saved_tensors
        messages.gather("output gradient", grads[0])
        if x is not None:
            messages.gather_next("input", x)
        return grads[0], None, None


class _ColumnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, call: _PartCall) -> torch.Tensor:
        saves, messages = call.saves_input, call.messages
        gather = messages.full("input", x)
        y, full = gather.matmul(w.t(), bias), gather.finish()
        messages.saved = x.detach().contiguous() if saves and messages.gathers else None
        ctx.save_for_backward(full if saves and not messages.gathers else None, w)
        ctx.call = call
        call.report("forward", gather.num_bytes)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, dy = ctx.call, grads[0].contiguous()
        messages, (full, w) = call.messages, ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            sum_of_dx = messages.reduce("input gradient", dy, w)
            dx = sum_of_dx.out
            call.report("dgrad", sum_of_dx.num_bytes)
        if call.saves_input:
            call.defer_wgrad(dy, messages.take("input").finish if full is None else full)
        return dx, None, dy.sum(0) if ctx.needs_input_grad[2] else None, None


class _RowPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor | None, call: _PartCall, skip_output: bool) -> torch.Tensor:
        ctx.save_for_backward(x if call.saves_input else None, w)
        ctx.call = call
        if skip_output and w is not None:
            return skipped_output(x, x.shape[0] // call.messages.num_owners, w.shape[0], call.report)
        y = call.messages.reduce("output", x, None if w is None else w.t())
        call.report("forward", y.num_bytes)
        return y.out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, (x, w) = ctx.call, ctx.saved_tensors
        gather = call.messages.full("output gradient", grads[0])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = gather.finish() if w is None else gather.matmul(w)
        if dx is not None or gather.num_bytes:
            call.report("dgrad", gather.num_bytes)
        if x is not None:
            call.defer_wgrad(gather.finish(), x)
        return dx, None, None, None


def split_rows(x: torch.Tensor, group: dist.ProcessGroup, num_first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Own rows of both parts. Equals block r of the R blocks of each part of `all_gather(x).split([R F, S - R F])`.

    Args:
        x: `[S/R, ...]` own rows.
        group: the R ranks.
        num_first: F, own rows of the first part, the same on all ranks; each part has a row.

    Returns:
        `[F, ...]` and `[S/R - F, ...]`. Backward is `join_rows` of the gradients.
    """
    rows: torch.Tensor = _Exchange.apply(x, group, num_first, False)
    first, second = rows.split([num_first, x.shape[0] - num_first])
    return first, second


def join_rows(first: torch.Tensor, second: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Own rows `[S/R, ...]` of the sequence from own rows of its parts: the inverse of `split_rows`."""
    rows: torch.Tensor = _Exchange.apply(torch.cat((first, second)), group, first.shape[0], True)
    return rows


class _Exchange(torch.autograd.Function):
    """Own rows: of the sequence to those of its parts, one after the other, or `back`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, num_first: int, back: bool) -> torch.Tensor:
        ctx.group, ctx.num_first, ctx.back = group, num_first, back
        return _exchanged(rows, group, num_first, back)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(grads[0], ctx.group, ctx.num_first, not ctx.back), None, None, None


def _exchanged(rows: torch.Tensor, group: dist.ProcessGroup, num_first: int, back: bool) -> torch.Tensor:
    rank, size, num_rows = dist.get_rank(group), group.size(), rows.shape[0]

    def runs(owner: int, receiver: int) -> Iterator[slice]:
        """Rows that `owner` has of the sequence, and `receiver` of its parts, as slices of the rows of `owner`."""
        for begin, length in (0, num_first), (size * num_first, num_rows - num_first):
            first = begin + receiver * length - owner * num_rows
            yield slice(*(min(max(row, 0), num_rows) for row in (first, first + length)))

    def count(owner: int, receiver: int) -> int:
        return sum(run.stop - run.start for run in runs(owner, receiver))

    in_parts = [count(rank, peer) for peer in range(size)]
    in_sequence = [count(peer, rank) for peer in range(size)]
    # The rows of the parts are in the order of their owners in the sequence; the rows of the sequence are not in the
    # order of their owners in the parts.
    of_peers = [run for peer in range(size) for run in runs(rank, peer)]
    sent = rows if back else torch.cat([rows[run] for run in of_peers])
    received = torch.empty_like(sent, memory_format=torch.contiguous_format)
    num_received, num_sent = (in_parts, in_sequence) if back else (in_sequence, in_parts)
    dist.all_to_all_single(received, sent.contiguous(), num_received, num_sent, group=group)
    if not back:
        return received
    result = torch.empty_like(received)
    for run, part in zip(of_peers, received.split([run.stop - run.start for run in of_peers]), strict=True):
        result[run] = part
    return result
