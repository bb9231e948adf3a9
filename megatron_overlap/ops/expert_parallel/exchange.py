"""One pass of expert parallelism: the messages of dispatch and combine, and the computation between them.

`schedules.expert_parallel` has the order.
"""

from collections.abc import Callable
from itertools import accumulate
from math import prod

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.symmetric.backend import aligned
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.schedules.expert_parallel import (
    ExpertPlan,
    OwnPiece,
    RowGroup,
    Segments,
    is_one_run,
    joined,
)

Rows = tuple[torch.Tensor, ...]
"""Tensors with the same number of rows. A message carries the same rows of all of them."""

Compute = Callable[[Segments, Rows, Rows], None]
"""`compute(segments, inputs, outputs)`: computes these expert rows, which follow one another in `inputs`, and writes
`outputs`."""


class ExpertPass:
    """A pass that has sent its first dispatch messages: other computation overlaps its dispatch until `run`.

    Messages land in symmetric buffers if the transport has them and the plan knows the places of chunks at peers. The
    next pass uses the same buffers. This rank sends `send_bytes`.

    Args:
        tokens, results: inputs and outputs of the experts, a row for each token. `finish` completes the outputs.
        serial: receive all messages of dispatch here, and send the results after all computation.
    """

    def __init__(
        self, transport: Transport, plan: ExpertPlan, op: str, tokens: Rows, results: Rows, *, serial: bool
    ) -> None:
        self._transport, self._plan, self._serial = transport, plan, serial
        self._tokens, self.results = tokens, results
        self._symmetric = transport.prepares and plan.most_tokens > 0
        num_received = plan.most_received if self._symmetric else plan.num_received
        self._received = received = self._take("received", tokens, num_received, symmetric=self._symmetric)
        self._outputs = outputs = self._take("outputs", results, plan.num_received)
        self._returned = returned = (
            self._take("returned", results, plan.most_tokens, symmetric=True) if self._symmetric else results
        )
        sizes = [segment.rows for segment in plan.received]
        self._firsts = list(accumulate(sizes, initial=0))
        # The received rows and their results, by segment.
        self._received_parts, self._output_parts = (
            [tensor[: self._firsts[-1]].split(sizes) for tensor in tensors] for tensors in (received, outputs)
        )
        # The first input of all expert rows.
        self._inputs = dict(zip(plan.received, self._received_parts[0], strict=True))
        there, home = [], []
        for each in plan.messages:
            sent, count = _tokens(each.sent), each.num_received
            arrived, returns = (slice(first, first + count) for first in (each.arrives, each.returns))
            lands = slice(each.lands, each.lands + sent.stop - sent.start)
            there.append((_rows(tokens, sent), _rows(received, arrived), self._at_peer(received, lands)))
            home.append((_rows(outputs, arrived), _rows(returned, sent), self._at_peer(returned, returns)))
        transfers = [
            Transfer(message, send[0], recv[0], send[1:], recv[1:], *place)
            for message, (send, recv, place) in zip(plan.transfers, there + home, strict=True)
        ]
        self.send_bytes = sum(each.send_bytes for each in transfers)
        self._p2p_work = transport.begin(transfers, op)
        if serial:
            self._p2p_work.wait(*range(len(plan.messages)))

    def _at_peer(self, buffers: Rows, rows: slice) -> tuple[torch.Tensor | None, Rows]:
        """Where rows land in symmetric buffers: in the first one, and in the others."""
        return (buffers[0][rows], _rows(buffers[1:], rows)) if self._symmetric else (None, ())

    def _take(self, name: str, like: Rows, num_rows: int, *, symmetric: bool = False) -> Rows:
        """Tensors of `num_rows` rows each, as those of `like`, in one buffer: a message needs one flag."""
        shapes = [(num_rows, *each.shape[1:]) for each in like]
        sizes = [aligned(prod(shape) * each.itemsize) for shape, each in zip(shapes, like, strict=True)]
        of_bytes = like[0].new_empty(0, dtype=torch.uint8)
        pool = self._transport.buffer_pool
        parts = pool.take(f"expert_{name}", (sum(sizes),), of_bytes, symmetric=symmetric).split(sizes)
        return tuple(
            part.view(each.dtype)[: prod(shape)].view(shape)
            for part, each, shape in zip(parts, like, shapes, strict=True)
        )

    def run(self, compute: Compute, *, fixed_order: bool) -> None:
        """Computes all rows, with `fixed_order` the own pieces where the plan places them.

        Otherwise it computes one while messages of the next step are missing, if the transport can report that.
        """
        plan, p2p_work = self._plan, self._p2p_work
        apart = [group for step in plan.steps for group in step.received if not is_one_run(group)]
        most = max((sum(plan.received[number].rows for number in group) for group in apart), default=0)
        gathered = self._take("gathered", self._tokens, most) if most else ()
        computed = self._take("computed", self.results, most) if most else ()
        done = 0
        for number, step in enumerate(plan.steps):
            while done < len(plan.own) and (
                done < step.own_before if fixed_order else not all(map(p2p_work.is_completed, step.messages))
            ):
                self._compute_own(plan.own[done], compute)
                done += 1
            if step.received:
                p2p_work.wait(*(index for index in step.messages if plan.messages[index].received))
            for group in step.received:
                self._compute_group(group, compute, gathered, computed)
            if not self._serial:
                p2p_work.mark_ready(number + 1)
        for piece in plan.own[done:]:
            self._compute_own(piece, compute)

    def _compute_own(self, piece: OwnPiece, compute: Compute) -> None:
        for own, segment in zip(piece.tokens, piece.rows, strict=True):
            self._inputs[segment] = self._tokens[0][own.start : own.stop]
        tokens = _tokens(piece.tokens)
        compute(piece.rows, _rows(self._tokens, tokens), _rows(self.results, tokens))

    def _compute_group(self, group: RowGroup, compute: Compute, gathered: Rows, computed: Rows) -> None:
        """Computes received rows. Those of several messages are gathered by expert, and the results put back."""
        segments = [self._plan.received[number] for number in group]
        if is_one_run(group):
            rows = slice(self._firsts[group[0]], self._firsts[group[-1] + 1])
            compute(joined(segments), _rows(self._received, rows), _rows(self._outputs, rows))
            return
        sizes = [segment.rows for segment in segments]
        rows = slice(0, sum(sizes))
        inputs, outputs = _rows(gathered, rows), _rows(computed, rows)
        for into, parts in zip(inputs, self._received_parts, strict=True):
            torch.cat([parts[number] for number in group], out=into)
        compute(joined(segments), inputs, outputs)
        for output, parts in zip(outputs, self._output_parts, strict=True):
            torch._foreach_copy_([parts[number] for number in group], output.split(sizes))

    def expert_rows(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The first input of all expert rows, copied: later passes overwrite the received rows."""
        rows = (self._inputs[segment] for segment in sorted(self._inputs))
        return torch.cat([self._tokens[0][:0], *rows], out=out)

    def finish(self) -> None:
        """Receives all results. They are sent while the caller computes between `run` and this call."""
        messages = self._plan.messages
        if self._serial:
            self._p2p_work.mark_ready(len(self._plan.steps))
        for index, message in enumerate(messages, len(messages)):
            self._p2p_work.wait(index)
            if self._symmetric:
                sent = _tokens(message.sent)
                for result, returned in zip(_rows(self.results, sent), _rows(self._returned, sent), strict=True):
                    result.copy_(returned)
        self._p2p_work.wait_all()


def _rows(tensors: Rows, rows: slice) -> Rows:
    return tuple(tensor[rows] for tensor in tensors)


def _tokens(segments: Segments) -> slice:
    """The tokens of a chunk: consecutive segments."""
    return slice(segments[0].start, segments[-1].stop) if segments else slice(0, 0)
