"""Loads micro-batches of whole documents: all ranks of a group read them, plan them and exchange their rows.

A thread prepares the next micro-batch, and the messages of its attention, during the current step.
"""

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
from megatron_overlap.schedules.varlen.plan import Piece, Plan
from megatron_overlap.schedules.varlen.rebalance import linear_layout

Planner = Callable[[Sequence[int]], Plan]

_COLUMNS = 3  # token, label, loss mask
_LENGTHS_PER_GATHER = 32  # documents of each rank


class Documents(Protocol):
    """A source of documents. Each rank reads only its share of them."""

    def __len__(self) -> int:
        """Number of documents; the same on every rank."""

    def rows(self, index: int) -> int:
        """Rows of a document: the tokens that have a successor."""

    def read(self, index: int) -> np.ndarray:
        """`[rows, 3]` int32: token, next token, loss mask (0 or 1)."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank in the linear layout: rows `[1, T]`, the last of them padding.

    Attributes:
        tokens, labels: input ids, and the ids after them.
        loss_mask: 1 for rows that count in the loss, 0 for padding.
        position_ids: position of each token in its document.
        documents: number of each row's document in the micro-batch; -1 for padding.
        num_rows: rows without padding.
        plan: placement of the tokens in attention, one pass.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    documents: torch.Tensor
    num_rows: int
    plan: Plan


class LoaderThread:
    """Prepares the micro-batches of a rank's loaders, in the order of the requests; `group` shares micro-batches."""

    def __init__(self, group: HostGroup) -> None:
        self.group = group
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="megatron_overlap_loader")

    def close(self) -> None:
        """Waits for the requested micro-batches: the peers need this rank to prepare them."""
        self.executor.shutdown(wait=True)
        self.group.close()


class DocumentLoader:
    """An endless iterator of micro-batches.

    On a group of one rank it equals packing documents in order until the next would exceed `tokens`. More ranks get the
    same micro-batches, with each row on one rank.

    Rank `n % size` reads document number n and its length. All ranks compute the same plan from the gathered lengths.

    Args:
        documents: source of documents; their order is shuffled anew in every epoch.
        thread: thread and group of the ranks that share micro-batches. All ranks create the same loaders and request
            micro-batches in the same order.
        planner: returns a plan of one pass for lengths.
        tokens: largest number of rows of a micro-batch.
        seed: seed of the order.
        first: number of the first micro-batch of this group.
        stride: this group gets every `stride`-th micro-batch; the others belong to other groups.
        row_multiple: the rows of a rank are padded to a multiple of this, and to at least this.

    Raises ValueError if no document has a row, or one has more than `tokens`.
    """

    def __init__(
        self,
        documents: Documents,
        thread: LoaderThread,
        planner: Planner,
        *,
        tokens: int,
        seed: int,
        first: int = 0,
        stride: int = 1,
        row_multiple: int = 1,
    ) -> None:
        count = len(documents)
        longest = max(map(documents.rows, range(count)), default=0)
        if not 0 < longest <= tokens:
            remedy = f"give documents of 1 to {tokens} rows (two ids make a row)"
            raise ValueError(f"documents: the longest of {count} has {longest} rows: {remedy}")
        self._documents, self._thread, self._planner = documents, thread, planner
        self._tokens, self._row_multiple = tokens, row_multiple
        self._skip, self._stride = first, stride
        self._order = lru_cache(maxsize=2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(count))
        self._next_lengths: deque[int] = deque()  # gathered lengths of the documents from number _next on
        self._next = 0
        self._next_batch: Future[Batch] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        submit = self._thread.executor.submit
        batch = (self._next_batch or submit(self._prepare)).result()
        self._next_batch = submit(self._prepare)
        return batch

    def _prepare(self) -> Batch:
        for _ in range(self._skip):
            self._next_documents()
        self._skip = self._stride - 1
        first, lengths = self._next_documents()
        plan = self._planner(lengths)
        precompute(plan)
        return self._exchange(first, plan, linear_layout(plan))

    def _next_documents(self) -> tuple[int, list[int]]:
        """Number of the first document of the next micro-batch, and the lengths of all its documents."""
        first, lengths, room = self._next, list[int](), self._tokens
        while True:
            if not self._next_lengths:
                self._gather_lengths()
            if self._next_lengths[0] > room:
                return first, lengths
            lengths.append(self._next_lengths.popleft())
            room -= lengths[-1]
            self._next += 1

    def _gather_lengths(self) -> None:
        group = self._thread.group
        numbers = range(self._next, self._next + _LENGTHS_PER_GATHER * group.size)
        own = [self._documents.rows(self._index(number)) for number in numbers if number % group.size == group.rank]
        gathered = [iter(lengths) for lengths in group.all_gather(own)]
        self._next_lengths.extend(next(gathered[number % group.size]) for number in numbers)

    def _exchange(self, first: int, plan: Plan, rows: Sequence[Sequence[Piece]]) -> Batch:
        """Reads the own share of the documents and sends every rank its rows."""
        group = self._thread.group

        @cache
        def read(document: int) -> np.ndarray:
            found = self._documents.read(self._index(first + document))
            assert found.shape == (plan.lengths[document], _COLUMNS), "Documents.read and Documents.rows must agree"
            return found

        def reader(piece: Piece) -> int:
            return (first + piece.document) % group.size

        def count(pieces: Sequence[Piece], of: int) -> int:
            return sum(p.stop - p.start for p in pieces if reader(p) == of)

        own = rows[group.rank]
        sends = [read(p.document)[p.start : p.stop] for pieces in rows for p in pieces if reader(p) == group.rank]
        send = torch.from_numpy(np.concatenate([np.empty((0, _COLUMNS), np.int32), *sends]))
        send_counts = [count(pieces, group.rank) for pieces in rows]
        received = group.all_to_all(send, send_counts, [count(own, of) for of in range(group.size)])
        by_reader = sorted(own, key=reader)
        parts = dict(zip(by_reader, received.split([p.stop - p.start for p in by_reader]), strict=True))
        return self._batch(torch.cat([received.new_empty((0, _COLUMNS)), *(parts[p] for p in own)]), own, plan)

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

    def _index(self, number: int) -> int:
        epoch, place = divmod(number, len(self._documents))
        return int(self._order(epoch)[place])
