"""Tensor-parallel layers under sequence parallelism on one part of a split micro-batch.

The messages of one part travel while the other part is computed. A step is a column-parallel layer, what follows it,
and a row-parallel layer. The caller runs the steps of both parts in turn. In the middle of a step, after its
column-parallel GEMM, it completes the output of the step before, and starts the gather of the same part's next step:

    compute   attention a         | attention b              | MLP a                    | MLP b
    link                          | scatter of a, gather of a | scatter of b, gather of b | scatter of a, gather of a

Autograd mirrors this order in backward, where `gathered` completes the reduce-scatter of the input gradient and
`scattered` starts the all-gathers of the output gradient and of the saved input. Postponed weight gradients run while a
message has not arrived. Each message is whole.

Where the transport has collectives (`Transport.collectives`) each message is one of them, and no GEMM is cut. Elsewhere
a GEMM multiplies own rows first if others have not arrived, and computes own rows last if its result is sent.

Source: Domino (arXiv 2409.15241) for the split of a micro-batch. The order under sequence parallelism is not from a
paper.
"""

from typing import Any, Literal

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import CollectiveWork
from megatron_overlap.ops.call import Observer, SavedInput, SavedInputHook, check_operands, gemm_into
from megatron_overlap.ops.tensor_parallel.batch_overlap import Slots
from megatron_overlap.ops.tensor_parallel.method import skipped_output
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, P2PMethod
from megatron_overlap.ops.tensor_parallel.pipelined import PipelinedAllGather
from megatron_overlap.ops.wgrad import DeferredWgrad, LateTensor, WgradTarget

_WHOLE = LinearPlan(pattern="serial", chunks_per_rank=1)
"""One message to each rank, after the whole GEMM."""
_OWN_LAST = LinearPlan(pattern="direct", chunks_per_rank=1)
"""One message to each rank, before the GEMM of the own rows."""
_MAX_DEFERRED = 4
"""Postponed products of two steps. More would keep more gathered rows."""

Rows = Literal["input", "output", "output gradient", "input gradient"]
"""What the messages of one operation carry. Backward gathers the input again."""


