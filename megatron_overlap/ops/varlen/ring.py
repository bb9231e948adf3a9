"""The rings of one rank in one pass: posts their messages and puts their computation in queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.ops.varlen.flash_attention import Mask, wide
from megatron_overlap.ops.varlen.layout import OwnRows, join, length, place_in_load
from megatron_overlap.ops.varlen.pass_kv_pass_q import Flow
from megatron_overlap.ops.varlen.task_queue import Queues, Task
from megatron_overlap.ops.varlen.transfers import TripP2PWork, home_rounds, index_of
from megatron_overlap.schedules.varlen import Plan
from megatron_overlap.schedules.varlen.messages import Visit, visits_of, works_of
from megatron_overlap.schedules.varlen.program import Turn, program
from megatron_overlap.schedules.varlen.ring_groups import blocks, chunks_at


@dataclass(frozen=True, slots=True)
class Call:
    """One pass in one direction, on one rank.

    Attributes:
        transports: for rings between nodes, and inside; may be the same one.
        plan: of the batch.
        index: of the pass.
        flow: what travels, and what is computed of it.
        own: the rows of this rank.
        window: keys that a query sees before its own.
        queues: get the computation.
        like: dtype and device of the data.
        name: of the op.
    """

    transports: tuple[Transport, Transport]
    plan: Plan
    index: int
    flow: Flow
    own: OwnRows
    window: int | None
    queues: Queues
    like: torch.Tensor
    name: str

    def begin(self) -> list[RunningTurn]:
        """Posts all messages and enqueues all computation of rings."""
        turns = program(self.plan, self.index, self.flow.traffic, self.window)
        running = [RunningTurn(self, turn, number) for number, turn in enumerate(turns)]
        # All ways out before the first way back: they wait for no computation, and nothing that does is before them.
        for turn in running:
            turn.begin_out()
        for turn in running:
            turn.begin_back()
        for turn in running:
            turn.enqueue()
        return running


class RunningTurn:
    """One turn on this rank, which may be a member, a proxy, or have no part in it."""

    def __init__(self, call: Call, turn: Turn, number: int) -> None:
        self._call, self._turn, self._circle = call, turn, turn.ring_group
        self._transport = call.transports[turn.ring_group.zone != "inter"]
        self._name = f"{call.name} {number}"
        rank = self._transport.rank
        self._place = turn.ring_group.ranks.index(rank) if rank in turn.ring_group.ranks else None
        self._homes = [index for index, load in enumerate(turn.loads) if load.home == self._place]
        self._visits: list[Visit] = []
        self._works: list[Visit] = []
        if self._place is not None:
            self._visits = visits_of(turn.loads, turn.out, self._place, rank)
            self._works = works_of(turn.loads, turn.back, self._place, rank) if turn.back else []
        self._done: set[tuple[int, int]] = set()
        self._worked = 0
        self._back: TripP2PWork | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends."""
        return self._out.num_bytes + (self._back.num_bytes if self._back else 0)

    def begin_out(self) -> None:
        """Posts the way to the visits."""
        loads, width = self._turn.loads, self._call.flow.widths[0]
        keys = [(index, 0) for index in self._homes] + [(visit.load, visit.step) for visit in self._visits]
        buffers = self._take("out", keys, [loads[index].rows[step] for index, step in keys], width, self._call.like)
        sources = dict(list(buffers.items())[: len(self._homes)])
        self._loads = dict(list(buffers.items())[len(self._homes) :])
        for (index, _), rows in sources.items():
            place = place_in_load(self._circle, loads[index])
            for number in range(len(self._circle.rings)):
                for chunk in loads[index].chunks:
                    runs = self._own_runs(number, (chunk,))
                    if runs:
                        self._call.flow.pack(runs, rows[place(number, chunk)])
        self._out = TripP2PWork(
            self._transport, self._turn.out, sources, self._loads, {}, self._call.like, width, f"{self._name} out"
        )

    def begin_back(self) -> None:
        """Posts the way of what visits make."""
        turn, width = self._turn, self._call.flow.widths[1]
        if turn.back is None:
            return
        like = torch.empty(0, dtype=wide(self._call.like.dtype), device=self._call.like.device)
        keys = [(visit.load, visit.step) for visit in self._works]
        rows = [turn.loads[index].rows[step] for index, step in keys]
        self._made = self._take("made", keys, rows, width, like)
        arriving = [(index, step - 1) for index, step in keys if step] + [(index, -1) for index in self._homes]
        rows = [turn.loads[index].rows[step + 1] for index, step in arriving]
        self._more = self._take("more", arriving, rows, width, like)
        self._back = TripP2PWork(
            self._transport, turn.back, self._made, self._more, index_of(self._works), like, width, f"{self._name} back"
        )

    def _take(
        self, name: str, keys: Sequence[tuple[int, int]], rows: Sequence[int], width: int, like: torch.Tensor
    ) -> dict[tuple[int, int], torch.Tensor]:
        """One buffer, divided."""
        if not keys:
            return {}
        buffer = self._transport.buffer_pool.take(f"{self._name} {name}", (sum(rows), width), like)
        return dict(zip(keys, buffer.split(list(rows)), strict=True))

    def enqueue(self) -> None:
        """Puts the computation of this turn in the queues."""
        call, ring_group, cost = self._call, self._circle, self._call.plan.cost
        if self._place is None:
            return
        tokens = sum(ring.tokens(self._place) for ring in ring_group.rings)
        inter = ring_group.zone == "inter"
        call.queues.first.append(Task(self._own))
        for visit in self._visits:
            rows = self._turn.loads[visit.load].rows[visit.step]
            task = Task(
                partial(self._visit, visit),
                partial(self._out.is_completed, visit.rounds),
                partial(self._out.wait, visit.rounds),
                takes_fs=cost.attention_fs(tokens * rows // 2, tokens),
                due_fs=cost.ring_fs(rows * (visit.step + 1), visit.step + 1, call.plan.topology, inter=inter),
            )
            call.queues.visits[ring_group.zone].append(task)
        if self._back is None:
            return
        for work in self._works:
            may = partial(self._done.__contains__, (work.load, work.step))
            landed, wait = partial(self._back.is_completed, work.rounds), partial(self._back.wait, work.rounds)
            call.queues.returns[ring_group.zone].append(Task(partial(self._return, work), landed, wait, may))
        for index in self._homes:
            rounds = home_rounds(self._turn, index, self._transport.rank)
            landed, wait = partial(self._back.is_completed, rounds), partial(self._back.wait, rounds)
            call.queues.returns[ring_group.zone].append(Task(partial(self._home, index), landed, wait))

    def finish(self) -> None:
        """Waits until every buffer is free again."""
        self._out.wait_all()
        if self._back is not None:
            self._back.wait_all()

    def _own_runs(self, number: int, chunks: Sequence[int]) -> list[slice]:
        assert self._place is not None
        place = self._call.own.place(self._circle, self._place)
        return join([place(number, chunk) for chunk in chunks])

    def _mask(self, number: int, queries: int, keys: int, masked: bool) -> Mask | None:
        bounds = self._circle.rings[number].bounds
        return Mask(bounds[queries] - bounds[keys], self._call.window) if masked else None

    def _own(self) -> None:
        assert self._place is not None
        chunks = self._circle.chunks_of(self._place)
        for number, ring in enumerate(self._circle.rings):
            for block in blocks(ring, chunks, chunks, self._call.window):
                mask = self._mask(number, block.queries[0], block.keys[0], block.masked)
                self._call.flow.own(self._own_runs(number, block.queries), self._own_runs(number, block.keys), mask)

    def _visit(self, visit: Visit) -> None:
        assert self._place is not None
        key = visit.load, visit.step
        load, call = self._turn.loads[visit.load], self._call
        rows, made = self._loads[key], self._loads[key]
        if self._back is not None:
            made = self._made[key]
            call.flow.clear(made)
        mine, theirs = self._circle.chunks_of(self._place), chunks_at(self._circle, load, visit.step)
        place, keys_travel = place_in_load(self._circle, load), call.flow.traffic.side == "keys"
        for number, ring in enumerate(self._circle.rings):
            queries, keys = (mine, theirs) if keys_travel else (theirs, mine)
            for block in blocks(ring, queries, keys, call.window):
                own, other = (block.queries, block.keys) if keys_travel else (block.keys, block.queries)
                runs = join([place(number, chunk) for chunk in other])
                mask = self._mask(number, block.queries[0], block.keys[0], block.masked)
                call.flow.visit(self._own_runs(number, own), rows, made, runs, mask)
        self._done.add(key)

    def _return(self, work: Visit) -> None:
        assert self._back is not None
        if work.step:
            self._call.flow.grow(self._made[work.load, work.step], self._more[work.load, work.step - 1])
        self._worked += 1
        self._back.mark_ready(self._worked)

    def _home(self, index: int) -> None:
        place, load = place_in_load(self._circle, self._turn.loads[index]), self._turn.loads[index]
        for number, ring in enumerate(self._circle.rings):
            for chunk in load.chunks:
                if length(ring, chunk):
                    self._call.flow.home(self._own_runs(number, (chunk,)), self._more[index, -1][place(number, chunk)])
