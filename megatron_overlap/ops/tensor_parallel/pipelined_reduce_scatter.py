"""Reduce-scatter that overlaps with the GEMMs whose results it sums."""

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Exchange, Transfer
from megatron_overlap.ops.call import repeated
from megatron_overlap.ops.tensor_parallel.pipelined import GemmInto, WorkRows
from megatron_overlap.ops.tensor_parallel.tree_sum import tree_sum
from megatron_overlap.ops.wgrad import add_terms, add_wide
from megatron_overlap.schedules import Chunk, ChunkLayout, Plan
from megatron_overlap.schedules.plan import num_before_last_call


class _ScatteredRows(WorkRows):
    """The rows of a reduce-scatter: of `partial`, before they are sent, and of `terms`, the received ones.

    Attributes:
        of_partial: by work of the plan.
        terms: received rows by source, `[R - 1, own rows, F]`, unless of a ring: all, those before the last call of
            messages, and those of the last call.
        first_messages: those before the last call.
        received: by message.
    """

    def __init__(
        self, plan: Plan, layout: ChunkLayout, partial: torch.Tensor, terms: torch.Tensor, hidden: bool
    ) -> None:
        super().__init__(plan, layout)
        self.of_partial = [partial[start:stop] for start, stop in self.of_work]
        # The messages are in the order of sources and rows.
        by_source = bool(plan.messages) and plan.pattern != "ring"
        lengths = [layout.num_chunk_rows(message.recv) for message in plan.messages]
        of_this_rank = terms[: sum(lengths)]
        every = of_this_rank.unflatten(0, (plan.num_ranks - 1, -1)) if by_source else of_this_rank
        num_first = num_before_last_call(plan.messages) // plan.chunks_per_rank
        self.terms = every, every[:num_first], every[num_first:]
        self.first_messages = range(num_first * plan.chunks_per_rank)
        self.received = of_this_rank.split(lengths)
        num_sent = 0
        transfers: list[Transfer] = []
        for message, received in zip(plan.messages, self.received, strict=True):
            start, stop = layout.rows(message.send)
            # Where the receiver has the rows: it receives from this rank in the same order, of other owners before it.
            first = num_sent
            if by_source:
                before = len(transfers) // plan.chunks_per_rank
                first = before * layout.shard_rows(message.to) + layout.rows_in_shard(message.send)[0]
            num_sent += stop - start
            if hidden and plan.pattern != "ring":
                # The GEMM of the own rows hides the first call.
                message = replace(message, not_before=len(plan.work) - (message.call == plan.messages[0].call))
            lands = terms[first : first + stop - start]
            transfers.append(Transfer(message, partial[start:stop], received, lands=lands))
        self._transfers = transfers

    def build(self, own: torch.Tensor | None) -> list[Transfer]:
        return self._transfers


