"""Tensor-parallel layers under sequence parallelism on one part of a split micro-batch.

The messages of one part travel while the other part is computed. A step is a column-parallel layer, what follows it,
and a row-parallel layer. The caller runs the steps of both parts in turn. In the middle of a step, after its
column-parallel GEMM, it completes the output of the step before, and starts the gather of the same part's next step:

    compute   attention a         | attention b              | MLP a                    | MLP b
    link                          | scatter of a, gather of a | scatter of b, gather of b | scatter of a, gather of a

Autograd mirrors this order in backward, where `gathered` completes the reduce-scatter of the input gradient and
`scattered` starts the all-gathers of the output gradient and of the saved input. Postponed weight gradients run while a
message has not arrived. `PartMessages` starts and completes the messages.

`split_rows` and `join_rows` divide sequences. Rank r of R owns rows `[r S / R, (r + 1) S / R)` of a sequence. The first
part has the rows before `R F`, the second part the rest. Rank r owns block r of the R blocks of each part.

Source: Domino (arXiv 2409.15241) for the split of a micro-batch. The order under sequence parallelism is not from a
paper.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.ops.call import Observer, SavedInput, SavedInputHook
from megatron_overlap.ops.tensor_parallel.batch_overlap import Identity, PartCall, Slots
from megatron_overlap.ops.tensor_parallel.method import skipped_output
from megatron_overlap.ops.tensor_parallel.part_messages import PartMessages
from megatron_overlap.ops.wgrad import WgradTarget


def gathered(x: torch.Tensor, messages: PartMessages, slot: int | None = None) -> torch.Tensor:
    """Starts the all-gather of `x` `[S/R, B, K]`, own rows of one part; returns `x`, the input of `column_part`.

    Backward completes the sum of its gradient, at `slot`; see `Slots`.
    """
    start = partial(messages.gather, "input", x.detach().reshape(-1, x.shape[-1]).contiguous())
    y: torch.Tensor = Identity.apply(x, start, partial(messages.finish, "input gradient"))
    Slots.put(y, slot)
    return y


def scattered(y: torch.Tensor, messages: PartMessages, slot: int | None = None) -> torch.Tensor:
    """The result `y` of `row_part` or `summed_part`, after its sum is complete.

    Backward starts its all-gathers, at `slot`; see `Slots`.
    """
    saved, messages.saved = messages.saved, None
    result: torch.Tensor = _Scattered.apply(y, saved, messages)
    Slots.put(result, slot)
    return result


def column_part(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    messages: PartMessages,
    target: WgradTarget | None = None,
    observer: Observer | None = None,
    on_save: SavedInputHook | None = None,
) -> torch.Tensor:
    """Equals `all_gather(x) @ w.T + bias`. `gathered` waits for the sum of its input gradient.

    Args:
        x: `[S/R, B, K]` own rows of one part: the result of `gathered`, with no other use.
        w: `[F/R, K]` own rows of the weight.
        bias: `[F/R]` or None.
        messages: of the step.
        target: destination of the weight gradient.
        observer, on_save: as of `all_gather_linear`.

    Returns:
        `[S, B, F/R]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        RuntimeError: `gathered` has not started the all-gather.
    """
    call = PartCall(x, w, bias, messages.deferred_wgrad, target, observer)
    y: torch.Tensor = _ColumnPart.apply(x.reshape(-1, x.shape[-1]), w.detach(), bias, call, messages, on_save)
    return y.view(-1, *x.shape[1:-1], w.shape[0])


def row_part(
    x: torch.Tensor,
    w_shard: torch.Tensor,
    messages: PartMessages,
    target: WgradTarget | None = None,
    observer: Observer | None = None,
    skip_output: bool = False,
) -> torch.Tensor:
    """Own rows of `x @ w_shard.T`, whose reduce-scatter starts. Only `scattered` may read the result.

    Args:
        x: `[S, B, K/R]` all rows of one part.
        w_shard: `[F, K/R]` own columns of the weight.
        messages, target, observer: see `column_part`.
        skip_output: see `linear_reduce_scatter`.

    Returns:
        `[S/R, B, F]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
    """
    call = PartCall(x, w_shard, None, messages.deferred_wgrad, target, observer)
    y: torch.Tensor = _RowPart.apply(x.reshape(-1, x.shape[-1]), w_shard.detach(), call, messages, skip_output)
    return y.view(-1, *x.shape[1:-1], w_shard.shape[0])


def summed_part(x: torch.Tensor, messages: PartMessages, observer: Observer | None = None) -> torch.Tensor:
    """Own rows of the sum of `x` over ranks, whose reduce-scatter starts. Only `scattered` may read the result.

    Backward waits for the gradient that `scattered` gathers.

    Args:
        x: `[S, B, H]` all rows of one part, the term of this rank.
        messages, observer: of this sum, as of `column_part`.

    Returns:
        `[S/R, B, H]`, dtype of `x`.
    """
    y: torch.Tensor = _SummedPart.apply(x.reshape(-1, x.shape[-1]), messages, observer)
    return y.view(-1, *x.shape[1:])


class _SummedPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, messages: PartMessages, observer: Observer | None) -> torch.Tensor:
        ctx.messages, ctx.observer = messages, observer
        y, num_bytes = messages.scatter("output", x)
        if observer is not None:
            observer("forward", num_bytes)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, size = ctx.messages.finish("output gradient"), ctx.messages.transport.size
        if ctx.observer is not None:
            ctx.observer("dgrad", dx.nbytes // size * (size - 1))
        return dx, None, None


class _Scattered(torch.autograd.Function):
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
        messages.gather("output gradient", grads[0].reshape(-1, grads[0].shape[-1]).contiguous())
        if x is not None:
            messages.gather_next("input", x)
        return grads[0], None, None


class _ColumnPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        call: PartCall,
        messages: PartMessages,
        on_save: SavedInputHook | None,
    ) -> torch.Tensor:
        saves = call.saves_input
        y, full = messages.matmul("input", w.t(), bias)
        keeps_full = saves and messages.save_gathered
        messages.saved = x.detach().contiguous() if saves and not keeps_full else None
        ctx.save_for_backward(full if keeps_full else None, w)
        ctx.call, ctx.messages, ctx.saved_input = call, messages, None
        if saves and on_save is not None:
            ctx.saved_input = SavedInput(on_save(x, full.nbytes))
        call.report("forward", full.nbytes // messages.transport.size * (messages.transport.size - 1))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, messages, dy = ctx.call, ctx.messages, grads[0].contiguous()
        full, w = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx, num_bytes = messages.scatter("input gradient", dy, w)
            call.report("dgrad", num_bytes)
        if call.weight.requires_grad:
            call.defer_wgrad(dy, messages.take("input").finish if full is None else full)
            messages.limit_deferred()
        if ctx.saved_input is not None:
            ctx.saved_input.release()
        return dx, None, dy.sum(0) if ctx.needs_input_grad[2] else None, None, None, None


class _RowPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, call: PartCall, messages: PartMessages, skip_output: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x if call.saves_input else None, w)
        ctx.call, ctx.messages = call, messages
        if skip_output:
            return skipped_output(x, x.shape[0] // messages.transport.size, w.shape[0], call.report)
        y, num_bytes = messages.scatter("output", x, w.t())
        call.report("forward", num_bytes)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, messages, (x, w) = ctx.call, ctx.messages, ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            dx, dy = messages.matmul("output gradient", w)
        else:
            dx, dy = None, messages.finish("output gradient")
        call.report("dgrad", dy.nbytes // messages.transport.size * (messages.transport.size - 1))
        if x is not None:
            call.defer_wgrad(dy, x)
            messages.limit_deferred()
        return dx, None, None, None, None


def split_rows(x: torch.Tensor, group: dist.ProcessGroup, num_first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Own rows of both parts. Equals `all_gather(x).split([R F, S - R F])`, each cut into R blocks.

    Args:
        x: `[S/R, ...]` own rows.
        group: the R ranks.
        num_first: F, own rows of the first part, the same on all ranks.

    Returns:
        `[F, ...]` and `[S/R - F, ...]`. Backward is `join_rows` of the gradients.

    Raises:
        ValueError: a part has no rows.
    """
    if not 0 < num_first < x.shape[0]:
        raise ValueError(f"num_first: {num_first} of {x.shape[0]} rows: each part needs a row")
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
        begin, length = receiver * num_first, num_first
        for _ in range(2):
            start, stop = (min(max(row - owner * num_rows, 0), num_rows) for row in (begin, begin + length))
            yield slice(start, stop)
            begin, length = size * num_first + receiver * (num_rows - num_first), num_rows - num_first

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
