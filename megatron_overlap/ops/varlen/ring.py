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
from megatron_overlap.ops.varlen.layout import OwnRows, RowMessages, join, rows_in_payload
from megatron_overlap.ops.varlen.pass_kv_pass_q import RingAttention
from megatron_overlap.schedules.varlen import Plan, Zone
from megatron_overlap.schedules.varlen.messages import RingMessages, RingStep, messages_of
from megatron_overlap.schedules.varlen.rebalance import Rebalance
from megatron_overlap.schedules.varlen.ring_groups import Passing, blocks, chunks_at


@dataclass(slots=True)
class Task:
    """One unit of computation.

    Attributes:
        run: executes the task.
        is_completed: whether the messages that the task needs have completed.
        wait: waits for the messages that the task needs.
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
        """Runs all tasks.

        Without a ready or local task the rank waits: for ring steps first, inter-node before intra-node, then for
        rebalanced rows, then for results. `tests/schedules/varlen` proves that this order cannot deadlock. Rebalanced
        rows come before results because their owners send them at the start, before any computation.

        Args:
            gather_first: wait for all payloads before the first computation, as an all-gather does.
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


@dataclass(frozen=True, slots=True)
class RingCall:
    """One pass in one direction, on one rank. The data have the dtype and device of `like`."""

    options: CallOptions
    attention: RingAttention
    own: OwnRows
    queues: TaskQueues
    like: torch.Tensor
    name: str

    def begin(self) -> list[RingGroupRun]:
        """Posts the messages and enqueues the computation of all ring groups."""
        groups = messages_of(self.options.plan, self.options.index, self.attention.traffic, self.options.window)
        runs = [RingGroupRun(self, messages, number) for number, messages in enumerate(groups)]
        # Post all payloads before the first result: payloads need no computation, so no message blocks them.
        for run in runs:
            run.post_payloads()
        for run in runs:
            run.post_results()
        for run in runs:
            run.enqueue()
        return runs