class PipelinedReduceScatter:
    """A reduce-scatter of GEMM results: rows of other owners are computed and sent first, own rows last, to `out`.

    Args:
        transport: carries partial sums.
        plan, layout: a reduce-scatter plan and the rows of its chunks.
        out: own rows of the result, written here.
        op: name in error messages.
        work_follows: the caller enqueues further work before `finish`. On CUDA the messages are enqueued after it, and
            the GEMMs here hide the messages of another operation.
        add_early: the messages take longer than the GEMMs. On a device all terms but those of the last call of messages
            are added before it arrives: a second kernel, but less time after the last message.
        tree: add in the fixed tree, see `tree_sum`; not for a ring.

    Attributes:
        rows: of the GEMMs of the plan.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        layout: ChunkLayout,
        out: torch.Tensor,
        op: str,
        *,
        work_follows: bool = False,
        add_early: bool = False,
        tree: bool = False,
    ) -> None:
        self._plan, self._layout, self.out, self._add_early, self._tree = plan, layout, out, add_early, tree
        pool = self._buffer_pool = transport.buffer_pool
        self._on_device = transport.on_device
        features, hidden, sent = out.shape[1], work_follows and transport.on_device, bool(plan.messages)
        partial = pool.take("partial", (layout.num_rows * sent, features), out)
        # The first shard is the longest.
        terms = pool.take(
            "received", ((plan.num_ranks - 1) * layout.shard_rows(0) * sent, features), out, symmetric=True
        )
        of = plan, layout, partial, terms, hidden
        self.rows = repeated(transport, of, lambda: _ScatteredRows(*of))
        self._partial, self._received = partial, self.rows.received
        self._p2p_work = transport.begin(Exchange(self.rows), op)
        self._done = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the partial sums of other owners."""
        return (self._layout.num_rows - self.out.shape[0]) * self.out.shape[1] * self.out.element_size()

    @property
    def ready(self) -> bool:
        """Whether `finish` returns without waiting for a received message."""
        return all(map(self._p2p_work.is_completed, range(len(self._plan.messages))))

    def compute(self, gemm: GemmInto, meanwhile: Callable[[], bool] | None = None) -> None:
        """Runs the GEMMs, own rows last.

        A ring adds received partial sums to the chunks that it forwards. On the CPU it computes further rows until
        those sums arrive.

        Args:
            gemm: see `GemmInto`.
            meanwhile: a piece of other work, called while a ring waits and only own rows are left, and on CUDA after
                each GEMM. It returns False when there is no work left.
        """
        plan = self._plan
        serial = plan.pattern == "serial" and plan.num_ranks > 1
        for index, work in enumerate(plan.work):
            if not work.chunks:
                break
            own = work.chunks[0].owner == plan.rank and not serial
            if own:
                self._forward_until(index, meanwhile)
            start, stop = self.rows.of_work[index]
            if start < stop:
                gemm(start, stop, self.out if own else self.rows.of_partial[index])
            if meanwhile is not None and self._on_device:
                meanwhile()
            if not own:
                self._forward_until(index + 1, None, wait=self._on_device)
        if serial:
            self.out.copy_(self._partial[slice(*self._layout.shard(plan.rank))])
        # All but the addition of `finish`.
        self._p2p_work.mark_ready(len(plan.work) - 1)

    def _forward_until(self, stop: int, meanwhile: Callable[[], bool] | None, *, wait: bool = True) -> None:
        """Adds received partial sums to the work items before `stop`, in order, and marks their sends ready."""
        while self._done < stop:
            adds = self._plan.work[self._done].adds
            if adds and not all(map(self._p2p_work.is_completed, adds)):
                if meanwhile is not None and meanwhile():
                    continue
                if not wait:
                    return
            for k in adds:
                self._p2p_work.wait(k)
                self._partial[slice(*self._layout.rows(self._plan.messages[k].recv))].add_(self._received[k])
            self._done += 1
            self._p2p_work.mark_ready(self._done)

    def finish(self) -> torch.Tensor:
        """Adds the received partial sums to the own rows, in the order of the plan; returns `out`.

        Waits for all messages. More than two terms are summed in fp32 and rounded once. On a device the received terms
        are added first, then the own rows.
        """
        self._p2p_work.mark_ready(len(self._plan.work))
        if self._tree:
            return self._finish_tree()
        if self._plan.messages and self._plan.pattern != "ring" and self._on_device:
            return self._add_on_device()
        messages, out = self._plan.messages, self.out
        # Each part is summed in the order of the plan. Parts are summed in the order of arrival.
        waiting: dict[int, list[int]] = {}
        for k in self._plan.work[-1].adds:
            waiting.setdefault(messages[k].recv.part, []).append(k)
        total = out
        if out.element_size() < 4 and any(len(terms) > 1 for terms in waiting.values()):
            total = self._buffer_pool.take("sum", out.shape, out, dtype=torch.float32)
            total.copy_(out)
        while waiting:
            part = next(
                (part for part, terms in waiting.items() if self._p2p_work.is_completed(terms[0])), next(iter(waiting))
            )
            k = waiting[part].pop(0)
            self._p2p_work.wait(k)
            start, stop = self._layout.rows_in_shard(messages[k].recv)
            add_wide(total[start:stop], self._received[k], self._buffer_pool)
            if not waiting[part]:
                del waiting[part]
                if total is not out:
                    out[start:stop].copy_(total[start:stop])
        self._p2p_work.wait_all()
        return out

    def _add_on_device(self) -> torch.Tensor:
        """Adds received terms and own rows in one kernel; with `add_early` first all but the terms of the last call."""
        own = out = self.out
        terms, first_terms, last_term = self.rows.terms
        if self._add_early and self.rows.first_messages:
            self._p2p_work.wait(*self.rows.first_messages)
            own = self._buffer_pool.take("sum", out.shape, out, dtype=torch.float32)
            add_terms(first_terms, out, own)
            terms = last_term
        self._p2p_work.wait_all()
        return add_terms(terms, own, out)

    def _finish_tree(self) -> torch.Tensor:
        plan = self._plan
        self._p2p_work.wait_all()
        for part in range(plan.chunks_per_rank):
            own = self.out[slice(*self._layout.rows_in_shard(Chunk(plan.rank, part)))]
            terms = {m.source: self._received[k] for k, m in enumerate(plan.messages) if m.recv.part == part}
            own.copy_(tree_sum([terms.get(rank, own) for rank in range(plan.num_ranks)]))
        return self.out
