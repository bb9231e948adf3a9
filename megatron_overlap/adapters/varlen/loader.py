"""Micro-batches of whole documents: read by all ranks of a group, planned, and handed to where their rows belong.

Everything of the next micro-batch happens on a thread while the current one is computed with: reading, gathering
lengths, planning, exchanging; and what attention will ask of the plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol, Self

import numpy as np
import torch

from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.schedules.varlen.messages import precompute
from megatron_overlap.schedules.varlen.partition import CapacityError
from megatron_overlap.schedules.varlen.plan import Piece, Plan
from megatron_overlap.schedules.varlen.rebalance import linear_layout

Planner = Callable[[Sequence[int]], Plan]

_COLUMNS = 3  # token, label, whether the row counts in the loss
_LENGTHS_AT_ONCE = 32  # of each rank, in one gather


class Documents(Protocol):
    """Where documents come from. A rank asks for those that it reads, no others."""

    def __len__(self) -> int:
        """How many there are; the same on every rank."""

    def rows(self, index: int) -> int:
        """Rows of a document: tokens that have a next one."""

    def read(self, index: int) -> np.ndarray:
        """`[rows, 3]` int32: token, next token, 1 where the row counts in the loss."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch as a rank holds it in linear layers: rows `[1, T]`, the last of them padding.

    Attributes:
        tokens: input ids.
        labels: the next ids.
        loss_mask: 1 where a row counts, 0 in padding.
        position_ids: of a token in its document.
        documents: number of a row's document in the micro-batch; -1 in padding.
        num_rows: rows without padding.
        plan: where the tokens are in attention: one pass.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    documents: torch.Tensor
    num_rows: int
    plan: Plan


class Channel:
    """The messages and the thread of a rank's loaders. Loaders take turns, in the order in which they are asked.

    Args:
        group: the ranks that share micro-batches.
    """

    def __init__(self, group: HostGroup) -> None:
        self.group = group
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="megatron_overlap_loader")

    def close(self) -> None:
        """Waits for what was asked for: peers need this rank for it."""
        self.thread.shutdown(wait=True)
        self.group.close()


