"""One pass of Ulysses attention: the buffers and messages of both all-to-alls, and the computation between them.

Source: DeepSpeed-Ulysses (arXiv 2309.14509). `schedules.ulysses` has the order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.schedules import AllToAllPlan, SequenceLayout
from megatron_overlap.schedules.ulysses import Task

Width = Callable[[int, int], int]
"""`width(rank, group)`: features per row and batch entry of the heads of a rank in a head group."""

Produce = Callable[[int, tuple[int, ...], list[torch.Tensor]], None]
"""`produce(group, peers, slots)`: writes the own rows for the heads of each peer, `[own rows, B, width]` each."""

Attend = Callable[[int, torch.Tensor, torch.Tensor], None]
"""`attend(group, gathered, result)`: reads all rows of the own heads `[S, B, width]` and writes those of the result."""

Consume = Callable[[int, int, torch.Tensor], None]
"""`consume(group, peer, rows)`: reads the own rows of the result for the heads of `peer`, `[own rows, B, width]`."""


class HeadAllToAll:
    """One pass: own rows of all heads become all rows of own heads, then own rows of all results.

    A received piece is written at its position in the whole sequence. No layout of the sequence over ranks needs a
    permutation or padding. `input_width` and `output_width` are the features of the inputs and results of `attend`.
    With `retain_gathered` the gathered rows outlive the pass, so they are not in a buffer of the transport.

    Attributes:
        gathered: all rows of the own heads, one tensor `[S, B, width]` per group.
        num_bytes: bytes that this rank sends.
    """

    def __init__(
        self,
        transport: Transport,
        plan: AllToAllPlan,
        sequence: SequenceLayout,
        input_width: Width,
        output_width: Width,
        like: torch.Tensor,
        op: str,
        *,
        retain_gathered: bool,
    ) -> None:
        self._plan, self._buffer_pool, self._like = plan, transport.buffer_pool, like
        rank, batch = plan.rank, like.shape[1]
        groups, rows = range(plan.num_groups), sequence.num_rows
        self._own_rows = own = sequence.rows_of(rank)
        # The runs of this rank as rows of its own tensors and of the whole sequence.
        self._local = local = [slice(*run) for run in sequence.local_runs(rank)]
        self._whole = [slice(*run) for run in sequence.runs[rank]]
        shapes = [(rows, input_width(rank, group)) for group in groups]
        self.gathered = (
            [like.new_empty(rows, batch, width) for _, width in shapes]
            if retain_gathered
            else self._take("ulysses_gathered", shapes)
        )
        self._result = self._take("ulysses_result", [(rows, output_width(rank, group)) for group in groups])
        keys = [(group, peer) for group in groups for peer in range(plan.num_ranks) if peer != rank]
        send = self._take("ulysses_send", [(own, input_width(peer, group)) for group, peer in keys])
        recv = self._take("ulysses_receive", [(own, output_width(peer, group)) for group, peer in keys])
        self._send_buffers = dict(zip(keys, send, strict=True))
        self._recv_buffers = dict(zip(keys, recv, strict=True))
        transfers = []
        for index, message in enumerate(plan.messages):
            sent, received = message.send, message.recv
            if sent.direction == "in":
                source = self._send_buffers[sent.group, sent.heads][local[sent.run]]
                sink = self.gathered[received.group][slice(*sequence.runs[received.rows][received.run])]
            else:
                source = self._result[sent.group][slice(*sequence.runs[sent.rows][sent.run])]
                sink = self._recv_buffers[received.group, received.heads][local[received.run]]
            transfers.append(Transfer(message.message(index), source, sink))
        self.num_bytes = sum(transfer.send.nbytes for transfer in transfers)
        self._p2p_work = transport.begin(transfers, op)

    def _take(self, name: str, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Takes one buffer of the pool and splits it into tensors `[rows, B, width]`."""
        batch = self._like.shape[1]
        sizes = [rows * batch * width for rows, width in shapes]
        parts = self._buffer_pool.take(name, (sum(sizes),), self._like).split(sizes) if sizes else ()
        return [part.view(rows, batch, width) for part, (rows, width) in zip(parts, shapes, strict=True)]

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
            produce, attend, consume: see `Produce`, `Attend`, `Consume`.
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
                attend(task.group, self.gathered[task.group], self._result[task.group])
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
        for k in needs:
            self._p2p_work.wait(k)

    def _produce(self, produce: Produce, group: int, peers: tuple[int, ...]) -> None:
        buffers = {peer: self._send_buffers[group, peer] for peer in peers if peer != self._plan.rank}
        is_own = self._plan.rank in peers
        if is_own:
            (buffers[self._plan.rank],) = self._take("ulysses_own", [(self._own_rows, self.gathered[group].shape[2])])
        produce(group, peers, [buffers[peer] for peer in peers])
        if is_own:
            for local, whole in zip(self._local, self._whole, strict=True):
                self.gathered[group][whole].copy_(buffers[self._plan.rank][local])

    def _own_result(self, group: int) -> torch.Tensor:
        result = self._result[group]
        if len(self._whole) == 1:
            return result[self._whole[0]]
        (own,) = self._take("ulysses_own", [(self._own_rows, result.shape[2])])
        for local, whole in zip(self._local, self._whole, strict=True):
            own[local].copy_(result[whole])
        return own
