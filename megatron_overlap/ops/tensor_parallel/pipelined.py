"""Where messages and GEMMs meet: arriving rows, departing partial sums, and a weight gradient that accumulates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megatron_overlap.comm import BufferPool, Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.schedules import ChunkLayout, Plan

try:
    # apex's extension, where it was built: a GEMM that adds a narrow product to an fp32 total.
    from fused_weight_gradient_mlp_cuda import wgrad_gemm_accum_fp32 as _fused_wgrad  # type: ignore[import-not-found]
except ImportError:
    _fused_wgrad = None

Rows = tuple[int, int]
GemmInto = Callable[[int, int, torch.Tensor], None]

_WGRAD_BLOCK = 2048
"""Output rows of one block of a narrow weight gradient."""


class PipelinedAllGather:
    """An all-gather on its way: rows are handed out as soon as they are there, own rows first.

    The plan's order is that of the sends; rows of several peers that share a link may land in another one.

    Args:
        transport: carries the shards.
        plan: an all-gather plan.
        shard: own rows `[shard rows, K]`, contiguous, unchanged until `finish`.
        layout: rows of every chunk.
        into: the gathered rows `[num_rows, K]`; own rows are copied into it only if `whole` is asked for.
        op: name in error messages.
        whole: the consumer reads own and others' rows as one run.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        shard: torch.Tensor,
        layout: ChunkLayout,
        into: torch.Tensor,
        op: str,
        *,
        whole: bool = False,
    ) -> None:
        self._plan, self._layout = plan, layout
        self._rank = plan.rank
        self.full = into
        own_start, own_stop = layout.shard(plan.rank)
        transfers = []
        for message in plan.messages:
            start, stop = layout.rows(message.send)
            own = message.send.owner == plan.rank
            sent = shard[start - own_start : stop - own_start] if own else into[start:stop]
            start, stop = layout.rows(message.recv)
            transfers.append(Transfer(message, sent, into[start:stop]))
        self._p2p_work = transport.begin(transfers, op)
        self._whole = whole or plan.pattern == "serial"
        self._shard = shard
        if self._whole:
            into[own_start:own_stop].copy_(shard)
        self._open = list(range(len(plan.work)))

    def _here(self, index: int) -> bool:
        return all(self._p2p_work.is_completed(k) for k in self._plan.work[index].needs)

    @property
    def ready(self) -> bool:
        """Whether `next_rows` would hand out rows without waiting."""
        return any(map(self._here, self._open))

    @property
    def done(self) -> bool:
        """Whether all rows have been handed out."""
        return not self._open

    def next_rows(self) -> tuple[Rows, torch.Tensor]:
        """Waits for the next rows: their bounds and their data, with what has landed beside them in the same slice."""
        work = self._plan.work
        place = next((place for place, index in enumerate(self._open) if self._here(index)), 0)
        first = last = self._open.pop(place)
        for k in work[first].needs:
            self._p2p_work.wait(k)
        owner = work[first].chunks[0].owner
        while place < len(self._open) and self._open[place] == last + 1 and self._here(last + 1):
            if work[last + 1].chunks[0].owner != owner:
                break
            last = self._open.pop(place)
        start = self._layout.rows(work[first].chunks[0])[0]
        stop = self._layout.rows(work[last].chunks[-1])[1]
        if not self._whole and owner == self._rank:
            return (start, stop), self._shard
        return (start, stop), self.full[start:stop]

    def __iter__(self) -> Iterator[tuple[Rows, torch.Tensor]]:
        while not self.done:
            rows, data = self.next_rows()
            if rows[0] < rows[1]:
                yield rows, data

    def finish(self) -> None:
        """Waits until the own rows have left too."""
        self._p2p_work.wait_all()


