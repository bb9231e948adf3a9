"""The compute tasks of one rank in one pass: their queues, and the rings that post messages and enqueue computation.

Tasks with inter-node messages come first, then intra-node, then local. The order within a queue is fixed, so every sum
has one order for every timing. Different queues write different rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Observer
from megatron_overlap.ops.flash_attention import accumulation_dtype
from megatron_overlap.ops.varlen.layout import Key, OwnRows, RowMessages, Rows, join, pick, rows_in_payload
from megatron_overlap.ops.varlen.pass_kv_pass_q import RingAttention
from megatron_overlap.schedules.varlen import Plan, Zone
from megatron_overlap.schedules.varlen.messages import RingMessages, RingStep, messages_of, received_rows
from megatron_overlap.schedules.varlen.plan import Ring
from megatron_overlap.schedules.varlen.rebalance import Rebalance
from megatron_overlap.schedules.varlen.ring_groups import Passing, blocks, chunks_at


@dataclass(slots=True)
class Task:
    """One unit of computation.

    Attributes:
        is_completed, wait: of the messages that the task needs.
        is_runnable: whether this rank has executed the tasks that this one needs.
        order: tasks of ring groups run in ascending order.
        duration_fs, arrival_fs: modelled duration, and time from the start of the pass until the messages arrive.
    """

    run: Callable[[], None]
    is_completed: Callable[[], bool] = lambda: True
    wait: Callable[[], None] = lambda: None
    is_runnable: Callable[[], bool] = lambda: True
    order: tuple[int, ...] = ()
    duration_fs: int = 0
    arrival_fs: int = 0


@dataclass(slots=True)
class TaskQueues:
    """The tasks of one rank in one pass.

    Attributes:
        can_query: the transport can report completion without a synchronisation. Otherwise the model predicts it.
        first: tasks that run first, in order: ring attention with the rank's own rows.
        ring_steps: by zone, tasks that need a payload.
        results: by zone, tasks that add a received result to the rank's own result. Without `can_query` one queue has
            those of both zones, on all ranks in the order of the rounds: a stream waits for each before later work.
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

    On NCCL, whose streams execute messages in order, the three kinds have a channel each: inter-node payloads do not
    delay intra-node payloads, and a rebalancing receive does not block ring results that the sender of its rows waits
    for. Other transports use one channel.

    Copies have no deadlock in the order of the tasks: every rank sends its payloads and surplus rows before its first
    task, and a result needs only results of earlier rounds.
    """

    inter: Transport
    intra: Transport
    rebalance: Transport

    @classmethod
    def open(cls, group: dist.ProcessGroup, open_channel: Callable[[str], Transport]) -> VarlenTransports:
        """Opens the transports of a group; `open_channel(name)` opens the channel with this name, `""` the default."""
        inter = open_channel("")
        if dist.get_backend(group) != "nccl" or inter.prepares:
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
    passing: Passing | None
    rebalances: tuple[Rebalance, Rebalance] | None
    observer: Observer


def begin_rings(
    options: CallOptions, attention: RingAttention, own: OwnRows, queues: TaskQueues, name: str
) -> list[RingRows]:
    """Posts the messages and enqueues the computation of all ring groups of one pass in one direction."""
    runs = [
        RingGroupRun(options, attention, own, *numbered)
        for numbered in enumerate(messages_of(options.plan, options.index, attention.traffic))
    ]
    # One operation for all groups of a zone. With several, a stream could receive results of a later group before it
    # sends those of an earlier one, and ranks would wait for each other.
    batches = {f"{zone}-node ": list(batch) for zone, batch in groupby(runs, key=lambda run: run.zone)}
    # Post all payloads before the first result: payloads need no computation, so no message blocks them.
    posted = [RingRows(batch, f"{name} {zone}payload") for zone, batch in batches.items()]
    if attention.traffic.result_bytes:
        if len(batches) > 1 and not queues.can_query:
            # Also of both zones: with one hardware queue a call that cannot start delays later calls on other channels,
            # and ranks that enqueue the calls of two channels in different orders would wait for each other.
            batches = {"": runs}
        posted += [RingRows(batch, f"{name} {zone}result", results=True) for zone, batch in batches.items()]
    for run in runs:
        run.enqueue(queues)
    for of_zones in (queues.ring_steps, queues.results):
        for zone, queue in of_zones.items():
            of_zones[zone] = deque(sorted(queue, key=lambda task: task.order))
    return posted


class RingRows:
    """The payloads of ring groups, or their results. The constructor packs the own payloads and posts the messages.

    Attributes:
        sent, received: see `RowMessages`.
        numbers: of the units of `messages.mark_ready` that complete results, by key.
    """

    def __init__(self, runs: Sequence[RingGroupRun], name: str, *, results: bool = False) -> None:
        transport, traffic, q = runs[0].transport, runs[0].attention.traffic, runs[0].attention.q
        dtype = accumulation_dtype(q.dtype) if results else q.dtype
        width = (traffic.result_bytes if results else traffic.payload_bytes) // dtype.itemsize
        take, like = transport.buffer_pool.take, q.new_empty(0, dtype=dtype)
        groups = {run.number: run.messages for run in runs}
        if results:
            # In the order in which the rank completes them.
            steps = [(step.round, run.number, step) for run in runs for step in run.result_steps]
            keys = [(number, step.payload, step.step) for _, number, step in sorted(steps)]
        else:
            keys = [(run.number, index, 0) for run in runs for index in run.owned]
        counts = [groups[number].payloads[index].rows[step] for number, index, step in keys]
        bounds = pairwise(accumulate(counts, initial=0))
        places = {key: slice(*each) for key, each in zip(keys, bounds, strict=True)}
        self.sent = Rows(take(name, (sum(counts), width), like), places)
        self.numbers = {key: number for number, key in enumerate(keys, start=1)} if results else {}
        places, num_rows = received_rows(tuple(groups.items()), transport.size, results=results)
        # Copies land in buffers of the same size on all ranks.
        most = max(num_rows) if transport.prepares else num_rows[transport.rank]
        self.received = Rows(take(f"{name} received", (most, width), like, symmetric=True), places)
        for run in runs:
            run.use(self, results=results)
        both = {number: group.collect if results else group.distribute for number, group in groups.items()}
        plans = {number: plan for number, plan in both.items() if plan is not None}
        self.messages = RowMessages(transport, plans, self.sent, self.received, self.numbers, places, name)


class RingGroupRun:
    """Ring group `number` of one pass on this rank: a member, a proxy, or not involved.

    This rank sends the results of `result_steps`.
    """

    def __init__(
        self, options: CallOptions, attention: RingAttention, own: OwnRows, number: int, messages: RingMessages
    ) -> None:
        self._options, self.attention, self._own, self.number = options, attention, own, number
        self.messages, self._ring_group = messages, messages.ring_group
        self.zone = messages.ring_group.zone
        self.transport = options.transports[self.zone != "inter"]
        ranks, rank = messages.ring_group.ranks, self.transport.rank
        # -1 in a proxy, and in a rank that is not involved: it has no ring steps.
        self._position = ranks.index(rank) if rank in ranks else -1
        self.owned = [index for index, payload in enumerate(messages.payloads) if payload.owner == self._position]
        self._received_steps = messages.received_steps(self._position)
        self.result_steps = messages.result_steps(self._position)
        self._computed: set[Key] = set()
        self._payloads: RingRows
        self._results: RingRows | None = None

    def use(self, rows: RingRows, *, results: bool) -> None:
        """Sets the rows of the payloads, and packs those of this rank, or the rows of the results."""
        if results:
            self._results = rows
            return
        self._payloads = rows
        for index in self.owned:
            for (ring, chunk), place in rows_in_payload(self._ring_group, self.messages.payloads[index]).items():
                runs = self._own_runs(self._ring_group.rings[ring], (chunk,))
                if runs:
                    self.attention.pack(runs, rows.sent[self.number, index, 0][place])

    def enqueue(self, queues: TaskQueues) -> None:
        if self._position < 0:
            return
        zone, number, cost, topology = self.zone, self.number, self._options.plan.cost, self._options.plan.topology
        tokens = sum(ring.tokens(self._position) for ring in self._ring_group.rings)
        queues.first.append(Task(self._compute_own))
        for step in self._received_steps:
            rows, hops = self.messages.payloads[step.payload].rows[step.step], step.step + 1
            task = Task(
                partial(self._compute_step, step),
                *self._payloads.messages.needs(number, step.messages),
                order=(step.round,),
                duration_fs=cost.attention_fs(tokens * rows // 2, tokens),
                arrival_fs=cost.ring_fs(rows * hops, hops, topology, inter=zone == "inter"),
            )
            queues.ring_steps[zone].append(task)
        if self._results is None:
            return
        # In the order of the rounds, first the own results: NCCL carries them and those of peers in one call.
        results, needs = queues.results[zone if queues.can_query else "inter"], self._results.messages.needs
        for step in self.result_steps:
            is_runnable = partial(self._computed.__contains__, (number, step.payload, step.step))
            order = step.round + 1, 0, number
            results.append(
                Task(partial(self._send_result, step), *needs(number, step.messages), is_runnable, order=order)
            )
        for index in self.owned:
            messages, last = self.messages.owner_results[index]
            order = last, 1, number
            results.append(Task(partial(self._apply_result, index), *needs(number, messages), order=order))

    def _own_runs(self, ring: Ring, chunks: Sequence[int]) -> list[slice]:
        return join([self._own.rows_of(ring, self._position, chunk) for chunk in chunks])

    def _compute_own(self) -> None:
        chunks = self._ring_group.chunks_of(self._position)
        for ring in self._ring_group.rings:
            for block in blocks(ring, chunks, chunks):
                queries, keys = self._own_runs(ring, block.queries), self._own_runs(ring, block.keys)
                self.attention.compute_own(queries, keys, causal=block.causal)

    def _compute_step(self, step: RingStep) -> None:
        key = self.number, step.payload, step.step
        payload, attention = self.messages.payloads[step.payload], self.attention
        rows = result = self._payloads.received[key]
        if self._results is not None:
            result = self._results.sent[key]
            result.zero_()
        own_chunks = self._ring_group.chunks_of(self._position)
        received_chunks = chunks_at(self._ring_group, payload, step.step)
        rows_of, is_kv = rows_in_payload(self._ring_group, payload), attention.traffic.passing == "kv"
        for number, ring in enumerate(self._ring_group.rings):
            queries, keys = (own_chunks, received_chunks) if is_kv else (received_chunks, own_chunks)
            for block in blocks(ring, queries, keys):
                own, received = (block.queries, block.keys) if is_kv else (block.keys, block.queries)
                runs, own_runs = join([rows_of[number, chunk] for chunk in received]), self._own_runs(ring, own)
                attention.compute_step(own_runs, pick(rows, runs), result, runs)
        self._computed.add(key)

    def _send_result(self, step: RingStep) -> None:
        assert self._results is not None
        key = self.number, step.payload, step.step
        if step.step:
            result = self._results.sent[key]
            result += self._results.received[self.number, step.payload, step.step - 1]
        self._results.messages.mark_ready(self._results.numbers[key])

    def _apply_result(self, index: int) -> None:
        assert self._results is not None
        received = self._results.received[self.number, index, -1]
        for (number, chunk), rows in rows_in_payload(self._ring_group, self.messages.payloads[index]).items():
            runs = self._own_runs(self._ring_group.rings[number], (chunk,))
            if runs:
                self.attention.apply_result(runs, received[rows])