class DocumentLoader:
    """An endless iterator of micro-batches.

    Equal, on a group of one rank, to packing documents in order until the next would exceed `tokens`. With more ranks
    the same micro-batches, each row on one of them.

    Document number n of the stream is read by rank `n % size`, which alone needs to know its length; everybody plans
    from the gathered lengths, so that all ranks have the same plan even where their files differ.

    Args:
        documents: what is read, in an order drawn anew in every epoch.
        channel: the ranks that share micro-batches; all make the same loaders and ask them in the same order.
        planner: lengths to a plan of one pass.
        tokens: most rows of a micro-batch.
        seed: of the order.
        first: number of the first micro-batch of this group.
        stride: every so many are this group's; others belong to other groups.
        row_multiple: a rank's rows are padded to a multiple of this, and to at least one.

    Raises:
        ValueError: no document has a row, or one has more than `tokens`.
    """

    def __init__(
        self,
        documents: Documents,
        channel: Channel,
        planner: Planner,
        *,
        tokens: int,
        seed: int,
        first: int = 0,
        stride: int = 1,
        row_multiple: int = 1,
    ) -> None:
        longest = max((documents.rows(index) for index in range(len(documents))), default=0)
        if not 0 < longest <= tokens:
            raise ValueError(
                f"documents: the longest of {len(documents)} has {longest} rows: give documents of 1 to {tokens} rows "
                "(two ids make a row)"
            )
        self._documents, self._channel, self._planner = documents, channel, planner
        self._tokens, self._seed = tokens, seed
        self._skip, self._stride = first, stride
        self._row_multiple = row_multiple
        self._order = lru_cache(maxsize=2)(self._draw_order)
        self._ahead: deque[int] = deque()  # lengths that are known and not used: of documents from number _next on
        self._next = 0
        self._coming: Future[Batch] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        coming = self._coming or self._ask()
        batch = coming.result()
        self._coming = self._ask()
        return batch

    def _ask(self) -> Future[Batch]:
        return self._channel.thread.submit(self._prepare)

    def _prepare(self) -> Batch:
        for _ in range(self._skip):
            self._choose()
        self._skip = self._stride - 1
        first, lengths = self._choose()
        plan = self._planner(lengths)
        if len(plan.passes) != 1:
            raise CapacityError(f"lengths: {sum(lengths)} tokens need {len(plan.passes)} passes: raise the capacity")
        precompute(plan)
        _, rows = linear_layout(plan)
        return self._collect(first, plan, rows)

    def _choose(self) -> tuple[int, list[int]]:
        """The next micro-batch: number of its first document, and the lengths of all."""
        first, lengths, room = self._next, list[int](), self._tokens
        while True:
            if not self._ahead:
                self._look_ahead()
            if self._ahead[0] > room:
                return first, lengths
            lengths.append(self._ahead.popleft())
            room -= lengths[-1]
            self._next += 1

    def _look_ahead(self) -> None:
        group = self._channel.group
        numbers = range(self._next, self._next + _LENGTHS_AT_ONCE * group.size)
        mine = [self._documents.rows(self._index(number)) for number in numbers if number % group.size == group.rank]
        everybodys = [iter(lengths) for lengths in group.all_gather(mine)]
        self._ahead.extend(next(everybodys[number % group.size]) for number in numbers)

    def _collect(self, first: int, plan: Plan, rows: Sequence[Sequence[Piece]]) -> Batch:
        group = self._channel.group
        read = cache(lambda document: self._read(first + document, plan.lengths[document]))

        def count(pieces: Sequence[Piece], reader: int) -> int:
            return sum(p.stop - p.start for p in pieces if (first + p.document) % group.size == reader)

        mine = rows[group.rank]
        sends = [
            read(piece.document)[piece.start : piece.stop]
            for pieces in rows
            for piece in pieces
            if (first + piece.document) % group.size == group.rank
        ]
        send = torch.from_numpy(np.concatenate([np.empty((0, _COLUMNS), np.int32), *sends]))
        received = [count(mine, reader) for reader in range(group.size)]
        landed = group.all_to_all(send, [count(pieces, group.rank) for pieces in rows], received)
        by_reader = torch.split(landed, received)
        taken = [0] * group.size
        columns = []
        for piece in mine:
            reader, length = (first + piece.document) % group.size, piece.stop - piece.start
            columns.append(by_reader[reader][taken[reader] : taken[reader] + length])
            taken[reader] += length
        return self._batch(torch.cat([landed.new_empty((0, _COLUMNS)), *columns]), mine, plan)

    def _batch(self, columns: torch.Tensor, pieces: Sequence[Piece], plan: Plan) -> Batch:
        num_rows = len(columns)
        padding = max(-num_rows % self._row_multiple, self._row_multiple - num_rows)
        positions = [torch.arange(piece.start, piece.stop) for piece in pieces]
        documents = [torch.full((piece.stop - piece.start,), piece.document) for piece in pieces]

        def row(parts: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
            return torch.cat([*parts, torch.full((padding,), fill)])[None]

        return Batch(
            tokens=row([columns[:, 0]], 0),
            labels=row([columns[:, 1]], 0),
            loss_mask=row([columns[:, 2]], 0).float(),
            position_ids=row(positions, 0),
            documents=row(documents, -1),
            num_rows=num_rows,
            plan=plan,
        )

    def _read(self, number: int, rows: int) -> np.ndarray:
        found = self._documents.read(self._index(number))
        assert found.shape == (rows, _COLUMNS), "a document has as many rows as it said"
        return found

    def _index(self, number: int) -> int:
        epoch, place = divmod(number, len(self._documents))
        return int(self._order(epoch)[place])

    def _draw_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._documents))
