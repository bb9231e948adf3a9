"""One pass of balanced attention in one direction on one rank: its rows, its computation, its results.

Rows may come in the layout of linear layers (`schedules.varlen.rebalance`). What this rank has too many of leaves at
once; what it
lacks lands while it computes the rest: those are last in attention's order, so that they are whole documents, and rings
only where rings are all that a rank has. Their results go back from when they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Observer
from megatron_overlap.ops.varlen.layout import OwnRows
from megatron_overlap.ops.varlen.pass_kv_pass_q import Flow
from megatron_overlap.ops.varlen.rebalance import Inbound, Outbound
from megatron_overlap.ops.varlen.ring import Call
from megatron_overlap.ops.varlen.task_queue import Queues, Task
from megatron_overlap.schedules.varlen import Plan
from megatron_overlap.schedules.varlen.rebalance import Remap
from megatron_overlap.schedules.varlen.ring_groups import Side

# Whole documents are computed in so many runs: messages are looked for between them.
_LOCAL_RUNS = 16


@dataclass(frozen=True, slots=True)
class Options:
    """Of a call.

    Attributes:
        transports: for rings between nodes, and inside.
        mover: for rows that go to another rank's attention, and back.
        ways: from the rows that come to those of attention and back, if they are others.
    """

    transports: tuple[Transport, Transport]
    mover: Transport
    plan: Plan
    index: int
    scale: float
    window: int | None
    moves: Side | None
    ways: tuple[Remap, Remap] | None
    observer: Observer | None


class Pass:
    """One pass in one direction: rows in, work, rows out.

    Args:
        tensors: as they come.
        heads: of each result.
    """

    def __init__(self, options: Options, tensors: Sequence[torch.Tensor], heads: Sequence[int], direction: str) -> None:
        self._options, self._direction, transport = options, direction, options.mover
        self._name = f"balanced_attention {direction}"
        self.own = OwnRows.of(options.plan, options.index, transport.rank)
        self._like, self.rows = tensors[0], list(tensors)
        self._inbound: Inbound | None = None
        self._outbound: Outbound | None = None
        self._ends: list[int] = []
        if options.ways is None:
            shapes = [(self._like.shape[0], count, self._like.shape[2]) for count in heads]
            self.made = [self._like.new_empty(shape) for shape in shapes]
            return
        self._inbound = Inbound(transport, options.ways[0], tensors, self._name)
        self._outbound = Outbound(transport, options.ways[1], heads, self._like, self._name)
        self.rows, self.made = self._inbound.rows, self._outbound.made
        if self.own.rings > self._inbound.kept:
            # Rings send their rows at once.
            self._inbound.wait()

    def run(self, flow: Flow, whole: Callable[[slice, tuple[int, ...]], None]) -> None:
        """Posts, and computes everything: rings by `flow`, runs of whole documents by `whole(rows, lengths)`."""
        options = self._options
        queues = Queues(asks=not self._like.is_cuda)
        self._enqueue(queues, whole)
        call = Call(
            options.transports, options.plan, options.index, flow, self.own, options.window, queues, self._like,
            self._name,
        )  # fmt: skip
        turns = call.begin()
        if self._outbound is not None:
            self._outbound.begin(self._works)
        queues.run(gather_first=options.plan.exchange == "all_gather")
        for turn in turns:
            turn.finish()
        self._num_bytes = sum(turn.num_bytes for turn in turns)

    def finish(self) -> list[torch.Tensor]:
        """What is returned, when all that was made is written."""
        results = self.made
        if self._inbound is not None and self._outbound is not None:
            self._outbound.step()
            self._num_bytes += self._outbound.finish() + self._inbound.finish()
            results = self._outbound.results()
        if self._options.observer is not None:
            self._options.observer("forward" if self._direction == "forward" else "dgrad", self._num_bytes)
        return results

    def _enqueue(self, queues: Queues, whole: Callable[[slice, tuple[int, ...]], None]) -> None:
        """Whole documents as tasks of about equal numbers of tokens; those with rows that are still to come wait."""
        own, plan = self.own, self._options.plan
        kept = self._inbound.kept if self._inbound is not None else self.rows[0].shape[0]
        for rows, lengths in _runs(own, kept):
            run = partial(whole, rows, lengths)
            takes_fs = sum(plan.cost.attention_fs(length * (length + 1) // 2, length) for length in lengths)
            if self._inbound is None or self._outbound is None or rows.stop <= kept:
                queues.local.append(Task(run, takes_fs=takes_fs))
                continue
            inbound, outbound = self._inbound, self._outbound
            due_fs = plan.cost.ring_fs(rows.stop - kept, 1, plan.topology, inter=plan.topology.nodes > 1)
            self._ends.append(rows.stop)

            def moved(run: Callable[[], None] = run, step: Callable[[], None] = outbound.step) -> None:
                run()
                step()

            queues.moved.append(Task(moved, inbound.is_completed, inbound.wait, takes_fs=takes_fs, due_fs=due_fs))

    def _works(self, start: int, stop: int) -> int:
        """Steps after which these rows are made: of rings only when all is done."""
        if start < self.own.rings:
            return len(self._ends) + 1
        return next(number for number, end in enumerate(self._ends, start=1) if stop <= end)


def _runs(own: OwnRows, kept: int) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Runs of whole documents of about equal numbers of tokens; the first document that goes beyond row `kept` begins
    one, so that no more than it must wait for rows from there on.
    """
    most = -(-sum(own.lengths) // _LOCAL_RUNS)
    start, lengths, tokens = own.rings, list[int](), 0
    for length in own.lengths:
        if lengths and (tokens >= most or start + tokens <= kept < start + tokens + length):
            yield slice(start, start + tokens), tuple(lengths)
            start, lengths, tokens = start + tokens, [], 0
        lengths.append(length)
        tokens += length
    if lengths:
        yield slice(start, start + tokens), tuple(lengths)
