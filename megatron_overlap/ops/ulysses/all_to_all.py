"""The moving part of Ulysses attention: buffers and messages of one pass, and the order of computation around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.schedules import AllToAllPlan, SequenceLayout
from megatron_overlap.schedules.all_to_all import Task

Width = Callable[[int, int], int]
"""`width(rank, group)`: features of one row and batch entry that a rank needs, or gives, for a head group."""

Produce = Callable[[int, tuple[int, ...], list[torch.Tensor]], None]
"""`produce(group, peers, slots)`: writes the own rows for the heads of each peer, `[own rows, B, width]` each."""

Attend = Callable[[int, torch.Tensor, torch.Tensor], None]
"""`attend(group, inside, result)`: reads all rows of the own heads, `[S, B, width]`, writes all rows of the result."""

Consume = Callable[[int, int, torch.Tensor], None]
"""`consume(group, peer, rows)`: takes the own rows of the result for the heads of `peer`, `[own rows, B, width]`."""


class Passage:
    """One pass: own rows of all heads become all rows of own heads, are worked on, and come back.

    A piece lands at its natural place in the whole sequence, so that no layout of the sequence over ranks needs a
    permutation, and no padding exists.

    Args:
        transport: carries the pieces.
        plan: a plan of this rank.
        sequence: which rows each rank holds.
        batch: B.
        width_in, width_out: features inbound and outbound.
        like: dtype and device.
        op: name in error messages.
        keep: the inbound rows are kept after the pass: not in a buffer of the transport.
    """

    def __init__(
        self,
        transport: Transport,
        plan: AllToAllPlan,
        sequence: SequenceLayout,
        batch: int,
        width_in: Width,
        width_out: Width,
        like: torch.Tensor,
        op: str,
        *,
        keep: bool,
    ) -> None:
        self._plan, self._sequence, self._buffer_pool = plan, sequence, transport.buffer_pool
        self._rank = rank = plan.rank
        self._batch, self._width_out, self._like = batch, width_out, like
        groups, rows, own = range(plan.num_groups), sequence.num_rows, sequence.rows_of(rank)
        others = [peer for peer in range(plan.num_ranks) if peer != rank]
        self._own_in = [width_in(rank, group) for group in groups]
        self.inside = (
            [like.new_empty(rows, batch, width_in(rank, group)) for group in groups]
            if keep
            else self._take("ulysses_inside", [(rows, width_in(rank, group)) for group in groups])
        )
        """All rows of the own heads, a tensor for each group."""
        self._result = self._take("ulysses_result", [(rows, width_out(rank, group)) for group in groups])
        keys = [(group, peer) for group in groups for peer in others]
        leaving = self._take("ulysses_leaving", [(own, width_in(peer, group)) for group, peer in keys])
        landing = self._take("ulysses_landing", [(own, width_out(peer, group)) for group, peer in keys])
        self._leaving = dict(zip(keys, leaving, strict=True))
        self._landing = dict(zip(keys, landing, strict=True))
        local = [slice(*run) for run in sequence.local_runs(rank)]
        transfers = []
        for index, message in enumerate(plan.messages):
            send, recv = message.send, message.recv
            if send.way == "in":
                leaves = self._leaving[send.group, send.heads][local[send.run]]
                lands = self.inside[recv.group][slice(*sequence.runs[recv.rows][recv.run])]
            else:
                leaves = self._result[send.group][slice(*sequence.runs[send.rows][send.run])]
                lands = self._landing[recv.group, recv.heads][local[recv.run]]
            transfers.append(Transfer(message.message(index), leaves, lands))
        self.num_bytes = sum(transfer.send.nbytes for transfer in transfers)
        """Bytes that this rank sends."""
        self._p2p_work = transport.begin(transfers, op)

    def _take(self, name: str, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        sizes = [rows * self._batch * width for rows, width in shapes]
        parts = self._buffer_pool.take(name, (sum(sizes),), self._like).split(sizes) if sizes else ()
        return [part.view(rows, self._batch, width) for part, (rows, width) in zip(parts, shapes, strict=True)]

    def run(
        self,
        produce: Produce,
        attend: Attend,
        consume: Consume,
        *,
        flush: Callable[[], None] | None = None,
        fillers: Iterable[Callable[[], None]] = (),
    ) -> None:
        """Does the work of the plan.

        Args:
            produce, attend, consume: see their types.
            flush: called when what was consumed since the last call should be worked on.
            fillers: further work of no fixed time; done while nothing has landed, the rest at the end.
        """
        work = self._plan.work
        waiting = iter(fillers)
        for index, task in enumerate(work):
            if task.needs:
                self._fill(task.needs, waiting)
            if task.step == "produce":
                self._produce(produce, task.group, task.peers)
            elif task.step == "attend":
                attend(task.group, self.inside[task.group], self._result[task.group])
            else:
                (peer,) = task.peers
                rows = self._own_result(task.group) if peer == self._rank else self._landing[task.group, peer]
                consume(task.group, peer, rows)
                following = work[index + 1] if index + 1 < len(work) else None
                if flush is not None and (following is None or self._pause(task, following)):
                    flush()
            self._p2p_work.mark_ready(index + 1)
        for filler in waiting:
            filler()
        self._p2p_work.wait_all()

    def _pause(self, task: Task, following: Task) -> bool:
        """Whether what has been consumed should be worked on before the next piece: that one has not landed, or, on a
        device that cannot be asked, is of another group.
        """
        if self._like.is_cuda:
            return following.group != task.group
        return not self._here(following.needs)

    def _here(self, needs: tuple[int, ...]) -> bool:
        return all(self._p2p_work.is_completed(k) for k in needs)

    def _fill(self, needs: tuple[int, ...], fillers: Iterator[Callable[[], None]]) -> None:
        while not self._like.is_cuda and not self._here(needs):
            filler = next(fillers, None)
            if filler is None:
                break
            filler()
        for k in needs:
            self._p2p_work.wait(k)

    def _produce(self, produce: Produce, group: int, peers: tuple[int, ...]) -> None:
        own = None
        if self._rank in peers:
            shape = (self._sequence.rows_of(self._rank), self._batch, self._own_in[group])
            own = self._buffer_pool.take("ulysses_own", shape, self._like)
        slots = [own if peer == self._rank else self._leaving[group, peer] for peer in peers]
        produce(group, peers, [slot for slot in slots if slot is not None])
        if own is not None:
            for (start, stop), run in zip(*self._own_runs(), strict=True):
                self.inside[group][slice(*run)].copy_(own[start:stop])

    def _own_result(self, group: int) -> torch.Tensor:
        local, places = self._own_runs()
        if len(places) == 1:
            return self._result[group][slice(*places[0])]
        shape = (self._sequence.rows_of(self._rank), self._batch, self._width_out(self._rank, group))
        own = self._buffer_pool.take("ulysses_own", shape, self._like)
        for (start, stop), run in zip(local, places, strict=True):
            own[start:stop].copy_(self._result[group][slice(*run)])
        return own

    def _own_runs(self) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]:
        return self._sequence.local_runs(self._rank), self._sequence.runs[self._rank]
