"""Reduce-scatters and all-reduces that overlap with the GEMMs whose results they sum.

Sums in a fixed binary tree have the same bits on 1, 2 and 4 ranks, also over a sharded K: K is cut into `NUM_BLOCKS`
blocks. The products of the blocks are the leaves, in the order of K. A rank adds those of its blocks; the tree
continues with the sums of the ranks. Each sum is rounded to the dtype of the GEMM.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Exchange, Transfer
from megatron_overlap.ops.call import repeated
from megatron_overlap.ops.tensor_parallel.pipelined import GemmInto, WorkRows
from megatron_overlap.ops.wgrad import Piece, add_terms, add_wide
from megatron_overlap.schedules import Chunk, ChunkLayout, Message, PartLayout, Plan


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
        num_first = _num_before_last_call(plan.messages) // plan.chunks_per_rank
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


def _num_before_last_call(messages: Sequence[Message]) -> int:
    """How many messages precede those of the last call."""
    return sum(message.call != messages[-1].call for message in messages)


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
        """Adds the received partial sums to the own rows, in the order of the plan. Waits for all messages.

        More than two terms are summed in fp32 and rounded once. On a device the received terms are added first,
        then the own rows.

        Returns:
            `out`.
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


NUM_BLOCKS = 4
"""Leaves of the tree, and the most ranks."""
MIN_ROWS = 16
"""Of a GEMM. With 1 to 3 rows in fp32 the bits of a row depend on the number of rows, measured on one CPU."""


def unsupported_reason(num_ranks: int, depth: int, num_rows: int) -> str | None:
    """The reason that a GEMM with `depth` columns of K on each of `num_ranks` ranks has no tree.

    `num_rows`: rows of the smallest GEMM of the operation.
    """
    if NUM_BLOCKS % num_ranks:
        return f"tp_invariant needs 1, 2 or {NUM_BLOCKS} tensor-parallel ranks"
    if depth * num_ranks % NUM_BLOCKS:
        return f"tp_invariant needs a divided dimension of the weight that is a multiple of {NUM_BLOCKS}"
    if num_rows < MIN_ROWS:
        return f"tp_invariant needs GEMMs of {MIN_ROWS} rows or more"
    return None


def tree_gemm_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, num_ranks: int) -> None:
    """`out = a @ b`, where `a` and `b` are the share of one of `num_ranks` ranks."""
    width = a.shape[1] * num_ranks // NUM_BLOCKS
    products = [torch.mm(x, y) for x, y in zip(a.split(width, dim=1), b.split(width), strict=True)]
    out.copy_(tree_sum(products))


