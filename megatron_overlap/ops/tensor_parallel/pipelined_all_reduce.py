"""Where an all-reduce and GEMMs meet: partial results leave as they are made, sums come back beside later GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.ops.tensor_parallel.pipelined import GemmInto, add_wide, like_fp32
from megatron_overlap.schedules import Chunk, PartLayout, Plan


class PipelinedAllReduce:
    """An all-reduce of GEMM results on its way. Every owner adds its chunks once; all ranks end with the same bits.

    The computing thread does the additions between its GEMMs. On the CPU it adds what has landed and never stands
    still for what has not, before `finish`; where that cannot be asked (CUDA) it adds at the places of the plan.

    Args:
        transport: carries partial sums and sums.
        plan: an all-reduce plan.
        out: all rows of the result `[num_rows, F]`, contiguous, written here. It also holds the own partial sums
            until they have left: a sum arrives where its partial was, and its owner cannot send it before it has
            received that partial.
        op: name in error messages.
        add_in_place: add at the places of the plan; None chooses by the device.
    """

    def __init__(
        self, transport: Transport, plan: Plan, out: torch.Tensor, op: str, *, add_in_place: bool | None = None
    ) -> None:
        self._plan, self._out = plan, out
        self._buffer_pool = transport.buffer_pool
        self._layout = PartLayout(out.shape[0], plan.num_ranks, plan.chunks_per_rank)
        self._in_place = out.device.type != "cpu" if add_in_place is None else add_in_place
        self._gathers = [k for k, message in enumerate(plan.messages) if message.recv.owner != plan.rank]
        partial = [k for k, message in enumerate(plan.messages) if message.recv.owner == plan.rank]
        sizes = [self._layout.num_chunk_rows(plan.messages[k].recv) for k in partial]
        landing = self._buffer_pool.take("landing", (sum(sizes), out.shape[1]), out).split(sizes)
        self._landing = dict(zip(partial, landing, strict=True))
        self._num_gemms = 1 + max(index for index, work in enumerate(plan.work) if work.chunks)
        self._done = 0
        transfers = []
        for k, message in enumerate(plan.messages):
            lands = self._landing[k] if k in self._landing else self._rows(message.recv)
            transfers.append(Transfer(message, self._rows(message.send), lands))
        self._p2p_work = transport.begin(transfers, op)

    def _rows(self, chunk: Chunk) -> torch.Tensor:
        return self._out[slice(*self._layout.rows(chunk))]

    def compute(self, gemm: GemmInto) -> None:
        """Runs the GEMMs: `gemm(start, stop, out)` writes rows `[start, stop)` of the product."""
        for index, work in enumerate(self._plan.work[: self._num_gemms]):
            if work.chunks:
                start, stop = self._layout.rows(work.chunks[0])[0], self._layout.rows(work.chunks[-1])[1]
                if start < stop:
                    gemm(start, stop, self._out[start:stop])
            self._advance(index + 1, wait=self._in_place)

    def beside(self, pieces: Sequence[Callable[[], None]]) -> None:
        """Runs other work after `compute`, piece by piece; between them sums are made and leave."""
        num_work = len(self._plan.work)
        for number, piece in enumerate(pieces):
            piece()
            if not self._in_place:
                self._advance(num_work, wait=False)
            else:
                # Spread evenly, and all of them before the last piece, which hides the last sums' messages.
                share = min(1.0, (number + 1) / max(1, len(pieces) - 1))
                self._advance(self._num_gemms + round(share * (num_work - self._num_gemms)), wait=True)

    def finish(self) -> None:
        """Makes the sums that are left, and waits until all rows of `out` are sums and everything has left."""
        self._advance(len(self._plan.work), wait=True)
        for k in self._gathers:
            self._p2p_work.wait(k)
        self._p2p_work.wait_all()

    def _advance(self, stop: int, *, wait: bool) -> None:
        """Ends the pieces of work before `stop` in order, each with its additions, and lets go what waited for them."""
        while self._done < stop:
            adds = self._plan.work[self._done].adds
            if not wait and not all(self._p2p_work.is_completed(k) for k in adds):
                return
            if adds:
                self._add(adds)
            self._done += 1
            self._p2p_work.mark_ready(self._done)

    def _add(self, adds: tuple[int, ...]) -> None:
        """Adds what others computed of one own chunk; with more than two terms in fp32, rounded once."""
        own = self._rows(self._plan.messages[adds[0]].recv)
        total = own
        if len(adds) > 1 and own.element_size() < 4:
            total = self._buffer_pool.take("sum", own.shape, like_fp32(own))
            total.copy_(own)
        for k in adds:
            self._p2p_work.wait(k)
            add_wide(total, self._landing[k], self._buffer_pool)
        if total is not own:
            own.copy_(total)
