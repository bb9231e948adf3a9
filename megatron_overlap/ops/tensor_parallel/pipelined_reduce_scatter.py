"""Reduce-scatter that overlaps with the GEMMs that compute its rows."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Exchange, Repeated, Transfer
from megatron_overlap.ops.tensor_parallel.pipelined import GemmInto, WorkRows, repeated
from megatron_overlap.ops.tensor_parallel.tree import tree_sum
from megatron_overlap.ops.wgrad import add_wide, like_fp32
from megatron_overlap.schedules import Chunk, ChunkLayout, Plan

_HAS_TRITON = find_spec("triton") is not None


class _ScatteredRows(WorkRows):
    """The rows of a reduce-scatter, and the buffers of its partial sums.

    Args:
        pool: has the buffers.
        out: own rows of a result.
        hidden: further work hides the messages; see `work_follows`.

    Attributes:
        partial: all rows before they are sent.
        of_partial: rows of `partial` by work of the plan.
        of_sources: received rows by source, `[R - 1, own rows, F]`; of a ring `[rows, F]`.
        received: rows of `terms` by message.
        repeated: the messages.
    """

    def __init__(
        self, plan: Plan, layout: ChunkLayout, partial: torch.Tensor, terms: torch.Tensor, hidden: bool
    ) -> None:
        super().__init__(plan, layout)
        self.partial = partial
        self.of_partial = [partial[start:stop] for start, stop in self.of_work]
        # The messages are in the order of sources and rows.
        by_source = bool(plan.messages) and plan.pattern != "ring"
        self.of_sources = terms.unflatten(0, (plan.num_ranks - 1, -1)) if by_source else terms
        self.received = terms.split([layout.num_chunk_rows(message.recv) for message in plan.messages])
        # All ranks receive the same numbers of rows, in the same order.
        symmetric = layout.num_rows % plan.num_ranks == 0
        transfers: list[Transfer] = []
        for message, received in zip(plan.messages, self.received, strict=True):
            start, stop = layout.rows(message.send)
            if hidden and plan.pattern != "ring":
                # The GEMM of the own rows hides the first one.
                message = replace(message, not_before=len(plan.work) - (not transfers))
            transfers.append(Transfer(message, partial[start:stop], received, lands=received if symmetric else None))
        self.repeated = Repeated(lambda own: transfers)


def add_terms(terms: torch.Tensor, own: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out = terms.sum(0) + own` in fp32. On CUDA one kernel adds in this order: a second one costs a pass."""
    if out.is_cuda and _HAS_TRITON:
        from megatron_overlap.kernels import gemm_rs

        gemm_rs.add_terms(terms, own, out)
        return out
    return torch.add(terms.sum(0, dtype=torch.float32), own, out=out)


class PipelinedReduceScatter:
    """A reduce-scatter of GEMM results: rows of other owners are computed and sent first, own rows last, to `out`.

    Args:
        transport: carries partial sums.
        plan: a reduce-scatter plan.
        layout: rows of every chunk.
        out: own rows of the result, written here.
        op: name in error messages.
        work_follows: the caller enqueues further work before `finish`. On CUDA the messages are enqueued after it, and
            the GEMMs here hide the messages of another operation.
        add_early: the messages take longer than the GEMMs. On a device all terms but the last are added before it
            arrives: a second kernel, but less time after the last message.
        tree: add in the order of `ops.tensor_parallel.tree`; not for a ring.
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
        num_received = (plan.num_ranks - 1) * out.shape[0] * sent
        if plan.pattern == "ring":  # it receives rows of other owners too
            num_received = sum(layout.num_chunk_rows(message.recv) for message in plan.messages)
        symmetric = layout.num_rows % plan.num_ranks == 0
        terms = pool.take("received", (num_received, features), out, symmetric=symmetric)
        self._rows = repeated(
            transport,
            (plan, layout, partial, terms, hidden),
            lambda: _ScatteredRows(plan, layout, partial, terms, hidden),
        )
        self._partial, self._received = partial, self._rows.received
        self._p2p_work = transport.begin(Exchange(self._rows.repeated), op)
        self._done = 0

    def split(self, tensor: torch.Tensor) -> dict[int, torch.Tensor]:
        """See `WorkRows.split`; the rows of the calls of a GEMM."""
        return self._rows.split(tensor)

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
            start, stop = self._rows.of_work[index]
            if start < stop:
                gemm(start, stop, self.out if own else self._rows.of_partial[index])
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
            total = self._buffer_pool.take("sum", out.shape, like_fp32(out))
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
        """Adds the received terms in the order of the plan, then the own rows; with `add_early` the last term last."""
        out, terms, own = self.out, self._rows.of_sources, self.out
        if self._add_early and len(terms) > 1:
            for k in range(len(self._received) - self._plan.chunks_per_rank):
                self._p2p_work.wait(k)
            own = add_terms(terms[:-1], out, self._buffer_pool.take("sum", out.shape, like_fp32(out)))
            terms = terms[-1:]
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
