"""Executes one pass of balanced attention in one direction on one rank.

The rows may come in the linear layout (`schedules.varlen.rebalance`). Surplus rows leave at the start. Missing rows
arrive while the rank computes with its own. They are last in the attention layout, so they mostly belong to whole
documents. Results leave for the linear layout as soon as they are computed.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.ops.varlen.layout import Key, OwnRows, RowMessages, Rows
from megatron_overlap.ops.varlen.pass_kv_pass_q import RingAttention
from megatron_overlap.ops.varlen.ring import CallOptions, Task, TaskQueues, begin_rings
from megatron_overlap.schedules.varlen.messages import rebalance_messages
from megatron_overlap.schedules.varlen.rebalance import Rebalance

# Whole documents are computed in this many runs. Between two runs the rank checks for arrived messages.
_LOCAL_RUNS = 16

Layout = Literal["linear", "attention"]

DocumentsKernel = Callable[[slice, tuple[int, ...]], None]
"""`kernel(rows, lengths)`: computes consecutive whole documents."""


class PassExecutor:
    """One pass in one direction, `forward` or `backward`, of inputs `[rows, heads, D]` in the layout of the call.

    Attributes:
        own: the rows of this rank in the attention layout.
        rows: the inputs in the attention layout.
        results: the results in the attention layout; the caller writes them.
    """

    def __init__(
        self, options: CallOptions, tensors: Sequence[torch.Tensor], heads: Sequence[int], direction: str
    ) -> None:
        self._options, self._direction, transport = options, direction, options.transports.rebalance
        self._name = f"balanced_attention {direction}"
        self.own = OwnRows.of(options.plan, options.index, transport.rank)
        self._like, self.rows = tensors[0], list(tensors)
        self._moved: _MovedRows | None = None
        if options.rebalances is None:
            shapes = [(self._like.shape[0], count, self._like.shape[2]) for count in heads]
            self.results = [self._like.new_empty(shape) for shape in shapes]
            return
        self._moved = moved = _MovedRows(transport, options.rebalances, tensors, heads, self._name)
        self.rows, self.results = moved.rows, moved.results
        if self.own.num_ring_rows > moved.num_in_place:
            # Rings send their rows at the start.
            moved.wait()

    def run(self, attention: RingAttention, documents: DocumentsKernel) -> None:
        """Posts all messages and computes all rows: rings with `attention`, whole documents with `documents`."""
        options = self._options
        queues = TaskQueues(can_query=not options.transports.rebalance.on_device)
        ends = self._enqueue(queues, documents)
        posted = begin_rings(options, attention, self.own, queues, self._name)
        if self._moved is not None:
            self._moved.begin_outbound(self.own.num_ring_rows, ends)
        queues.run(gather_first=options.plan.exchange == "all_gather")
        for rows in posted:
            rows.messages.wait_all()
        self._num_bytes = sum(rows.messages.num_bytes for rows in posted)

    def finish(self) -> list[torch.Tensor]:
        """Returns the results in the layout of the call. The caller has written all of `results`."""
        results = self.results
        if self._moved is not None:
            results = self._moved.finish()
            self._num_bytes += self._moved.num_bytes
        self._options.observer("forward" if self._direction == "forward" else "dgrad", self._num_bytes)
        return results

    def _enqueue(self, queues: TaskQueues, documents: DocumentsKernel) -> list[int]:
        """Enqueues runs of whole documents; a run with missing rows waits for them. Returns the ends of those runs."""
        plan, moved, ends = self._options.plan, self._moved, list[int]()
        num_in_place = self.rows[0].shape[0] if moved is None else moved.num_in_place
        for rows, lengths in _document_runs(self.own, num_in_place):
            run = partial(documents, rows, lengths)
            duration_fs = sum(plan.cost.attention_fs(length * (length + 1) // 2, length) for length in lengths)
            if moved is None or rows.stop <= num_in_place:
                queues.local.append(Task(run, duration_fs=duration_fs))
                continue
            arrival_fs = plan.cost.ring_fs(rows.stop - num_in_place, 1, plan.topology, inter=plan.topology.nodes > 1)
            ends.append(rows.stop)
            run = partial(moved.step, run)
            queues.rebalanced.append(
                Task(run, moved.is_arrived, moved.wait, duration_fs=duration_fs, arrival_fs=arrival_fs)
            )
        return ends


def _document_runs(own: OwnRows, num_in_place: int) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Runs of whole documents with about equal numbers of tokens.

    The document that contains row `num_in_place` begins a run, so that no other document waits for received rows.
    """
    most = -(-sum(own.lengths) // _LOCAL_RUNS)
    start, lengths, tokens = own.num_ring_rows, list[int](), 0
    for length in own.lengths:
        if lengths and (tokens >= most or start + tokens <= num_in_place < start + tokens + length):
            yield slice(start, start + tokens), tuple(lengths)
            start, lengths, tokens = start + tokens, [], 0
        lengths.append(length)
        tokens += length
    if lengths:
        yield slice(start, start + tokens), tuple(lengths)


class _MovedRows:
    """A pass in the linear layout: its rows move to the attention layout, and its results back.

    Attributes:
        rows: the tensors in the attention layout; the rows from `num_in_place` on are valid after `wait`.
        num_in_place: rows that this rank holds in both layouts.
        results: `[rows in the attention layout, heads, D]` each; the caller writes them.
        num_bytes: bytes that this rank has sent, after `finish`.
    """

    def __init__(
        self,
        transport: Transport,
        rebalances: tuple[Rebalance, Rebalance],
        tensors: Sequence[torch.Tensor],
        heads: Sequence[int],
        name: str,
    ) -> None:
        inbound, self._moves = rebalances
        self._transport, self._name, rank = transport, name, transport.rank
        self._num_linear, num_rows = inbound.before[rank], inbound.after[rank]
        like, self._heads = tensors[0], [x.shape[1] for x in tensors]
        self._in_place = list(map(min, inbound.before, inbound.after))
        self.num_in_place = in_place = self._in_place[rank]
        shape = (sum(self._heads), like.shape[2])
        # One message carries the moved rows of all tensors.
        leaving = transport.buffer_pool.take(f"{name} sent rows", (self._num_linear - in_place, *shape), like)
        torch.cat([x[in_place:] for x in tensors], dim=1, out=leaving)
        self._received = self._take(f"{name} received rows", inbound.after, shape, like)
        self.rows = [x[:num_rows] for x in tensors]
        self._needs_copy = num_rows > in_place
        if self._needs_copy:
            self.rows = [x.new_empty(num_rows, *x.shape[1:]) for x in tensors]
            for whole, own in zip(self.rows, tensors, strict=True):
                whole[:in_place] = own
        self._inbound = self._post(inbound, leaving, in_place, self._received, self._in_place, {}, f"{name} inbound")
        self.is_arrived, self._wait_inbound = self._inbound.needs(0, self._inbound.received)
        # The buffer holds the computed rows and the received rows. The rows that stay in place belong to both.
        self._packed = like.new_empty(max(num_rows, self._num_linear), sum(heads), like.shape[2])
        self._parts = self._packed.split(list(heads), dim=1)
        self.results = [part[:num_rows] for part in self._parts]
        self._num_steps = 0

    def _take(self, name: str, num_rows: Sequence[int], shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """A buffer of the rows that this rank receives to hold its share of `num_rows`; for copies that of any rank."""
        counts = [count - in_place for count, in_place in zip(num_rows, self._in_place, strict=True)]
        most = max(counts) if self._transport.prepares else counts[self._transport.rank]
        return self._transport.buffer_pool.take(name, (most, *shape), like, symmetric=True)

    def wait(self) -> None:
        """Waits for the rows of other ranks."""
        self._wait_inbound()
        if self._needs_copy:
            self._needs_copy = False
            for whole, part in zip(self.rows, self._received.split(self._heads, dim=1), strict=True):
                whole[self.num_in_place :] = part[: whole.shape[0] - self.num_in_place]

    def begin_outbound(self, num_ring_rows: int, ends: Sequence[int]) -> None:
        """Posts the result messages. Step i completes the rows before `ends[i]`; ring rows need one step more."""
        packed = self._packed
        after = {
            (0, index, 0): len(ends) + 1 if move.start < num_ring_rows else bisect_left(ends, move.stop) + 1
            for index, move in enumerate(self._moves.moves)
            if move.source == self._transport.rank
        }
        self._results, first_rows = packed, [0] * self._transport.size
        if self._transport.prepares:
            # Copies land in a symmetric buffer, and the caller keeps the results.
            self._results = self._take(f"{self._name} received results", self._moves.after, packed.shape[1:], packed)
            first_rows = self._in_place
        self._outbound = self._post(self._moves, packed, 0, self._results, first_rows, after, f"{self._name} outbound")

    def step(self, compute: Callable[[], None]) -> None:
        """Computes the next rows of the results, and marks them as ready."""
        compute()
        self._num_steps += 1
        self._outbound.mark_ready(self._num_steps)

    def finish(self) -> list[torch.Tensor]:
        """Waits for all messages; returns the results in the linear layout."""
        self._outbound.mark_ready(self._num_steps + 1)
        _, wait = self._outbound.needs(0, self._outbound.received)
        wait()
        self._outbound.wait_all()
        if self._results is not self._packed:
            linear = self._packed[self.num_in_place : self._num_linear]
            linear.copy_(self._results[: linear.shape[0]])
        self.wait()
        self._inbound.wait_all()
        self.num_bytes = self._outbound.num_bytes + self._inbound.num_bytes
        return [part[: self._num_linear] for part in self._parts]

    def _post(
        self,
        moves: Rebalance,
        x: torch.Tensor,
        first_sent: int,
        y: torch.Tensor,
        first_received: Sequence[int],
        after_work: dict[Key, int],
        name: str,
    ) -> RowMessages:
        """Posts the messages of a rebalancing.

        They read and write only the moved rows of `x` and `y`. These begin with row `first_sent` of the source layout
        and, on each rank, with row `first_received` of the destination layout.
        """
        rank, numbered = self._transport.rank, [(move, (0, index, 0)) for index, move in enumerate(moves.moves)]
        sent = {key: slice(m.start - first_sent, m.stop - first_sent) for m, key in numbered if m.source == rank}
        firsts = [(key, move.at - first_received[move.to], move.rows) for move, key in numbered]
        received = Rows(y, {key: slice(first, first + rows) for key, first, rows in firsts})
        plan = rebalance_messages(moves)
        # Results of other transports than copies arrive in a new tensor.
        of = moves if self._transport.prepares or y is self._received else None
        return RowMessages(self._transport, {0: plan}, Rows(x, sent), received, after_work, of, name)
