"""Moves rows between the attention layout and the linear layout, in which all ranks have equally many tokens.

Source: Zeppelin (arXiv 2509.21841, section 4.3).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Literal

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.ops.varlen.layout import RowMessages
from megatron_overlap.schedules.varlen.message_order import MessagePlan
from megatron_overlap.schedules.varlen.messages import rebalance_messages
from megatron_overlap.schedules.varlen.rebalance import Rebalance

Layout = Literal["linear", "attention"]


class _MoveMessages(RowMessages):
    """The messages of a rebalancing, posted. They read and write only the moved rows of `x` and `y`.

    `is_arrived` returns whether all rows for this rank have arrived; `wait_arrived` waits for them.

    Args:
        first_row: row number of `x[0]` in the source layout and of `y[0]` in the destination layout.
        after_work: see `RowMessages`.
    """

    def __init__(
        self,
        transport: Transport,
        moves: Rebalance,
        x: torch.Tensor,
        y: torch.Tensor,
        after_work: dict[tuple[int, int], int],
        name: str,
        first_row: int = 0,
    ) -> None:
        rank = transport.rank
        self.num_in_place = min(moves.before[rank], moves.after[rank])
        numbered = [(move, (index, 0)) for index, move in enumerate(moves.moves)]
        sources = {key: x[m.start - first_row : m.stop - first_row] for m, key in numbered if m.source == rank}
        sinks = {key: y[m.at - first_row : m.at - first_row + m.rows] for m, key in numbered if m.to == rank}
        super().__init__(transport, _messages_of(moves), sources, sinks, after_work, x, 0, name)
        self.is_arrived = partial(self.is_completed, self.receive_rounds)
        self.wait_arrived = partial(self.wait, self.receive_rounds)


class InboundRows:
    """Tensors of the linear layout in the attention layout. Rows of other ranks arrive during attention with own rows.

    Attributes:
        rows: the tensors in the attention layout; the rows from `num_in_place` on are valid after `wait`.
        num_in_place: rows that this rank holds in both layouts.
    """

    def __init__(self, transport: Transport, moves: Rebalance, tensors: Sequence[torch.Tensor], name: str) -> None:
        held, target = moves.before[transport.rank], moves.after[transport.rank]
        like, self._heads = tensors[0], [x.shape[1] for x in tensors]
        self.num_in_place = in_place = min(held, target)
        shape = (sum(self._heads), like.shape[2])
        # One message carries the moved rows of all tensors.
        leaving = transport.buffer_pool.take(f"{name} sent rows", (held - in_place, *shape), like)
        torch.cat([x[in_place:] for x in tensors], dim=1, out=leaving)
        self._received = transport.buffer_pool.take(f"{name} received rows", (target - in_place, *shape), like)
        self.rows = [x[:target] for x in tensors]
        if target > held:
            self.rows = [x.new_empty(target, *x.shape[1:]) for x in tensors]
            for whole, own in zip(self.rows, tensors, strict=True):
                whole[:held] = own
        self._messages = _MoveMessages(transport, moves, leaving, self._received, {}, f"{name} inbound", in_place)
        self._needs_copy = target > held
        self.is_arrived = self._messages.is_arrived

    def wait(self) -> None:
        """Waits for the rows of other ranks."""
        self._messages.wait_arrived()
        if self._needs_copy:
            self._needs_copy = False
            for whole, part in zip(self.rows, self._received.split(self._heads, dim=1), strict=True):
                whole[self.num_in_place :] = part

    def finish(self) -> int:
        """Waits for all messages; returns the number of bytes that this rank sent."""
        self.wait()
        self._messages.wait_all()
        return self._messages.num_bytes


class OutboundRows:
    """Results of attention that return to the linear layout. Each row leaves as soon as it is computed.

    Attributes:
        results: `[rows in the attention layout, heads, D]` each; the caller writes them.
    """

    def __init__(
        self, transport: Transport, moves: Rebalance, heads: Sequence[int], like: torch.Tensor, name: str
    ) -> None:
        self._transport, self._moves, self._name = transport, moves, name
        held, self._target = moves.before[transport.rank], moves.after[transport.rank]
        # The buffer holds the computed rows and the received rows. The rows that stay in place belong to both.
        self._packed = like.new_empty(max(held, self._target), sum(heads), like.shape[2])
        self._parts = self._packed.split(list(heads), dim=1)
        self.results = [part[:held] for part in self._parts]
        self._num_steps = 0

    def begin(self, num_steps: Callable[[int, int], int]) -> None:
        """Posts the messages. `num_steps(start, stop)`: number of `step` calls after which these rows are ready."""
        rank = self._transport.rank
        after = {(i, 0): num_steps(m.start, m.stop) for i, m in enumerate(self._moves.moves) if m.source == rank}
        self._messages = _MoveMessages(
            self._transport, self._moves, self._packed, self._packed, after, f"{self._name} outbound"
        )

    def step(self) -> None:
        """Marks the next rows as ready."""
        self._num_steps += 1
        self._messages.mark_ready(self._num_steps)

    def finish(self) -> int:
        """Waits for all messages; returns the number of bytes that this rank sent."""
        self._messages.wait_arrived()
        self._messages.wait_all()
        return self._messages.num_bytes

    def linear_results(self) -> list[torch.Tensor]:
        """The results in the linear layout."""
        return [part[: self._target] for part in self._parts]


@lru_cache(maxsize=64)
def _messages_of(moves: Rebalance) -> MessagePlan:
    return rebalance_messages(moves)
