"""All-reduce that overlaps with the GEMMs whose results it sums."""

from collections.abc import Sequence

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Exchange, Transfer
from megatron_overlap.ops.call import repeated
from megatron_overlap.ops.tensor_parallel.pipelined import GemmInto, WorkRows
from megatron_overlap.ops.tensor_parallel.tree_sum import tree_sum
from megatron_overlap.ops.wgrad import Piece, add_terms, add_wide
from megatron_overlap.schedules import Chunk, PartLayout, Plan
from megatron_overlap.schedules.plan import num_before_last_call


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
                num_first = num_before_last_call(partial_sums[len(self.received) :][: plan.num_ranks - 1])
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
        """Computes the remaining sums; returns `out` when all its rows are sums and all messages are complete."""
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