class PipelinedReduceScatter:
    """A reduce-scatter of GEMM results on its way: others' rows are computed and sent first, own rows last.

    Args:
        transport: carries the partial sums.
        plan: a reduce-scatter plan.
        layout: rows of every chunk.
        out: own rows of the sum `[shard rows, F]`, written here.
        op: name in error messages.
    """

    def __init__(self, transport: Transport, plan: Plan, layout: ChunkLayout, out: torch.Tensor, op: str) -> None:
        self._plan, self._layout, self._out = plan, layout, out
        self._buffer_pool = transport.buffer_pool
        self._own = layout.shard(plan.rank)
        features = out.shape[1]
        self._partial = self._buffer_pool.take("partial", (layout.num_rows if plan.messages else 0, features), out)
        sizes = [layout.num_chunk_rows(message.recv) for message in plan.messages]
        self._landing = self._buffer_pool.take("landing", (sum(sizes), features), out).split(sizes)
        transfers = []
        for message, landing in zip(plan.messages, self._landing, strict=True):
            start, stop = layout.rows(message.send)
            transfers.append(Transfer(message, self._partial[start:stop], landing))
        self._p2p_work = transport.begin(transfers, op)
        self._done = 0

    def compute(self, gemm: GemmInto, meanwhile: Callable[[], bool] | None = None) -> None:
        """Runs the GEMMs: `gemm(start, stop, out)` writes rows `[start, stop)` of the product. Own rows come last.

        A ring adds what has come to what it passes on. On the CPU it computes further rows while that is on its way,
        and calls `meanwhile` when only own rows are left: a piece of other work, which says whether there was any.
        """
        plan, layout = self._plan, self._layout
        serial = plan.pattern == "serial" and plan.num_ranks > 1
        for index, work in enumerate(plan.work):
            if not work.chunks:
                break
            own = work.chunks[0].owner == plan.rank and not serial
            if own:
                self._pass_on(index, meanwhile)
            start, stop = layout.rows(work.chunks[0])[0], layout.rows(work.chunks[-1])[1]
            if start < stop:
                gemm(start, stop, self._out if own else self._partial[start:stop])
            if not own:
                self._pass_on(index + 1, None, wait=self._out.is_cuda)
        if serial:
            self._out.copy_(self._partial[slice(*self._own)])
        self._p2p_work.mark_ready(len(plan.work))

    def _pass_on(self, stop: int, meanwhile: Callable[[], bool] | None, *, wait: bool = True) -> None:
        """Adds what has come to the pieces of work before `stop`, in order, and lets go what waited for them."""
        while self._done < stop:
            adds = self._plan.work[self._done].adds
            if not all(map(self._p2p_work.is_completed, adds)):
                if meanwhile is not None and meanwhile():
                    continue
                if not wait:
                    return
            for k in adds:
                self._p2p_work.wait(k)
                self._partial[slice(*self._layout.rows(self._plan.messages[k].recv))].add_(self._landing[k])
            self._done += 1
            self._p2p_work.mark_ready(self._done)

    def finish(self) -> None:
        """Adds what others computed for the own rows, in the order of the plan, and waits until all has left.

        With more than two terms the sum is made in fp32 and rounded once.
        """
        messages, out = self._plan.messages, self._out
        # Each part is summed in the order of the plan; parts are taken as they land.
        waiting: dict[int, list[int]] = {}
        for k in self._plan.work[-1].adds:
            waiting.setdefault(messages[k].recv.part, []).append(k)
        total = out
        if out.element_size() < 4 and any(len(terms) > 1 for terms in waiting.values()):
            total = self._buffer_pool.take("sum", out.shape, like_fp32(out))
            total.copy_(out)
        while waiting:
            part = next(
                (part for part, terms in waiting.items() if self._p2p_work.is_completed(terms[0])), next(iter(waiting))
            )
            k = waiting[part].pop(0)
            self._p2p_work.wait(k)
            start, stop = self._layout.rows_in_shard(messages[k].recv)
            add_wide(total[start:stop], self._landing[k], self._buffer_pool)
            if not waiting[part]:
                del waiting[part]
                if total is not out:
                    out[start:stop].copy_(total[start:stop])
        self._p2p_work.wait_all()


class WeightGradient:
    """`dw = dy.T @ x`, accumulated over rows as they come.

    Args:
        weight: the parameter `[F, K]`; only its shape, dtype and device are used.
        main_grad: where the gradient is added, as Megatron's gradient accumulation fusion does; None makes a gradient
            of its own.
        buffer_pool: where narrow products wait to be added.
    """

    def __init__(self, weight: torch.Tensor, main_grad: torch.Tensor | None, buffer_pool: BufferPool) -> None:
        self._main_grad, self._buffer_pool = main_grad, buffer_pool
        self._own = torch.empty_like(weight, memory_format=torch.contiguous_format) if main_grad is None else None
        self._sum: torch.Tensor | None = None
        self._empty = True

    def add(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the product of some rows: `dy` is `[rows, F]`, `x` is `[rows, K]`."""
        if self._main_grad is not None:
            add_product(self._main_grad, dy, x, self._buffer_pool)
        elif self._own is not None:
            if self._empty:
                torch.mm(dy.t(), x, out=self._own)
            elif self._own.element_size() < 4:
                # Rounding the running sum after every piece would cost a bit of precision each time.
                if self._sum is None:
                    self._sum = self._buffer_pool.take("wgrad_sum", self._own.shape, like_fp32(self._own))
                    self._sum.copy_(self._own)
                add_product(self._sum, dy, x, self._buffer_pool)
            else:
                self._own.addmm_(dy.t(), x)
        self._empty = False

    def result(self) -> torch.Tensor | None:
        """The gradient; None where it went into `main_grad`."""
        if self._own is not None:
            if self._empty:
                self._own.zero_()
            elif self._sum is not None:
                self._own.copy_(self._sum)
        return self._own


def add_product(total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, buffer_pool: BufferPool) -> None:
    """`total += dy.T @ x`, where the product may be narrower than `total`."""
    if total.dtype == x.dtype:
        total.addmm_(dy.t(), x)
        return
    if total.is_cuda and _fused_wgrad is not None and total.dtype == torch.float32:
        _fused_wgrad(x, dy.contiguous(), total)
        return
    # In blocks of output rows: the narrow product never needs a buffer of the weight's size.
    for start in range(0, total.shape[0], _WGRAD_BLOCK):
        rows = slice(start, start + _WGRAD_BLOCK)
        product = buffer_pool.take("wgrad_block", (total[rows].shape[0], total.shape[1]), x)
        torch.mm(dy[:, rows].t(), x, out=product)
        add_wide(total[rows], product, buffer_pool)


class Spans:
    """Runs of rows that wait to be used, joined where they touch."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []

    def add(self, rows: tuple[int, int]) -> None:
        if rows[0] < rows[1]:
            self._runs.append(rows)

    def into(self, wgrad: WeightGradient, dy: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the weight gradient of the rows and forgets them."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(self._runs):
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        self._runs.clear()
        for start, stop in joined:
            wgrad.add(dy[start:stop], x[start:stop])


def add_wide(total: torch.Tensor, term: torch.Tensor, buffer_pool: BufferPool) -> None:
    """`total += term`, where `term` may be narrower than `total`."""
    if term.dtype != total.dtype and not term.is_cuda:
        # torch adds mixed dtypes on the CPU element by element, ten times slower than widening first.
        wide = buffer_pool.take("widened", term.shape, total)
        wide.copy_(term)
        term = wide
    total.add_(term)


def like_fp32(like: torch.Tensor) -> torch.Tensor:
    """Names fp32 on the device of `like` to a buffer_pool."""
    return torch.empty(0, dtype=torch.float32, device=like.device)
