"""Method `p2p`: the linear layers communicate by point-to-point messages between GEMMs.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import InputVersion, gemm_into, transport_for
from megatron_overlap.ops.tensor_parallel.method import LinearMethod
from megatron_overlap.ops.tensor_parallel.pipelined import (
    PipelinedAllGather,
    PipelinedAllReduce,
    PipelinedReduceScatter,
)
from megatron_overlap.ops.tensor_parallel.plan import LinearPlan
from megatron_overlap.ops.wgrad import MAX_PIECES, Spans, WeightGradient
from megatron_overlap.schedules import ChunkLayout
from megatron_overlap.schedules.all_reduce import Gathers

_DEFAULT_PLAN = LinearPlan()


def method_for(group: dist.ProcessGroup | Transport | LinearMethod, plan: LinearPlan | None) -> LinearMethod:
    """`group` itself where it is a method; else point-to-point messages between its ranks."""
    if isinstance(group, LinearMethod):
        return group
    return P2PMethod(transport_for(group), plan or _DEFAULT_PLAN)


class P2PMethod(LinearMethod):
    """Point-to-point messages.

    Args:
        transport: of the group.
        plan: how messages are cut and ordered; the same on every rank.
    """

    wgrad_pieces = MAX_PIECES

    def __init__(self, transport: Transport, plan: LinearPlan) -> None:
        self.transport, self.plan = transport, plan
        self.rank, self.size, self.buffer_pool = transport.rank, transport.size, transport.buffer_pool
        self.save_gathered = plan.save_gathered

    def gather(
        self, shard: torch.Tensor, num_rows: int, op: str, *, version: InputVersion | None = None, save: bool = False
    ) -> P2PGather | _ReusedGather:
        """See `LinearMethod.gather`."""
        full = None if save or version is None else self._reusable(shard, num_rows, version)
        return P2PGather(self, shard, num_rows, op, version, save) if full is None else _ReusedGather(full)

    def _reusable(self, shard: torch.Tensor, num_rows: int, version: InputVersion) -> torch.Tensor | None:
        """The gathered rows of `shard` if the last gather was of this version; the same decision on all ranks."""
        last = self.buffer_pool.recall("gather", shard)
        if last is None or not version.unchanged_since(last[1]):
            return None
        full = last[0]
        start, stop = ChunkLayout(num_rows, self.size).shard(self.rank)
        full[start:stop].copy_(shard)
        return full

    def scatter(
        self, a: torch.Tensor, b: torch.Tensor, op: str, meanwhile: Callable[[], bool] | None = None
    ) -> PipelinedReduceScatter:
        """See `LinearMethod.scatter`."""
        num_rows, features = a.shape[0], b.shape[1]
        row_bytes = features * a.itemsize
        schedule, layout = self.plan.schedule("reduce_scatter", self.transport, num_rows, row_bytes, a.device)
        out = a.new_empty(layout.shard_rows(self.rank), features)
        scatter = PipelinedReduceScatter(self.transport, schedule, layout, out, op)
        scatter.compute(partial(_gemm_rows, a, b), meanwhile)
        return scatter

    def all_reduce(
        self, a: torch.Tensor, b: torch.Tensor, op: str, *, work_follows: bool = False
    ) -> PipelinedAllReduce:
        """See `LinearMethod.all_reduce`."""
        gathers: Gathers = "after" if work_follows else "between"
        schedule = self.plan.all_reduce_schedule(self.transport, a.shape[0], a.device, gathers)
        out = a.new_empty(a.shape[0], b.shape[1])
        total = PipelinedAllReduce(self.transport, schedule, out, op, add_in_place=self.plan.add_in_place)
        total.compute(partial(_gemm_rows, a, b))
        return total


def _gemm_rows(a: torch.Tensor, b: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
    gemm_into(a[start:stop], b, out)


class _ReusedGather:
    """The result of an earlier all-gather of the same tensor; see `Gather`."""

    num_bytes = 0

    def __init__(self, full: torch.Tensor) -> None:
        self.full = full

    def matmul(self, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Gather.matmul`."""
        out = self.full.new_empty(self.full.shape[0], b.shape[1])
        gemm_into(self.full, b, out, bias)
        return out

    def wgrad(self, wgrad: WeightGradient, *, dy: torch.Tensor | None = None, x: torch.Tensor | None = None) -> None:
        """See `Gather.wgrad`."""
        wgrad.add(self.full if dy is None else dy, self.full if x is None else x)

    def advance(self) -> bool:
        """See `Gather.advance`."""
        return False

    def finish(self) -> None:
        """See `Gather.finish`."""


class P2PGather:
    """An all-gather by messages; see `Gather`. At most one weight gradient and one product use its rows."""

    def __init__(
        self, method: P2PMethod, shard: torch.Tensor, num_rows: int, op: str, version: InputVersion | None, save: bool
    ) -> None:
        transport, shape = method.transport, (num_rows, shard.shape[1])
        row_bytes = shape[1] * shard.itemsize
        schedule, layout = method.plan.schedule("all_gather", transport, num_rows, row_bytes, shard.device)
        self.full = shard.new_empty(shape) if save else transport.buffer_pool.take("gather", shape, shard)
        self.num_bytes = (transport.size - 1) * shard.nbytes
        self._buffer_pool, self._version = transport.buffer_pool, None if save else version
        self._gather = PipelinedAllGather(transport, schedule, shard, layout, self.full, op, whole=save)
        self._product: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor] | None = None
        self._wgrad: tuple[WeightGradient, torch.Tensor, torch.Tensor] | None = None
        self._spans = Spans()

    def matmul(self, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Gather.matmul`."""
        out = self.full.new_empty(self.full.shape[0], b.shape[1])
        self._product = b, bias, out
        return out

    def wgrad(self, wgrad: WeightGradient, *, dy: torch.Tensor | None = None, x: torch.Tensor | None = None) -> None:
        """See `Gather.wgrad`."""
        self._gather.copy_own_rows()
        self._wgrad = wgrad, self.full if dy is None else dy, self.full if x is None else x

    def advance(self) -> bool:
        """See `Gather.advance`."""
        computed = False
        while self._gather.ready:
            self._compute_next()
            computed = True
        return computed

    def finish(self) -> None:
        """See `Gather.finish`."""
        while not self._gather.done:
            self._compute_next()
        self._gather.finish()
        if self._version is not None:
            self._buffer_pool.remember("gather", self.full, self._version)

    def _compute_next(self) -> None:
        (start, stop), rows = self._gather.next_rows()
        if self._product is not None and start < stop:
            b, bias, out = self._product
            gemm_into(rows, b, out[start:stop], bias)
        if self._wgrad is not None:
            self._spans.add((start, stop))
            # The product uses rows as they arrive; the weight gradient fills the time without new rows.
            if not self._gather.ready:
                self._spans.add_to(*self._wgrad)
