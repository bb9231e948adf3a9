"""Method `p2p`: the linear layers communicate by point-to-point messages between GEMMs, which a plan cuts and orders.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.comm.symmetric.nodes import CopyNodesTransport
from megatron_overlap.ops.call import transport_for
from megatron_overlap.ops.tensor_parallel.method import LinearMethod
from megatron_overlap.ops.tensor_parallel.nodes import NodesMethod
from megatron_overlap.ops.tensor_parallel.pipelined import PLAIN, Gemm, GemmInto, PipelinedAllGather, WorkRows
from megatron_overlap.ops.tensor_parallel.pipelined_all_reduce import PipelinedAllReduce
from megatron_overlap.ops.tensor_parallel.pipelined_reduce_scatter import PipelinedReduceScatter
from megatron_overlap.ops.tensor_parallel.tree_sum import tree_gemm_into
from megatron_overlap.ops.wgrad import MAX_PIECES, Piece, Spans, WeightGradient
from megatron_overlap.schedules import (
    Chunk,
    ChunkLayout,
    PartLayout,
    Plan,
    all_gather_plan,
    all_reduce_plan,
    reduce_scatter_plan,
)
from megatron_overlap.schedules.gather_scatter import Gathers
from megatron_overlap.schedules.heuristics import (
    SHALLOW_DEPTH,
    default_chunks,
    default_parts,
    default_pattern,
    default_slices_per_gemm,
)
from megatron_overlap.schedules.plan import Pattern, Split

RowCollective = Literal["all_gather", "reduce_scatter"]
"""The collectives of sequence parallelism, where ranks own rows."""


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How one operation is cut and ordered; the same on every rank of the group.

    Attributes:
        pattern: `direct` or `ring`; `serial` sends the same messages without overlap. None is the device default.
        chunks_per_rank: messages per slice of a rank; None chooses by the number of rows and their bytes.
        split: `all` computes chunk by chunk, `edge` only where a chunk is exposed; None chooses by the device and the
            collective.
        add_in_place: an all-reduce waits and adds at the positions in the plan; otherwise after messages have arrived.
            None chooses by the device.
        tree: partial sums are added in the fixed tree of `tree_sum`; not for pattern `ring`.
    """

    pattern: Pattern | None = None
    chunks_per_rank: int | None = None
    split: Split | None = None
    add_in_place: bool | None = None
    tree: bool = False

    def schedule(
        self,
        collective: RowCollective,
        transport: Transport,
        num_rows: int,
        row_bytes: int,
        device: torch.device,
        *,
        hidden: bool | None = None,
    ) -> tuple[Plan, ChunkLayout]:
        """The schedule of one rank for `num_rows` gathered rows of `row_bytes` each, and the rows of its chunks.

        `hidden`: see `default_slices_per_gemm`; None: no GEMM computes several slices.
        """
        size, rank, engines = transport.size, transport.rank, transport.copy_engines
        return _schedule(self, collective, size, rank, num_rows, row_bytes, device.type, engines, hidden)

    def fewest_rows(self, op: str, num_ranks: int, num_rows: int, row_bytes: int, device: torch.device) -> int:
        """Rows of the smallest GEMM of the forward pass of `op`, with `num_rows` gathered rows of `row_bytes` each."""
        collective = _COLLECTIVES.get(op)
        last = num_ranks - 1  # the first ranks and parts get the remainder
        if collective is not None:
            _, layout = _schedule(self, collective, num_ranks, 0, num_rows, row_bytes, device.type)
            return min(layout.num_chunk_rows(Chunk(last, part)) for part in range(layout.chunks_per_rank))
        if op == "copy_gemm":
            return num_rows
        num_parts = self.chunks_per_rank or default_parts(num_rows, num_ranks, 0, on_device=device.type != "cpu")
        parts = PartLayout(num_rows, num_ranks, num_parts)
        return min(
            parts.rows(Chunk(last, part))[1] - parts.rows(Chunk(0, part))[0] for part in range(parts.chunks_per_rank)
        )

    def all_reduce_schedule(
        self, transport: Transport, num_rows: int, depth: int, gathers: Gathers
    ) -> tuple[Plan, PartLayout]:
        """The schedule of one rank for an all-reduce of `num_rows` rows of a GEMM over `depth`, and its chunks.

        Raises:
            ValueError: the pattern is `ring`.
        """
        depth = depth if gathers == "between" else 0
        parts = self.chunks_per_rank or default_parts(num_rows, transport.size, depth, on_device=transport.on_device)
        # On a device one GEMM for each owner: with fewer, some ranks send later than others, and messages wait.
        split = self.split or ("all" if transport.on_device else "edge")
        pattern = self.pattern or "direct"
        engines = transport.copy_engines
        return _all_reduce_schedule(transport.size, transport.rank, parts, num_rows, pattern, split, gathers, engines)


_DEFAULT_PLAN = LinearPlan()
_COLLECTIVES: dict[str, RowCollective] = {"ag_gemm": "all_gather", "gemm_rs": "reduce_scatter"}


