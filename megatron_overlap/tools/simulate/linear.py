"""Simulated column- and row-parallel linear layers with each overlap method, forward and backward.

`p2p` simulates the plugin's schedules. On a device its messages follow one another: copies, each with the batches of
flags of `comm.symmetric.copies`, where the link has copy engines, else NCCL's kernels. The other methods consist of the
same parts. A collective is one message of `(R-1)/R` of the buffer with the latency of `R-1` hops.

Over several nodes `p2p` by copies and `fused` run inside each node, and NCCL's messages between nodes, in the order of
`ops.tensor_parallel.nodes`. `userbuffers` and `compiled` need one node (NVIDIA/TransformerEngine issue 1071).

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Literal

from megatron_overlap.autotune.cost_model import CostModel, Link, Mover
from megatron_overlap.autotune.search import MARGIN
from megatron_overlap.schedules import ChunkLayout, Plan, all_gather_plan, reduce_scatter_plan
from megatron_overlap.schedules.gather_scatter import Nodes
from megatron_overlap.schedules.heuristics import SHALLOW_DEPTH, default_chunks, default_slices_per_gemm
from megatron_overlap.schedules.plan import Pattern, Split, end_of_call
from megatron_overlap.tools.simulate.event_simulator import SimulatedRun, Stream, Transfer, run_streams

Method = Literal["serial", "stock", "sliced", "userbuffers", "fused", "p2p", "compiled"]

SLICES = 4
"""Slices of a sliced collective, and default splits of TransformerEngine's pipelined reduce-scatter."""

