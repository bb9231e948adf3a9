"""The compute tasks of one rank in one pass: their queues, and the rings that post messages and enqueue computation.

Tasks with inter-node messages come first, then intra-node, then local. The order within a queue is fixed, so every sum
has one order for every timing. Different queues write different rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Observer
from megatron_overlap.ops.flash_attention import Mask, accumulation_dtype
from megatron_overlap.ops.varlen.layout import Key, OwnRows, RowMessages, join, pick, rows_in_payload
from megatron_overlap.ops.varlen.pass_kv_pass_q import RingAttention
from megatron_overlap.schedules.varlen import Plan, Zone
from megatron_overlap.schedules.varlen.messages import RingMessages, RingStep, messages_of
from megatron_overlap.schedules.varlen.plan import Ring
from megatron_overlap.schedules.varlen.rebalance import Rebalance
from megatron_overlap.schedules.varlen.ring_groups import Block, Passing, blocks, chunks_at


@dataclass(slots=True)
class Task:
    """One unit of computation.

    Attributes:
        run: executes the task.
        is_completed, wait: of the messages that the task needs.
        is_runnable: whether this rank has executed the tasks that this one needs.
        duration_fs: modelled duration.
        arrival_fs: modelled time, from the start of the pass, at which the messages arrive.
    """

    run: Callable[[], None]
    is_completed: Callable[[], bool] = lambda: True
    wait: Callable[[], None] = lambda: None
    is_runnable: Callable[[], bool] = lambda: True
    duration_fs: int = 0
    arrival_fs: int = 0


@dataclass(slots=True)
class TaskQueues:
    """The tasks of one rank in one pass.

    Attributes:
        can_query: the transport can report completion without a synchronisation. Otherwise the model predicts it.
        first: tasks that run first, in order: ring attention with the rank's own rows.
        ring_steps: by zone, tasks that need a payload.
        results: by zone, tasks that add a received result to the rank's own result.
        rebalanced: whole documents with rows that other ranks hold in the linear layout.
        local: tasks that need no message.
    """

    can_query: bool
    first: list[Task] = field(default_factory=list)
    ring_steps: dict[Zone, deque[Task]] = field(default_factory=lambda: {"inter": deque(), "intra": deque()})
    results: dict[Zone, deque[Task]] = field(default_factory=lambda: {"inter": deque(), "intra": deque()})
    rebalanced: deque[Task] = field(default_factory=deque)
    local: deque[Task] = field(default_factory=deque)
    _now_fs: int = 0

    def run(self, *, gather_first: bool = False) -> None:
        """Runs all tasks; with `gather_first` it first waits for all payloads, as an all-gather does.

        Without a ready or local task the rank waits: for ring steps first, inter-node before intra-node, then for
        rebalanced rows, then for results. `tests/schedules/varlen` proves that this order cannot deadlock. Rebalanced
        rows come before results because their owners send them at the start, before any computation.
        """
        ring_steps, results = list(self.ring_steps.values()), list(self.results.values())
        if gather_first:
            for queue in ring_steps:
                for task in queue:
                    task.wait()
        for task in self.first:
            self._execute(task)
        while any(ring_steps) or any(results) or self.rebalanced or self.local:
            # Tasks whose results other ranks need come before the others.
            queues = (*results, *ring_steps, self.rebalanced)
            ready = next((queue for queue in queues if queue and self._is_ready(queue[0])), None)
            if ready is not None:
                self._execute(ready.popleft())
            elif self.local:
                self._execute(self.local.popleft())
            else:
                self._execute(next(queue for queue in (*ring_steps, self.rebalanced, *results) if queue).popleft())

    def _is_ready(self, task: Task) -> bool:
        return task.is_runnable() and (task.is_completed() if self.can_query else task.arrival_fs <= self._now_fs)

    def _execute(self, task: Task) -> None:
        task.wait()
        task.run()
        self._now_fs = max(self._now_fs, task.arrival_fs) + task.duration_fs


class VarlenTransports(NamedTuple):
    """The transports of balanced attention.

    A stream executes its messages in order. On NCCL the three kinds of messages therefore have a channel each:
    inter-node messages do not delay intra-node messages, and a rebalancing receive does not block ring results that the
    sender of its rows waits for. Other transports use one channel.
    """

    inter: Transport
    intra: Transport
    rebalance: Transport

    @classmethod
    def open(cls, group: dist.ProcessGroup, open_channel: Callable[[str], Transport]) -> VarlenTransports:
        """Opens the transports of a group; `open_channel(name)` opens the channel with this name, `""` the default."""
        inter = open_channel("")
        if dist.get_backend(group) != "nccl":
            return cls(inter, inter, inter)
        return cls(inter, open_channel("intra"), open_channel("rebalance"))


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Arguments of one call of `balanced_attention`, for forward and backward.

    `rebalances` lead from the layout of the arguments to the attention layout, and back; None if they are the same.
    """

    transports: VarlenTransports
    plan: Plan
    index: int
    scale: float
    window: int | None
    passing: Passing | None
    rebalances: tuple[Rebalance, Rebalance] | None
    observer: Observer | None


