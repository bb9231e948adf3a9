"""One pass of Ulysses attention: the buffers and messages of both all-to-alls, and the computation between them.

Source: DeepSpeed-Ulysses (arXiv 2309.14509). `schedules.ulysses` has the order.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from math import prod

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Exchange, RepeatedTransfers, Transfer
from megatron_overlap.ops.call import repeated
from megatron_overlap.schedules import AllToAllPlan, SequenceLayout
from megatron_overlap.schedules.ulysses import Task

Widths = tuple[tuple[int, ...], ...]
"""Features per row and batch entry of the heads of a rank in a head group, by rank and group."""

Produce = Callable[[int, tuple[int, ...], list[torch.Tensor]], None]
"""`produce(group, peers, slots)`: writes the own rows for the heads of each peer, `[own rows, B, width]` each."""

Attend = Callable[[int, torch.Tensor, torch.Tensor], None]
"""`attend(group, gathered, result)`: reads all rows of the own heads `[S, B, width]` and writes those of the result."""

Consume = Callable[[int, int, torch.Tensor], None]
"""`consume(group, peer, rows)`: reads the own rows of the result for the heads of `peer`, `[own rows, B, width]`."""


class Shapes:
    """The tensors of every rank in the buffers of a pass, in this order, `[rows, B, width]` each.

    Attributes:
        sent, received: own rows, by group and peer.
        gathered, result: all rows, by group.
        most_gathered, most_received: elements of the largest buffer of all ranks.
    """

    def __init__(self, sequence: SequenceLayout, batch: int, inputs: Widths, outputs: Widths) -> None:
        self.sequence = sequence
        ranks, groups = range(sequence.num_ranks), range(len(inputs[0]))
        keys = [[(group, peer) for group in groups for peer in ranks if peer != rank] for rank in ranks]
        own = [sequence.rows_of(rank) for rank in ranks]
        self.sent, self.received = (
            [{key: (own[rank], batch, widths[key[1]][key[0]]) for key in keys[rank]} for rank in ranks]
            for widths in (inputs, outputs)
        )
        self.gathered, self.result = (
            [{group: (sequence.num_rows, batch, widths[rank][group]) for group in groups} for rank in ranks]
            for widths in (inputs, outputs)
        )
        self.most_gathered, self.most_received = (max(map(_size, each)) for each in (self.gathered, self.received))


def _size[Key](shapes: dict[Key, tuple[int, int, int]]) -> int:
    """Elements of the tensors of a rank."""
    return sum(map(prod, shapes.values()))


def _tensors[Key](buffer: torch.Tensor, shapes: dict[Key, tuple[int, int, int]]) -> dict[Key, torch.Tensor]:
    """The tensors of this rank in `buffer`; of another rank: its own ones at the same places."""
    sizes = [*map(prod, shapes.values())]
    parts = buffer[: sum(sizes)].split(sizes) if sizes else ()
    return {key: part.view(shape) for part, (key, shape) in zip(parts, shapes.items(), strict=True)}


# Cached, because every layer makes the same call.
shapes_of = lru_cache(maxsize=256)(Shapes)


class _Pieces:
    """The tensors of a pass in the buffers `sent`, `gathered`, `result` and `received`, and its messages."""

    def __init__(self, plan: AllToAllPlan, shapes: Shapes, *buffers: torch.Tensor, symmetric: bool) -> None:
        rank, sequence, (sent, gathered, result, received) = plan.rank, shapes.sequence, buffers
        self.sent, self.gathered = _tensors(sent, shapes.sent[rank]), _tensors(gathered, shapes.gathered[rank])
        self.result, self.received = _tensors(result, shapes.result[rank]), _tensors(received, shapes.received[rank])
        local = [[slice(*run) for run in sequence.local_runs(each)] for each in range(plan.num_ranks)]
        whole = [[slice(*run) for run in runs] for runs in sequence.runs]
        # Where the tensors land that this rank sends.
        of_ranks = range(plan.num_ranks) if symmetric else ()
        gathers = [_tensors(gathered, shapes.gathered[each]) for each in of_ranks]
        receives = [_tensors(received, shapes.received[each]) for each in of_ranks]
        transfers = []
        for index, message in enumerate(plan.messages):
            send, recv, to, lands = message.send, message.recv, message.to, None
            if send.direction == "in":
                source, sink = self.sent[send.group, to][local[rank][send.run]], self.gathered[recv.group]
                received_rows = whole[recv.rows][recv.run]
                if symmetric:
                    lands = gathers[to][send.group][whole[rank][send.run]]
            else:
                source, sink = self.result[send.group][whole[to][send.run]], self.received[recv.group, recv.heads]
                received_rows = local[rank][recv.run]
                if symmetric:
                    lands = receives[to][send.group, rank][local[to][send.run]]
            transfers.append(Transfer(message.message(index), source, sink[received_rows], lands=lands))
        self.num_bytes = sum(transfer.send.nbytes for transfer in transfers)
        self.transfers = RepeatedTransfers(transfers)


class HeadAllToAll:
    """One pass: own rows of all heads become all rows of own heads, then own rows of all results.

    A received piece is written at its position in the whole sequence, without a permutation or padding. With
    `retain` the gathered rows outlive the pass, so they are not in a buffer of the transport.

    Attributes:
        gathered: all rows of the own heads, `[S, B, width]` by group.
        num_bytes: bytes that this rank sends.
    """

    def __init__(
        self, transport: Transport, plan: AllToAllPlan, shapes: Shapes, like: torch.Tensor, op: str, *, retain: bool
    ) -> None:
        self._plan, self._buffer_pool, self._like = plan, transport.buffer_pool, like
        rank, sequence, take = plan.rank, shapes.sequence, transport.buffer_pool.take
        self._own_rows = sequence.rows_of(rank)
        # The runs of this rank as rows of its own tensors and of the whole sequence.
        runs = zip(sequence.local_runs(rank), sequence.runs[rank], strict=True)
        self._runs = [(slice(*local), slice(*whole)) for local, whole in runs]
        num_gathered, num_received = _size(shapes.gathered[rank]), _size(shapes.received[rank])
        symmetric = transport.prepares
        if symmetric:
            # Buffers of the same size on all ranks.
            num_gathered, num_received = shapes.most_gathered, shapes.most_received
        if retain and not symmetric:
            gathered = like.new_empty(num_gathered)
        else:
            gathered = take("ulysses_gathered", (num_gathered,), like, symmetric=True)
        of = (
            plan,
            shapes,
            take("ulysses_send", (_size(shapes.sent[rank]),), like),
            gathered,
            take("ulysses_result", (_size(shapes.result[rank]),), like),
            take("ulysses_receive", (num_received,), like, symmetric=True),
        )
        build = partial(_Pieces, *of, symmetric=symmetric)
        pieces = repeated(transport, of, build) if symmetric else build()
        self._send_buffers, self._result, self._recv_buffers = pieces.sent, pieces.result, pieces.received
        self.num_bytes = pieces.num_bytes
        self._arrives = self.gathered = pieces.gathered
        if symmetric and retain:
            # Later messages overwrite the buffer.
            retained = like.new_empty(_size(shapes.gathered[rank]))
            self.gathered = _tensors(retained, shapes.gathered[rank])
        self._p2p_work = transport.begin(Exchange(pieces.transfers), op)

    def run(
        self,
        produce: Produce,
        attend: Attend,
        consume: Consume,
        *,
        flush: Callable[[], None] | None = None,
        fillers: Iterable[Callable[[], None]] = (),
    ) -> None:
        """Executes the tasks of the plan.

        Args:
            flush: processes the rows that were consumed since the last call. It is called before a wait and at the end.
            fillers: further computation without a fixed order. It runs while a message is not complete; the rest runs
                at the end.
        """
        work = self._plan.work
        remaining = iter(fillers)
        for index, task in enumerate(work):
            if task.needs:
                self._wait(task.needs, remaining)
            if task.step == "produce":
                self._produce(produce, task.group, task.peers)
            elif task.step == "attend":
                gathered, arrived = self.gathered[task.group], self._arrives[task.group]
                if gathered is not arrived:
                    gathered.copy_(arrived)
                attend(task.group, gathered, self._result[task.group])
            else:
                (peer,) = task.peers
                rows = self._own_result(task.group) if peer == self._plan.rank else self._recv_buffers[task.group, peer]
                consume(task.group, peer, rows)
                following = work[index + 1] if index + 1 < len(work) else None
                if flush is not None and (following is None or self._must_flush(task, following)):
                    flush()
            self._p2p_work.mark_ready(index + 1)
        for filler in remaining:
            filler()
        self._p2p_work.wait_all()

    def _must_flush(self, task: Task, following: Task) -> bool:
        """Whether the next piece has not arrived. On CUDA: whether it is of another group, as a query synchronises."""
        if self._like.is_cuda:
            return following.group != task.group
        return not self._are_completed(following.needs)

    def _are_completed(self, needs: tuple[int, ...]) -> bool:
        return all(self._p2p_work.is_completed(k) for k in needs)

    def _wait(self, needs: tuple[int, ...], fillers: Iterator[Callable[[], None]]) -> None:
        """Waits for messages; runs fillers until they are complete."""
        while not self._like.is_cuda and not self._are_completed(needs) and (filler := next(fillers, None)):
            filler()
        self._p2p_work.wait(*needs)

    def _produce(self, produce: Produce, group: int, peers: tuple[int, ...]) -> None:
        buffers = {peer: self._send_buffers[group, peer] for peer in peers if peer != self._plan.rank}
        is_own = self._plan.rank in peers
        if is_own:
            buffers[self._plan.rank] = self._take_own(self._arrives[group].shape[2])
        produce(group, peers, [buffers[peer] for peer in peers])
        if is_own:
            for local, whole in self._runs:
                self._arrives[group][whole].copy_(buffers[self._plan.rank][local])

    def _own_result(self, group: int) -> torch.Tensor:
        result = self._result[group]
        if len(self._runs) == 1:
            return result[self._runs[0][1]]
        own = self._take_own(result.shape[2])
        for local, whole in self._runs:
            own[local].copy_(result[whole])
        return own

    def _take_own(self, width: int) -> torch.Tensor:
        return self._buffer_pool.take("ulysses_own", (self._own_rows, self._like.shape[1], width), self._like)
