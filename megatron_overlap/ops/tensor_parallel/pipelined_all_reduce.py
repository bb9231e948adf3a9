"""An all-reduce that overlaps with the GEMMs whose results it sums, and with further work."""

from collections.abc import Sequence

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.ops.tensor_parallel.pipelined import GemmInto
from megatron_overlap.ops.tensor_parallel.tree import tree_sum
from megatron_overlap.ops.wgrad import Piece, add_wide, like_fp32
from megatron_overlap.schedules import Chunk, PartLayout, Plan


class PipelinedAllReduce:
    """An all-reduce of GEMM results. The owner of a chunk sums it, so all ranks get the same bits.

    The computing thread adds received chunks between its GEMMs. On the CPU it adds chunks that have arrived and does
    not wait before `finish`. On CUDA a query for arrival would synchronise, so it adds at the positions in the plan.

    Args:
        transport: carries partial sums and sums.
        plan: an all-reduce plan.
        out: all rows of the result `[num_rows, F]`, contiguous, written here. It also holds the own partial sums
            until they are sent: a sum arrives at the rows of its partial sum, and the owner sends it only after it
            has received that partial sum.
        op: name in error messages.
        add_in_place: wait and add at the positions in the plan; None chooses by the device.
        tree: add in the order of `ops.tensor_parallel.tree`.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        out: torch.Tensor,
        op: str,
        *,
        add_in_place: bool | None = None,
        tree: bool = False,
    ) -> None:
        self._plan, self._out, self._tree = plan, out, tree
        self._buffer_pool = transport.buffer_pool
        self._layout = PartLayout(out.shape[0], plan.num_ranks, plan.chunks_per_rank)
        self._in_place = out.device.type != "cpu" if add_in_place is None else add_in_place
        self._gather_messages = [k for k, message in enumerate(plan.messages) if message.recv.owner != plan.rank]
        partial = [k for k, message in enumerate(plan.messages) if message.recv.owner == plan.rank]
        sizes = [self._layout.num_chunk_rows(plan.messages[k].recv) for k in partial]
        received = self._buffer_pool.take("received", (sum(sizes), out.shape[1]), out).split(sizes)
        self._received = dict(zip(partial, received, strict=True))
        self._num_gemms = 1 + max(index for index, work in enumerate(plan.work) if work.chunks)
        self._done = 0
        self._finished = False
        transfers = []
        for k, message in enumerate(plan.messages):
            recv = self._received[k] if k in self._received else self._rows(message.recv)
            transfers.append(Transfer(message, self._rows(message.send), recv))
        self._p2p_work = transport.begin(transfers, op)

    def _rows(self, chunk: Chunk) -> torch.Tensor:
        return self._out[slice(*self._layout.rows(chunk))]

    def compute(self, gemm: GemmInto) -> None:
        """Runs the GEMMs."""
        for index, work in enumerate(self._plan.work[: self._num_gemms]):
            if work.chunks:
                start, stop = self._layout.rows(work.chunks[0])[0], self._layout.rows(work.chunks[-1])[1]
                if start < stop:
                    gemm(start, stop, self._out[start:stop])
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
                self._advance(self._num_gemms + round(share * (num_work - self._num_gemms)), wait=True)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends."""
        num_rows = sum(self._layout.num_chunk_rows(message.send) for message in self._plan.messages)
        return num_rows * self._out.shape[1] * self._out.element_size()

    def finish(self) -> torch.Tensor:
        """Computes the remaining sums. Waits until all rows of `out` are sums and all messages are complete.

        Returns:
            `out`.
        """
        if not self._finished:
            self._advance(len(self._plan.work), wait=True)
            for k in self._gather_messages:
                self._p2p_work.wait(k)
            self._p2p_work.wait_all()
            self._finished = True
        return self._out

    def _advance(self, stop: int, *, wait: bool) -> None:
        """Does the additions of the work items before `stop`, in order, and marks their sends ready."""
        while self._done < stop:
            adds = self._plan.work[self._done].adds
            if not wait and not all(self._p2p_work.is_completed(k) for k in adds):
                return
            if adds:
                self._add(adds)
            self._done += 1
            self._p2p_work.mark_ready(self._done)

    def _add(self, adds: tuple[int, ...]) -> None:
        """Adds the received partial sums of one own chunk; more than two terms in fp32, rounded once."""
        own = self._rows(self._plan.messages[adds[0]].recv)
        if self._tree:
            for k in adds:
                self._p2p_work.wait(k)
            terms = {self._plan.messages[k].source: self._received[k] for k in adds}
            own.copy_(tree_sum([terms.get(rank, own) for rank in range(self._plan.num_ranks)]))
            return
        total = own
        if len(adds) > 1 and own.element_size() < 4:
            total = self._buffer_pool.take("sum", own.shape, like_fp32(own))
            total.copy_(own)
        for k in adds:
            self._p2p_work.wait(k)
            add_wide(total, self._received[k], self._buffer_pool)
        if total is not own:
            own.copy_(total)