def begin_rings(
    options: CallOptions, attention: RingAttention, own: OwnRows, queues: TaskQueues, name: str
) -> list[RingGroupRun]:
    """Posts the messages and enqueues the computation of all ring groups of one pass in one direction."""
    groups = messages_of(options.plan, options.index, attention.traffic, options.window)
    runs = [
        RingGroupRun(options, attention, own, messages, f"{name} {number}") for number, messages in enumerate(groups)
    ]
    # Post all payloads before the first result: payloads need no computation, so no message blocks them.
    for run in runs:
        run.post_payloads()
    for run in runs:
        run.post_results()
        run.enqueue(queues)
    return runs


class RingGroupRun:
    """One ring group in one pass on this rank, which is a member, a proxy, or not involved."""

    def __init__(
        self, options: CallOptions, attention: RingAttention, own: OwnRows, messages: RingMessages, name: str
    ) -> None:
        self._options, self._attention, self._own, self._name = options, attention, own, name
        self._messages, self._ring_group, self._traffic = messages, messages.ring_group, attention.traffic
        self._transport = options.transports[messages.ring_group.zone != "inter"]
        ranks, rank = messages.ring_group.ranks, self._transport.rank
        # -1 in a proxy, and in a rank that is not involved: it has no ring steps.
        self._position = ranks.index(rank) if rank in ranks else -1
        self._owned = [index for index, payload in enumerate(messages.payloads) if payload.owner == self._position]
        self._received_steps = messages.received_steps(self._position)
        self._result_steps = messages.result_steps(self._position)
        self._computed: set[Key] = set()
        self._result_messages: RowMessages | None = None

    def post_payloads(self) -> None:
        """Packs the own payloads and posts the messages of all payloads."""
        transport, name, like = self._transport, f"{self._name} payload", self._attention.q
        width = self._traffic.payload_bytes // like.itemsize
        keys = [(index, 0) for index in self._owned] + [(step.payload, step.step) for step in self._received_steps]
        # An owner does not receive its own payload, so no key is both sent and received.
        self._payloads = rows = self._take(name, keys, 0, width, like)
        for index in self._owned:
            for (number, chunk), place in rows_in_payload(self._ring_group, self._messages.payloads[index]).items():
                runs = self._own_runs(self._ring_group.rings[number], (chunk,))
                if runs:
                    self._attention.pack(runs, rows[index, 0][place])
        self._payload_messages = RowMessages(transport, self._messages.distribute, rows, rows, {}, like, width, name)

    def post_results(self) -> None:
        """Posts the messages of the results for the owners."""
        transport, name, plan = self._transport, f"{self._name} result", self._messages.collect
        if plan is None:
            return
        q = self._attention.q
        like = q.new_empty(0, dtype=accumulation_dtype(q.dtype))
        width = self._traffic.result_bytes // like.itemsize
        keys = [(step.payload, step.step) for step in self._result_steps]
        self._results = rows = self._take(name, keys, 0, width, like)
        # A received result is keyed by the ring step that sent it, and a complete one for the owner by -1.
        arriving = [(index, step - 1) for index, step in keys if step] + [(index, -1) for index in self._owned]
        self._received_results = received = self._take(f"{self._name} received result", arriving, 1, width, like)
        after_work = {key: number for number, key in enumerate(keys, start=1)}
        self._result_messages = RowMessages(transport, plan, rows, received, after_work, like, width, name)

    def _take(
        self, name: str, keys: Sequence[Key], later: int, width: int, like: torch.Tensor
    ) -> dict[Key, torch.Tensor]:
        """Takes one buffer of the pool and splits it: the rows of each payload `later` ring steps after its key."""
        if not keys:
            return {}
        sizes = [self._messages.payloads[index].rows[step + later] for index, step in keys]
        buffer = self._transport.buffer_pool.take(name, (sum(sizes), width), like)
        return dict(zip(keys, buffer.split(sizes), strict=True))

    def enqueue(self, queues: TaskQueues) -> None:
        """Enqueues the tasks of this ring group."""
        if self._position < 0:
            return
        zone, cost, topology = self._ring_group.zone, self._options.plan.cost, self._options.plan.topology
        tokens = sum(ring.tokens(self._position) for ring in self._ring_group.rings)
        queues.first.append(Task(self._compute_own))
        is_completed, wait = self._payload_messages.is_completed, self._payload_messages.wait
        for step in self._received_steps:
            rows, hops = self._messages.payloads[step.payload].rows[step.step], step.step + 1
            task = Task(
                partial(self._compute_step, step),
                partial(is_completed, step.rounds),
                partial(wait, step.rounds),
                duration_fs=cost.attention_fs(tokens * rows // 2, tokens),
                arrival_fs=cost.ring_fs(rows * hops, hops, topology, inter=zone == "inter"),
            )
            queues.ring_steps[zone].append(task)
        if self._result_messages is None:
            return
        results = queues.results[zone]
        is_completed, wait = self._result_messages.is_completed, self._result_messages.wait
        for number, step in enumerate(self._result_steps, start=1):
            is_runnable = partial(self._computed.__contains__, (step.payload, step.step))
            run = partial(self._send_result, step, number)
            results.append(Task(run, partial(is_completed, step.rounds), partial(wait, step.rounds), is_runnable))
        for index in self._owned:
            rounds = self._messages.owner_rounds(index)
            run = partial(self._apply_result, index)
            results.append(Task(run, partial(is_completed, rounds), partial(wait, rounds)))

    def finish(self) -> int:
        """Waits until all buffers may be reused; returns the bytes that this rank has sent."""
        posted = [each for each in (self._payload_messages, self._result_messages) if each is not None]
        for messages in posted:
            messages.wait_all()
        return sum(messages.num_bytes for messages in posted)

    def _own_runs(self, ring: Ring, chunks: Sequence[int]) -> list[slice]:
        return join([self._own.rows_of(ring, self._position, chunk) for chunk in chunks])

    def _mask(self, ring: Ring, block: Block) -> Mask | None:
        offset = ring.bounds[block.queries[0]] - ring.bounds[block.keys[0]]
        return Mask(offset, self._options.window) if block.masked else None

    def _compute_own(self) -> None:
        chunks = self._ring_group.chunks_of(self._position)
        for ring in self._ring_group.rings:
            for block in blocks(ring, chunks, chunks, self._options.window):
                queries, keys = self._own_runs(ring, block.queries), self._own_runs(ring, block.keys)
                self._attention.compute_own(queries, keys, self._mask(ring, block))

    def _compute_step(self, step: RingStep) -> None:
        key = step.payload, step.step
        payload, attention = self._messages.payloads[step.payload], self._attention
        rows, result = self._payloads[key], self._payloads[key]
        if self._result_messages is not None:
            result = self._results[key]
            attention.reset(result)
        own_chunks = self._ring_group.chunks_of(self._position)
        received_chunks = chunks_at(self._ring_group, payload, step.step)
        rows_of, is_kv = rows_in_payload(self._ring_group, payload), attention.passing == "kv"
        for number, ring in enumerate(self._ring_group.rings):
            queries, keys = (own_chunks, received_chunks) if is_kv else (received_chunks, own_chunks)
            for block in blocks(ring, queries, keys, self._options.window):
                own, received = (block.queries, block.keys) if is_kv else (block.keys, block.queries)
                runs, own_runs = join([rows_of[number, chunk] for chunk in received]), self._own_runs(ring, own)
                attention.compute_step(own_runs, pick(rows, runs), result, runs, self._mask(ring, block))
        self._computed.add(key)

    def _send_result(self, step: RingStep, number: int) -> None:
        assert self._result_messages is not None
        if step.step:
            received = self._received_results[step.payload, step.step - 1]
            self._attention.accumulate(self._results[step.payload, step.step], received)
        self._result_messages.mark_ready(number)

    def _apply_result(self, index: int) -> None:
        for (number, chunk), rows in rows_in_payload(self._ring_group, self._messages.payloads[index]).items():
            runs = self._own_runs(self._ring_group.rings[number], (chunk,))
            if runs:
                self._attention.apply_result(runs, self._received_results[index, -1][rows])
