"""Executes one pass of balanced attention in one direction on one rank.

The rows may come in the linear layout (`schedules.varlen.rebalance`). Surplus rows leave at the start. Missing rows
arrive while the rank computes with its own. They are last in the attention layout, so they belong to whole documents,
or to rings if the rank has no whole documents. Results leave for the linear layout as soon as they are computed.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from megatron_overlap.ops.varlen.layout import OwnRows
from megatron_overlap.ops.varlen.pass_kv_pass_q import RingAttention
from megatron_overlap.ops.varlen.rebalance import InboundRows, OutboundRows
from megatron_overlap.ops.varlen.ring import CallOptions, RingCall, Task, TaskQueues

# Whole documents are computed in this many runs. Between two runs the rank checks for arrived messages.
_LOCAL_RUNS = 16

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
        self._inbound: InboundRows | None = None
        self._outbound: OutboundRows | None = None
        self._ends: list[int] = []
        if options.rebalances is None:
            shapes = [(self._like.shape[0], count, self._like.shape[2]) for count in heads]
            self.results = [self._like.new_empty(shape) for shape in shapes]
            return
        self._inbound = InboundRows(transport, options.rebalances[0], tensors, self._name)
        self._outbound = OutboundRows(transport, options.rebalances[1], heads, self._like, self._name)
        self.rows, self.results = self._inbound.rows, self._outbound.results
        if self.own.num_ring_rows > self._inbound.num_in_place:
            # Rings send their rows at the start.
            self._inbound.wait()

    def run(self, attention: RingAttention, documents: DocumentsKernel) -> None:
        """Posts all messages and computes all rows: rings with `attention`, whole documents with `documents`."""
        options = self._options
        queues = TaskQueues(can_query=not self._like.is_cuda)
        self._enqueue(queues, documents)
        call = RingCall(options, attention, self.own, queues, self._like, self._name)
        groups = call.begin()
        if self._outbound is not None:
            self._outbound.begin(self._num_steps)
        queues.run(gather_first=options.plan.exchange == "all_gather")
        for group in groups:
            group.finish()
        self._num_bytes = sum(group.num_bytes for group in groups)

    def finish(self) -> list[torch.Tensor]:
        """Returns the results in the layout of the call. The caller has written all of `results`."""
        results = self.results
        if self._inbound is not None and self._outbound is not None:
            self._outbound.step()
            self._num_bytes += self._outbound.finish() + self._inbound.finish()
            results = self._outbound.linear_results()
        if self._options.observer is not None:
            self._options.observer("forward" if self._direction == "forward" else "dgrad", self._num_bytes)
        return results

    def _enqueue(self, queues: TaskQueues, documents: DocumentsKernel) -> None:
        """Enqueues runs of whole documents; a run with missing rows waits for them."""
        own, plan = self.own, self._options.plan
        num_in_place = self._inbound.num_in_place if self._inbound is not None else self.rows[0].shape[0]
        for rows, lengths in _document_runs(own, num_in_place):
            run = partial(documents, rows, lengths)
            duration_fs = sum(plan.cost.attention_fs(length * (length + 1) // 2, length) for length in lengths)
            if self._inbound is None or self._outbound is None or rows.stop <= num_in_place:
                queues.local.append(Task(run, duration_fs=duration_fs))
                continue
            inbound, outbound = self._inbound, self._outbound
            arrival_fs = plan.cost.ring_fs(rows.stop - num_in_place, 1, plan.topology, inter=plan.topology.nodes > 1)
            self._ends.append(rows.stop)

            def rebalanced(run: Callable[[], None] = run, step: Callable[[], None] = outbound.step) -> None:
                run()
                step()

            queues.rebalanced.append(
                Task(rebalanced, inbound.is_arrived, inbound.wait, duration_fs=duration_fs, arrival_fs=arrival_fs)
            )

    def _num_steps(self, start: int, stop: int) -> int:
        """Number of `OutboundRows.step` calls after which these rows are computed; ring rows only after all of them."""
        if start < self.own.num_ring_rows:
            return len(self._ends) + 1
        return next(number for number, end in enumerate(self._ends, start=1) if stop <= end)


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