_CHUNKS: tuple[int, ...] = (1, 2, 4, 8)
_Collective = Literal["all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class LinearOverlap:
    """Overlap method of a linear layer. `auto` is the faster of `stock` and `p2p`, see `fastest`.

    `chunks_per_rank` are those of `p2p` and `fused`. None: the heuristics for `p2p`, the fastest of 1, 2, 4 and 8 for
    `fused`.
    """

    method: Method | Literal["auto"] = "p2p"
    pattern: Pattern = "direct"  # message pattern of `p2p`
    chunks_per_rank: int | None = None
    split: Split | None = None  # of `p2p`; None: `edge` on a device, else the faster one
    # Of `serial`, `stock` and `compiled`: a column-parallel layer saves its gathered input for the weight gradient.
    save_gathered: bool = False
    copies: bool = True  # messages of `p2p` are copies by the copy engines of the link, if it has some


def unsupported_reason(method: str, link: Link) -> str | None:
    """Return why the ranks of `link` cannot use a method; None if they can."""
    if method in ("userbuffers", "compiled") and link.per_node < link.size:
        return f"method: {method}: {link.size} ranks are on several nodes; use ranks of one node"
    if method == "fused" and link.per_node < min(2, link.size):
        return f"method: fused: {link.size} ranks; use several ranks on each node, the same number on all"
    return None


@dataclass(frozen=True)
class Linear:
    """A linear layer on the ranks of one tensor parallel group, under sequence parallelism.

    The simulation runs rank 0 for all ranks. That is exact if ranks and chunks divide the rows evenly. Otherwise the
    chunks of other ranks differ from those of rank 0 by one row.
    """

    model: CostModel
    link: Link
    overlap: LinearOverlap
    rows: int  # those of the gathered activation
    out_features: int  # n: columns of this rank's output
    in_features: int  # k: columns of this rank's input

    def __post_init__(self) -> None:
        if reason := unsupported_reason(self.overlap.method, self.link):
            raise ValueError(reason)

    def column_forward(self) -> SimulatedRun:
        """`y = all_gather(x_shard) @ w.T`."""
        return self._gather(self.out_features, self.in_features)

    def row_forward(self) -> SimulatedRun:
        """`y_shard = reduce_scatter(x @ w.T)`."""
        return self._scatter(self.out_features, self.in_features)

    def column_backward(self) -> SimulatedRun:
        """`dx_shard = reduce_scatter(dy @ w)`, `dw = dy.T @ all_gather(x_shard)`."""
        width, method = self.in_features, self.overlap.method
        if method in ("p2p", "fused", "sliced") and self.link.size > 1:
            return self._scatter(width, self.out_features, wgrad=True)
        steps = Stream()
        gathered = () if self.overlap.save_gathered else self._send(steps, "all_gather", self.rows, width)
        # Unless all is sequential, each collective overlaps the GEMM that does not depend on it.
        sequential = method in ("serial", "compiled")
        steps.compute(self.model.gemm_us(self.rows, width, self.out_features), *(gathered if sequential else ()))
        scattered = self._send(steps, "reduce_scatter", self.rows, width)
        steps.compute(self.wgrad_us, *(scattered if sequential else gathered))
        steps.compute(0.0, *scattered)
        return self._fastest("collective", [steps])

    def row_backward(self) -> SimulatedRun:
        """`dx = all_gather(dy_shard) @ w`, `dw = all_gather(dy_shard).T @ x`."""
        return self._gather(self.in_features, self.out_features, wgrad=True)

    def enqueue_us(self, run: SimulatedRun) -> float:
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
    def _by_copies(self) -> bool:
        return self._queued and self.overlap.copies and self.model.mover(self.link) == "copy"

    @property
    def _mover(self) -> Mover:
        return "message" if self._queued and not self._by_copies else "copy"

    @property
    def _flag_us(self) -> float:
        """Time of the computing queue to wait for the flag of a message."""
        return self.link.flag_us if self._by_copies else 0.0

    @cached_property
    def _nodes(self) -> Nodes:
        """Placement of the ranks; one node where messages between nodes are as those inside."""
        size, per_node = self.link.size, self.link.per_node
        if 1 < per_node < size:
            inside = replace(self, link=self.model.link(per_node))
            if inside._by_copies or self.overlap.method == "fused":
                return Nodes(size // per_node, per_node)
        return Nodes(1, size)

    def _inside(self, node: int) -> "Linear":
        """The layer on the rows and the ranks of a node."""
        if self._nodes.num_nodes == 1:
            return self
        start, stop = self._nodes.rows(self.rows, node)
        return replace(self, link=self.model.link(self._nodes.per_node), rows=stop - start)

    def _send_along_rail(self, stream: Stream, width: int, after_work: int = 0) -> int:
        """Adds the message of the rows of one rank to another node; returns its number."""
        nodes, inside = self._nodes, self._inside(0).link
        rail = self.model.link(nodes.num_nodes, nodes.per_node)
        num_bytes, stretch = self._shard_bytes(width), inside.copy_rate / rail.copy_rate
        queued_us = self.model.queued_us(rail, "message")
        return stream.add(Transfer(num_bytes, after_work, None, stretch, 0.0, queued_us, "message", between_nodes=True))

    def _arriving(self, stream: Stream, width: int) -> Iterator["Linear"]:
        """Yields the layer on the rows of each node, own rows first, after the message along the rail."""
        plan, sent = self._nodes.gather(0), list[int]()
        for number, work in enumerate(plan.work, 1):
            while len(sent) < len(plan.messages) and plan.messages[len(sent)].not_before <= number:
                sent.append(self._send_along_rail(stream, width))
            if work.needs:
                stream.compute(0.0, *(sent[message] for message in work.needs))
            yield self._inside(work.chunks[0].owner)

    def _own_rows_us(self, width: int) -> float:
        """Copy of the own rows: beside the gathered ones, which wgrad reads as one tensor, or for the peers."""
        return self.model.memory_us(2 * self._bytes(self.rows / self.link.size, width))

    def _bytes(self, rows: float, width: int) -> float:
        return rows * width * self.model.item_bytes

    def _shard_bytes(self, width: int) -> float:
        """Bytes of the rows that rank 0 owns."""
        return self._bytes(ChunkLayout(self.rows, self.link.size).shard_rows(0), width)

    def _gather(self, n: int, k: int, *, wgrad: bool = False) -> SimulatedRun:
        """An all-gather of rows of width k and the GEMM to width n, then the weight gradient."""
        if slices := self._slices("all_gather"):
            steps = Stream()
            gathered = [self._send(steps, "all_gather", rows, k) for rows in slices]
            for messages, rows in zip(gathered, slices, strict=True):
                steps.compute(self.model.gemm_us(rows, n, k), *messages)
            steps.compute(self.wgrad_us if wgrad else 0.0)
            return self._fastest("collective", [steps])
        streams = []
        for plan in self._inside(0)._plans("all_gather", k):
            stream = Stream()
            for inside in self._arriving(stream, k):
                inside._run(stream, plan, n, k, wgrad=wgrad)
            streams.append(stream)
        return self._fastest(self._inside(0)._mover, streams)

    def _scatter(self, n: int, k: int, *, wgrad: bool = False) -> SimulatedRun:
        """A GEMM from width k to width n, and the reduce-scatter of its result. Before its sums the weight gradient."""
        if slices := self._slices("reduce_scatter"):
            steps, sent = Stream(), list[int]()
            gathered = self._send(steps, "all_gather", self.rows, self.in_features) if wgrad else ()
            for rows in slices:
                steps.compute(self.model.gemm_us(rows, n, k))
                sent += self._send(steps, "reduce_scatter", rows, n)
            steps.compute(self.wgrad_us if wgrad else 0.0, *gathered)
            steps.compute(0.0, *sent)
            return self._fastest("collective", [steps])
        streams, rail, shard_bytes = [], self._nodes.scatter(0), self._shard_bytes(n)
        concurrent = self._queued or len(rail.work) == 1  # see `LinearMethod.concurrent`
        for plan in self._inside(0)._plans("reduce_scatter", n, hidden=wgrad):
            stream, sums = Stream(), list[int]()
            wgrads = self._wgrads(stream) if wgrad else repeat(None)
            next(wgrads)
            for number, work in enumerate(rail.work, 1):
                if work.adds:
                    if not concurrent:
                        next(wgrads)
                    stream.compute(self.model.memory_us((len(work.adds) + 2) * shard_bytes, "sum"), *sums)
                    continue
                inside, before_sums = self._inside(work.chunks[0].owner), None
                if work.chunks[0].owner == rail.rank and concurrent:
                    next(wgrads)
                    before_sums = wgrads if wgrad else None
                inside._run(stream, plan, n, k, before_sums)
                for message in rail.messages:
                    if message.after_work == number:
                        stream.compute(self.model.memory_us(2 * shard_bytes))  # from the result of the node
                        sums.append(self._send_along_rail(stream, n, len(stream.work)))
            streams.append(stream)
        return self._fastest(self._inside(0)._mover, streams)

    def _wgrads(self, stream: Stream) -> Iterator[None]:
        """Adds the weight gradient step by step: a first message, messages inside the own node, and all else."""
        if self._nodes.num_nodes == 1 and not self._queued:
            gathered = self._send(stream, "all_gather", self.rows, self.in_features)
            yield
            yield
            stream.compute(self.wgrad_us, *gathered)
            yield
        arriving = self._arriving(stream, self.in_features)
        first = next(arriving)
        yield
        started = first._gather_rows(stream, 0 if self._queued else len(stream.work))
        if self._queued:
            yield
        stream.compute(*started)
        for inside in arriving:
            stream.compute(*inside._gather_rows(stream, len(stream.work)))
        yield

    def _gather_rows(self, stream: Stream, after_work: int) -> tuple[float, *tuple[int, ...]]:
        """Adds the messages that gather the input; returns the time of the weight gradient, and what it needs."""
        width = self.in_features
        plan = self._plans("all_gather", width)[0]
        sent = self._send_messages(stream, plan, width, [after_work])
        return len(sent) * self._flag_us + self._own_rows_us(width) + self.wgrad_us, *sent

    def _slices(self, collective: _Collective) -> list[int]:
        """Rows of each collective; empty: the ranks send messages."""
        method = self.overlap.method
        if method in ("serial", "stock") or self.link.size == 1:
            return [self.rows]
        sliced = method == "sliced" or (method == "userbuffers" and collective == "reduce_scatter")
        layout = ChunkLayout(self.rows, SLICES)
        return [layout.shard_rows(index) for index in range(SLICES)] if sliced else []

    def _send(self, steps: Stream, kind: _Collective, rows: int, width: int) -> tuple[int, ...]:
        """Adds a collective over so many rows, after all steps so far, if the group has several ranks."""
        link = self.link
        if link.size == 1:
            return ()
        num_bytes = self._bytes(rows, width) * (link.size - 1) / link.size
        slower = link.collective_rate / link.scatter_rate if kind == "reduce_scatter" else 1.0
        latency_us = link.ring_latency_us + self.model.launch_us
        return (steps.send(Transfer(num_bytes, stretch=slower, latency_us=latency_us)),)

    def _plans(self, collective: _Collective, width: int, *, hidden: bool = True) -> list[Plan]:
        """The plans of rank 0, one for each number of chunks and split that may be the fastest.

        `hidden`: as of `default_slices_per_gemm`.
        """
        overlap, size = self.overlap, self.link.size
        pattern: Pattern = "direct"
        splits: tuple[Split, ...] = ("all",)
        counts = _CHUNKS if overlap.chunks_per_rank is None else (overlap.chunks_per_rank,)
        if overlap.method == "userbuffers":
            pattern, counts = "ring", (1,)
        elif overlap.method != "fused":
            pattern = overlap.pattern
            if overlap.chunks_per_rank is None:
                row_bytes, engines = int(self._bytes(1, width)), self._by_copies
                counts = (default_chunks(collective, size, self.rows, row_bytes, copy_engines=engines),)
            splits = ("edge",) if self._queued or counts == (1,) else ("edge", "all")
            splits = splits if overlap.split is None else (overlap.split,)
        build = all_gather_plan if collective == "all_gather" else reduce_scatter_plan
        joins = self._by_copies and counts == (1,) and splits == ("edge",) and pattern == "direct"
        slices = default_slices_per_gemm(size, self.rows, hidden=hidden) if joins else 1
        return [
            build(size, 0, chunks_per_rank=chunks, pattern=pattern, split=split, slices_per_gemm=slices)
            for chunks in counts
            for split in splits
        ]

    def _run(
        self, stream: Stream, plan: Plan, n: int, k: int, before_sums: Iterator[None] | None = None, wgrad: bool = False
    ) -> None:
        """Adds the GEMMs, messages and additions of a plan, and a step of `before_sums` before the last additions.

        `wgrad`: then also the weight gradient, in two parts where `P2PGather` makes two.
        """
        gathers, fused, calls = plan.collective == "all_gather", self.overlap.method == "fused", self._calls(plan)
        width, layout, gemm_us = k if gathers else n, plan.layout(self.rows), self.model.gemm_us
        sent = [number for number, call in enumerate(calls, len(stream.messages)) for _ in call]
        # See `add_early` of `PipelinedReduceScatter`.
        shallow = not gathers and k <= SHALLOW_DEPTH
        early = shallow and self._queued and plan.pattern == "direct" and self.link.size > 2

        def add(received: Sequence[int]) -> None:
            num_last = max(plan.chunks_per_rank, len(calls[-1])) if early else 0
            for added in (received[:-num_last], received[-num_last:]) if early else (received,):
                if added:
                    rows = sum(layout.num_chunk_rows(plan.messages[message].recv) for message in added)
                    # Before an early sum most messages have arrived long ago.
                    flags_us = (1 if early else len(added)) * self._flag_us
                    time_us = self._added_us(rows, layout.shard_rows(0), width, early)
                    stream.compute(time_us + flags_us, *(sent[message] for message in added))

        if gathers and self.overlap.method == "compiled":
            stream.compute(self._own_rows_us(k))
        done, num_rows, left = [len(stream.work)], 0, self.rows
        early_wgrad = wgrad and self._by_copies and n <= SHALLOW_DEPTH
        for index, work in enumerate(plan.work):
            if work.chunks:
                rows, launch_us = sum(layout.num_chunk_rows(chunk) for chunk in work.chunks), 0.0
                product_us = gemm_us(rows, n, k)
                if fused:  # a share of one GEMM
                    product_us = (gemm_us(self.rows, n, k) - self.model.launch_us) * rows / self.rows
                    launch_us = self.model.launch_us if index == 0 else 0.0
                flags_us = self._flag_us if work.needs else 0.0
                stream.compute(product_us + flags_us + launch_us, *(sent[message] for message in work.needs))
                add(work.adds)
                num_rows += rows
                if early_wgrad and 2 * num_rows >= self.rows:
                    stream.compute(self._own_rows_us(k) + gemm_us(self.out_features, self.in_features, num_rows))
                    early_wgrad, left = False, self.rows - num_rows
                done.append(len(stream.work))
        # As `PipelinedReduceScatter` with `work_follows`.
        num_first = 1 if before_sums is not None and plan.pattern != "ring" else len(calls)
        self._send_messages(stream, plan, width, done, stop=num_first)
        if before_sums is not None:
            next(before_sums)
        num_sent = sum(map(len, calls[:num_first]))
        sent[num_sent:] = self._send_messages(stream, plan, width, done, start=num_first)
        for work in plan.work:
            if not work.chunks:
                add(work.adds)
        if wgrad:
            own_rows_us = self._own_rows_us(k) if self._queued and left == self.rows else 0.0
            stream.compute(own_rows_us + gemm_us(self.out_features, self.in_features, left))

    def _calls(self, plan: Plan) -> list[range]:
        """The messages of each call, by number."""
        calls, first = list[range](), 0
        while first < len(plan.messages):
            stop = end_of_call(plan.messages, first) if self._queued else first + 1
            calls.append(range(first, stop))
            first = stop
        return calls

    def _send_messages(
        self, stream: Stream, plan: Plan, width: int, done: Sequence[int], start: int = 0, stop: int | None = None
    ) -> list[int]:
        """Adds calls of a plan; returns that of each message. `done`: works of the stream by GEMMs of the plan."""
        layout, sent = plan.layout(self.rows), list[int]()
        for call in self._calls(plan)[start:stop]:
            messages, latency_us, queued_us = [plan.messages[index] for index in call], None, 0.0
            if self._queued:
                # The first copy to a peer also waits until its buffer is free.
                waits = {message.to for message in messages} - {other.to for other in plan.messages[: call.start]}
                num_flags = len(call) + len(waits)
                latency_us, queued_us = 0.0, self.model.queued_us(self.link, self._mover, num_flags, len(call))
            num_bytes = self._bytes(sum(layout.num_chunk_rows(message.send) for message in messages), width)
            # A message that forwards is alone, and follows an earlier one of this plan.
            after = next((sent[other] for other in messages[0].after_messages), None)
            work = done[messages[0].after_work]
            transfer = Transfer(num_bytes, work, after, 1.0, latency_us, queued_us, num_messages=len(call))
            sent += [stream.add(transfer)] * len(call)
        return sent

    def _added_us(self, received: int, own: int, width: int, early: bool) -> float:
        """Time to add received rows to own rows; `early`: in one of two sums, which write or read an fp32 total."""
        if early:
            return self.model.memory_us(self._bytes(received + own, width) + 4 * own * width, "sum")
        if self._queued and self.overlap.pattern != "ring":
            return self.model.memory_us(self._bytes(received + 2 * own, width), "sum")
        # An addition reads its terms once and reads and writes the sum.
        return self.model.memory_us(self._bytes(received + 2 * min(received, own), width))

    def _fastest(self, kind: Mover, streams: Sequence[Stream]) -> SimulatedRun:
        runs = (run_streams([stream], self.model, self._inside(0).link, kind) for stream in streams)
        return min(runs, key=lambda simulated: simulated.time_us)


@lru_cache(maxsize=8192)
def simulated(linear: Linear, column: bool, backward: bool) -> SimulatedRun:
    """Simulated pass of a column- or row-parallel layer, cached by shape."""
    if column:
        return linear.column_backward() if backward else linear.column_forward()
    return linear.row_backward() if backward else linear.row_forward()


@lru_cache(maxsize=8192)
def fastest(linear: Linear, column: bool, forward_only: bool = False) -> Linear:
    """The method that `auto` selects: `p2p` if its passes gain more than 2 %, else `stock`."""
    requested = linear.overlap.chunks_per_rank
    counts = (None, *_CHUNKS) if requested is None else (requested,)
    overlaps = [replace(linear.overlap, method="p2p", chunks_per_rank=count) for count in counts]

    def passes_us(one: Linear) -> float:
        runs = [simulated(one, column, backward) for backward in ((False,) if forward_only else (False, True))]
        return sum(max(run.time_us, one.enqueue_us(run)) for run in runs)

    p2p = min((replace(linear, overlap=each) for each in overlaps), key=passes_us)
    stock = replace(linear, overlap=LinearOverlap("stock"))
    return p2p if passes_us(p2p) < (1 - MARGIN) * passes_us(stock) else stock
