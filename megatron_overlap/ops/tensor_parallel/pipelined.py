"""All-gather whose rows GEMMs use as they arrive, the number formats of rows, and what the pipelined collectives share.

`pipelined_reduce_scatter` and `pipelined_all_reduce` send rows as GEMMs compute them.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Protocol

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Exchange, Repeated, Transfer
from megatron_overlap.ops.call import product, repeated
from megatron_overlap.ops.wgrad import WeightGradient
from megatron_overlap.schedules import ChunkLayout, PartLayout, Plan

Rows = tuple[int, int]
GemmInto = Callable[[int, int, torch.Tensor], object]
"""`gemm(start, stop, out)` writes rows `[start, stop)` of a product into `out`."""

Payload = tuple[torch.Tensor, ...]
"""The encoded rows: contiguous tensors whose first dimension is the row."""


class Gemm(Protocol):
    """Encodes rows for an all-gather, and multiplies encoded rows."""

    def encode(self, rows: torch.Tensor) -> Payload:
        """`rows` `[n, K]` in this format. Each row is encoded independently of the other rows."""

    def matmul(self, rows: Payload, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """`out = rows @ b + bias`."""

    def wgrad(self, wgrad: WeightGradient, dy: torch.Tensor | Payload, x: torch.Tensor | Payload) -> None:
        """Adds `dy.T @ x` to `wgrad`. One operand is encoded."""


class PlainGemm:
    """Rows in the dtype of the input."""

    def encode(self, rows: torch.Tensor) -> Payload:
        return (rows,)

    def matmul(self, rows: Payload, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        product(rows[0], b, bias, out)

    def wgrad(self, wgrad: WeightGradient, dy: torch.Tensor | Payload, x: torch.Tensor | Payload) -> None:
        wgrad.add(dy[0] if isinstance(dy, tuple) else dy, x[0] if isinstance(x, tuple) else x)


PLAIN = PlainGemm()


class PipelinedAllGather:
    """An all-gather whose rows are consumed as they arrive, own rows first.

    The plan defines the order of the sends. Rows of several peers that share a link may arrive in another order.

    Args:
        plan, layout: an all-gather plan and the rows of its chunks.
        shard: own rows: one or more contiguous tensors `[shard rows, ...]`, unchanged until `finish`. One message
            carries a chunk of all of them.
        into: the gathered rows, one tensor `[num_rows, ...]` for each of `shard`; own rows are copied into it only with
            `whole`.
        whole: the consumer reads the own and the received rows as one tensor.
        repeats: `into` are buffers of the transport's pool, and further calls have the same plan and layout.

    Attributes:
        rows: of the GEMMs of the plan; on a device those that `next_rows` returns.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        shard: Payload,
        layout: ChunkLayout,
        into: Payload,
        op: str,
        *,
        whole: bool = False,
        repeats: bool = False,
    ) -> None:
        self._plan, self._rank = plan, plan.rank
        self.full = into
        self._on_device = transport.on_device
        self._shard, self._has_own_rows = shard, False
        if repeats and transport.prepares and len(shard) == 1:
            self.rows = repeated(transport, (plan, layout, into[0]), lambda: _GatheredRows(plan, layout, into))
            self._has_own_rows = whole
            exchange = Exchange(self.rows, shard[0], self.rows.own[0] if whole else None)
            self._p2p_work = transport.begin(exchange, op)
        else:
            self.rows = _GatheredRows(plan, layout, into)
            self._p2p_work = transport.begin(self.rows.transfers(shard), op)
        if whole or plan.pattern == "serial":
            self.copy_own_rows()
        self._pending = list(range(len(plan.work)))
        self._enqueued = 0

    def copy_own_rows(self) -> None:
        """Copies the own rows into `full`, once."""
        if not self._has_own_rows:
            for own, full in zip(self._shard, self.rows.own, strict=True):
                full.copy_(own)
            self._has_own_rows = True

    def _has_arrived(self, index: int) -> bool:
        return all(self._p2p_work.is_completed(k) for k in self._plan.work[index].needs)

    @property
    def ready(self) -> bool:
        """Whether `next_rows` returns without waiting."""
        if self._on_device:
            return bool(self._pending) and not self._plan.work[self._pending[0]].needs
        return any(map(self._has_arrived, self._pending))

    @property
    def done(self) -> bool:
        """Whether `next_rows` has returned all rows."""
        return not self._pending

    def next_rows(self) -> tuple[Rows, Payload]:
        """Waits for rows; returns their range and data, joined with arrived rows next to them of the same owner."""
        position = 0
        if not self._on_device:
            position = next((place for place, index in enumerate(self._pending) if self._has_arrived(index)), 0)
        first = self._pending.pop(position)
        self._enqueue(first)
        if needs := self._plan.work[first].needs:
            self._p2p_work.wait(*needs)
        last = first if self._on_device else self._last_arrived(first, position)
        if self.rows.owners[first] == self._rank and not self._has_own_rows:
            return (self.rows.of_work[first][0], self.rows.of_work[last][1]), self._shard
        if first == last:
            return self.rows.of_work[first], self.rows.of_full[first]
        start, stop = self.rows.of_work[first][0], self.rows.of_work[last][1]
        return (start, stop), tuple(full[start:stop] for full in self.full)

    def _last_arrived(self, last: int, position: int) -> int:
        """Takes the work after `last` for which rows of the same owner have arrived; returns the last one."""
        owner = self.rows.owners[last]
        while (
            position < len(self._pending)
            and self._pending[position] == last + 1
            and self._has_arrived(last + 1)
            and self.rows.owners[last + 1] == owner
        ):
            last = self._pending.pop(position)
        return last

    def enqueue_next(self) -> None:
        """On CUDA, enqueues the messages of the next owner's rows. The caller has enqueued work that hides them."""
        place, owners = self._enqueued + 1, self.rows.owners
        while place < len(owners) - 1 and owners[place + 1] == owners[place]:
            place += 1
        self._enqueue(place)

    def _enqueue(self, work_done: int) -> None:
        if self._on_device and work_done > self._enqueued:
            self._enqueued = work_done
            self._p2p_work.mark_ready(work_done)

    def __iter__(self) -> Iterator[tuple[Rows, Payload]]:
        while self._pending:
            rows, data = self.next_rows()
            if rows[0] < rows[1]:
                yield rows, data

    def finish(self) -> None:
        """Waits until the own rows are sent too."""
        self._p2p_work.wait_all()


