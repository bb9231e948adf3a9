"""One pass of expert parallelism: the messages of dispatch and combine, and the computation between them.

`schedules.expert_parallel` has the order.
"""

from collections.abc import Callable, Iterable

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.schedules.expert_parallel import ExpertPlan, OwnPiece, Segment, Segments

Rows = tuple[torch.Tensor, ...]
"""Tensors with the same number of rows. A message carries the same rows of all of them."""

Exchange = tuple[Rows, Rows]
"""What an all-to-all sends, and what it receives."""

Compute = Callable[[Segment, Rows], None]
"""`compute(segment, outputs)`: computes these expert rows from the inputs; `outputs` are the rows to write."""


class ExpertPass:
    """A pass that has sent its first dispatch messages: other computation overlaps its dispatch until `finish`.

    Args:
        op: name in errors and traces.
        dispatch: a row for each token, and a row for each expert row. Own rows are copied.
        combine: a row for each expert row, and a row for each token. Own rows are computed where they are received.
        serial: receive all messages of dispatch here, and send the results after all computation.

    Attributes:
        send_bytes: the bytes that this rank sends.
    """

    def __init__(
        self, transport: Transport, plan: ExpertPlan, op: str, dispatch: Exchange, combine: Exchange, *, serial: bool
    ) -> None:
        (self._tokens, self.inputs), (self._outputs, self.results) = dispatch, combine
        self._plan, self._serial = plan, serial
        there = [(_all(self._tokens, each.sent), _all(self.inputs, each.received)) for each in plan.messages]
        home = [(_all(self._outputs, each.received), _all(self.results, each.sent)) for each in plan.messages]
        empty = (self._tokens[0].new_empty(0),)
        transfers = []
        for message, (send, recv) in zip(plan.transfers, there + home, strict=True):
            send, recv = send or empty, recv or empty
            transfers.append(Transfer(message, send[0], recv[0], send[1:], recv[1:]))
        self.send_bytes = sum(each.send_bytes for each in transfers)
        self._p2p_work = transport.begin(transfers, op)
        if serial:
            for index in range(len(plan.messages)):
                self._p2p_work.wait(index)

    def finish(self, compute: Compute, *, fixed_order: bool, fillers: Iterable[Callable[[], None]] = ()) -> None:
        """Executes the rest of the plan.

        Args:
            fixed_order: compute own pieces where the plan places them. Otherwise one is computed whenever the next
                chunk is not received, which needs a transport that can report it.
            fillers: computed after all rows, while the last results are sent.
        """
        plan, p2p_work = self._plan, self._p2p_work
        done = 0
        for index, message in enumerate(plan.messages):
            while done < len(plan.own) and (
                done < message.own_before if fixed_order else not p2p_work.is_completed(index)
            ):
                self._compute_own(plan.own[done], compute)
                done += 1
            if message.received:
                p2p_work.wait(index)
            for segment in message.received:
                compute(segment, _rows(self._outputs, segment))
            if not self._serial:
                p2p_work.mark_ready(index + 1)
        for piece in plan.own[done:]:
            self._compute_own(piece, compute)
        for filler in fillers:
            filler()
        if self._serial:
            p2p_work.mark_ready(len(plan.messages))
        for index in range(len(plan.messages), 2 * len(plan.messages)):
            p2p_work.wait(index)
        p2p_work.wait_all()

    def _compute_own(self, piece: OwnPiece, compute: Compute) -> None:
        for tokens, rows in zip(piece.tokens, piece.rows, strict=True):
            for source, sink in zip(_rows(self._tokens, tokens), _rows(self.inputs, rows), strict=True):
                sink.copy_(source)
            compute(rows, _rows(self.results, tokens))


def _rows(tensors: Rows, segment: Segment) -> Rows:
    return tuple(tensor[segment.start : segment.stop] for tensor in tensors)


def _all(tensors: Rows, segments: Segments) -> Rows:
    return tuple(rows for segment in segments for rows in _rows(tensors, segment))
