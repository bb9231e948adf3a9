"""Simulated column- and row-parallel linear layers with each overlap method, forward and backward.

`p2p` simulates the plugin's schedules. On a device its messages follow one another: copies, each with the batches of
flags of `comm.symmetric.copies`, where the link has copy engines, else NCCL's kernels. The other methods consist of the
same parts. A collective is one message of `(R-1)/R` of the buffer with the latency of `R-1` hops.

| method | forward | backward |
|---|---|---|
| `serial` | collective, then GEMM, or GEMM, then collective | all sequential |
| `stock` | as serial | column: AG(x) with dgrad, RS(dx) with wgrad; row: AG(dy) first |
| `sliced` | `SLICES` collectives, each with the GEMM of another slice | as forward; column: AG(x) with dgrad |
| `userbuffers` | AG: ring of slices; RS: `SLICES` slices, the last one exposed | row: ring; column: as stock |
| `fused` | one GEMM whose tiles wait for messages or send them (Flux) | as forward |
| `p2p` | tail-free point-to-point schedules | as forward; the last dgrad messages overlap wgrad |
| `compiled` | as p2p, the gather starts after a copy of the local slice | row: as forward; column: serial |

`compiled` is PyTorch's asynchronous tensor parallelism for models with separate Q, K, V and gate weights. The compiler
fuses a reduce-scatter with the one GEMM that makes its input (`_find_producer_matmul` in
`torch/_inductor/fx_passes/micro_pipeline_tp.py`). The backward of a column-parallel layer scatters a sum of two or
three GEMMs and is not fused. Peers read the gathered slices: a rank copies its slice to symmetric memory before its
first GEMM (`_pipelined_multi_all_gather_and_consume` in `torch/distributed/_symmetric_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megatron_overlap.autotune.cost_model import CostModel, Link, Mover
from megatron_overlap.autotune.search import MARGIN
from megatron_overlap.schedules import Chunk, ChunkLayout, Message, Plan, Work, all_gather_plan, reduce_scatter_plan
from megatron_overlap.schedules.heuristics import SHALLOW_DEPTH, default_chunks
from megatron_overlap.schedules.plan import Collective, Pattern, Split
from megatron_overlap.tools.simulate.event_simulator import Program, SimulatedRun, Stream, in_order, run_program

Method = Literal["serial", "stock", "sliced", "userbuffers", "fused", "p2p", "compiled"]
METHODS: tuple[Method, ...] = ("serial", "stock", "sliced", "userbuffers", "fused", "p2p", "compiled")

SLICES = 4
"""Slices of a sliced collective, and default splits of TransformerEngine's pipelined reduce-scatter."""

_CHUNKS = (1, 2, 4, 8)
_Step = tuple[Literal["all_gather", "reduce_scatter", "compute"], float]