class WorkRows(Repeated):
    """The rows of the GEMMs of a plan, which are all rows, and its messages.

    Attributes:
        of_work: start and stop by work of the plan, without work that has no GEMM.
    """

    def __init__(self, plan: Plan, layout: ChunkLayout | PartLayout) -> None:
        bounds = [(work.chunks[0], work.chunks[-1]) for work in plan.work if work.chunks]
        self.of_work = [(layout.rows(first)[0], layout.rows(last)[1]) for first, last in bounds]

    @cached_property
    def _runs_and_sizes(self) -> tuple[list[tuple[int, int]], list[int]]:
        in_order = sorted(self.of_work)
        return in_order, [stop - start for start, stop in in_order]

    def split(self, tensor: torch.Tensor) -> dict[tuple[int, int], torch.Tensor]:
        """The rows of each GEMM in `tensor` `[num_rows, ...]`, by their start and stop. Only without autograd.

        For the host, one call of torch's dispatcher for all rows costs less than one for each.
        """
        runs, sizes = self._runs_and_sizes
        return dict(zip(runs, torch.unsafe_split_with_sizes(tensor, sizes), strict=True))


class _GatheredRows(WorkRows):
    """The rows of an all-gather; `of_full`, the gathered ones, and `owners` by work of the plan."""

    def __init__(self, plan: Plan, layout: ChunkLayout, full: Payload) -> None:
        super().__init__(plan, layout)
        self._plan, self._layout, self._full = plan, layout, full
        self.of_full = [tuple(each[start:stop] for each in full) for start, stop in self.of_work]
        self.owners = [work.chunks[0].owner for work in plan.work]

    @cached_property
    def own(self) -> Payload:
        """The own rows among the gathered ones."""
        return tuple(each[slice(*self._layout.shard(self._plan.rank))] for each in self._full)

    def build(self, own: torch.Tensor | None) -> list[Transfer]:
        return self.transfers(() if own is None else (own,))

    def transfers(self, shard: Payload) -> list[Transfer]:
        """The messages of the own rows `shard`."""
        plan, layout, into = self._plan, self._layout, self._full
        own_start = layout.shard(plan.rank)[0]
        transfers = []
        for message in plan.messages:
            start, stop = layout.rows(message.send)
            own = message.send.owner == plan.rank
            sent = tuple(
                rows[start - own_start : stop - own_start] if own else full[start:stop]
                for rows, full in zip(shard, into, strict=True)
            )
            start, stop = layout.rows(message.recv)
            received = tuple(full[start:stop] for full in into)
            lands = into[0][slice(*layout.rows(message.send))]
            transfers.append(Transfer(message, sent[0], received[0], sent[1:], received[1:], lands))
        return transfers