def method_for(group: dist.ProcessGroup | Transport | LinearMethod, plan: LinearPlan | None) -> LinearMethod:
    """`group` itself where it is a method; else point-to-point messages between its ranks."""
    if isinstance(group, LinearMethod):
        return group
    transport, plan = transport_for(group), plan or _DEFAULT_PLAN
    if isinstance(transport, CopyNodesTransport):
        between = P2PMethod(transport.between, plan)
        return NodesMethod(P2PMethod(transport.inside, plan), transport.between, transport.nodes, between)
    return P2PMethod(transport, plan)


class P2PMethod(LinearMethod):
    """Point-to-point messages over `transport`, which `plan` cuts and orders.

    `plan`, and `gemm`, the number format of gathered rows, are the same on every rank.
    """

    wgrad_pieces = MAX_PIECES
    concurrent = True

    def __init__(self, transport: Transport, plan: LinearPlan, gemm: Gemm = PLAIN) -> None:
        self.transport, self.plan, self.gemm = transport, plan, gemm
        self.rank, self.size, self.buffer_pool = transport.rank, transport.size, transport.buffer_pool

    def gather(self, shard: torch.Tensor, num_rows: int, op: str) -> P2PGather:
        return P2PGather(self, shard, num_rows, op)

    def scatter(
        self, a: torch.Tensor, b: torch.Tensor, op: str, meanwhile: Callable[[], bool] | None = None
    ) -> PipelinedReduceScatter:
        shallow = a.shape[1] <= SHALLOW_DEPTH
        scatter = self.begin_scatter(a, b.shape[1], op, work_follows=meanwhile is not None, add_early=shallow)
        scatter.compute(self._gemm_rows(a, b, scatter.rows), meanwhile)
        return scatter

    def reduce_scatter(self, rows: torch.Tensor, op: str) -> PipelinedReduceScatter:
        """Starts the reduce-scatter of `rows` `[num_rows, F]`, which are complete."""
        scatter = self.begin_scatter(rows, rows.shape[1], op)
        scatter.compute(lambda start, stop, out: out.copy_(rows[start:stop]))
        return scatter

    def begin_scatter(
        self, like: torch.Tensor, features: int, op: str, *, work_follows: bool = False, add_early: bool = False
    ) -> PipelinedReduceScatter:
        """Starts the reduce-scatter of rows `[like.shape[0], features]`, which the caller computes."""
        num_rows, row_bytes = like.shape[0], features * like.itemsize
        schedule, layout = self.plan.schedule(
            "reduce_scatter", self.transport, num_rows, row_bytes, like.device, hidden=work_follows
        )
        out = like.new_empty(layout.shard_rows(self.rank), features)
        tree = self.plan.tree
        return PipelinedReduceScatter(
            self.transport, schedule, layout, out, op, work_follows=work_follows, add_early=add_early, tree=tree
        )

    def all_reduce(self, a: torch.Tensor, b: torch.Tensor, op: str, pieces: Sequence[Piece] = ()) -> PipelinedAllReduce:
        gathers: Gathers = "after" if pieces else "between"
        plan, (num_rows, depth) = self.plan, a.shape
        schedule, layout = plan.all_reduce_schedule(self.transport, num_rows, depth, gathers)
        out = a.new_empty(num_rows, b.shape[1])
        early = depth <= SHALLOW_DEPTH
        total = PipelinedAllReduce(
            self.transport, schedule, layout, out, op, add_in_place=plan.add_in_place, add_early=early, tree=plan.tree
        )
        total.compute(self._gemm_rows(a, b, total.rows))
        total.run_beside(pieces)
        return total

    def _gemm_rows(self, a: torch.Tensor, b: torch.Tensor, rows: WorkRows) -> GemmInto:
        if self.plan.tree:
            return lambda start, stop, out: tree_gemm_into(a[start:stop], b, out, self.size)
        rows_of_a = rows.split(a)
        return lambda start, stop, out: torch.mm(rows_of_a[start, stop], b, out=out)