ANY_CHUNK = Chunk(0, 0)
"""Chunk of work whose rows do not matter."""


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives as messages: sizes in bytes, and transfer times relative to an all-gather."""

    messages: tuple[Message, ...] = ()
    sizes: tuple[float, ...] = ()
    stretch: tuple[float, ...] = ()

    def __add__(self, other: Collectives) -> Collectives:
        return Collectives(self.messages + other.messages, self.sizes + other.sizes, self.stretch + other.stretch)


@dataclass(frozen=True)
class Gemm:
    """Times in us of `(rows, k) @ (k, n)`, as one GEMM and as GEMMs over some of the rows."""

    model: CostModel
    rows: int
    n: int
    k: int

    @property
    def whole(self) -> float:
        """Time of one GEMM over all rows."""
        return self.model.gemm_us(self.rows, self.n, self.k)

    def rows_us(self, rows: int) -> float:
        """Time of a separate GEMM over some of the rows."""
        return self.model.gemm_us(rows, self.n, self.k)

    def share_us(self, rows: int) -> float:
        """Share of some of the rows in the time of one GEMM over all rows, without the launch."""
        return (self.whole - self.model.launch_us) * rows / self.rows


def preceded_by(stream: Stream, first_us: float) -> Stream:
    """The stream with work before it that all its messages wait for."""
    plan = replace(
        stream.plan,
        messages=tuple(replace(each, after_work=each.after_work + 1) for each in stream.plan.messages),
        work=(Work((ANY_CHUNK,)), *stream.plan.work),
    )
    return replace(stream, plan=plan, work_us=(first_us, *stream.work_us), add_us=(0.0, *stream.add_us))


def followed_by(stream: Stream, then_us: float) -> list[Stream]:
    """The stream and a second stream with work after it."""
    if not then_us:
        return [stream]
    plan = Plan("all_gather", "serial", stream.plan.num_ranks, 0, 1, (), (Work((ANY_CHUNK,)),))
    return [stream, Stream(plan, (then_us,), (0.0,), ())]


@dataclass(frozen=True)
class LinearOverlap:
    """Overlap method of a linear layer.

    Attributes:
        method: see the table above; `auto` is the faster of `stock` and `p2p`, see `Linear.fastest`.
        pattern: message pattern of `p2p`.
        chunks_per_rank: chunks of `p2p` and `fused`. None: the heuristics for `p2p`, the fastest of 1, 2, 4 and 8 for
            `fused`.
        split: split of `p2p`; None: `edge` on a device, else the faster one.
        save_gathered: a column-parallel layer saves its gathered input for the weight gradient.
        copies: messages of `p2p` are copies by the copy engines of the link, if it has some.
    """

    method: Method | Literal["auto"] = "p2p"
    pattern: Pattern = "direct"
    chunks_per_rank: int | None = None
    split: Split | None = None
    save_gathered: bool = False
    copies: bool = True


@dataclass(frozen=True)
class Linear:
    """A linear layer on the ranks of one tensor parallel group, under sequence parallelism.

    The simulation runs rank 0 for all ranks. That is exact if ranks and chunks divide the rows evenly. Otherwise the
    chunks of other ranks differ from those of rank 0 by one row.

    Attributes:
        rows: rows of the gathered activation.
        out_features: columns of this rank's output, `n`.
        in_features: columns of this rank's input, `k`.
    """

    model: CostModel
    link: Link
    overlap: LinearOverlap
    rows: int
    out_features: int
    in_features: int

    def column_forward(self) -> SimulatedRun:
        """`y = all_gather(x_shard) @ w.T`."""
        return self._gather(self._gemm(self.out_features, self.in_features), self.in_features)

    def row_forward(self) -> SimulatedRun:
        """`y_shard = reduce_scatter(x @ w.T)`."""
        return self._scatter(self._gemm(self.out_features, self.in_features), self.out_features)

    def column_backward(self) -> SimulatedRun:
        """`dx_shard = reduce_scatter(dy @ w)`, `dw = dy.T @ all_gather(x_shard)`."""
        width = self.in_features
        dgrad = self._gemm(self.in_features, self.out_features)
        method = self.overlap.method
        # wgrad needs the gathered input: gathered again, or saved by the forward.
        gather = Collectives() if self.overlap.save_gathered else self._collective("all_gather", [self.rows], width)
        needs = tuple(range(len(gather.messages)))
        if method in ("serial", "compiled") or self.link.size == 1:
            gathers: list[_Step] = [("all_gather", width)] * len(needs)
            return self._sequential(
                [*gathers, ("compute", dgrad.whole), ("reduce_scatter", width), ("compute", self.wgrad_us)]
            )
        if method in ("p2p", "fused", "sliced"):
            wgrad = self._concurrent(gather, (Work((ANY_CHUNK,), needs=needs),), (self.wgrad_us,))
            if self._queued and needs:
                wgrad = self._regather(width)
            candidates = []
            for scatter in self._scatter_streams(dgrad, width):
                last = sum(bool(work.chunks) for work in scatter.plan.work)
                order = [(0, k) for k in range(last)] + [(1, 0)] + [(0, k) for k in range(last, len(scatter.work_us))]
                candidates.append(Program((scatter, wgrad), tuple(order)))
            return self._best(candidates)
        # Each collective overlaps the GEMM that does not depend on it.
        moves = gather + self._collective("reduce_scatter", [self.rows], width, after=1)
        work = (Work((ANY_CHUNK,)), Work((ANY_CHUNK,), needs=needs), Work((), adds=(len(needs),)))
        stream = self._concurrent(moves, work, (dgrad.whole, self.wgrad_us, 0.0))
        return self._play(in_order(stream), "collective")

    def row_backward(self) -> SimulatedRun:
        """`dx = all_gather(dy_shard) @ w`, `dw = all_gather(dy_shard).T @ x`."""
        width = self.out_features
        dgrad = self._gemm(self.in_features, self.out_features)
        if self.overlap.method in ("serial", "stock") or self.link.size == 1:
            return self._sequential([("all_gather", width), ("compute", dgrad.whole), ("compute", self.wgrad_us)])
        return self._gather(dgrad, width, then_us=self.wgrad_us + self._own_rows_us(width))

    def fastest(self, column: bool, *, forward_only: bool = False) -> Linear:
        """The method that `auto` selects: `p2p` if its passes gain more than 2 %, else `stock`."""
        requested = self.overlap.chunks_per_rank
        counts = (None, *_CHUNKS) if requested is None else (requested,)
        overlaps = [replace(self.overlap, method="p2p", chunks_per_rank=count) for count in counts]

        def passes_us(one: Linear) -> float:
            return one._passes_us(column, forward_only)

        p2p = min((replace(self, overlap=each) for each in overlaps), key=passes_us)
        stock = replace(self, overlap=LinearOverlap("stock"))
        return p2p if passes_us(p2p) < (1 - MARGIN) * passes_us(stock) else stock

    def _passes_us(self, column: bool, forward_only: bool) -> float:
        passes = (self.column_forward, self.column_backward) if column else (self.row_forward, self.row_backward)
        runs = [one() for one in passes[: 1 if forward_only else 2]]
        return sum(max(run.time_us, self.enqueue_us(run)) for run in runs)

    def enqueue_us(self, run: SimulatedRun) -> float:
        """Host time of the messages of a pass."""
        return run.num_messages * self.model.enqueue_us if self.overlap.method == "p2p" else 0.0

    @cached_property
    def wgrad_us(self) -> float:
        """`dw = dy.T @ x` over all rows."""
        return self.model.gemm_us(self.out_features, self.in_features, self.rows)

    @property
    def _queued(self) -> bool:
        """Whether a queue of a device sends the messages of `p2p` one after another."""
        return self.overlap.method == "p2p" and self.model.on_device

    @property
    def _copy_us(self) -> float | None:
        """Fixed time of a copy; None: other messages."""
        return self.link.copy_us if self._queued and self.overlap.copies else None

    @property
    def _mover(self) -> Mover:
        return "message" if self._queued and self._copy_us is None else "copy"

    def _queued_us(self, plan: Plan) -> tuple[float, ...]:
        """Fixed times of the messages. The first copy to each peer waits until the buffer of the peer is free."""
        copy_us = self._copy_us
        if copy_us is None:
            return (self.model.nccl_message_us(self.link),) * len(plan.messages)
        first = {message.to: index for index, message in reversed(list(enumerate(plan.messages)))}
        flags = [1 + (first[message.to] == index) for index, message in enumerate(plan.messages)]
        return tuple(copy_us + count * self.link.flag_us for count in flags)

    def _own_rows_us(self, width: int) -> float:
        """Copy of the own rows beside the gathered ones, which the weight gradient reads as one tensor."""
        if not self._queued:
            return 0.0
        return self.model.memory_us(2 * self._bytes(self.rows / self.link.size, width))

    def _regather(self, width: int) -> Stream:
        """The gather of the input in backward, and the weight gradient after its last message."""
        chunks, split = self._variants("all_gather", width)[0]
        gather = self._stream("all_gather", lambda rows: 0.0, width, self.overlap.pattern, chunks, split)
        work = Work((ANY_CHUNK,), needs=tuple(range(len(gather.plan.messages))))
        time_us = sum(gather.work_us) + self._own_rows_us(width) + self.wgrad_us
        return replace(gather, plan=replace(gather.plan, work=(work,)), work_us=(time_us,), add_us=(0.0,))

    @property
    def _ring_latency(self) -> float:
        return self.link.ring_latency_us + self.model.launch_us

    def _gemm(self, n: int, k: int) -> Gemm:
        return Gemm(self.model, self.rows, n, k)

    def _bytes(self, rows: float, width: int) -> float:
        return rows * width * self.model.item_bytes

    def _gather(self, gemm: Gemm, width: int, then_us: float = 0.0) -> SimulatedRun:
        method = self.overlap.method
        if method in ("serial", "stock") or self.link.size == 1:
            return self._sequential([("all_gather", width), ("compute", gemm.whole + then_us)])
        if method == "sliced":
            moves = self._collective("all_gather", self._slices(), width)
            work = tuple(Work((ANY_CHUNK,), needs=(k,)) for k in range(SLICES))
            sliced = self._concurrent(moves, work, [gemm.rows_us(rows) for rows in self._slices()])
            return self._play(in_order(*followed_by(sliced, then_us)), "collective")
        if method == "userbuffers":
            streams: Iterable[Stream] = [self._stream("all_gather", gemm.rows_us, width, "ring", 1, "all")]
        elif method == "fused":
            streams = [
                self._stream("all_gather", gemm.share_us, width, "direct", c, "all", launch_us=self.model.launch_us)
                for c in self._chunks()
            ]
        else:
            variants = self._variants("all_gather", width)
            streams = [self._stream("all_gather", gemm.rows_us, width, self.overlap.pattern, c, s) for c, s in variants]
        if method == "compiled":
            copy_us = self.model.memory_us(2 * self._bytes(self.rows / self.link.size, width))
            streams = [preceded_by(stream, copy_us) for stream in streams]
        return self._best([in_order(*followed_by(stream, then_us)) for stream in streams])

    def _scatter(self, gemm: Gemm, width: int) -> SimulatedRun:
        method = self.overlap.method
        if method in ("serial", "stock") or self.link.size == 1:
            return self._sequential([("compute", gemm.whole), ("reduce_scatter", width)])
        kind: Mover = "collective" if method in ("sliced", "userbuffers") else self._mover
        return self._best([in_order(stream) for stream in self._scatter_streams(gemm, width)], kind)

    def _scatter_streams(self, gemm: Gemm, width: int) -> list[Stream]:
        method = self.overlap.method
        if method in ("sliced", "userbuffers"):
            moves = self._collective("reduce_scatter", self._slices(), width, after=1, each=1)
            work = (*(Work((ANY_CHUNK,)) for _ in range(SLICES)), Work((), adds=tuple(range(SLICES))))
            return [self._concurrent(moves, work, [*(gemm.rows_us(rows) for rows in self._slices()), 0.0])]
        if method == "fused":
            return [
                self._stream("reduce_scatter", gemm.share_us, width, "direct", c, "all", launch_us=self.model.launch_us)
                for c in self._chunks()
            ]
        variants, early = self._variants("reduce_scatter", width), gemm.k <= SHALLOW_DEPTH
        return [
            self._stream("reduce_scatter", gemm.rows_us, width, self.overlap.pattern, c, s, add_early=early)
            for c, s in variants
        ]

    def _slices(self) -> list[int]:
        layout = ChunkLayout(self.rows, SLICES)
        return [layout.shard_rows(index) for index in range(SLICES)]

    def _chunks(self) -> tuple[int, ...]:
        return _CHUNKS if self.overlap.chunks_per_rank is None else (self.overlap.chunks_per_rank,)

    def _variants(self, collective: Collective, width: int) -> list[tuple[int, Split]]:
        splits: tuple[Split, ...] = ("edge",) if self._queued else ("edge", "all")
        if self.overlap.split is not None:
            splits = (self.overlap.split,)
        chunks = self.overlap.chunks_per_rank
        if chunks is None:
            row_bytes, engines = int(self._bytes(1, width)), self._copy_us is not None
            chunks = default_chunks(collective, self.link.size, self.rows, row_bytes, copy_engines=engines)
        return [(chunks, split) for split in splits[: None if chunks > 1 else 1]]

    def _collective(
        self, kind: Collective, rows: Sequence[int], width: int, *, after: int = 0, each: int = 0
    ) -> Collectives:
        """Collectives over `rows[k]` rows each. Collective k may start after `after + each * k` completed work."""
        part = (self.link.size - 1) / self.link.size
        slower = self.link.collective_rate / self.link.scatter_rate if kind == "reduce_scatter" else 1.0
        return Collectives(
            tuple(Message(ANY_CHUNK, 0, ANY_CHUNK, 0, after_work=after + each * k) for k in range(len(rows))),
            tuple(self._bytes(piece, width) * part for piece in rows),
            (slower,) * len(rows),
        )

    def _concurrent(self, moves: Collectives, work: Sequence[Work], times: Sequence[float]) -> Stream:
        """Collectives concurrent with GEMMs, without additions."""
        plan = Plan("all_gather", "serial", self.link.size, 0, 1, moves.messages, tuple(work))
        return Stream(plan, tuple(times), (0.0,) * len(times), moves.sizes, self._ring_latency, moves.stretch)

    def _stream(
        self,
        collective: Collective,
        time: Callable[[int], float],
        width: int,
        pattern: Pattern,
        chunks: int,
        split: Split,
        *,
        launch_us: float = 0.0,
        add_early: bool = False,
    ) -> Stream:
        """The plugin's plan of one rank with the times of its GEMMs, additions and messages.

        `add_early` as of `PipelinedReduceScatter`.
        """
        build = all_gather_plan if collective == "all_gather" else reduce_scatter_plan
        plan = build(self.link.size, 0, chunks_per_rank=chunks, pattern=pattern, split=split)
        early = add_early and self._queued and pattern == "direct" and self.link.size > 2
        if early:
            *gemms, last = plan.work
            sums = Work((), adds=last.adds[:-chunks]), Work((), adds=last.adds[-chunks:])
            plan = replace(plan, work=(*gemms, *sums))
        layout = plan.layout(self.rows)
        # The computing queue waits for the flag of each message.
        flag_us = 0.0 if self._copy_us is None else self.link.flag_us
        times, additions = [], []
        for index, work in enumerate(plan.work):
            gemm_us = time(sum(layout.num_chunk_rows(chunk) for chunk in work.chunks)) if work.chunks else 0.0
            times.append(gemm_us + len(work.needs) * flag_us + (launch_us if index == 0 else 0.0))
            added = sum(layout.num_chunk_rows(plan.messages[k].recv) for k in work.adds)
            # Before an early sum most messages have arrived long ago.
            num_flags = bool(work.adds) if early else len(work.adds)
            additions.append(self._added_us(added, layout.shard_rows(0), width, early) + num_flags * flag_us)
        sizes = tuple(self._bytes(layout.num_chunk_rows(e.send), width) for e in plan.messages)
        stream = Stream(plan, tuple(times), tuple(additions), sizes)
        return replace(stream, latency_us=0.0, queued_us=self._queued_us(plan)) if self._queued else stream

    def _added_us(self, received: int, own: int, width: int, early: bool) -> float:
        """Time to add received rows to own rows; `early`: in one of two sums, which write or read an fp32 total."""
        if not received:
            return 0.0
        if early:
            return self.model.memory_us(self._bytes(received + own, width) + 4 * own * width, "sum")
        if self._queued and self.overlap.pattern != "ring":
            return self.model.sum_us(received * width, own * width)
        # An addition reads its terms once and reads and writes the sum.
        return self.model.memory_us(self._bytes(received + 2 * min(received, own), width))

    def _sequential(self, steps: Sequence[_Step]) -> SimulatedRun:
        """Collectives and GEMMs one after the other."""
        moves = Collectives()
        work: list[Work] = []
        times: list[float] = []
        needs: tuple[int, ...] = ()
        for what, amount in steps:
            if what == "compute":
                work.append(Work((ANY_CHUNK,), needs=needs))
                times.append(amount)
                needs = ()
            elif self.link.size > 1:
                needs = (len(moves.messages),)
                moves += self._collective(what, [self.rows], int(amount), after=len(work))
        return self._play(in_order(self._concurrent(moves, work, times)), "collective")

    def _best(self, programs: list[Program], kind: Mover | None = None) -> SimulatedRun:
        runs = (self._play(program, kind or self._mover) for program in programs)
        return min(runs, key=lambda simulated: simulated.time_us)

    def _play(self, program: Program, kind: Mover) -> SimulatedRun:
        return run_program(program, self.model, self.link, kind)