class RingGroupRun:
    """One ring group in one pass on this rank, which is a member, a proxy, or not involved."""

    def __init__(self, call: RingCall, messages: RingMessages, number: int) -> None:
        self._call, self._messages, self._ring_group = call, messages, messages.ring_group
        self._transport = call.options.transports[messages.ring_group.zone != "inter"]
        self._name = f"{call.name} {number}"
        ranks, rank = messages.ring_group.ranks, self._transport.rank
        self._position = ranks.index(rank) if rank in ranks else None
        self._owned = [index for index, payload in enumerate(messages.payloads) if payload.owner == self._position]
        self._received_steps: list[RingStep] = []
        self._result_steps: list[RingStep] = []
        if self._position is not None:
            self._received_steps = messages.received_steps(self._position)
            self._result_steps = messages.result_steps(self._position)
        self._computed: set[tuple[int, int]] = set()
        self._num_results = 0
        self._result_messages: RowMessages | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends."""
        return self._payload_messages.num_bytes + (self._result_messages.num_bytes if self._result_messages else 0)

    def post_payloads(self) -> None:
        """Packs the own payloads and posts the messages of all payloads."""
        payloads, width = self._messages.payloads, self._call.attention.widths[0]
        keys = [(index, 0) for index in self._owned] + [(step.payload, step.step) for step in self._received_steps]
        buffers = self._take("payload", keys, [payloads[index].rows[step] for index, step in keys], width)
        sources = dict(list(buffers.items())[: len(self._owned)])
        self._payloads = dict(list(buffers.items())[len(self._owned) :])
        for (index, _), rows in sources.items():
            rows_of = rows_in_payload(self._ring_group, payloads[index])
            for number in range(len(self._ring_group.rings)):
                for chunk in payloads[index].chunks:
                    runs = self._own_runs(number, (chunk,))
                    if runs:
                        self._call.attention.pack(runs, rows[rows_of(number, chunk)])
        self._payload_messages = RowMessages(
            self._transport, self._messages.distribute, sources, self._payloads, {}, self._call.like, width,
            f"{self._name} payload",
        )  # fmt: skip

    def post_results(self) -> None:
        """Posts the messages of the results for the owners."""
        messages, width = self._messages, self._call.attention.widths[1]
        if messages.collect is None:
            return
        like = torch.empty(0, dtype=accumulation_dtype(self._call.like.dtype), device=self._call.like.device)
        keys = [(step.payload, step.step) for step in self._result_steps]
        rows = [messages.payloads[index].rows[step] for index, step in keys]
        self._results = self._take("result", keys, rows, width, like)
        # A received result is keyed by the ring step that sent it, and a complete one for the owner by -1.
        arriving = [(index, step - 1) for index, step in keys if step] + [(index, -1) for index in self._owned]
        rows = [messages.payloads[index].rows[step + 1] for index, step in arriving]
        self._received_results = self._take("received result", arriving, rows, width, like)
        after_work = {key: number for number, key in enumerate(keys, start=1)}
        self._result_messages = RowMessages(
            self._transport, messages.collect, self._results, self._received_results, after_work, like, width,
            f"{self._name} result",
        )  # fmt: skip

    def _take(
        self,
        name: str,
        keys: Sequence[tuple[int, int]],
        rows: Sequence[int],
        width: int,
        like: torch.Tensor | None = None,
    ) -> dict[tuple[int, int], torch.Tensor]:
        """Takes one buffer of the pool and splits it."""
        if not keys:
            return {}
        like = self._call.like if like is None else like
        buffer = self._transport.buffer_pool.take(f"{self._name} {name}", (sum(rows), width), like)
        return dict(zip(keys, buffer.split(list(rows)), strict=True))

    def enqueue(self) -> None:
        """Enqueues the tasks of this ring group."""
        call, ring_group, cost = self._call, self._ring_group, self._call.options.plan.cost
        if self._position is None:
            return
        tokens = sum(ring.tokens(self._position) for ring in ring_group.rings)
        inter = ring_group.zone == "inter"
        call.queues.first.append(Task(self._compute_own))
        for step in self._received_steps:
            rows = self._messages.payloads[step.payload].rows[step.step]
            task = Task(
                partial(self._compute_step, step),
                partial(self._payload_messages.is_completed, step.rounds),
                partial(self._payload_messages.wait, step.rounds),
                duration_fs=cost.attention_fs(tokens * rows // 2, tokens),
                arrival_fs=cost.ring_fs(rows * (step.step + 1), step.step + 1, call.options.plan.topology, inter=inter),
            )
            call.queues.ring_steps[ring_group.zone].append(task)
        if self._result_messages is None:
            return
        results = call.queues.results[ring_group.zone]
        is_completed, wait = self._result_messages.is_completed, self._result_messages.wait
        for step in self._result_steps:
            is_runnable = partial(self._computed.__contains__, (step.payload, step.step))
            run = partial(self._send_result, step)
            results.append(Task(run, partial(is_completed, step.rounds), partial(wait, step.rounds), is_runnable))
        for index in self._owned:
            rounds = self._messages.owner_rounds(index, self._transport.rank)
            run = partial(self._apply_result, index)
            results.append(Task(run, partial(is_completed, rounds), partial(wait, rounds)))

    def finish(self) -> None:
        """Waits until all buffers may be reused."""
        self._payload_messages.wait_all()
        if self._result_messages is not None:
            self._result_messages.wait_all()

    def _own_runs(self, number: int, chunks: Sequence[int]) -> list[slice]:
        assert self._position is not None
        rows_of = self._call.own.rows_of(self._ring_group, self._position)
        return join([rows_of(number, chunk) for chunk in chunks])

    def _mask(self, number: int, queries: int, keys: int, masked: bool) -> Mask | None:
        bounds = self._ring_group.rings[number].bounds
        return Mask(bounds[queries] - bounds[keys], self._call.options.window) if masked else None

    def _compute_own(self) -> None:
        assert self._position is not None
        chunks = self._ring_group.chunks_of(self._position)
        for number, ring in enumerate(self._ring_group.rings):
            for block in blocks(ring, chunks, chunks, self._call.options.window):
                mask = self._mask(number, block.queries[0], block.keys[0], block.masked)
                self._call.attention.compute_own(
                    self._own_runs(number, block.queries), self._own_runs(number, block.keys), mask
                )

    def _compute_step(self, step: RingStep) -> None:
        assert self._position is not None
        key = step.payload, step.step
        payload, call = self._messages.payloads[step.payload], self._call
        rows, result = self._payloads[key], self._payloads[key]
        if self._result_messages is not None:
            result = self._results[key]
            call.attention.reset(result)
        own_chunks = self._ring_group.chunks_of(self._position)
        received_chunks = chunks_at(self._ring_group, payload, step.step)
        rows_of, is_kv = rows_in_payload(self._ring_group, payload), call.attention.traffic.passing == "kv"
        for number, ring in enumerate(self._ring_group.rings):
            queries, keys = (own_chunks, received_chunks) if is_kv else (received_chunks, own_chunks)
            for block in blocks(ring, queries, keys, call.options.window):
                own, received = (block.queries, block.keys) if is_kv else (block.keys, block.queries)
                runs = join([rows_of(number, chunk) for chunk in received])
                mask = self._mask(number, block.queries[0], block.keys[0], block.masked)
                call.attention.compute_step(self._own_runs(number, own), rows, result, runs, mask)
        self._computed.add(key)

    def _send_result(self, step: RingStep) -> None:
        assert self._result_messages is not None
        if step.step:
            received = self._received_results[step.payload, step.step - 1]
            self._call.attention.accumulate(self._results[step.payload, step.step], received)
        self._num_results += 1
        self._result_messages.mark_ready(self._num_results)

    def _apply_result(self, index: int) -> None:
        payload = self._messages.payloads[index]
        rows_of = rows_in_payload(self._ring_group, payload)
        for number, ring in enumerate(self._ring_group.rings):
            for chunk in payload.chunks:
                if ring.chunk_length(chunk):
                    result = self._received_results[index, -1][rows_of(number, chunk)]
                    self._call.attention.apply_result(self._own_runs(number, (chunk,)), result)