class P2PGather:
    """An all-gather by messages; see `Gather`. At most one weight gradient and one product use its rows."""

    def __init__(self, method: P2PMethod, shard: torch.Tensor, num_rows: int, op: str) -> None:
        transport, self._gemm = method.transport, method.gemm
        payload = self._gemm.encode(shard)
        self._num_rows, self._like = num_rows, shard
        row_bytes = sum(tensor.shape[1:].numel() * tensor.itemsize for tensor in payload)
        schedule, layout = method.plan.schedule("all_gather", transport, num_rows, row_bytes, shard.device, hidden=True)
        self._full = tuple(
            transport.buffer_pool.take(f"gather{number or ''}", (num_rows, *tensor.shape[1:]), tensor, symmetric=True)
            for number, tensor in enumerate(payload)
        )
        self.num_bytes = (transport.size - 1) * sum(tensor.nbytes for tensor in payload)
        self._gather = PipelinedAllGather(transport, schedule, payload, layout, self._full, op, repeats=True)
        self._on_device, self._copy_engines = transport.on_device, transport.copy_engines
        self._product: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor] | None = None
        self._wgrad: tuple[WeightGradient, torch.Tensor | None, torch.Tensor | None] | None = None
        self._spans = Spans()

    def matmul(
        self, b: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self._like.new_empty(self._num_rows, b.shape[1]) if out is None else out
        self._product = b, bias, out
        return out

    def wgrad(self, wgrad: WeightGradient, *, dy: torch.Tensor | None = None, x: torch.Tensor | None = None) -> None:
        self._wgrad = wgrad, dy, x

    def advance(self) -> bool:
        self._gather.enqueue_next()
        if self._wgrad is not None:
            self._gather.copy_own_rows()
        computed = False
        while not self._on_device and self._gather.ready:
            self._compute_next()
            computed = True
        return computed

    def finish(self) -> None:
        if self._on_device:
            self._finish_on_device()
        else:
            while not self._gather.done:
                self._compute_next()
            self._gather.finish()

    def _finish_on_device(self) -> None:
        """Enqueues the product in GEMMs that follow their messages, and the weight gradient after the last row.

        Messages take longer than the GEMMs of a narrow product. With copy engines the weight gradient of the first half
        of the rows then fills the wait. It is not cut further: each GEMM of it reads and writes the whole gradient.
        """
        if self._product is not None:
            b, bias, out = self._product
            rows_of_out, num_rows = self._gather.rows.split(out), 0
            early_wgrad = self._copy_engines and b.shape[1] <= SHALLOW_DEPTH
            early_wgrad = early_wgrad and self._wgrad is not None and self._wgrad[0].adds_to_main_grad
            for run, rows in self._gather:
                self._gemm.matmul(rows, b, rows_of_out[run], bias)
                if self._wgrad is None:
                    continue
                self._spans.add(run)
                num_rows += run[1] - run[0]
                if early_wgrad and 2 * num_rows >= self._num_rows:
                    self._add_wgrad()
                    early_wgrad = False
        else:
            self._spans.add((0, self._num_rows))
        self._gather.finish()
        self._add_wgrad()

    def _compute_next(self) -> None:
        (start, stop), rows = self._gather.next_rows()
        if self._product is not None and start < stop:
            b, bias, out = self._product
            self._gemm.matmul(rows, b, out[start:stop], bias)
        if self._wgrad is None:
            return
        self._spans.add((start, stop))
        # The product uses rows as they arrive; the weight gradient fills the time without new rows.
        if self._gather.done or not self._gather.ready:
            self._add_wgrad()

    def _add_wgrad(self) -> None:
        """Adds the rows since the last call to the weight gradient, if there is one."""
        if self._wgrad is None:
            return
        self._gather.copy_own_rows()
        wgrad, dy, x = self._wgrad
        for start, stop in self._spans.joined():
            rows = tuple(full[start:stop] for full in self._full)
            self._gemm.wgrad(wgrad, rows if dy is None else dy[start:stop], rows if x is None else x[start:stop])


@lru_cache(maxsize=256)
def _schedule(
    plan: LinearPlan,
    collective: RowCollective,
    size: int,
    rank: int,
    num_rows: int,
    row_bytes: int,
    device: str,
    copy_engines: bool = False,
    hidden: bool | None = None,
) -> tuple[Plan, ChunkLayout]:
    chunks = plan.chunks_per_rank
    if chunks is None:
        chunks = default_chunks(collective, size, num_rows, row_bytes, copy_engines=copy_engines)
    # On the CPU, arrived chunks are merged into one GEMM. On a GPU a query for arrival would synchronise.
    split = plan.split or ("all" if device == "cpu" else "edge")
    build = all_gather_plan if collective == "all_gather" else reduce_scatter_plan
    pattern = plan.pattern or default_pattern(device)
    slices = 1
    if hidden is not None and copy_engines and chunks == 1 and pattern == "direct" and split == "edge":
        slices = default_slices_per_gemm(size, num_rows, hidden=hidden)
    schedule = build(size, rank, chunks_per_rank=chunks, pattern=pattern, split=split, slices_per_gemm=slices)
    return schedule, schedule.layout(num_rows)


@lru_cache(maxsize=256)
def _all_reduce_schedule(
    size: int, rank: int, parts: int, num_rows: int, pattern: Pattern, split: Split, gathers: Gathers, engines: bool
) -> tuple[Plan, PartLayout]:
    slices = 1
    if engines and (parts, pattern, split) == (1, "direct", "all"):
        slices = default_slices_per_gemm(size, num_rows, hidden=gathers == "after")
    plan = all_reduce_plan(
        size, rank, chunks_per_rank=parts, pattern=pattern, split=split, gathers=gathers, slices_per_gemm=slices
    )
    return plan, PartLayout(num_rows, size, parts)
