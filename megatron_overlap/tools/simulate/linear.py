"""Column- and row-parallel linear layers under each way to overlap them, forward and backward.

`p2p` plays the plugin's own schedules. The baselines are made of the same parts: a collective is one message of
`(R-1)/R` of the buffer with the latency of `R-1` hops.

| method | forward | backward |
|---|---|---|
| `serial` | collective, then GEMM, or the other way round | all in turn |
| `megatron` | as serial | column: AG(x) beside dgrad, RS(dx) beside wgrad; row: AG(dy) first |
| `sliced` | `SLICES` collectives, each beside the GEMM of another slice | as forward; column's AG(x) beside dgrad |
| `userbuffers` | AG: ring of slices; RS: `SLICES` slices, the last one exposed | row: ring; column as megatron |
| `fused` | one GEMM whose tiles wait for messages, or send them (Flux) | as forward |
| `p2p` | tail-free point-to-point schedules | as forward; dgrad's last messages beside wgrad |
| `compiled` | as p2p, a gather after a copy of the rank's own slice | row: as forward; column: serial |

`compiled` is PyTorch's asynchronous tensor parallelism for models that keep the weights of QKV and of the gate apart:
the compiler joins a reduce-scatter to the one GEMM that makes its input (`_find_producer_matmul` in
`torch/_inductor/fx_passes/micro_pipeline_tp.py`), and what a column-parallel layer's backward scatters is a sum of two
or three. Its gather is pulled: a rank copies its slice to where its peers can read it before any GEMM begins
(`_pipelined_multi_all_gather_and_consume` in `torch/distributed/_symmetric_memory`, which says why).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megatron_overlap.autotune.cost_model import CostModel, Link
from megatron_overlap.autotune.search import MARGIN
from megatron_overlap.schedules import ChunkLayout, Message, Plan, Work, all_gather_plan, reduce_scatter_plan
from megatron_overlap.schedules.heuristics import default_chunks
from megatron_overlap.schedules.plan import Collective, Pattern, Split
from megatron_overlap.tools.simulate.event_simulator import play
from megatron_overlap.tools.simulate.parts import NOTHING, Gemm, Moves, and_then, begun_by
from megatron_overlap.tools.simulate.program import Played, Program, Stream, in_order

Method = Literal["serial", "megatron", "sliced", "userbuffers", "fused", "p2p", "compiled"]
METHODS: tuple[Method, ...] = ("serial", "megatron", "sliced", "userbuffers", "fused", "p2p", "compiled")

SLICES = 4
"""Slices of the usual overlap, and of TransformerEngine's pipelined reduce-scatter (its default number of splits)."""

_CHUNKS = (1, 2, 4, 8)
_Step = tuple[Literal["all_gather", "reduce_scatter", "compute"], float]


@dataclass(frozen=True)
class Choice:
    """How a linear layer is overlapped.

    Attributes:
        method: see the table above; `auto` is what `fastest` takes of `megatron` and `p2p`.
        pattern: of `p2p`.
        chunks_per_rank: of `p2p` and `fused`; None is for `p2p` what the plugin takes unless told, for `fused` the
            fastest of 1, 2, 4 and 8, as a tuner would.
        split: of `p2p`; None takes the faster one.
        save_gathered: a column-parallel layer keeps its gathered input for the weight gradient.
    """

    method: Method | Literal["auto"] = "p2p"
    pattern: Pattern = "direct"
    chunks_per_rank: int | None = None
    split: Split | None = None
    save_gathered: bool = False