def tree_sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of a power of two of terms: neighbours first, then neighbouring sums."""
    while len(terms) > 1:
        terms = [x + y for x, y in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


class _SummedRows(WorkRows):
    """The rows of an all-reduce: `terms`, received partial sums, and `summed`, the own sums, from which peers copy.

    Attributes:
        received: partial sums by message.
        terms_of: those of each own chunk by their first message, where they are contiguous: all `[R - 1, rows, F]`,
            those before the last call of messages, and those of the last call.
        num_gemms: work of the plan up to the last GEMM.
        has_gemm_of_each_chunk: no GEMM computes several chunks.
        gathers: the messages that receive sums.
        sums: start and stop of each own chunk, and its rows of `summed`, by part; empty without `summed`.
        num_sent: rows that this rank sends.
    """

    def __init__(self, plan: Plan, layout: PartLayout, terms: torch.Tensor, summed: torch.Tensor | None) -> None:
        super().__init__(plan, layout)
        self._plan, self._layout = plan, layout
        self.received: dict[int, torch.Tensor] = {}
        self.terms_of: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.num_gemms = 1 + max(index for index, work in enumerate(plan.work) if work.chunks)
        self.has_gemm_of_each_chunk = all(len(work.chunks) <= 1 for work in plan.work)
        self._lands: dict[int, torch.Tensor] = {}
        first, partial_sums = 0, [each for each in plan.messages if each.recv.owner == plan.rank]
        for k, message in enumerate(plan.messages):
            if message.recv.owner != plan.rank:
                continue
            num_rows, longest = layout.num_chunk_rows(message.recv), layout.longest[message.recv.part]
            if len(self.received) % (plan.num_ranks - 1) == 0 and num_rows == longest:
                of_chunk = terms[first : first + (plan.num_ranks - 1) * longest]
                of_chunk = of_chunk.unflatten(0, (plan.num_ranks - 1, longest))
                num_first = _num_before_last_call(partial_sums[len(self.received) :][: plan.num_ranks - 1])
                self.terms_of[k] = of_chunk, of_chunk[:num_first], of_chunk[num_first:]
            # On all ranks it begins at the same row.
            self.received[k] = terms[first : first + num_rows]
            self._lands[k] = terms[first : first + layout.num_chunk_rows(message.send)]
            first += longest
        self.gathers = [k for k in range(len(plan.messages)) if k not in self.received]
        # Each part begins at the same row on all ranks.
        self._sums_of_parts = parts = () if summed is None else summed.split(layout.longest)
        own = [layout.rows(Chunk(plan.rank, part)) for part in range(len(parts))]
        self.sums = [(rows, sums[: rows[1] - rows[0]]) for rows, sums in zip(own, parts, strict=True)]
        self.num_sent = sum(layout.num_chunk_rows(message.send) for message in plan.messages)

    def build(self, own: torch.Tensor | None) -> list[Transfer]:
        """The messages of a result."""
        assert own is not None
        transfers = []
        for k, message in enumerate(self._plan.messages):
            send, recv = (own[slice(*self._layout.rows(chunk))] for chunk in (message.send, message.recv))
            if k in self.received:
                transfers.append(Transfer(message, send, self.received[k], lands=self._lands[k]))
            elif self.sums:
                reads = self._sums_of_parts[message.recv.part][: recv.shape[0]]
                transfers.append(Transfer(message, self.sums[message.send.part][1], recv, reads=reads))
            else:
                transfers.append(Transfer(message, send, recv))
        return transfers


class PipelinedAllReduce:
    """An all-reduce of GEMM results. The owner of a chunk sums it, so all ranks get the same bits.

    The computing thread adds received chunks between its GEMMs. On the CPU it adds chunks that have arrived and does
    not wait before `finish`. On a device a query for arrival would synchronise, so it adds at the positions in the
    plan, each chunk in one kernel.

    Args:
        transport: carries partial sums and sums.
        plan, layout: an all-reduce plan and the rows of its chunks.
        out: all rows of the result `[num_rows, F]`, contiguous, written here. It also holds the own partial sums
            until they are sent: a sum arrives at the rows of its partial sum, and the owner sends it only after it
            has received that partial sum. Of a transport that `prepares` peers copy the sums from a symmetric buffer.
        op: name in error messages.
        add_in_place: wait and add at the positions in the plan; None chooses by the device.
        add_early: as of `PipelinedReduceScatter`.
        tree: add in the fixed tree, see `tree_sum`.

    Attributes:
        rows: of the GEMMs of the plan.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        layout: PartLayout,
        out: torch.Tensor,
        op: str,
        *,
        add_in_place: bool | None = None,
        add_early: bool = False,
        tree: bool = False,
    ) -> None:
        self._plan, self._layout, self._out, self._add_early, self._tree = plan, layout, out, add_early, tree
        pool = self._buffer_pool = transport.buffer_pool
        self._on_device = transport.on_device
        self._in_place = self._on_device if add_in_place is None else add_in_place
        longest = sum(layout.longest)
        terms = pool.take("received", ((plan.num_ranks - 1) * longest, out.shape[1]), out, symmetric=True)
        summed = pool.take("summed", (longest, out.shape[1]), out, symmetric=True) if transport.prepares else None
        of = plan, layout, terms, summed
        self.rows = repeated(transport, of, lambda: _SummedRows(*of))
        self._rows_of_out = self.rows.split(out)
        self._done = 0
        self._finished = False
        cut = self._rows_of_out if self.rows.has_gemm_of_each_chunk else None
        self._p2p_work = transport.begin(Exchange(self.rows, out, cut=cut), op)

    def compute(self, gemm: GemmInto) -> None:
        """Runs the GEMMs."""
        rows = iter(self.rows.of_work)
        for index, work in enumerate(self._plan.work[: self.rows.num_gemms]):
            if work.chunks:
                start, stop = next(rows)
                if start < stop:
                    gemm(start, stop, self._rows_of_out[start, stop])
            self._advance(index + 1, wait=self._in_place)

    def run_beside(self, pieces: Sequence[Piece]) -> None:
        """Runs other work after `compute`, in pieces. Between two pieces it adds and sends the received chunks.

        The `serial` pattern completes the sums first.
        """
        if self._plan.pattern == "serial":
            self.finish()
        num_work = len(self._plan.work)
        for number, piece in enumerate(pieces):
            piece()
            if not self._in_place:
                self._advance(num_work, wait=False)
            else:
                # Spread evenly; all before the last piece, which hides the messages of the last sums.
                share = min(1.0, (number + 1) / max(1, len(pieces) - 1))
                num_gemms = self.rows.num_gemms
                self._advance(num_gemms + round(share * (num_work - num_gemms)), wait=True)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends."""
        return self.rows.num_sent * self._out.shape[1] * self._out.element_size()

    def finish(self) -> torch.Tensor:
        """Computes the remaining sums. Waits until all rows of `out` are sums and all messages are complete.

        Returns:
            `out`.
        """
        if not self._finished:
            self._advance(len(self._plan.work), wait=True, exposed=True)
            for own, sums in self.rows.sums:
                self._rows(own).copy_(sums)
            self._p2p_work.wait(*self.rows.gathers)
            self._p2p_work.wait_all()
            self._finished = True
        return self._out

    def _rows(self, run: tuple[int, int]) -> torch.Tensor:
        """Rows of the result."""
        found = self._rows_of_out.get(run)
        return self._out[slice(*run)] if found is None else found

    def _advance(self, stop: int, *, wait: bool, exposed: bool = False) -> None:
        """Does the additions of the work items before `stop`, in order, and marks their sends ready."""
        while self._done < stop:
            adds = self._plan.work[self._done].adds
            if not wait and not all(self._p2p_work.is_completed(k) for k in adds):
                return
            if adds:
                self._add(adds, early=exposed and self._add_early)
            self._done += 1
            self._p2p_work.mark_ready(self._done)

    def _add(self, adds: tuple[int, ...], *, early: bool) -> None:
        """Adds the received partial sums of one own chunk; more than two terms in fp32, rounded once."""
        chunk = self._plan.messages[adds[0]].recv
        own, received = self._rows(self._layout.rows(chunk)), self.rows.received
        out = self.rows.sums[chunk.part][1] if self.rows.sums else own
        terms_of = self.rows.terms_of.get(adds[0])
        if self._on_device and terms_of is not None and not self._tree:
            every, first_terms, last_term = terms_of
            total = own
            if early and len(first_terms):
                self._p2p_work.wait(*adds[: len(first_terms)])
                total = self._buffer_pool.take("sum", own.shape, own, dtype=torch.float32)
                add_terms(first_terms, own, total)
                every = last_term
            self._p2p_work.wait(*adds)
            add_terms(every, total, out)
            return
        if self._on_device or self._tree:
            self._p2p_work.wait(*adds)
        if self._tree:
            terms = {self._plan.messages[k].source: received[k] for k in adds}
            out.copy_(tree_sum([terms.get(rank, own) for rank in range(self._plan.num_ranks)]))
            return
        total = own
        if len(adds) > 1 and own.element_size() < 4:
            total = self._buffer_pool.take("sum", own.shape, own, dtype=torch.float32)
            total.copy_(own)
        for k in adds:
            self._p2p_work.wait(k)
            add_wide(total, received[k], self._buffer_pool)
        if total is not out:
            out.copy_(total)
