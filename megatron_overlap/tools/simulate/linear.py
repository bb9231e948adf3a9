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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, get_args

from megatron_overlap.autotune.cost_model import CostModel, Link, Mover
from megatron_overlap.autotune.search import MARGIN
from megatron_overlap.schedules import ChunkLayout, Plan, all_gather_plan, reduce_scatter_plan
from megatron_overlap.schedules.heuristics import SHALLOW_DEPTH, default_chunks
from megatron_overlap.schedules.plan import Pattern, Split
from megatron_overlap.tools.simulate.event_simulator import SimulatedRun, Stream, Transfer, run_streams

Method = Literal["serial", "stock", "sliced", "userbuffers", "fused", "p2p", "compiled"]
METHODS: tuple[Method, ...] = get_args(Method)

SLICES = 4
"""Slices of a sliced collective, and default splits of TransformerEngine's pipelined reduce-scatter."""

_CHUNKS = (1, 2, 4, 8)
_Collective = Literal["all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class LinearOverlap:
    """Overlap method of a linear layer.

    Attributes:
        method: see the table above; `auto` is the faster of `stock` and `p2p`, see `fastest`.
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
    chunks of other ranks differ from those of rank 0 by one row. `rows` are those of the gathered activation,
    `out_features` (n) and `in_features` (k) the columns of this rank's output and input.
    """

    model: CostModel
    link: Link
    overlap: LinearOverlap
    rows: int
    out_features: int
    in_features: int

    def column_forward(self) -> SimulatedRun:
        """`y = all_gather(x_shard) @ w.T`."""
        return self._gather(self.out_features, self.in_features)

    def row_forward(self) -> SimulatedRun:
        """`y_shard = reduce_scatter(x @ w.T)`."""
        kind: Mover = "collective" if self._slices("reduce_scatter") else self._mover
        return self._fastest(kind, self._scatters(self.out_features, self.in_features))

    def column_backward(self) -> SimulatedRun:
        """`dx_shard = reduce_scatter(dy @ w)`, `dw = dy.T @ all_gather(x_shard)`."""
        width, method, saved = self.in_features, self.overlap.method, self.overlap.save_gathered
        dgrad_us = self.model.gemm_us(self.rows, width, self.out_features)
        steps = self._collectives()
        # wgrad needs the gathered input: gathered again, or saved by the forward.
        gathered = () if saved else self._send(steps, "all_gather", self.rows, width)
        if method in ("p2p", "fused", "sliced") and self.link.size > 1:
            steps.compute(self.wgrad_us, *gathered)
            wgrad = self._regather() if self._queued and gathered else steps
            return self._fastest(self._mover, self._scatters(width, self.out_features), wgrad)
        # Unless all is sequential, each collective overlaps the GEMM that does not depend on it.
        sequential = method in ("serial", "compiled")
        steps.compute(dgrad_us, *(gathered if sequential else ()))
        scattered = self._send(steps, "reduce_scatter", self.rows, width)
        steps.compute(self.wgrad_us, *(scattered if sequential else gathered))
        steps.compute(0.0, *scattered)
        return self._fastest("collective", [steps])

    def row_backward(self) -> SimulatedRun:
        """`dx = all_gather(dy_shard) @ w`, `dw = all_gather(dy_shard).T @ x`."""
        copy_us = self._own_rows_us(self.out_features) if self._queued and self.link.size > 1 else 0.0
        return self._gather(self.in_features, self.out_features, then_us=self.wgrad_us + copy_us)

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
    def _copy_us(self) -> float | None:
        """Fixed time of a copy; None: other messages."""
        return self.link.copy_us if self._queued and self.overlap.copies else None

    @property
    def _mover(self) -> Mover:
        return "message" if self._queued and self._copy_us is None else "copy"

    def _queued_us(self, plan: Plan) -> tuple[float, ...]:
        """Fixed times of the messages. The first copy to each peer waits until the buffer of the peer is free."""
        copy_us = self._copy_us
        if copy_us is None:  # a kernel of NCCL; the next one starts when it has ended
            return (self.link.latency_us + self.model.launch_us,) * len(plan.messages)
        first = {message.to: index for index, message in reversed(list(enumerate(plan.messages)))}
        flags = [1 + (first[message.to] == index) for index, message in enumerate(plan.messages)]
        return tuple(copy_us + count * self.link.flag_us for count in flags)

    def _own_rows_us(self, width: int) -> float:
        """Copy of the own rows: beside the gathered ones, which wgrad reads as one tensor, or for the peers."""
        return self.model.memory_us(2 * self._bytes(self.rows / self.link.size, width))

    def _regather(self) -> Stream:
        """The gather of the input in backward, and the weight gradient after its last message."""
        width = self.in_features
        gather = self._streams("all_gather", 0, width)[0]
        flags_us = sum(time_us for time_us, _ in gather.work)
        gather.work.clear()
        gather.compute(flags_us + self._own_rows_us(width) + self.wgrad_us, *range(len(gather.messages)))
        return gather

    def _bytes(self, rows: float, width: int) -> float:
        return rows * width * self.model.item_bytes

    def _gather(self, n: int, k: int, then_us: float = 0.0) -> SimulatedRun:
        """An all-gather of rows of width k and the GEMM to width n, then other work."""
        kind: Mover
        if slices := self._slices("all_gather"):
            steps = self._collectives()
            gathered = [self._send(steps, "all_gather", rows, k) for rows in slices]
            for messages, rows in zip(gathered, slices, strict=True):
                steps.compute(self.model.gemm_us(rows, n, k), *messages)
            streams, kind = [steps], "collective"
        else:
            streams, kind = self._streams("all_gather", n, k), self._mover
        for stream in streams:
            stream.compute(then_us)
        return self._fastest(kind, streams)

    def _scatters(self, n: int, k: int) -> list[Stream]:
        """A GEMM from width k to width n, and the reduce-scatter of its result."""
        slices = self._slices("reduce_scatter")
        if not slices:
            return self._streams("reduce_scatter", n, k)
        steps, sent = self._collectives(), list[int]()
        for rows in slices:
            steps.compute(self.model.gemm_us(rows, n, k))
            sent += self._send(steps, "reduce_scatter", rows, n)
        steps.last_sums = steps.compute(0.0, *sent)
        return [steps]

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
        if self.link.size == 1:
            return ()
        part = (self.link.size - 1) / self.link.size
        slower = self.link.collective_rate / self.link.scatter_rate if kind == "reduce_scatter" else 1.0
        return (steps.send(self._bytes(rows, width) * part, slower),)

    def _collectives(self) -> Stream:
        return Stream(self.link.ring_latency_us + self.model.launch_us)

    def _streams(self, collective: _Collective, n: int, k: int) -> list[Stream]:
        """The point-to-point streams, one for each number of chunks and split that may be the fastest."""
        overlap, chunks = self.overlap, self.overlap.chunks_per_rank
        if overlap.method == "userbuffers":
            return [self._stream(collective, n, k, "ring", 1, "all")]
        if overlap.method == "fused":
            counts = _CHUNKS if chunks is None else (chunks,)
            return [self._stream(collective, n, k, "direct", count, "all") for count in counts]
        splits: tuple[Split, ...] = ("edge",) if self._queued else ("edge", "all")
        if overlap.split is not None:
            splits = (overlap.split,)
        if chunks is None:
            width = k if collective == "all_gather" else n
            row_bytes, engines = int(self._bytes(1, width)), self._copy_us is not None
            chunks = default_chunks(collective, self.link.size, self.rows, row_bytes, copy_engines=engines)
        splits = splits[: None if chunks > 1 else 1]
        return [self._stream(collective, n, k, overlap.pattern, chunks, split) for split in splits]

    def _stream(self, collective: _Collective, n: int, k: int, pattern: Pattern, chunks: int, split: Split) -> Stream:
        """The plugin's plan of one rank with the times of its GEMMs, additions and messages."""
        gathers, fused = collective == "all_gather", self.overlap.method == "fused"
        width, build = (k, all_gather_plan) if gathers else (n, reduce_scatter_plan)
        plan = build(self.link.size, 0, chunks_per_rank=chunks, pattern=pattern, split=split)
        # See `add_early` of `PipelinedReduceScatter`.
        shallow = not gathers and k <= SHALLOW_DEPTH
        early = shallow and self._queued and pattern == "direct" and self.link.size > 2
        layout, stream = plan.layout(self.rows), Stream(0.0 if self._queued else None)
        # The computing queue waits for the flag of each message.
        flag_us = 0.0 if self._copy_us is None else self.link.flag_us
        if gathers and self.overlap.method == "compiled":
            stream.compute(self._own_rows_us(k))
        done = [len(stream.work)]  # works of the stream after each number of works of the plan
        for index, work in enumerate(plan.work):
            if work.chunks:
                rows, launch_us = sum(layout.num_chunk_rows(chunk) for chunk in work.chunks), 0.0
                gemm_us = self.model.gemm_us(rows, n, k)
                if fused:  # a share of one GEMM
                    gemm_us = (self.model.gemm_us(self.rows, n, k) - self.model.launch_us) * rows / self.rows
                    launch_us = self.model.launch_us if index == 0 else 0.0
                stream.compute(gemm_us + len(work.needs) * flag_us + launch_us, *work.needs)
            for added in (work.adds[:-chunks], work.adds[-chunks:]) if early else (work.adds,):
                if added:
                    rows = sum(layout.num_chunk_rows(plan.messages[message].recv) for message in added)
                    # Before an early sum most messages have arrived long ago.
                    num_flags = 1 if early else len(added)
                    time_us = self._added_us(rows, layout.shard_rows(0), width, early)
                    stream.compute(time_us + num_flags * flag_us, *added)
            done.append(len(stream.work))
        queued_us = self._queued_us(plan) if self._queued else [0.0] * len(plan.messages)
        for message, time_us in zip(plan.messages, queued_us, strict=True):
            num_bytes = self._bytes(layout.num_chunk_rows(message.send), width)
            after = done[message.after_work], message.after_message
            stream.messages.append(Transfer(num_bytes, *after, queued_us=time_us))
        stream.last_sums = done[sum(bool(work.chunks) for work in plan.work)]
        return stream

    def _added_us(self, received: int, own: int, width: int, early: bool) -> float:
        """Time to add received rows to own rows; `early`: in one of two sums, which write or read an fp32 total."""
        if not received:
            return 0.0
        if early:
            return self.model.memory_us(self._bytes(received + own, width) + 4 * own * width, "sum")
        if self._queued and self.overlap.pattern != "ring":
            return self.model.memory_us(self._bytes(received + 2 * own, width), "sum")
        # An addition reads its terms once and reads and writes the sum.
        return self.model.memory_us(self._bytes(received + 2 * min(received, own), width))

    def _fastest(self, kind: Mover, streams: Sequence[Stream], wgrad: Stream | None = None) -> SimulatedRun:
        """The fastest of the streams, each with the weight gradient of another stream before its last sums."""
        runs = []
        for stream in streams:
            order = [(0, k) for k in range(len(stream.work))]
            if wgrad is not None:
                order.insert(stream.last_sums, (1, 0))
            both = [stream] if wgrad is None else [stream, wgrad]
            runs.append(run_streams(both, self.model, self.link, kind, order))
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