@dataclass(frozen=True)
class Linear:
    """A linear layer on the ranks of one tensor parallel group, under sequence parallelism.

    One rank is played for all. That is exact where rows divide evenly over ranks and chunks; where they do not, all
    ranks are taken to have rank 0's pieces, which differ from others' by one row.

    Attributes:
        model: costs.
        link: what joins the group.
        choice: how it is overlapped.
        rows: gathered rows.
        out_features: columns of this rank's output, `n`.
        in_features: columns of this rank's input, `k`.
    """

    model: CostModel
    link: Link
    choice: Choice
    rows: int
    out_features: int
    in_features: int

    def column_forward(self) -> Played:
        """`y = all_gather(x_shard) @ w.T`."""
        return self._gather(self._gemm(self.out_features, self.in_features), self.in_features)

    def row_forward(self) -> Played:
        """`y_shard = reduce_scatter(x @ w.T)`."""
        return self._scatter(self._gemm(self.out_features, self.in_features), self.out_features)

    def column_backward(self) -> Played:
        """`dx_shard = reduce_scatter(dy @ w)`, `dw = dy.T @ all_gather(x_shard)`."""
        width = self.in_features
        dgrad = self._gemm(self.in_features, self.out_features)
        method = self.choice.method
        # Gathered again for wgrad, or kept: then nothing is moved for it.
        gather = Moves() if self.choice.save_gathered else self._collective("all_gather", [self.rows], width)
        needs = tuple(range(len(gather.messages)))
        if method in ("serial", "compiled") or self.link.size == 1:
            again: list[_Step] = [("all_gather", width)] * len(needs)
            return self._bulk([*again, ("compute", dgrad.whole), ("reduce_scatter", width), ("compute", self.wgrad_us)])
        if method in ("p2p", "fused", "sliced"):
            behind = self._beside(gather, (Work((NOTHING,), needs=needs),), (self.wgrad_us,))
            candidates = []
            for ahead in self._scatter_streams(dgrad, width):
                last = len(ahead.work_us) - (not ahead.plan.work[-1].chunks)
                order = [(0, k) for k in range(last)] + [(1, 0)] + [(0, k) for k in range(last, len(ahead.work_us))]
                candidates.append(Program((ahead, behind), tuple(order)))
            return self._best(candidates)
        # Both collectives beside the GEMM that does not wait for them.
        moves = gather + self._collective("reduce_scatter", [self.rows], width, after=1)
        work = (Work((NOTHING,)), Work((NOTHING,), needs=needs), Work((), adds=(len(needs),)))
        stream = self._beside(moves, work, (dgrad.whole, self.wgrad_us, 0.0))
        return self._play(in_order(stream), "collective")

    def row_backward(self) -> Played:
        """`dx = all_gather(dy_shard) @ w`, `dw = all_gather(dy_shard).T @ x`."""
        width = self.out_features
        dgrad = self._gemm(self.in_features, self.out_features)
        if self.choice.method in ("serial", "megatron") or self.link.size == 1:
            return self._bulk([("all_gather", width), ("compute", dgrad.whole), ("compute", self.wgrad_us)])
        return self._gather(dgrad, width, then_us=self.wgrad_us)

    def fastest(self, column: bool) -> Linear:
        """What `method: auto` settles on: `p2p` where forward and backward together win more than its margin of 2 %.

        Args:
            column: a column-parallel layer, else a row-parallel one.
        """
        asked = self.choice.chunks_per_rank
        counts = (None, *_CHUNKS) if asked is None else (asked,)
        cut = [replace(self, choice=replace(self.choice, method="p2p", chunks_per_rank=count)) for count in counts]
        ours, stock = min(cut, key=lambda one: one._both_us(column)), replace(self, choice=Choice("megatron"))
        return ours if ours._both_us(column) < (1 - MARGIN) * stock._both_us(column) else stock

    def _both_us(self, column: bool) -> float:
        passes = (self.column_forward, self.column_backward) if column else (self.row_forward, self.row_backward)
        return sum(one().time_us for one in passes)

    @cached_property
    def wgrad_us(self) -> float:
        """`dw = dy.T @ x` over all rows."""
        return self.model.weight_gradient_us(self.out_features, self.in_features, self.rows)

    @property
    def _ring_latency(self) -> float:
        return self.link.ring_latency_us + self.model.launch_us

    def _gemm(self, n: int, k: int) -> Gemm:
        return Gemm(self.model, self.rows, n, k)

    def _bytes(self, rows: float, width: int) -> float:
        return rows * width * self.model.item_bytes

    def _gather(self, gemm: Gemm, width: int, then_us: float = 0.0) -> Played:
        method = self.choice.method
        if method in ("serial", "megatron") or self.link.size == 1:
            return self._bulk([("all_gather", width), ("compute", gemm.whole + then_us)])
        if method == "sliced":
            moves = self._collective("all_gather", self._slices(), width)
            work = tuple(Work((NOTHING,), needs=(k,)) for k in range(SLICES))
            sliced = self._beside(moves, work, [gemm.rows_us(rows) for rows in self._slices()])
            return self._play(in_order(*and_then(sliced, then_us)), "collective")
        if method == "userbuffers":
            streams: Iterable[Stream] = [self._stream("all_gather", gemm.rows_us, width, "ring", 1, "all")]
        elif method == "fused":
            streams = [
                self._stream("all_gather", gemm.share_us, width, "direct", c, "all", launch_us=gemm.launch_us)
                for c in self._chunks()
            ]
        else:
            cuts = self._cuts("all_gather", width)
            streams = [self._stream("all_gather", gemm.rows_us, width, self.choice.pattern, c, s) for c, s in cuts]
        if method == "compiled":
            copy_us = self.model.memory_us(2 * self._bytes(self.rows / self.link.size, width))
            streams = [begun_by(stream, copy_us) for stream in streams]
        return self._best([in_order(*and_then(stream, then_us)) for stream in streams])

    def _scatter(self, gemm: Gemm, width: int) -> Played:
        method = self.choice.method
        if method in ("serial", "megatron") or self.link.size == 1:
            return self._bulk([("compute", gemm.whole), ("reduce_scatter", width)])
        kind: Literal["copy", "collective"] = "collective" if method in ("sliced", "userbuffers") else "copy"
        return self._best([in_order(stream) for stream in self._scatter_streams(gemm, width)], kind)

    def _scatter_streams(self, gemm: Gemm, width: int) -> list[Stream]:
        method = self.choice.method
        if method in ("sliced", "userbuffers"):
            moves = self._collective("reduce_scatter", self._slices(), width, after=1, each=1)
            work = (*(Work((NOTHING,)) for _ in range(SLICES)), Work((), adds=tuple(range(SLICES))))
            return [self._beside(moves, work, [*(gemm.rows_us(rows) for rows in self._slices()), 0.0])]
        if method == "fused":
            return [
                self._stream("reduce_scatter", gemm.share_us, width, "direct", c, "all", launch_us=gemm.launch_us)
                for c in self._chunks()
            ]
        cuts = self._cuts("reduce_scatter", width)
        return [self._stream("reduce_scatter", gemm.rows_us, width, self.choice.pattern, c, s) for c, s in cuts]

    def _slices(self) -> list[int]:
        layout = ChunkLayout(self.rows, SLICES)
        return [layout.shard_rows(index) for index in range(SLICES)]

    def _chunks(self) -> tuple[int, ...]:
        return _CHUNKS if self.choice.chunks_per_rank is None else (self.choice.chunks_per_rank,)

    def _cuts(self, collective: Collective, width: int) -> list[tuple[int, Split]]:
        splits: tuple[Split, ...] = ("edge", "all") if self.choice.split is None else (self.choice.split,)
        chunks = self.choice.chunks_per_rank
        if chunks is None:
            chunks = default_chunks(collective, self.link.size, self.rows, int(self._bytes(1, width)))
        return [(chunks, split) for split in splits[: None if chunks > 1 else 1]]

    def _collective(self, kind: Collective, rows: Sequence[int], width: int, *, after: int = 0, each: int = 0) -> Moves:
        """Collectives over so many rows each; number k may start after `after + each * k` pieces of work."""
        part = (self.link.size - 1) / self.link.size
        slower = self.link.collective_rate / self.link.scatter_rate if kind == "reduce_scatter" else 1.0
        return Moves(
            tuple(Message(NOTHING, 0, NOTHING, 0, after_work=after + each * k) for k in range(len(rows))),
            tuple(self._bytes(piece, width) * part for piece in rows),
            (slower,) * len(rows),
        )

    def _beside(self, moves: Moves, work: Sequence[Work], times: Sequence[float]) -> Stream:
        """Collectives beside GEMMs, with nothing to add."""
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
        rank: int = 0,
        launch_us: float = 0.0,
    ) -> Stream:
        """The plugin's own plan of one rank with the times of its GEMMs, additions and messages."""
        build = all_gather_plan if collective == "all_gather" else reduce_scatter_plan
        plan = build(self.link.size, rank, chunks_per_rank=chunks, pattern=pattern, split=split)
        layout = plan.layout(self.rows)
        times, additions = [], []
        for index, work in enumerate(plan.work):
            gemm_us = time(sum(layout.num_chunk_rows(chunk) for chunk in work.chunks)) if work.chunks else 0.0
            times.append(gemm_us + (launch_us if index == 0 else 0.0))
            added = sum(layout.num_chunk_rows(plan.messages[k].recv) for k in work.adds)
            # Terms are read once, the sum is read and written.
            touched = added + 2 * min(added, layout.shard_rows(rank)) if added else 0
            additions.append(self.model.memory_us(self._bytes(touched, width)))
        sizes = tuple(self._bytes(layout.num_chunk_rows(e.send), width) for e in plan.messages)
        return Stream(plan, tuple(times), tuple(additions), sizes)

    def _bulk(self, steps: Sequence[_Step]) -> Played:
        """Collectives and GEMMs strictly in turn."""
        moves = Moves()
        work: list[Work] = []
        times: list[float] = []
        needs: tuple[int, ...] = ()
        for what, amount in steps:
            if what == "compute":
                work.append(Work((NOTHING,), needs=needs))
                times.append(amount)
                needs = ()
            elif self.link.size > 1:
                needs = (len(moves.messages),)
                moves += self._collective(what, [self.rows], int(amount), after=len(work))
        return self._play(in_order(self._beside(moves, work, times)), "collective")

    def _best(self, programs: list[Program], kind: Literal["copy", "collective"] = "copy") -> Played:
        return min((self._play(program, kind) for program in programs), key=lambda played: played.time_us)

    def _play(self, program: Program, kind: Literal["copy", "collective"]) -> Played:
        return play([program], self.model, self.link, kind=kind, fold=True)

    def unfolded(self, collective: Collective) -> Played:
        """A `p2p` forward with every rank of the group played by itself.

        Args:
            collective: `all_gather` for the column-parallel, `reduce_scatter` for the row-parallel forward.
        """
        gemm = self._gemm(self.out_features, self.in_features)
        width = self.in_features if collective == "all_gather" else self.out_features
        groups = [
            [
                in_order(self._stream(collective, gemm.rows_us, width, self.choice.pattern, c, s, rank=rank))
                for rank in range(self.link.size)
            ]
            for c, s in self._cuts(collective, width)
        ]
        return min((play(group, self.model, self.link) for group in groups), key=lambda played: played.time_us)
