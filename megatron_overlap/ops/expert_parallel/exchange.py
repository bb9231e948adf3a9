"""One pass of expert parallelism: the messages of dispatch and combine, and the computation between them.

`schedules.expert_parallel` has the order.
"""

from collections.abc import Callable
from math import prod

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.symmetric.backend import aligned
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.schedules.expert_parallel import ExpertPlan, OwnPiece, Segment, Segments

Rows = tuple[torch.Tensor, ...]
"""Tensors with the same number of rows. A message carries the same rows of all of them."""

Compute = Callable[[Segment, Rows, Rows], None]
"""`compute(segment, inputs, outputs)`: computes these expert rows from `inputs`, and writes `outputs`."""


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
        # The first input of the rows that are computed.
        self._inputs: dict[Segment, torch.Tensor] = {}
        there, home = [], []
        for each in plan.messages:
            sent, count = _tokens(each.sent), each.num_received
            arrived, returns = (slice(first, first + count) for first in (each.arrives, each.returns))
            lands = slice(each.lands, each.lands + sent.stop - sent.start)
            there.append((_rows(tokens, sent), _rows(received, arrived), _rows(received, lands)))
            home.append((_rows(outputs, arrived), _rows(returned, sent), _rows(returned, returns)))
        transfers = []
        for message, (send, recv, place) in zip(plan.transfers, there + home, strict=True):
            known = (place[0], place[1:]) if self._symmetric else (None, ())
            transfers.append(Transfer(message, send[0], recv[0], send[1:], recv[1:], *known))
        self.send_bytes = sum(each.send_bytes for each in transfers)
        self._p2p_work = transport.begin(transfers, op)
        if serial:
            self._p2p_work.wait(*range(len(plan.messages)))

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

        Otherwise one is computed whenever the next chunk is not received, which needs a transport that can report it.
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
            first = message.arrives
            for segment in message.received:
                rows = slice(first, first + segment.rows)
                self._compute(segment, _rows(self._received, rows), _rows(self._outputs, rows), compute)
                first = rows.stop
            if not self._serial:
                p2p_work.mark_ready(index + 1)
        for piece in plan.own[done:]:
            self._compute_own(piece, compute)

    def _compute_own(self, piece: OwnPiece, compute: Compute) -> None:
        for tokens, segment in zip(piece.tokens, piece.rows, strict=True):
            rows = slice(tokens.start, tokens.stop)
            self._compute(segment, _rows(self._tokens, rows), _rows(self.results, rows), compute)

    def _compute(self, segment: Segment, inputs: Rows, outputs: Rows, compute: Compute) -> None:
        self._inputs[segment] = inputs[0]
        compute(segment, inputs, outputs)

    def expert_rows(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The first input of all expert rows, copied: later passes overwrite the received rows."""
        rows = (self._inputs[segment] for segment in sorted(self._inputs))
        return torch.cat([self._tokens[0][:0], *rows], out=out)

    def finish(self) -> None:
        """Receives all results. They are sent while the caller computes between `run` and this call."""
        messages = self._plan.messages
        if self._serial:
            self._p2p_work.mark_ready(len(messages))
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