class PartGather:
    """An all-gather of the rows `[rows, K]` of one part, in one message to each rank."""

    def __init__(self, transport: Transport, shard: torch.Tensor, op: str) -> None:
        num_rows, features = shard.shape[0] * transport.size, shard.shape[1]
        row_bytes = features * shard.itemsize
        plan, layout = _WHOLE.schedule("all_gather", transport, num_rows, row_bytes, shard.device)
        full = shard.new_empty(num_rows, features)
        self._gather = PipelinedAllGather(transport, plan, (shard,), layout, (full,), op, whole=True)
        self._own = layout.shard(transport.rank)
        self.num_bytes = (transport.size - 1) * shard.nbytes

    @property
    def ready(self) -> bool:
        """Whether `finish` returns without waiting for a received message."""
        return self._gather.done or self._gather.ready

    def finish(self) -> torch.Tensor:
        """Waits for all messages; returns the rows of all ranks. Further calls return the same tensor."""
        if not self._gather.done:
            self._gather.next_rows()
            self._gather.finish()
        return self._gather.full[0]

    def matmul(self, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`finish() @ b + bias`."""
        full, (start, stop) = self._gather.full[0], self._own
        out = full.new_empty(full.shape[0], b.shape[1])
        if self.ready:
            gemm_into(self.finish(), b, out, bias)
            return out
        gemm_into(full[start:stop], b, out[start:stop], bias)
        self.finish()
        for rows in slice(start), slice(stop, None):
            if out[rows].numel():
                gemm_into(full[rows], b, out[rows], bias)
        return out


class PartScatter:
    """The reduce-scatter of the rows of one part, in one message to each rank.

    Args:
        transport: of the ranks.
        a: the rows, or the left operand of the GEMM `a @ b` that computes them.
        b: the right operand of that GEMM, or None.
        op: name in error messages.
        whole: the messages start after the whole GEMM.

    Attributes:
        out: own rows; the sum over ranks after `finish`.
    """

    def __init__(
        self, transport: Transport, a: torch.Tensor, b: torch.Tensor | None, op: str, *, whole: bool = False
    ) -> None:
        method = P2PMethod(transport, _WHOLE if whole else _OWN_LAST)
        self._scatter = method.reduce_scatter(a, op) if b is None else method.scatter(a, b, op)
        self.out = self._scatter.out
        self.num_bytes = (transport.size - 1) * self.out.nbytes
        self._finished = False

    @property
    def ready(self) -> bool:
        """See `PartGather.ready`."""
        return self._finished or self._scatter.ready

    def finish(self) -> torch.Tensor:
        """Waits for all messages; returns `out`. Further calls return the same tensor."""
        if not self._finished:
            self._scatter.finish()
            self._finished = True
        return self.out


class PartCollective:
    """An all-gather or reduce-scatter of the rows of one part that the transport runs as a whole.

    Args:
        work: the collective that has started.
        out: its result.
        num_bytes: that this rank sends.
    """

    def __init__(self, work: CollectiveWork, out: torch.Tensor, num_bytes: int) -> None:
        self._work: CollectiveWork | None = work
        self.out, self.num_bytes = out, num_bytes

    @property
    def ready(self) -> bool:
        """See `PartGather.ready`. False before `finish`: a query would synchronise."""
        return self._work is None

    def finish(self) -> torch.Tensor:
        """Waits for the collective; returns `out`. Further calls return the same tensor."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self.out

    def matmul(self, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`finish() @ b + bias`."""
        full = self.finish()
        out = full.new_empty(full.shape[0], b.shape[1])
        gemm_into(full, b, out, bias)
        return out


_PartWork = PartGather | PartScatter | PartCollective


class PartMessages:
    """The messages of one part in one step, in forward and in backward.

    Args:
        transport: of the ranks. No other part uses it, since its buffers belong to one reduce-scatter at a time.
        deferred_wgrad: gets the weight gradients of both parts of the step; made with `num_terms=2`.
        save_gathered: forward saves the gathered input for the weight gradient; otherwise backward gathers it again.
        serial: wait for each message where it starts, to measure the time without overlap.

    Attributes:
        saved: own rows of the input that `scattered` saves for the weight gradient.
    """

    def __init__(
        self, transport: Transport, deferred_wgrad: DeferredWgrad, *, save_gathered: bool = False, serial: bool = False
    ) -> None:
        self.transport, self.deferred_wgrad, self.save_gathered = transport, deferred_wgrad, save_gathered
        self.saved: torch.Tensor | None = None
        self._serial = serial
        self._started: dict[Rows, _PartWork] = {}
        self._following: tuple[Rows, torch.Tensor] | None = None

    def has_started(self, rows: Rows) -> bool:
        """Whether messages with `rows` have started."""
        return rows in self._started

    def is_ready(self, rows: Rows) -> bool:
        """Whether `finish(rows)` returns without waiting. False where a query would synchronise."""
        return self._started[rows].ready

    def gather(self, rows: Rows, shard: torch.Tensor) -> int:
        """Starts an all-gather; returns the bytes that this rank sends."""
        op, collectives = f"all-gather of {rows} of a part", self.transport.collectives
        gather: PartGather | PartCollective
        if collectives is None:
            gather = PartGather(self.transport, shard, op)
        else:
            full = shard.new_empty(shard.shape[0] * self.transport.size, shard.shape[1])
            gather = PartCollective(collectives.all_gather(shard, full, op), full, full.nbytes - shard.nbytes)
        self._start(rows, gather)
        return gather.num_bytes

    def gather_next(self, rows: Rows, shard: torch.Tensor) -> None:
        """Starts an all-gather behind the one before.

        As a collective it starts when that one has arrived: in the same hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1)
        it would delay all work that is enqueued meanwhile.
        """
        if self.transport.collectives is None:
            self.gather(rows, shard)
        else:
            self._following = rows, shard

    def scatter(self, rows: Rows, a: torch.Tensor, b: torch.Tensor | None = None) -> tuple[torch.Tensor, int]:
        """Starts the reduce-scatter of `a` or `a @ b`; returns own rows, incomplete, and the bytes that are sent."""
        op, collectives = f"reduce-scatter of {rows} of a part", self.transport.collectives
        scatter: PartScatter | PartCollective
        if collectives is None:
            scatter = PartScatter(self.transport, a, b, op, whole=self._serial)
        else:
            terms = a.contiguous() if b is None else a @ b
            out = terms.new_empty(terms.shape[0] // self.transport.size, terms.shape[1])
            scatter = PartCollective(collectives.reduce_scatter(terms, out, op), out, terms.nbytes - out.nbytes)
        self._start(rows, scatter)
        return scatter.out, scatter.num_bytes

    def take(self, rows: Rows) -> _PartWork:
        """Removes started messages. The caller finishes them.

        Raises:
            RuntimeError: they were not started.
        """
        work = self._started.pop(rows, None)
        if work is None:
            raise RuntimeError(
                f"the {rows} of a split layer was not started: its linear layers did not run in the order of its "
                "forward; set overlap.tensor.split to none"
            )
        return work

    def finish(self, rows: Rows) -> torch.Tensor:
        """Waits for started messages; computes postponed weight gradients until they are complete."""
        return self._filled(rows).finish()

    def matmul(
        self, rows: Rows, b: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`full @ b + bias` and `full`, the rows of all ranks, whose all-gather has started."""
        gather = self._filled(rows)
        assert not isinstance(gather, PartScatter)
        return gather.matmul(b, bias), gather.finish()

    def _filled(self, rows: Rows) -> _PartWork:
        """Takes started messages, and computes postponed weight gradients until they are complete."""
        work = self.take(rows)
        self.deferred_wgrad.run_while(lambda: not work.ready)
        if self._following is not None:
            work.finish()
            following, self._following = self._following, None
            self.gather(*following)
        return work

    def abandon(self) -> None:
        """Completes all messages. No layer uses their rows."""
        self._following = None
        while self._started:
            self._started.popitem()[1].finish()

    def _start(self, rows: Rows, work: _PartWork) -> None:
        self._started[rows] = work
        if self._serial:
            work.finish()


def gathered(x: torch.Tensor, messages: PartMessages, slot: int | None = None) -> torch.Tensor:
    """Starts the all-gather of `x` and returns `x`, the input of `column_part`.

    Backward completes the sum of its gradient.

    Args:
        x: `[S/R, B, K]` own rows of one part.
        messages: of the step.
        slot: position in the backward pass; see `Slots`.
    """
    y: torch.Tensor = _Gathered.apply(x, messages)
    Slots.put(y, slot)
    return y


def scattered(y: torch.Tensor, messages: PartMessages, slot: int | None = None) -> torch.Tensor:
    """The result `y` of `row_part` or `summed_part`, after its sum is complete. Backward starts its all-gathers.

    Args:
        y: own rows.
        messages: of the step.
        slot: position in the backward pass; see `Slots`.
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
        observer: called in every pass.
        on_save: called in forward where the input is saved for the weight gradient.

    Returns:
        `[S, B, F/R]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        RuntimeError: `gathered` has not started the all-gather.
    """
    call = _PartCall(x, w, bias, messages, target or WgradTarget(), observer)
    y: torch.Tensor = _ColumnPart.apply(x.reshape(-1, x.shape[-1]), w.detach(), bias, call, on_save)
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
    call = _PartCall(x, w_shard, None, messages, target or WgradTarget(), observer)
    y: torch.Tensor = _RowPart.apply(x.reshape(-1, x.shape[-1]), w_shard.detach(), call, skip_output)
    return y.view(-1, *x.shape[1:-1], w_shard.shape[0])


def summed_part(x: torch.Tensor, messages: PartMessages, observer: Observer | None = None) -> torch.Tensor:
    """Own rows of the sum of `x` over ranks, whose reduce-scatter starts. Only `scattered` may read the result.

    Backward waits for the gradient that `scattered` gathers.

    Args:
        x: `[S, B, H]` all rows of one part, the term of this rank.
        messages: of this sum.
        observer: called in every pass.

    Returns:
        `[S/R, B, H]`, dtype of `x`.
    """
    y: torch.Tensor = _SummedPart.apply(x.reshape(-1, x.shape[-1]), messages, observer)
    return y.view(-1, *x.shape[1:])


class _PartCall:
    """The options of one GEMM: everything but tensors that autograd differentiates."""

    def __init__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        messages: PartMessages,
        target: WgradTarget,
        observer: Observer | None,
    ) -> None:
        check_operands(x, w, bias, target.main_grad, "x")
        self.weight, self.messages = w, messages
        # Inside the autograd function gradients are disabled.
        self.saves_input = torch.is_grad_enabled() and w.requires_grad
        self._target, self._observer = target, observer

    def count(self, direction: str, num_bytes: int = 0) -> None:
        if self._observer is not None:
            self._observer(direction, num_bytes)

    def defer_wgrad(self, dy: torch.Tensor, x: LateTensor) -> None:
        deferred_wgrad = self.messages.deferred_wgrad
        deferred_wgrad.put(self.weight, dy, x, self._target)
        deferred_wgrad.run_while(lambda: deferred_wgrad.num_pending > _MAX_DEFERRED)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, messages: PartMessages) -> torch.Tensor:
        ctx.messages = messages
        messages.gather("input", x.detach().reshape(-1, x.shape[-1]).contiguous())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.messages.finish("input gradient")
        return grads[0], None


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
        call: _PartCall,
        on_save: SavedInputHook | None,
    ) -> torch.Tensor:
        messages, saves = call.messages, call.saves_input
        y, full = messages.matmul("input", w.t(), bias)
        keeps_full = saves and messages.save_gathered
        messages.saved = x.detach().contiguous() if saves and not keeps_full else None
        ctx.save_for_backward(full if keeps_full else None, w)
        ctx.call, ctx.saved_input = call, None
        if saves and on_save is not None:
            ctx.saved_input = SavedInput(on_save(x, full.nbytes))
        call.count("forward", full.nbytes // messages.transport.size * (messages.transport.size - 1))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, dy = ctx.call, grads[0].contiguous()
        full, w = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx, num_bytes = call.messages.scatter("input gradient", dy, w)
            call.count("dgrad", num_bytes)
        if call.weight.requires_grad:
            call.defer_wgrad(dy, call.messages.take("input").finish if full is None else full)
            call.count("wgrad")
        if ctx.saved_input is not None:
            ctx.saved_input.release()
        return dx, None, dy.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _RowPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, call: _PartCall, skip_output: bool) -> torch.Tensor:
        ctx.save_for_backward(x if call.weight.requires_grad else None, w)
        ctx.call = call
        if skip_output:
            return skipped_output(x, x.shape[0] // call.messages.transport.size, w.shape[0], call.count)
        y, num_bytes = call.messages.scatter("output", x, w.t())
        call.count("forward", num_bytes)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, (x, w) = ctx.call, ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            dx, dy = call.messages.matmul("output gradient", w)
        else:
            dx, dy = None, call.messages.finish("output gradient")
        call.count("dgrad", dy.nbytes // call.messages.transport.size * (call.messages.transport.size - 1))
        if x is not None:
            call.defer_wgrad(dy, x)
            call.count("wgrad")
        return dx, None, None, None
